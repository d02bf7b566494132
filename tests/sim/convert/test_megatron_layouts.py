"""Megatron-LM's layouts of layers over pipeline stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.convert.converting import converted, refused
from tests.sim.convert.launch_files import MEGATRON


@pytest.mark.parametrize("layout", ["Ettt*2|(tt|)*6,(t|)*16L", r"Ettt*2\|\(tt\|\)*6,\(t\|\)*16L"])
def test_a_layout_of_stages_is_unrolled_as_megatron_does(tmp_path: Path, layout: str) -> None:
    """Also one that is escaped for a shell, as in tests/functional_tests."""
    text = MEGATRON.replace("--sequence-parallel", f'--sequence-parallel --pipeline-model-parallel-layout "{layout}"')
    parallelism = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0]["parallelism"]
    assert parallelism["layers_per_stage"] == [4, *[2] * 6, *[1] * 16, 0]
    assert parallelism["virtual_stages"] == 12


@pytest.mark.parametrize(
    ("flags", "stages", "layers"),
    [
        ("--decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 6", 4, [6, 10, 10, 6]),
        ("--decoder-last-pipeline-num-layers 5", 4, [9, 9, 9, 5]),
        ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", 2, [16, 16]),
        ("--account-for-embedding-in-pipeline-split --num-layers 31", 4, [7, 8, 8, 8]),
        (
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --num-layers 30 "
            "--num-layers-per-virtual-pipeline-stage 4",
            4,
            [3, 4, 4, 4, 4, 4, 4, 3],
        ),
        (
            "--decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 4 "
            "--num-virtual-stages-per-pipeline-rank 2",
            4,
            [2, 6, 6, 2, 2, 6, 6, 2],
        ),
    ],
)
def test_stages_of_different_sizes(tmp_path: Path, flags: str, stages: int, layers: list[int]) -> None:
    text = (
        MEGATRON.replace("PP=2 ", f"PP={stages} ")
        .replace("--sequence-parallel\n", f"{flags}\n")
        .replace("TP=4", "TP=1")
    )
    if "--num-layers " in flags:
        text = text.replace("    --num-layers 32\n", "")
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert data["parallelism"]["layers_per_stage"] == layers
    assert "pipeline" not in said.partition("version: 1")[0]


def test_stages_that_do_not_divide(tmp_path: Path) -> None:
    text = MEGATRON.replace("--sequence-parallel\n", "--decoder-first-pipeline-num-layers 6\n").replace(
        "PP=2 ", "PP=4 "
    )
    said = refused(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert "--num-layers: found 32; 26 layers for 3 pipeline ranks with 1 stage each do not divide" in said
    text = MEGATRON.replace("--num-layers 32", "--num-layers 31")
    said = refused(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert "--num-layers: found 31; 31 layers for 2 pipeline ranks with 1 stage each do not divide" in said
    flag = "--num-layers-per-virtual-pipeline-stage"
    text = MEGATRON.replace("--sequence-parallel\n", f"{flag} 3\n").replace("TP=4", "TP=1")
    said = refused(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert f"{flag}: found 3; must divide a pipeline rank's layers (16)" in said
