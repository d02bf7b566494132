"""The step that a program was captured from, run for real, and set beside its simulation operator by operator."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.measured_run import MeasuredRun
from sim.inputs.program_file import read_program
from sim.inputs.scenario import Scenario, parse_scenario
from sim.simulation import simulate
from sim.studies.comparison import operators
from tests.modules import run_module

torch = pytest.importorskip("torch", reason="runs a step for real")

SOURCE = """
import torch
from calibrate.capture import Step

def step():
    layers = [torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(3)]
    model = torch.nn.Sequential(*layers)
    x = torch.zeros(4, 32, 64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return Step(model, lambda: model(x).square().mean(), optimizer, 32, 4, "", 1.0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("program")
    (found / "encoder_step.py").write_text(SOURCE, encoding="utf-8")
    words = ("encoder_step:step", "--device", "cpu", "--out", "p.json.gz")
    done = run_module("calibrate.capture", *words, cwd=found)
    assert done.returncode == 0, done.stderr
    return found


def scenario(folder: Path, batch: int = 4, **more: Any) -> Scenario:
    model = {"program": str(folder / "p.json.gz")}
    return parse_scenario(
        {"name": "x", "model": model, "training": {"global_batch_size": batch}, "cluster": "cpu-host", **more}
    )


def runner(folder: Path, s: Scenario, monkeypatch: pytest.MonkeyPatch) -> Any:
    from calibrate.real_steps.measure_program import ProgramRunner, check_program

    monkeypatch.chdir(folder)
    made = ProgramRunner(s, check_program(s, "x"), "encoder_step:step", "cpu")
    made.step(made.batch(0))
    return made


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_it_runs_the_operators_that_were_captured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, micro_batches: int
) -> None:
    from calibrate.real_steps.measure_program import differences

    s = scenario(folder, 4 * micro_batches)
    ran = runner(folder, s, monkeypatch)
    rows = ran.operators()
    beyond = differences(read_program(folder / "p.json.gz"), rows, micro_batches)
    assert set(beyond) <= {"aten.add_"}  # of the second micro-batch's gradients
    records = ran.step(ran.batch(0))
    assert [r.kind for r in records] == ["F", "B"] * micro_batches + ["OPTIMIZER"]
    assert all(r.end_ns >= r.start_ns for r in records)


def test_memory_is_what_the_lives_of_storages_say(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s = scenario(folder)
    assert simulate(s).outcome.peak_memory_bytes == pytest.approx(runner(folder, s, monkeypatch).peak_bytes(), rel=0.03)


def test_operators_stand_side_by_side(folder: Path) -> None:
    s = scenario(folder)
    measured = [
        {"operator": "aten.mm", "phase": "backward", "seconds": 1.0, "count": 3},
        {"operator": "aten.view", "phase": "forward", "seconds": 0.25},
    ]
    run = MeasuredRun.model_validate(
        {"format": "measured-run/1", "scenario": {}, "step_times_s": [2.0], "operators": measured}
    )
    rows = {(r.operator, r.phase): r for r in operators(simulate(s), run)}
    assert rows["aten.mm", "backward"].measured == 1.0
    assert rows["aten.mm", "backward"].simulated > 0  # both halves of the backward
    assert rows["aten.view", "forward"].simulated == 0.0
    assert rows["between operators", ""].measured == 0.75


def test_what_cannot_run_is_refused(folder: Path) -> None:
    from calibrate.real_steps.measure_program import check_program

    for more, said in (
        ({"cluster": "dgx-h100"}, "was captured for cpu, the cluster has cuda: capture it with --device cuda"),
        ({"parallelism": {"dp": 2}}, "found 2 ranks; calibrate.measure --program runs one"),
    ):
        with pytest.raises(InputError, match=said):
            check_program(scenario(folder, 8, **more), "x")


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("layer(torch.zeros(4, 8)).mean()", "mat1 and mat2 shapes cannot be multiplied"),
        ("None", "wrong_step:step: Step.loss: returned None; must return the loss"),
    ],
)
def test_code_that_fails_for_real_is_one_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, loss: str, said: str
) -> None:
    from calibrate.real_steps.measure_program import ProgramRunner, check_program

    source = f"""
import torch
from calibrate.capture import Step

def step():
    layer = torch.nn.Linear(64, 64)
    return Step(layer, lambda: {loss}, torch.optim.SGD(layer.parameters()), 32, 4)
"""
    (folder / "wrong_step.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "wrong_step", raising=False)
    s = scenario(folder)
    made = ProgramRunner(s, check_program(s, "x"), "wrong_step:step", "cpu")
    with pytest.raises(InputError, match=re.escape(said)):
        made.first_step()
