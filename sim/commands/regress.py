"""Stored real runs against their simulation: has an error grown since it was last accepted?

    python -m sim.regress [FOLDER] [--update] [--benchmarks PROFILE.json] [--live] [--json FILE|-]

FOLDER (scenarios/measured) holds measured runs, `NAME.json`, and in `expected.json` what their comparisons came to
when last accepted, with limits that hold whatever was accepted. As runs and calibrations are stored, results differ
only where the simulator does.
Each step is predicted from the calibration taken beside it and, where the folder has them, from `calibrate.run`'s
micro-benchmarks of the same machine: `machine.json`, or the profile that `--update --benchmarks` has noted. The first
holds schedules and communications to account, the second the prices too.
`--live` also makes both anew on this machine, micro-benchmarks once and a run of each scenario (minutes, and on a
quiet machine), and compares them with the tolerances. What this machine cannot run is listed. `--update` accepts
today's errors, not limits. Exit codes: 0 nothing grew, 1 something did or is beyond its limit (or a live run is out of
tolerance), 2 bad input; with `--update` what grew is accepted and does not count.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from sim.commands.command import Command
from sim.commands.files_named import FILE
from sim.commands.options import Report, gathered, json_option
from sim.inputs.shipped import scenarios_folder
from sim.studies.regression import accept, regress
from sim.views.terminal import PIPED_WIDTH, standard_output, words_table


def _print(result: dict[str, Any]) -> None:
    lines: list[tuple[str, str]] = []
    for row in result["runs"]:
        errors = ", ".join(f"{k} {v:+.2%}" for k, v in row["errors"].items())
        live, ours = row.get("live_step_time_error"), row.get("live_by_benchmarks")
        by_both = f", live {live:+.2%}" if live is not None else ""
        by_both += f" (by benchmarks {ours:+.2%})" if ours is not None else ""
        lines.append((row["name"], f"{errors}{by_both}"))
        if "live_not_run" in row:
            lines.append(("", f"not run here: {row['live_not_run']}"))
        lines += [("", f"WORSE: {line}") for line in row["grown"]]
        lines += [("", f"BEYOND: {line}") for line in row["beyond"]]
    lines += [(name, "MISSING: expected, but not there") for name in result["missing"]]
    standard_output(PIPED_WIDTH).print_table(words_table(lines))


@click.command("regress", cls=Command)
@click.argument("folder", type=FILE, required=False)
@click.option("--update", is_flag=True, help="store today's errors as the expected ones")
@click.option("--benchmarks", metavar="PROFILE.json", help="profile by calibrate.run of the machine that made the runs")
@click.option("--live", is_flag=True, help="also make new benchmarks and runs on this machine")
@gathered(Report, "report", json_option)
def main(folder: Path | None, update: bool, benchmarks: str | None, live: bool, report: Report) -> int:
    """Compare the measured runs in FOLDER with their simulation, and the errors with the stored, accepted ones."""
    if live and find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    folder = scenarios_folder() / "measured" if folder is None else folder
    if benchmarks is not None:
        benchmarks = os.path.relpath(benchmarks, folder)
    result = regress(folder, live, benchmarks)
    report.show(result, None, _print)
    if update:
        accept(folder, result)
        return 1 if any(row["beyond"] or row.get("live_beyond") for row in result["runs"]) else 0
    return 1 if result["missing"] or any(row["grown"] or row["beyond"] for row in result["runs"]) else 0
