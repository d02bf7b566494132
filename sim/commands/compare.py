"""Simulated against measured: the same scenario, once in the simulator and once for real.

    python -m sim.compare SCENARIO.yaml MEASURED.json [--calibration NAME] [--html FILE] [--json FILE|-]
                          [--tolerance 0.10]

Simulates with the run's own calibration unless another is named. Exit codes: 0 within tolerance, 1 step time
out of it, 2 bad input.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from sim.commands.command import Command
from sim.commands.options import Report, report_options, scenario_argument
from sim.core.errors import InputError
from sim.core.units import change_percent, n_bytes, percent, seconds
from sim.inputs.measured_run import QUIET_CORES, load_measured
from sim.inputs.scenario import load_scenario
from sim.prices.profiles import load_profile
from sim.studies.compared import Comparison, Pair
from sim.studies.comparison import check_same, compare, simulate_run
from sim.studies.measured import own_profile, to_timeline
from sim.views.compare_page import action_name

MOST_OPERATORS = 12  # that the table shows


def print_table(result: Comparison) -> None:
    """A table a person can read, on standard output."""
    from sim.views.terminal import plain_table, standard_output

    rows = [_row("step" if result.quiet else "step (noisy run)", result.step_time_s, seconds)]
    rows += [_row(action_name(kind, pair), pair, seconds) for kind, pair in result.actions.items()]
    rows += [_row(f"rank {r.rank} compute", r.compute_s, seconds) for r in result.ranks]
    for m in result.memory:
        rows.append(_row(f"rank {m.rank} peak memory", m.peak_bytes, n_bytes))
        if m.saved_for_backward_bytes is not None:
            rows.append(_row(f"rank {m.rank} saved for backward", m.saved_for_backward_bytes, n_bytes))
    shown = (result.operators or ())[:MOST_OPERATORS]
    rows += [_row(f"{row.operator} {row.phase}".strip(), row, seconds) for row in shown]
    title = f"{result.scenario}: simulated against measured (profile: {result.profile})"
    terminal = standard_output()
    terminal.print(title, "bold")
    terminal.print_table(plain_table(("", "simulated", "measured", "error"), rows, gap=2))
    verdict = "within" if result.within_tolerance else "OUT OF"
    terminal.print(
        f"step time {_error(result.step_time_s)}{doubt(result)}, {verdict} tolerance "
        f"({result.tolerance:.0%}); measured steps spread by {percent(result.noise)}; actions end "
        f"{percent(result.action_ends.mean)} of the step apart"
    )
    if result.torch is not None:
        theirs, ours = result.torch.step_time_s, result.torch.bundled_step_time_s
        terminal.print(
            f"{result.torch.what}: {seconds(theirs.measured)} a step, simulated {_error(theirs)}; the "
            f"bundled one in turns with it {seconds(ours.measured)}, simulated {_error(ours)}"
        )
    if result.cancelled is not None:
        terminal.print(result.cancelled)
    for warning in result.warnings:
        terminal.print(f"the run warned: {warning}")


def doubt(result: Comparison) -> str:
    """Return the note on an error of a noisy run: how many cores others kept busy; empty for a quiet run."""
    if result.quiet:
        return ""
    return f" (noisy run: others kept up to {result.others_cores:.2g} cores busy, quiet is {QUIET_CORES:g})"


def _row(name: str, pair: Pair, words: Callable[[float], str]) -> tuple[str, ...]:
    return name, words(pair.simulated), words(pair.measured), _error(pair)


def _error(pair: Pair) -> str:
    return "" if pair.error is None else change_percent(pair.error)


@click.command("compare", cls=Command)
@scenario_argument
@click.argument("measured", metavar="MEASURED.json")
@click.option("--calibration", metavar="NAME", help="a profile in place of the one stored in the run")
@click.option(
    "--tolerance", type=float, default=0.10, help="largest error of the step time for exit code 0; 0.1 is 10 %"
)
@report_options
def main(
    scenario: Path,
    measured: str,
    calibration: str | None,
    tolerance: float,
    report: Report,
) -> int:
    """Compare SCENARIO's simulation with MEASURED.json, a real run of it as calibrate.measure writes one."""
    from sim.views.compare_page import compare_page

    if not 0 <= tolerance < 100:
        raise InputError(f"--tolerance: found {tolerance:g}; allowed: 0 or more, such as 0.1")
    loaded, run = load_scenario(scenario, report.overrides), load_measured(measured)
    check_same(loaded, run, measured)
    profile = load_profile(calibration, "--calibration") if calibration else own_profile(run, measured)
    simulation = simulate_run(loaded, run, profile, measured)
    timeline = to_timeline(run.actions, loaded.parallelism)
    result = compare(simulation, run, timeline, tolerance)
    report.show(result, lambda found: compare_page(found, simulation.timeline, timeline), print_table)
    return 0 if result.within_tolerance else 1
