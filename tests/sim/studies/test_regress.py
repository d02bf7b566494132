"""Stored real runs: their errors are those accepted, and worse ones are found."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path

import pytest

from sim.commands.regress import main
from sim.inputs.measured_run import load_measured
from sim.inputs.scenario import load_scenario
from sim.simulation import simulate
from sim.studies.measured import own_profile
from sim.studies.regression import BY_BENCHMARKS, EXPECTED, MACHINE, grown
from tests.processes import exit_code

ROOT = Path(__file__).parents[3]
STORED = ROOT / "scenarios" / "measured"
H200 = ROOT / "scenarios" / "cuda" / "h200.json"
RUNS = sorted(p for p in STORED.glob("*.json") if p.name not in (EXPECTED, MACHINE))
ON_GPU = sorted(p for p in (STORED / "cuda").glob("*.json") if p.name != EXPECTED)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One stored run with its expectation."""
    shutil.copy(RUNS[0], tmp_path)
    assert exit_code(main, str(tmp_path), "--update") == 0
    return tmp_path


@pytest.mark.parametrize("stored", [STORED, STORED / "cuda"], ids=["cpu", "gpu"])
def test_stored_runs_are_no_worse(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main, str(stored)) == 0, capsys.readouterr().out


def test_micro_benchmarks_of_a_gpu_alone_predict_its_steps() -> None:
    """Within a tenth, what waits for its host apart."""
    for name in ("llama_half_billion", "gpt_recompute", "gpt_unfused", "gpt_fp32"):
        path = STORED / "cuda" / f"{name}.json"
        scenario = load_scenario(ROOT / "scenarios" / "cuda" / f"{name}.yaml", [f"calibration={H200}"])
        measured = statistics.median(load_measured(path).step_times_s)
        assert simulate(scenario).step_time_s == pytest.approx(measured, rel=0.1)


def test_micro_benchmarks_of_the_same_machine_are_held_to_their_errors(folder: Path) -> None:
    """A profile beside the runs predicts them too; one that is worse than accepted is found."""
    own = json.loads((folder / RUNS[0].name).read_text())["profile"]
    (folder / MACHINE).write_text(json.dumps(own))
    assert exit_code(main, str(folder), "--update") == 0
    accepted = json.loads((folder / EXPECTED).read_text())["runs"][RUNS[0].stem]
    assert accepted[BY_BENCHMARKS] == pytest.approx(accepted["step_time"])
    for block in own["blocks"]:
        block["seconds"] *= 2
    (folder / MACHINE).write_text(json.dumps(own))
    assert exit_code(main, str(folder)) == 1


def test_where_benchmarks_lie_is_noted(tmp_path: Path) -> None:
    shutil.copy(STORED / "cuda" / "gpt_fp32.json", tmp_path)
    assert exit_code(main, str(tmp_path), "--benchmarks", str(H200), "--update") == 0
    assert BY_BENCHMARKS in json.loads((tmp_path / EXPECTED).read_text())["runs"]["gpt_fp32"]
    assert exit_code(main, str(tmp_path)) == 0


def test_stored_runs_are_small_and_each_has_a_profile() -> None:
    assert len(RUNS) >= 4
    for path in (*RUNS, *ON_GPU):
        assert path.stat().st_size < 600_000
        assert own_profile(load_measured(path), str(path)).blocks


def test_limits_hold_whatever_was_accepted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit below today's error fails, --update or not; a run's own limit goes before the folder's."""
    data = json.loads((folder / EXPECTED).read_text())
    name = RUNS[0].stem
    found = abs(data["runs"][name]["peak_bytes"])
    data["limits"] = {"peak_bytes": found / 2}
    (folder / EXPECTED).write_text(json.dumps(data))
    assert exit_code(main, str(folder), "--update") == 1
    assert exit_code(main, str(folder)) == 1
    assert "BEYOND: peak_bytes" in capsys.readouterr().out
    data["limits_of"] = {name: {"peak_bytes": found * 2}}
    (folder / EXPECTED).write_text(json.dumps(data))
    assert exit_code(main, str(folder)) == 0


def test_limits_of_a_run_that_is_gone_go_with_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(RUNS[1], folder)
    assert exit_code(main, str(folder), "--update") == 0
    data = json.loads((folder / EXPECTED).read_text())
    data["limits_of"] = {RUNS[0].stem: {"step_time": 0.9}, RUNS[1].stem: {"step_time": 0.9}}
    (folder / EXPECTED).write_text(json.dumps(data))
    (folder / RUNS[1].name).unlink()
    assert exit_code(main, str(folder), "--update") == 0
    assert f"{RUNS[1].stem}: the run is not there any more; its limits are dropped" in capsys.readouterr().err
    assert exit_code(main, str(folder)) == 0
    assert json.loads((folder / EXPECTED).read_text())["limits_of"].keys() == {RUNS[0].stem}


def test_wrong_limits_are_refused(folder: Path) -> None:
    for key, wrong in (
        ("limits", {"step_time": "small"}),
        ("limits_of", {"dp2": 0.1}),
        ("limits", [1]),
        ("limits", {"step_time": "nan"}),
        ("limits_of", {RUNS[0].stem: {"step_time": "nan"}}),
        ("limits", {"step_time": True}),
    ):
        data = json.loads((folder / EXPECTED).read_text())
        (folder / EXPECTED).write_text(json.dumps({**data, key: wrong}))
        assert exit_code(main, str(folder)) == 2
        (folder / EXPECTED).write_text(json.dumps(data))
    (folder / EXPECTED).write_text(
        json.dumps(data).replace('{"format"', '{"limits": {"step_time": 1e999}, "format"', 1)
    )
    assert exit_code(main, str(folder)) == 2


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"limits": {"nosuch_quantity": 0.0001}}, "limits: unknown quantity 'nosuch_quantity'; allowed: step_time"),
        ({"limits_of": {"nosuch_run": {"step_time": 0.1}}}, "limits_of: no run is called 'nosuch_run'"),
        ({"limits_of": {"a_run": 0.1}}, "limits_of: allowed: errors by quantity by run"),
        ({"limits": {"step_time": True}}, "limits: allowed: errors by quantity, as"),
        ({"benchmarks": 3}, "benchmarks: allowed: a profile's file"),
    ],
)
def test_limits_of_nothing_and_of_another_type_are_refused(
    folder: Path, limits: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads((folder / EXPECTED).read_text())
    (folder / EXPECTED).write_text(json.dumps({**data, **limits}))
    assert exit_code(main, str(folder)) == 2
    assert words in capsys.readouterr().err


def test_shipped_runs_have_limits() -> None:
    """Each run's step, by its own calibration and by micro-benchmarks, and its memory; none of them out of reach."""
    data = json.loads((STORED / EXPECTED).read_text())
    assert {"step_time", BY_BENCHMARKS, "peak_bytes", "saved_for_backward_bytes"} <= data["limits"].keys()
    given = [data["limits"], *data["limits_of"].values()]
    assert max(limit for limits in given for limit in limits.values()) <= 0.6
    assert data["limits_of"].keys() <= data["runs"].keys()


def test_a_slower_simulator_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cost that doubles in the stored calibration, as if the simulator priced it so."""
    path = folder / RUNS[0].name
    data = json.loads(path.read_text())
    for block in data["profile"]["blocks"]:
        block["seconds"] *= 2
    path.write_text(json.dumps(data))
    assert exit_code(main, str(folder)) == 1
    out = capsys.readouterr().out
    assert "WORSE: step_time" in out
    assert exit_code(main, str(folder), "--update") == 0
    assert exit_code(main, str(folder)) == 0


def test_a_missing_run_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(RUNS[1], folder)
    assert exit_code(main, str(folder)) == 1
    assert "no expectation is stored" in capsys.readouterr().out
    assert exit_code(main, str(folder), "--update", "--json", str(folder / "result.out")) == 0
    (folder / RUNS[1].name).unlink()
    assert exit_code(main, str(folder)) == 1
    assert "MISSING" in capsys.readouterr().out


def test_what_counts_as_grown() -> None:
    before = {"step_time": -0.02, "peak_bytes": 0.01}
    assert grown({"step_time": 0.02, "peak_bytes": 0.012}, before) == []
    assert grown({"step_time": 0.03, "peak_bytes": 0.01}, before) == ["step_time: -2.00% before, +3.00% now"]
    assert grown({"step_time": 0.0}, before) == ["peak_bytes: +1.00% before, not compared any more"]


def test_bad_input(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main, str(tmp_path / "nowhere")) == 2
    assert "no such folder" in capsys.readouterr().err
    (folder / EXPECTED).write_text('{"runs": [1]}')
    assert exit_code(main, str(folder)) == 2
    assert f"{folder / EXPECTED}: runs" in capsys.readouterr().err
    (folder / EXPECTED).unlink()
    (folder / "other.json").write_text('{"format": "profile/1"}')
    assert exit_code(main, str(folder)) == 2
    assert "other.json: is a calibration profile" in capsys.readouterr().err
