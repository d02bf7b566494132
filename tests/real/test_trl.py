"""TRL's own command for supervised fine-tuning, unmodified: run by two ranks (skipped without TRL), and captured."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")

from sim.inputs.script_program import read_rank_program
from tests.processes import HANGS_AFTER_S
from tests.real.test_script_collectives import really

STORED = Path(__file__).parents[2] / "scenarios" / "captured" / "trl_sft.rank0.json.gz"
WRAPPED = """
import runpy, sys
sys.argv = ["sft.py", "--model_name_or_path", "{files}/model", "--dataset_name", "{files}/data", "--learning_rate",
    "2.0e-5", "--max_steps", "4", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2",
    "--gradient_checkpointing", "--eos_token", "<|im_end|>", "--output_dir", "{files}/out", "--report_to", "none",
    "--save_strategy", "no", *{more}]
runpy.run_module("trl.scripts.sft", run_name="__main__")
"""


@pytest.mark.skipif(find_spec("trl") is None, reason="needs TRL (pip install 'stepsim[huggingface]')")
def test_collectives_are_those_of_two_real_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What two gloo ranks of sft.py all-reduce in a step, and what its capture foresees: as many buckets and bytes
    (where the first bucket ends, DDP decides by the order in which gradients came)."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    subprocess.run([sys.executable, "-m", "calibrate.sft_files", str(tmp_path)], check=True, capture_output=True)
    script, on_cpu = tmp_path / "sft.py", tmp_path / "sft_on_cpu.py"
    for path, more in ((script, []), (on_cpu, ["--use_cpu"])):
        path.write_text(WRAPPED.format(files=tmp_path, more=more), "utf-8")
    command = [sys.executable, "-m", "calibrate.capture", "--script", str(script), "--world-size", "2"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "p")], capture_output=True, text=True, timeout=HANGS_AFTER_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    program = read_rank_program(tmp_path / "p.rank0.json.gz")
    foreseen = [c.bytes for c in program.collectives if c.kind == "all_reduce"]
    ran = [size for (kind, size), n in really(tmp_path, on_cpu, 2)[0].items() for _ in range(n) if kind == "all_reduce"]
    assert foreseen
    assert (len(foreseen), sum(foreseen)) == (len(ran), sum(ran))


def test_the_stored_program_recomputes_every_layer_and_reduces_every_gradient_once() -> None:
    """The course's command on eight ranks: eight micro-batches, matmuls of four layers once more in the backward but
    for the last of each, whose result nothing needs (`--gradient_checkpointing`); the output's not. Then every byte of
    the gradients is all-reduced once."""
    program = read_rank_program(STORED)
    products = [x for x in program.program.operators if x.name in ("aten.mm", "aten.addmm") and "_proj" in x.module]
    matmuls = Counter(x.phase for x in products)
    layers, each, micro_batches = 4, 7, 8
    assert program.world_size == 8
    assert matmuls["forward"] == micro_batches * layers * each
    assert matmuls["recomputed"] == micro_batches * layers * (each - 1)
    assert matmuls["backward"] == 2 * matmuls["forward"]
    trained = sum(p.elements for p in program.program.parameters if p.trained)
    assert sum(c.bytes for c in program.collectives if c.kind == "all_reduce") == 4 * trained
