"""Errors of stored real runs against their simulation, and against the errors that were last accepted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert, field

from sim.core.errors import InputError
from sim.core.files import read_json, write_json
from sim.core.processes import python_module
from sim.inputs.measured_run import load_measured
from sim.inputs.scenario import Scenario, parse_scenario
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from sim.studies.compared import Pair
from sim.studies.comparison import compare, simulate_run
from sim.studies.measured import own_profile, to_timeline

EXPECTED = "expected.json"
MACHINE = "machine.json"  # micro-benchmarks of the machine that made the folder's runs
BY_BENCHMARKS = "step_time_by_benchmarks"
QUANTITIES = ("step_time", "replay", "peak_bytes", "saved_for_backward_bytes", BY_BENCHMARKS)
FORMAT = "sim-regress/1"
GROWN = 0.005  # an error may grow by this fraction of the measured figure before it counts
TOLERANCE = 0.10
BENCHMARKS_TOLERANCE = 0.25  # of a live run: kernels timed apart leave out what autograd and cold caches cost
LIVE_TIMEOUT_S = 600.0
BENCHMARKS_TIMEOUT_S = 1800.0
Errors = dict[str, Annotated[float, Meta(ge=-1e9, le=1e9)]]  # nothing would ever be beyond a limit of infinity


def errors_of(path: Path, benchmarks: Profile | None = None) -> Errors:
    """Simulated against measured for one stored run: step time, its replay, peak memory, bytes saved for backward, and
    the step's time by `benchmarks` of its machine.

    Raises:
        InputError: if the file is no measured run that can be simulated.
    """
    run = load_measured(path)
    scenario = scenario_of(path)
    simulation = simulate_run(scenario, run, own_profile(run, str(path)), str(path))
    result = compare(simulation, run, to_timeline(run.actions, scenario.parallelism), TOLERANCE)
    pairs: dict[str, list[Pair | None]] = {
        "step_time": [result.step_time_s],
        "replay": [result.replay],
        "peak_bytes": [m.peak_bytes for m in result.memory],
        "saved_for_backward_bytes": [m.saved_for_backward_bytes for m in result.memory],
    }
    out: Errors = {}
    for key, found in pairs.items():
        if errors := [pair.error for pair in found if pair is not None and pair.error is not None]:
            out[key] = max(errors, key=abs)
    if benchmarks is not None:
        simulated = simulate_run(scenario, run, benchmarks, str(path)).outcome
        out[BY_BENCHMARKS] = simulated.step_time_s / run.step_time_s - 1
    return out


def scenario_of(path: Path) -> Scenario:
    """The scenario that a stored run was a run of.

    Raises:
        InputError: if it is none.
    """
    return parse_scenario(load_measured(path).scenario, f"{path}: scenario")


def grown(found: Errors, expected: Errors) -> list[str]:
    """Return what is worse than expected, in words; what is not expected to be there does not count."""
    out = []
    for key, before in expected.items():
        now = found.get(key)
        if now is None:
            out.append(f"{key}: {before:+.2%} before, not compared any more")
        elif abs(now) > abs(before) + GROWN:
            out.append(f"{key}: {before:+.2%} before, {now:+.2%} now")
    return out


def live_errors(path: Path, options: Sequence[str] = (), benchmarks: Profile | None = None) -> Errors:
    """The step time's errors in a run taken now, of the scenario of a stored one, by its own calibration and by
    `benchmarks` of this machine; `options` go to calibrate.measure.

    Raises:
        InputError: if `calibrate.measure` could not run it.
    """
    with tempfile.TemporaryDirectory() as folder:
        scenario, out = Path(folder) / f"{path.stem}.yaml", Path(folder) / "measured.json"
        scenario.write_text(json.dumps(load_measured(path).scenario))  # JSON is YAML
        command = ["calibrate.measure", str(scenario), "--out", str(out), *options]
        _run(command, str(path), LIVE_TIMEOUT_S)
        found = errors_of(out, benchmarks)
        return {key: found[key] for key in ("step_time", BY_BENCHMARKS) if key in found}


def live_benchmarks(device: str) -> Profile:
    """Return what `calibrate.run --quick` measures of this machine now.

    Raises:
        InputError: if it could not.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / MACHINE
        command = ["calibrate.run", "--quick", "--device", device, "--out", str(out)]
        _run(command, "--live", BENCHMARKS_TIMEOUT_S)
        return load_profile(str(out), "--live")


def _run(command: Sequence[str], where: str, timeout_s: float) -> None:
    """Run a module with its arguments in a process of its own.

    Raises:
        InputError: begins with `where`; if the process failed, or took longer than `timeout_s`.
    """
    module, *arguments = command
    try:
        run = subprocess.run([*python_module(module), *arguments], capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise InputError(f"{where}: {module} took more than {timeout_s:g} s") from None
    if run.returncode:
        raise InputError(f"{where}: {module}: {run.stderr.strip()[-500:]}")


class Expected(Struct, frozen=True):
    """The content of a folder's `expected.json`: accepted errors by run, where the micro-benchmarks are, and limits.

    `limits`: the largest error by quantity. `limits_of`: by run, where a run has others, each for a reason that
    docs/measuring.md states.
    """

    runs: dict[str, Errors]
    benchmarks: str | None = None
    limits: Errors = field(default_factory=dict)
    limits_of: dict[str, Errors] = field(default_factory=dict)

    def check(self, where: str, names: Collection[str]) -> None:
        """Refuse limits that nothing would be held to; `names`: runs of the folder.

        Raises:
            InputError: begins with `where`; for an unknown quantity or run.
        """
        for name in self.limits_of:
            if name not in names and name not in self.runs:
                raise InputError(f"{where}: limits_of: no run is called {name!r}; allowed: {', '.join(sorted(names))}")
        given = {"limits": self.limits, **{f"limits_of.{name}": own for name, own in self.limits_of.items()}}
        for key, own in given.items():
            for quantity in own:
                if quantity not in QUANTITIES:
                    allowed = ", ".join(QUANTITIES)
                    raise InputError(f"{where}: {key}: unknown quantity {quantity!r}; allowed: {allowed}")

    def beyond(self, name: str, found: Errors) -> list[str]:
        """Return what exceeds its limit, in words."""
        limits = {**self.limits, **self.limits_of.get(name, {})}
        return [
            f"{key}: {found[key]:+.2%}, the limit is {limit:.0%}"
            for key, limit in limits.items()
            if key in found and abs(found[key]) > limit
        ]


def _expected(folder: Path) -> Expected:
    path = folder / EXPECTED
    if not path.is_file():
        return Expected({})
    try:
        return convert(read_json(path), Expected)
    except ValidationError as error:
        key = next(iter(re.findall(r"\$\.(\w+)", str(error))), "runs")
        others = {"limits": "errors by quantity", "benchmarks": "a profile's file, by its path from the folder"}
        what = others.get(key, "errors by quantity by run")
        raise InputError(f"{path}: {key}: allowed: {what}, as --update writes") from None


def regress(folder: Path, live: bool, benchmarks: str | None = None) -> dict[str, Any]:
    """All stored runs of a folder (`sim-regress/1`): errors, expectations, and what grew; `benchmarks`: a profile in
    place of the folder's own.

    Raises:
        InputError: if there is no run, or one cannot be simulated.
    """
    if not folder.is_dir():
        what = "no such folder" if not folder.exists() else "is a file"
        raise InputError(f"{folder}: {what}; allowed: a folder with NAME.json of calibrate.measure")
    paths = sorted(p for p in folder.glob("*.json") if p.name not in (EXPECTED, MACHINE))
    if not paths:
        raise InputError(f"{folder}: found no measured runs; allowed: a folder with NAME.json of calibrate.measure")
    known = _expected(folder)
    known.check(str(folder / EXPECTED), {p.stem for p in paths})
    if benchmarks is None:
        benchmarks = known.benchmarks or (MACHINE if (folder / MACHINE).is_file() else None)
    profile = None if benchmarks is None else load_profile(str(folder / benchmarks), "--benchmarks")
    now: dict[str, Profile] = {}  # this machine's own benchmarks, by device
    runs = []
    for path in paths:
        errors, before = errors_of(path, profile), known.runs.get(path.stem, {})
        row: dict[str, Any] = {"name": path.stem, "errors": errors, "expected": before, "grown": grown(errors, before)}
        if not before:
            row["grown"] = ["no expectation is stored; accept one with --update"]
        row["beyond"] = known.beyond(path.stem, errors)
        if live:
            _live(row, path, now)
        runs.append(row)
    gone = [name for name in known.runs if name not in {p.stem for p in paths}]
    return {"format": FORMAT, "runs": runs, "missing": gone, "benchmarks": benchmarks}


def _live(row: dict[str, Any], path: Path, benchmarks: dict[str, Profile]) -> None:
    """Add a run made now to a row: its errors and whether they are out of tolerance, or why it cannot be made here."""
    device = "cpu" if scenario_of(path).cluster.gpu.chip.is_host else "cuda"
    try:
        if device not in benchmarks:
            benchmarks[device] = live_benchmarks(device)
        found = live_errors(path, benchmarks=benchmarks[device])
    except InputError as error:
        row["live_not_run"] = str(error)
        return
    row["live_step_time_error"], row["live_by_benchmarks"] = found["step_time"], found.get(BY_BENCHMARKS)
    limits = {"step_time": TOLERANCE, BY_BENCHMARKS: BENCHMARKS_TOLERANCE}
    row["live_beyond"] = [f"live {key}: {error:+.2%}" for key, error in found.items() if abs(error) > limits[key]]
    row["grown"] += row["live_beyond"]


def accept(folder: Path, result: dict[str, Any]) -> None:
    """Accept today's errors. Limits stay, but for those of runs that are not there any more."""
    accepted = {r["name"]: r["errors"] for r in result["runs"]}
    noted = {} if result["benchmarks"] in (None, MACHINE) else {"benchmarks": result["benchmarks"]}
    known = _expected(folder)
    limits_of = {name: own for name, own in known.limits_of.items() if name in accepted}
    limits = {k: v for k, v in (("limits", known.limits), ("limits_of", limits_of)) if v}
    write_json(folder / EXPECTED, {"format": FORMAT, **noted, **limits, "runs": accepted}, indent=1)
    for name in known.limits_of.keys() - limits_of.keys():
        print(f"{name}: the run is not there any more; its limits are dropped", file=sys.stderr)
