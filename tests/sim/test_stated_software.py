"""What a table of measurements says about its software becomes keys of its rows' scenarios."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.validation.tables import read_table


def training(tmp_path: Path, software: str, row: dict[str, Any] | None = None, **training: Any) -> dict[str, Any]:
    data = {
        "format": "measurements/1",
        "name": "t",
        "kind": "training_step",
        "software": software,
        "rows": [
            {
                "id": "r",
                "scenario": {"training": {"seq_len": 8, **training}},
                "measured": {"step_time_s": 1.0},
                **(row or {}),
            }
        ],
    }
    file = tmp_path / "table.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    return dict(read_table(file).rows[0].scenario["training"])


@pytest.mark.parametrize(
    ("software", "date"),
    [
        ("torch 1963fc8 (2024-12-23), torchao eab345c", "2024-12-23"),
        ("NeMo 24.07, Megatron-Core", "2024-07"),
        ("Composer + PyTorch FSDP (A100: PyTorch 1.13 era; H100: PyTorch 2.1)", "2023-10"),
        ("Megatron-LM fork of the authors (2023)", "2023-07"),
    ],
)
def test_the_latest_release_is_the_date(tmp_path: Path, software: str, date: str) -> None:
    assert training(tmp_path, software)["software_date"] == date


def test_a_trainer_with_a_record_takes_the_place_of_its_nearest_word_alone(tmp_path: Path) -> None:
    assert training(tmp_path, "nanotron (early 2025)", elementwise="eager")["framework"] == "nanotron"
    assert "framework" not in training(tmp_path, "nanotron (early 2025)", elementwise="megatron")
    assert "framework" not in training(tmp_path, "Megatron-LM, read beside nanotron")
    assert training(tmp_path, "Meta's in-house training stack with NCCLX")["framework"] == "meta_llama3"
    assert "framework" not in training(tmp_path, "Meta Lingua")


def test_switches_of_the_launch_script(tmp_path: Path) -> None:
    on = {"run": {"settings": {"LAYER_CUDA_GRAPH": "1", "FULL_CUDA_GRAPH": "False"}}}
    assert training(tmp_path, "NeMo 24.09", on)["cuda_graphs"] == "layers"
    assert "cuda_graphs" not in training(tmp_path, "NeMo 24.09", {"run": {"settings": {"MCORE_CUDA_GRAPH": "0"}}})
    assert training(tmp_path, "NeMo 24.09", on, cuda_graphs="none")["cuda_graphs"] == "none"
