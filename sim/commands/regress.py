"""Stored real runs against their simulation: has an error grown since it was last accepted?

    python -m sim.regress [FOLDER] [--update] [--live] [--json FILE|-]

FOLDER (scenarios/measured) holds measured runs, `NAME.json`, and what their comparisons came to when last
accepted, `expected.json`. As runs and calibrations are stored, results differ only where the simulator does.
`--live` also measures each scenario afresh (minutes, and on a quiet machine) and compares it with the
tolerance. `--update` accepts today's errors. Exit codes: 0 nothing grew, 1 something did (or a live run is
out of tolerance), 2 bad input.
"""

from __future__ import annotations

import json as json_module
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from sim.commands.command import Command
from sim.commands.compare import compare, simulate_run
from sim.commands.options import FILE, json_option
from sim.core.errors import InputError
from sim.core.files import read_json, write_json
from sim.core.processes import python_module
from sim.inputs.measured_run import load_measured
from sim.inputs.scenario import Scenario, parse_scenario
from sim.inputs.shipped import scenarios_folder
from sim.studies.measured import own_profile, to_timeline

EXPECTED = "expected.json"
FORMAT = "sim-regress/1"
GROWN = 0.005  # an error may grow by this fraction of the measured figure before it counts
TOLERANCE = 0.10
LIVE_TIMEOUT_S = 600.0

Errors = dict[str, float]


def errors_of(path: Path) -> Errors:
    """Simulated against measured for one stored run: step time, its replay, peak memory, bytes saved for backward.

    Raises:
        InputError: if the file is no measured run that can be simulated.
    """
    run = load_measured(path)
    scenario = scenario_of(path)
    simulation = simulate_run(scenario, run, own_profile(run, str(path)), str(path))
    result = compare(simulation, run, to_timeline(run.actions, scenario), TOLERANCE)
    out = {"step_time": float(result["step_time_s"]["error"])}
    if result["replay"] is not None:
        out["replay"] = float(result["replay"]["error"])
    for key in ("peak_bytes", "saved_for_backward_bytes"):
        found = [float(m[key]["error"]) for m in result["memory"] if m.get(key, {}).get("error") is not None]
        if found:
            out[key] = max(found, key=abs)
    return out


def scenario_of(path: Path) -> Scenario:
    """The scenario that a stored run was a run of.

    Raises:
        InputError: if it is none.
    """
    return parse_scenario(load_measured(path).scenario, f"{path}: scenario")


def grown(found: Errors, expected: Errors) -> list[str]:
    """What is worse than expected, in words; what is not expected to be there does not count."""
    out = []
    for key, before in expected.items():
        now = found.get(key)
        if now is None:
            out.append(f"{key}: {before:+.2%} before, not compared any more")
        elif abs(now) > abs(before) + GROWN:
            out.append(f"{key}: {before:+.2%} before, {now:+.2%} now")
    return out


def live_error(path: Path, options: Sequence[str] = ()) -> float:
    """The step time's error in a run taken now, of the scenario of a stored one; `options` go to calibrate.measure.

    Raises:
        InputError: if `calibrate.measure` could not run it.
    """
    with tempfile.TemporaryDirectory() as folder:
        scenario, out = Path(folder) / f"{path.stem}.yaml", Path(folder) / "measured.json"
        scenario.write_text(json_module.dumps(load_measured(path).scenario))  # JSON is YAML
        command = [*python_module("calibrate.measure"), str(scenario), "--out", str(out), *options]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIVE_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise InputError(f"{path}: calibrate.measure took more than {LIVE_TIMEOUT_S:g} s") from None
        if done.returncode:
            raise InputError(f"{path}: calibrate.measure: {done.stderr.strip()[-500:]}")
        return errors_of(out)["step_time"]


def _expected(folder: Path) -> dict[str, Errors]:
    path = folder / EXPECTED
    if not path.is_file():
        return {}
    data = read_json(path)
    try:
        return {str(name): {k: float(v) for k, v in row.items()} for name, row in data["runs"].items()}  # type: ignore[index]
    except (TypeError, KeyError, ValueError, AttributeError):
        raise InputError(f"{path}: runs: allowed: errors by quantity by run, as --update writes") from None


def regress(folder: Path, live: bool) -> dict[str, Any]:
    """All stored runs of a folder (`sim-regress/1`): errors, expectations, and what grew.

    Raises:
        InputError: if there is no run, or one cannot be simulated.
    """
    paths = sorted(p for p in folder.glob("*.json") if p.name != EXPECTED)
    if not paths:
        raise InputError(f"{folder}: found no measured runs; allowed: a folder with NAME.json of calibrate.measure")
    expected = _expected(folder)
    runs = []
    for path in paths:
        errors, before = errors_of(path), expected.get(path.stem, {})
        row: dict[str, Any] = {
            "name": path.stem, "errors": errors, "expected": before, "grown": grown(errors, before),
        }  # fmt: skip
        if not before:
            row["grown"] = ["no expectation is stored; accept one with --update"]
        if live:
            row["live_step_time_error"] = error = live_error(path)
            row["grown"] += [f"live step_time: {error:+.2%}"] if abs(error) > TOLERANCE else []
        runs.append(row)
    gone = [name for name in expected if name not in {p.stem for p in paths}]
    return {"format": FORMAT, "runs": runs, "missing": gone}


def _print(result: dict[str, Any]) -> None:
    for row in result["runs"]:
        errors = "  ".join(f"{k} {v:+.2%}" for k, v in row["errors"].items())
        live = row.get("live_step_time_error")
        print(f"{row['name']:20} {errors}" + ("" if live is None else f"  live {live:+.2%}"))
        for line in row["grown"]:
            print(f"{'':20} WORSE: {line}")
    for name in result["missing"]:
        print(f"{name:20} MISSING: expected, but not there")


@click.command("regress", cls=Command)
@click.argument("folder", type=FILE, required=False)
@click.option("--update", is_flag=True, help="accept today's errors as expected")
@click.option("--live", is_flag=True, help="measure each scenario afresh too")
@json_option
def main(folder: Path | None, update: bool, live: bool, json: str | None) -> int:
    """Compare the measured runs in FOLDER with their simulation, and the errors with those accepted last."""
    if live and find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    folder = scenarios_folder() / "measured" if folder is None else folder
    result = regress(folder, live)
    if json != "-":
        _print(result)
    if json is not None:
        write_json(json, result, indent=1)
    if update:
        accepted = {r["name"]: r["errors"] for r in result["runs"]}
        write_json(folder / EXPECTED, {"format": FORMAT, "runs": accepted}, indent=1)
        return 0
    return 1 if result["missing"] or any(row["grown"] for row in result["runs"]) else 0
