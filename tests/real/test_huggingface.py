"""Transformers' own step under `calibrate.measure`: refusals without it, and with it the simulated step."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from calibrate.measure import simulated_blocks  # noqa: E402
from calibrate.real_steps.huggingface import Imported, check_model, find_layers  # noqa: E402
from sim.core.errors import InputError  # noqa: E402
from sim.inputs.scenario import load_scenario  # noqa: E402
from tests.processes import HANGS_AFTER_S  # noqa: E402
from tests.real.cpu_time import agree_within_a_quarter, measured_and_simulated  # noqa: E402

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scenarios" / "huggingface"
HERE = all(find_spec(name) for name in ("transformers", "peft"))
needs = pytest.mark.skipif(not HERE, reason="needs transformers and peft (pip install 'stepsim[huggingface]')")
torch.set_num_threads(1)


def measure(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "calibrate.measure", str(FOLDER / "sft_lora.yaml"), *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=HANGS_AFTER_S)


@pytest.mark.skipif(HERE, reason="transformers is installed")
def test_without_transformers_it_says_what_to_install(tmp_path: Path) -> None:
    found = measure("--huggingface", str(FOLDER), "--out", str(tmp_path / "m.json"))
    assert found.returncode == 2
    assert "transformers is not installed (pip install 'stepsim[huggingface]')" in found.stderr


def test_adapters_need_it(tmp_path: Path) -> None:
    found = measure("--out", str(tmp_path / "m.json"))
    assert found.returncode == 2
    assert "training.lora: found adapters; calibrate.measure can run: training of all parameters" in found.stderr


@needs
def test_another_model_is_refused() -> None:
    scenario = load_scenario(FOLDER / "sft_full.yaml")
    other = load_scenario(FOLDER / "sft_full.yaml", ["model.layers=3"])
    with pytest.raises(InputError, match="is not the scenario's model"):
        check_model(str(FOLDER), scenario, other)


@needs
@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("training.recompute=full", "recomputation"),
        ("training.activation_offload=true", "training.activation_offload"),
        ("training.optimizer_offload=true", "training.optimizer_offload"),
        ("training.packing={mean_seq_len: 64}", "training.packing"),
    ],
)
def test_what_transformers_step_does_not_do_is_refused(override: str, found: str) -> None:
    scenario = load_scenario(FOLDER / "sft_full.yaml", [override])
    with pytest.raises(InputError, match=f"found {found}"):
        check_model(str(FOLDER), scenario, scenario)


def test_the_layers_are_found_by_their_number() -> None:
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(3)])
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ModuleDict({"layers": layers}))
    assert find_layers(model, 3) == list(layers)
    with pytest.raises(InputError, match="no list of 4 layers"):
        find_layers(model, 4)


def seconds(name: str) -> tuple[float, float]:
    """Of a step in CPU time: measured, and simulated with blocks timed between the steps."""
    scenario = load_scenario(FOLDER / f"{name}.yaml")
    runner = Imported(scenario, str(FOLDER), "cpu")
    numbers = list(range(scenario.model.layers + 2))
    blocks, epilogue = simulated_blocks(scenario, {0: numbers}, [0], 0)
    assert sum(p.numel() for p in runner.inner.parameters()) == sum(b.held_params for b in blocks[0])
    assert sum(p.numel() for p in runner.trained) == sum(b.params for b in blocks[0])
    saved = runner.saved_bytes(runner.own(runner.batch(0))[0])
    rel = 0.01 if name == "sft_lora" else 0.12  # a trained norm keeps its normalized input too
    assert saved == pytest.approx(sum(s.bytes for b in blocks[0] for s in b.saved), rel=rel)
    keys = [b.key for b in blocks[0]]
    measured, simulated, _ = measured_and_simulated(scenario, runner, epilogue, lambda: runner.calibrate(keys))
    return measured, simulated


@needs
@pytest.mark.timed
@pytest.mark.parametrize("name", ["sft_full", "sft_lora"])
def test_a_step_takes_what_is_simulated(name: str, one_rank: None) -> None:
    agree_within_a_quarter(lambda: seconds(name))
