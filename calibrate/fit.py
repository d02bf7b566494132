"""Fits a profile's physical coefficients to measured step times.

    python -m calibrate.fit TABLE.json --profile BASE.json --out PROFILE.json

`calibrate.step_fit` is the method. The printed error is that of steps that a fit did not use: cases are split into
folds, and each fold is predicted by a fit to the others; with fewer than ten rows each configuration is a fold. With
`--given N` only N rows are fitted, spread evenly over the table, and the printed error is that of all other rows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from datetime import date as today
from pathlib import Path

import click
import numpy as np
from msgspec import structs

from calibrate.fitted_rows import Case, FittedRows, rows_to_fit
from calibrate.step_fit import PRIORS, Fit, Vector, count_steps, fit, fit_given
from sim.commands.command import Command, run_command
from sim.commands.files_named import FILE, OUTPUT
from sim.core.errors import InputError
from sim.core.long_runs import lines_while
from sim.core.units import counted
from sim.prices.coefficients import Coefficient
from sim.prices.nearby import shifts_near
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from sim.validation.records import Table
from sim.validation.tables import read_table

FAR_OFF = 100.0  # times too short or too long: no profile is so wrong
UNEXPLAINED = 3.0  # times too short or too long after the fit: no coefficient made it better


def fitted_profile(base: Profile, table: Table, found: Fit, count: int) -> Profile:
    """Return the base with fitted coefficients; each one's source names the old value and the table."""
    source = f"fitted to {table.name} ({counted(count, 'step')}); before: "
    stated, now, fitted = base.coefficients.flat(), found.profile.coefficients.flat(), {}
    for name in found.names:
        old = stated.get(name)
        before = f"{old.value:.4g}, {old.source}" if old else "none"
        fitted[name] = Coefficient(now[name].value, source + before)
    history = f"{base.source}; coefficients {', '.join(found.names)} fitted to {table.name} on {today.today()}"
    note = f"{float(np.mean(np.abs(np.expm1(found.held_out)))):.4f}"
    return structs.replace(
        found.profile,
        name=f"{base.name} fitted to {table.name}",
        source=history,
        date=str(today.today()),
        coefficients=found.profile.coefficients.changed(fitted),
        settings={**base.settings, "held_out_mean_abs_error": float(note)},
    )


@click.command("fit", cls=Command)
@click.argument("table", type=FILE, metavar="TABLE.json")
@click.option("--profile", required=True, metavar="BASE", help="the profile to start from")
@click.option("--out", type=OUTPUT, required=True, metavar="PROFILE.json", help="the fitted profile")
@click.option("--given", type=click.IntRange(2), metavar="N", help="fit only N rows, and predict the others")
@click.option("--only", multiple=True, metavar="NAME", help="coefficient to fit; may be repeated; default: all")
def main(table: Path, profile: str, out: Path, given: int | None, only: tuple[str, ...]) -> None:
    """Fit BASE's physical coefficients to the step times of TABLE.json and print the cross-validated error."""
    base = load_profile(profile, "--profile")
    for name in only:
        if name not in PRIORS:
            raise InputError(f"--only: found {name!r}; allowed: {', '.join(PRIORS)}")
    read = read_table(table)
    rows = rows_to_fit(read, base, given)
    for line in rows.left_out:
        print(f"left out: {line}")
    found = _with_progress(rows, base, only or tuple(PRIORS))
    fitted = None if rows.rest else found.after
    for words in far_off(rows.rest or rows.cases, found.before, fitted):
        click.echo(f"warning: {words}", err=True)
    fitted_profile(base, read, found, len(rows.cases)).save(out)
    _report(base, found, rows.cases, out)


def far_off(cases: Sequence[Case], log_errors: Vector, fitted: Vector | None = None) -> list[str]:
    """Return a question for each row that no coefficient explains: a time in milliseconds, or another scenario.

    `log_errors`: before the fit. `fitted`: after it, if these rows are the fitted ones.
    """
    wrong = np.abs(log_errors) > math.log(FAR_OFF)
    if fitted is not None:
        wrong |= np.abs(fitted) > math.log(UNEXPLAINED)
    return [
        f"{case.row.id}: measured.step_time_s: {case.row.measured['step_time_s']:.4g}, simulated "
        f"{case.row.measured['step_time_s'] * math.exp(error):.4g}; is it in seconds and of one step, and are the "
        "scenario's model, batch and GPUs the run's? One such row spoils the fit"
        for case, error, asked in zip(cases, log_errors.tolist(), wrong.tolist(), strict=True)
        if asked
    ]


def _with_progress(rows: FittedRows, base: Profile, names: Sequence[str]) -> Fit:
    """The fit, with a bar on standard error if that is a terminal, else lines there if it takes long."""

    def fitted(tick: Callable[[], None]) -> Fit:
        if rows.rest:
            return fit_given(rows.cases, rows.rest, base, names, tick)
        return fit(rows.cases, base, names, tick)

    total = count_steps(rows.cases, rows.rest, names)
    if not sys.stderr.isatty():
        simulated: list[None] = []
        with lines_while(lambda: f"fitting: {len(simulated):,} of at most {total:,} steps simulated"):
            return fitted(lambda: simulated.append(None))
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("fitting", total=total)
        return fitted(lambda: progress.advance(task))


def _report(base: Profile, found: Fit, cases: Sequence[Case], out: Path) -> None:
    stated, now = base.coefficients.flat(), found.profile.coefficients.flat()
    near = [shifts_near(found.profile.nearby, case.scenario) for case in cases]
    for name in found.names:
        old, values = stated.get(name), [now[name].value * math.exp(shifts.get(name, 0.0)) for shifts in near]
        print(
            f"{name:28s} {f'{old.value:.4g}' if old else 'not stated':>10s} -> {now[name].value:.4g}"
            f" ({min(values):.4g} to {max(values):.4g} at the fitted steps)"
        )
    for title, logs in (("before", found.before), ("fitted rows", found.after), ("rows not fitted", found.held_out)):
        off = np.abs(np.expm1(logs))
        print(
            f"{title:16s} mean {off.mean():6.1%}  median {np.median(off):6.1%}  max {off.max():6.1%}"
            f"  ({counted(len(off), 'step')})"
        )
    if np.abs(np.expm1(found.held_out)).mean() > np.abs(np.expm1(found.before)).mean():
        print(
            f"steps that the fit did not use are predicted worse with it: keep {base.name}, fit fewer coefficients, or "
            "give more steps"
        )
    print(f"wrote {out}; a step with it: stepsim run SCENARIO --set calibration={out}")


if __name__ == "__main__":
    run_command(main)
