"""Comparisons: a machine that runs as simulated shows no error, a slower one shows by how much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.commands.compare import main
from sim.core.timeline import Detail, Span
from sim.inputs.measured_run import load_measured
from sim.inputs.scenario import load_scenario
from sim.studies.comparison import _durations, check_same
from tests.processes import exit_code
from tests.sim.measured_runs import recorded, scenario

SCENARIOS = Path(__file__).parents[3] / "scenarios"


def _files(tmp_path: Path, slower: float = 1.0, **parallelism: Any) -> tuple[str, str]:
    s = scenario(**parallelism)
    keys = {key: value for key, value in s.model_dump("json").items() if key != "calibration"}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(keys | {"cluster": "cpu-host"}))
    (tmp_path / "run.json").write_text(json.dumps(recorded(s, slower)[0]))
    return str(tmp_path / "s.yaml"), str(tmp_path / "run.json")


def _compare(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any]]:
    code = exit_code(main, *args, "--json", "-")
    out = capsys.readouterr().out
    return code, json.loads(out)


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"schedule": "gpipe"},
    {"schedule": "zb_h1"},
    {"schedule": "interleaved_1f1b"},
    {"dp": 2, "dp_sync": "after_backward"},
    {"pp": 1, "dp": 2, "dp_sync": "after_backward"},
]


STORED = [
    pytest.param(scenario_file, run, id=f"{folder}/{run.stem}")
    for folder, runs in (("cpu", "measured"), ("cpu4", "measured"), ("cuda", "measured/cuda"))
    for run in sorted((SCENARIOS / runs).glob("*.json"))
    if (scenario_file := SCENARIOS / folder / f"{run.stem}.yaml").exists()
]


@pytest.mark.parametrize(("scenario_file", "run"), STORED)
def test_a_stored_run_is_a_run_of_its_scenario_file(scenario_file: Path, run: Path) -> None:
    check_same(load_scenario(scenario_file), load_measured(run), run.name)


@pytest.mark.parametrize("buckets", [1, 2, 7])
def test_buckets_against_one_message_of_all_compares_all_with_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], buckets: int
) -> None:
    """The simulated buckets of a step are one span: a run's, cut into any number of messages, have no error."""
    file, run = _files(tmp_path, pp=1, dp=2, bucket_bytes=100_000)
    data, cut = json.loads(Path(run).read_text()), list[dict[str, Any]]()
    for action in data["actions"]:
        pieces = buckets if action["kind"] == "ALL_REDUCE" else 1
        each, start_s = (action["end_s"] - action["start_s"]) / pieces, action["start_s"]
        times = [{"start_s": start_s + i * each, "end_s": start_s + (i + 1) * each} for i in range(pieces)]
        cut += [{**action, **time} for time in times]
    Path(run).write_text(json.dumps(data | {"actions": cut}))
    row = _compare(capsys, file, run)[1]["actions"]["ALL_REDUCE"]
    assert (row["simulated_count"], row["measured_count"], row["whole"]) == (1, buckets, buckets > 1)
    assert row["error"] == pytest.approx(0.0, abs=1e-9)


def test_errors_of_parts_that_cancel_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Forwards that take twice as long as simulated and backwards that take less by as much: the step is right."""
    file, run = _files(tmp_path, pp=1, dp=1)
    assert _compare(capsys, file, run)[1].get("cancelled") is None
    data, late = json.loads(Path(run).read_text()), 0.0
    for action in sorted(data["actions"], key=lambda a: a["start_s"]):
        took = action["end_s"] - action["start_s"]
        more = {"F": took, "B": -took / 2}.get(action["kind"], 0.0)
        action["start_s"], action["end_s"], late = action["start_s"] + late, action["end_s"] + late + more, late + more
    Path(run).write_text(json.dumps(data))
    found = _compare(capsys, file, run)[1]
    assert found["step_time_s"]["error"] == pytest.approx(0.0, abs=1e-6)
    assert found["cancelled"].startswith("errors of parts cancel: B is too long by")
    assert exit_code(main, file, run) == 0
    assert "errors of parts cancel" in capsys.readouterr().out


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_error_against_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: dict[str, Any]) -> None:
    code, result = _compare(capsys, *_files(tmp_path, **layout))
    assert code == 0
    assert result["format"] == "sim-compare/1"
    assert result["within_tolerance"]
    assert result["step_time_s"]["error"] == pytest.approx(0, abs=1e-12)
    assert result["replay"]["error"] == pytest.approx(0, abs=1e-12)
    assert result["action_ends"]["max"] == pytest.approx(0, abs=1e-12)
    for pair in result["actions"].values():
        assert pair["error"] == pytest.approx(0, abs=1e-9)
    for row in (*(r["compute_s"] for r in result["ranks"]), *(m["peak_bytes"] for m in result["memory"])):
        assert row["error"] == pytest.approx(0, abs=1e-12)


def test_a_machine_twice_as_slow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every duration is off by half; the replay of its own durations is not."""
    files = _files(tmp_path, slower=2.0)
    code, result = _compare(capsys, *files)
    assert code == 1
    assert not result["within_tolerance"]
    assert result["step_time_s"]["error"] == pytest.approx(-0.5)
    assert result["actions"]["F"]["error"] == pytest.approx(-0.5)
    assert result["ranks"][0]["compute_s"]["error"] == pytest.approx(-0.5)
    assert result["replay"]["error"] == pytest.approx(0, abs=1e-12)
    assert _compare(capsys, *files, "--tolerance", "0.51")[0] == 0


def test_table_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = _files(tmp_path)
    assert exit_code(main, *files, "--html", str(tmp_path / "c.html"), "--json", str(tmp_path / "c.json")) == 0
    assert "within tolerance" in capsys.readouterr().out
    assert json.loads((tmp_path / "c.json").read_text())["format"] == "sim-compare/1"
    assert "<html" in (tmp_path / "c.html").read_text()[:500].lower()


def test_a_noisy_run_says_so_beside_its_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By how much: the most that others used in any step or calibration; a quiet run has no such words."""
    scenario_file, run_file = _files(tmp_path)
    run = json.loads(Path(run_file).read_text())
    page = tmp_path / "c.html"
    for cores, calibrating, quiet in ((0.1, 0.2, True), (0.1, 1.3, False), (0.9, 0.1, False)):
        noise = {"foreign_cores": [0.0, cores], "calibration_foreign_cores": [calibrating], "warnings": ["a word"]}
        Path(run_file).write_text(json.dumps(run | noise))
        _, result = _compare(capsys, scenario_file, run_file)
        assert (result["quiet"], result["others_cores"]) == (quiet, max(cores, calibrating))
        exit_code(main, scenario_file, run_file, "--html", str(page))
        shown = " ".join(capsys.readouterr().out.split())
        assert "the run warned: a word" in shown
        assert (f"noisy run: others kept up to {max(cores, calibrating):g} cores busy" in shown) is not quiet
        assert ("a noisy run" in page.read_text()) is not quiet


def test_memory_over_the_first_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that has what is simulated: no error in any of four steps, and both curves on the page."""
    s = scenario()
    run, simulation = recorded(s)
    for row, curve in zip(run["memory"], simulation.memory_over(4), strict=True):
        steps = (curve.time_s / simulation.step_time_s).tolist()
        row["over_steps"] = list(zip(steps, curve.total.tolist(), strict=True))
    scenario_file, run_file = _files(tmp_path)
    Path(run_file).write_text(json.dumps(run))
    _, result = _compare(capsys, scenario_file, run_file)
    assert [r["rank"] for r in result["memory_over_steps"]] == [0, 1]
    for row in result["memory_over_steps"]:
        assert [p["error"] for p in row["peaks"]] == pytest.approx([0.0] * 4)
        assert row["peaks"][0]["measured"] < row["peaks"][1]["measured"], "states come with the first step's end"
    exit_code(main, scenario_file, run_file, "--html", str(tmp_path / "c.html"))
    assert "Memory over the first steps, rank 0" in (tmp_path / "c.html").read_text()


def test_another_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, result = _compare(capsys, *_files(tmp_path), "--calibration", "roofline")
    assert result["profile"] == "roofline"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--set", "parallelism.schedule=gpipe"], "scenario.parallelism.schedule: found 1f1b"),
        (["--set", "model.hidden=128"], "scenario.model.hidden: found 64, but the scenario file has 128"),
        (["--tolerance", "-1"], "--tolerance: found -1"),
        (["--calibration", "nobody"], "--calibration"),
        (["--json", "/does/not/exist/c.json"], "/does/not/exist/c.json"),
    ],
)
def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], message: str) -> None:
    assert exit_code(main, *_files(tmp_path), *extra) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_more_ranks_than_the_scenario_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = _files(tmp_path)
    run = json.loads(Path(files[1]).read_text())
    run["memory"][0]["rank"] = 7
    Path(files[1]).write_text(json.dumps(run))
    assert exit_code(main, *files) == 2
    assert "found 7; allowed: 0 to 1" in capsys.readouterr().err


def test_a_queued_collective_takes_no_longer_for_its_wait() -> None:
    """Two ranks start two chunks' collectives at once, of which each takes 2 s; messages are no queue."""

    def span(rank: int, kind: str, micro_batch: int, start_s: float, end_s: float) -> Span:
        return Span(rank, "", kind, 0, micro_batch, start_s, end_s, Detail(""))

    chunks = [span(r, "ALL_REDUCE", 0, 0.5 * r, end_s) for r in (0, 1) for end_s in (2.5, 4.5)]
    sent = [span(0, "SEND_F", m, 0.0, 1.0) for m in (0, 1)]
    received = [span(1, "RECV_F", m, 0.0, end_s) for m, end_s in ((0, 3.0), (1, 4.0))]
    found = {(key[0], key[2], key[4]): seconds for key, seconds in _durations([*chunks, *sent, *received]).items()}
    assert found == {
        ("ALL_REDUCE", 0, 0): 2.0,
        ("ALL_REDUCE", 0, 1): 2.0,
        ("SEND_F", 0, 0): 3.0,
        ("SEND_F", 1, 0): 4.0,
    }
