"""Transformers' own step under `calibrate.measure`: refusals without it, and with it the simulated step."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from calibrate import timed_rounds  # noqa: E402
from calibrate.huggingface import Imported, check_model, find_layers  # noqa: E402
from calibrate.measure import simulated_blocks  # noqa: E402
from calibrate.profile_from_steps import make_profile  # noqa: E402
from sim.core.errors import InputError  # noqa: E402
from sim.inputs.scenario import load_scenario  # noqa: E402
from sim.simulation import simulate  # noqa: E402
from tests.processes import HANGS_AFTER_S  # noqa: E402

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
    log, times = timed_rounds.Log(0), []
    for number in range(10):
        start = time.process_time()
        runner.step(runner.batch(number))
        times.append(time.process_time() - start)
        log.steps.append(timed_rounds.Step(0, times[-1], [], runner.loss(), 1.0))
        if number % 2:  # foreign_cores: so that CPU times count
            log.calibrations.append(replace(runner.calibrate([b.key for b in blocks[0]]), foreign_cores=1.0))
    facts = {"device": "cpu", "cores": 1}
    profile = make_profile(name, "2026-01-01", [log], [epilogue], 4, scenario.parallelism, facts, facts)
    return statistics.median(times[2:]), simulate(scenario, profile).result["step_time_s"]


@needs
@pytest.mark.real
@pytest.mark.parametrize("name", ["sft_full", "sft_lora"])
def test_a_step_takes_what_is_simulated(name: str, one_rank: None) -> None:
    """Within 25 % in the best of five tries."""
    errors = []
    while len(errors) < 5:
        measured, simulated = seconds(name)
        errors.append(simulated / measured - 1)
        if abs(errors[-1]) < 0.25:
            return
    pytest.fail(f"simulated / measured - 1 = {errors}")
