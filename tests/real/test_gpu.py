"""Real runs on a GPU, where there is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from sim.studies.regression import errors_of  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("offload", [False, True])
def test_a_step_on_one_gpu_is_what_its_calibration_says(tmp_path: Path, offload: bool) -> None:
    out = tmp_path / "run.json"
    command = [sys.executable, "-m", "calibrate.measure", "scenarios/cuda/gpt_unfused.yaml", "--out", str(out)]
    command += ["--set", f"training.activation_offload={str(offload).lower()}"]
    done = subprocess.run([*command, "--steps", "6", "--budget", "10"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = errors_of(out)
    assert abs(errors["step_time"]) < 0.15
    assert abs(errors["saved_for_backward_bytes"]) < 0.005
    assert abs(errors["peak_bytes"]) < 0.03


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    many = f"parallelism.dp={max(torch.cuda.device_count(), 1) * 2}"
    command = [sys.executable, "-m", "calibrate.measure", "scenarios/cuda/zero3_dp2.yaml", "--out", "x.json"]
    done = subprocess.run([*command, "--set", many], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "GPUs; calibrate.measure can run: cpu-host, or" in done.stderr
