"""Fits a profile's physical coefficients to measured step times.

    python -m calibrate.fit TABLE.json --profile BASE.json --out PROFILE.json

The fit minimizes squares of log(predicted ÷ measured) over all configurations. The loss is soft-L1, so that an outlier
counts no more than a few good rows. Each coefficient has a prior: its present value, within a stated factor.

The printed error is a cross-validated one. Configurations are split into folds, and each fold is predicted with
coefficients fitted to the other folds. These refits are a few Gauss-Newton steps from the fit of all rows: they keep
its slopes, priors and loss, and simulate the errors again after each step.

With `--given N` only N rows are fitted, spread evenly over the table, with wider priors (`FEW_ROWS_WIDTH`). The rows
themselves decide how much these priors count (`fit_few`). The printed error is then that of all other rows. Fewer than
`FEW` rows are fitted in this way too; then each row is predicted by a fit to the others.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date as today
from pathlib import Path

import click
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from calibrate.fitted_rows import Case, rows_to_fit
from sim.commands.command import Command, run_command
from sim.commands.files_named import FILE, OUTPUT
from sim.core.errors import InputError
from sim.core.long_runs import lines_while
from sim.core.units import counted
from sim.prices.coefficients import Coefficient
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from sim.validation.records import Table
from sim.validation.tables import read_table

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
FOLDS = 5
FEW = 2 * FOLDS  # rows; fewer are fitted as few
LOSS_SCALE = 0.05  # errors beyond 5 % count about linearly
STEP = 0.03  # change of a coefficient's logarithm from which slopes are computed
REFITS = 3  # Gauss-Newton steps for each fold

# Coefficients that may be fitted: the start if the profile has none, and the standard deviation of the logarithm.
PRIORS: Mapping[str, tuple[float, float]] = {
    "host_operator_s": (5e-5, 0.5),
    "host_collective_s": (3e-5, 1.0),
    "host_message_s": (1e-4, 1.0),
    "host_step_s": (1e-3, 0.7),
    "memory_efficiency": (0.85, 0.05),
    "memory_latency_s": (2e-6, 0.1),
    "memory_efficiency_cross_entropy": (0.85, 0.2),
    "power_at_peak": (1.2, 0.05),
    "matmul_speed": (1.0, 0.05),
    "unaligned_matmul_slowdown": (2.0, 0.5),
    "attention_speed": (1.0, 0.05),
    "attention_efficiency_64": (0.5, 0.1),
    "attention_efficiency_128": (0.5, 0.1),
    "attention_backward_share": (0.85, 0.1),
}


# A few rows do not tell one part of a machine from another. So the coefficients of all kernels get wide priors and take
# up what the rows have in common.
FEW_ROWS_WIDTH: Mapping[str, float] = {
    "matmul_speed": 0.2,
    "attention_speed": 0.3,
    "memory_efficiency": 0.2,
    "host_operator_s": 1.0,
}
WIDTH_FACTORS = (0.1, 0.3, 1.0)  # of these widths and those of `PRIORS`
NOISES = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2)  # standard deviations of errors that no coefficient explains
FAR_OFF = 100.0  # times too short or too long: no profile is so wrong
USUAL_NOISE, NOISE_WIDTH = 0.03, 0.8  # prior of the noise: its median, and the standard deviation of its logarithm


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted coefficients, and each case's log(predicted ÷ measured): before the fit, after it, and held out of it."""

    coefficients: dict[str, float]
    before: Vector
    after: Vector
    held_out: Vector


@dataclass(frozen=True, slots=True)
class _Problem:
    """Errors of cases as functions of the logarithms of the named coefficients.

    `tick` is called after each simulated step.
    """

    cases: Sequence[Case]
    base: Profile
    names: tuple[str, ...]
    tick: Callable[[], None]
    widths: Mapping[str, float] = field(default_factory=dict)

    @property
    def start(self) -> Vector:
        return np.array([math.log(_value(self.base, name)) for name in self.names])

    @property
    def width(self) -> Vector:
        return np.array([self.widths.get(name, PRIORS[name][1]) for name in self.names])

    def errors(self, x: Vector, which: Sequence[int] | None = None) -> Vector:
        """Return log(predicted ÷ measured) of all cases, or of `which`."""
        profile, out = changed(self.base, self.names, x), []
        for i in range(len(self.cases)) if which is None else which:
            out.append(self.cases[i].log_error(profile))
            self.tick()
        return np.array(out)

    def slopes(self, x: Vector, here: Vector) -> Matrix:
        """Return d error / d logarithm [cases, coefficients], from steps that are long enough to reach across kinks."""
        steps = STEP * np.eye(len(x))
        return np.column_stack([(self.errors(x + step) - here) / STEP for step in steps])

    def at_start(self) -> tuple[Vector, Matrix]:
        """Return the errors and slopes before any fit."""
        before = self.errors(self.start)
        return before, self.slopes(self.start, before)

    def residuals(self, x: Vector) -> Vector:
        return np.concatenate([_soft(self.errors(x)), (x - self.start) / self.width])

    def jacobian(self, x: Vector) -> Matrix:
        here = self.errors(x)
        return np.concatenate([self.slopes(x, here) / _soft_stretch(here)[:, None], np.diag(1.0 / self.width)])


def fit(
    cases: Sequence[Case],
    base: Profile,
    names: Sequence[str],
    tick: Callable[[], None] = lambda: None,
) -> Fit:
    """Fit those of the named coefficients of `base` that any case depends on.

    `tick` is called after each simulated step.

    Raises:
        InputError: if no case depends on any of the coefficients.
    """
    from scipy.optimize import least_squares

    every = _Problem(cases, base, tuple(names), tick)
    before, slopes = every.at_start()
    problem, _ = _that_matter(every, slopes)
    best = least_squares(problem.residuals, problem.start, problem.jacobian, max_nfev=6, xtol=1e-3, ftol=1e-3).x
    after = problem.errors(best)
    slopes = problem.slopes(best, after)
    held_out = np.empty(len(cases))
    for fold in folds([c.row.group for c in cases]):
        seen = [i for i in range(len(cases)) if i not in fold]
        x, errors = best, after[seen]
        for _ in range(REFITS):
            x = _refit(x, errors, slopes[seen], problem.start, problem.width)
            errors = problem.errors(x, seen)
        held_out[fold] = problem.errors(x, fold)
    return Fit(_values(problem, best), before, after, held_out)


def fit_few(cases: Sequence[Case], base: Profile, names: Sequence[str], tick: Callable[[], None] = lambda: None) -> Fit:
    """Fit named coefficients of `base` to a few cases, which may be too few to tell a cause from noise.

    Each pair of a factor on the priors' widths and of a noise is fitted. The result is the mean of these fits, weighted
    by the probability of the cases' errors under their pair (the evidence of MacKay 1992, "Bayesian interpolation",
    Neural Computation 4(3), with errors linear in the coefficients). So errors that agree move the coefficients far,
    and errors that contradict each other hardly at all.

    Raises:
        InputError: if no case depends on any of the coefficients.
    """
    problem = _Problem(cases, base, tuple(names), tick, FEW_ROWS_WIDTH)
    return _fit_few(problem, *problem.at_start())


def _fit_few(every: _Problem, before: Vector, every_slope: Matrix) -> Fit:
    """`fit_few` to a problem of which the errors and slopes at its start are known."""
    problem, slopes = _that_matter(every, every_slope)
    x, errors = problem.start, before
    for _ in range(REFITS):
        x = _weighed(x, errors, slopes, problem.start, problem.width)
        errors = problem.errors(x)
    return Fit(_values(problem, x), before, errors, errors)


def fit_all_few(cases: Sequence[Case], base: Profile, names: Sequence[str], tick: Callable[[], None]) -> Fit:
    """`fit_few` to all cases; held out: each case's error after `fit_few` to the others.

    Raises:
        InputError: if no case depends on any of the coefficients.
    """
    every = _Problem(cases, base, tuple(names), tick, FEW_ROWS_WIDTH)
    before, slopes = every.at_start()  # of each case by itself, so that all fits share them
    held_out = []
    for i, case in enumerate(cases):
        seen = [k for k in range(len(cases)) if k != i]
        others = _fit_few(replace(every, cases=[cases[k] for k in seen]), before[seen], slopes[seen])
        held_out.append(predicted_rest(others, base, [case]).held_out[0])
    return replace(_fit_few(every, before, slopes), held_out=np.array(held_out))


def _that_matter(problem: _Problem, slopes: Matrix) -> tuple[_Problem, Matrix]:
    """Return the problem and its slopes without coefficients that no case depends on."""
    matter = np.abs(slopes).max(axis=0) > 0
    if not matter.any():
        raise InputError(f"no step of the table depends on {', '.join(problem.names)}")
    kept = tuple(name for name, does in zip(problem.names, matter, strict=True) if does)
    return replace(problem, names=kept), slopes[:, matter]


def _values(problem: _Problem, logs: Vector) -> dict[str, float]:
    return {name: float(math.exp(v)) for name, v in zip(problem.names, logs, strict=True)}


def _weighed(near: Vector, errors: Vector, slopes: Matrix, start: Vector, width: Vector) -> Vector:
    """Return the mean of the fits with each pair of a factor and a noise, by the probability of the errors."""
    at_start, logs, fits = errors - slopes @ (near - start), list[float](), list[Vector]()
    for factor in WIDTH_FACTORS:
        explained = slopes * (factor * width)
        for noise in NOISES:
            covariance = explained @ explained.T + noise**2 * np.eye(len(errors))
            misfit = at_start @ np.linalg.solve(covariance, at_start)
            prior = (math.log(noise / USUAL_NOISE) / NOISE_WIDTH) ** 2
            logs.append(-0.5 * float(np.linalg.slogdet(covariance)[1] + misfit + prior))
            fits.append(_refit(near, errors, slopes, start, factor * width, noise))
    return np.asarray(np.average(fits, axis=0, weights=np.exp(np.array(logs) - max(logs))), dtype=np.float64)


def _refit(
    near: Vector, errors: Vector, slopes: Matrix, start: Vector, width: Vector, scale: float = LOSS_SCALE
) -> Vector:
    """Return the minimum over some cases, with errors linear in the coefficients around `near`."""
    from scipy.optimize import least_squares

    def residuals(x: Vector) -> Vector:
        return np.concatenate([_soft(errors + slopes @ (x - near), scale), (x - start) / width])

    return np.asarray(least_squares(residuals, near).x, dtype=np.float64)


def _soft(errors: Vector, scale: float = LOSS_SCALE) -> Vector:
    """Return residuals whose square is the soft-L1 loss 2(sqrt(1 + z²) − 1), z = error / scale."""
    z = errors / scale
    return np.asarray(np.sign(z) * np.sqrt(2.0 * (np.sqrt(1.0 + z * z) - 1.0)), dtype=np.float64)


def _soft_stretch(errors: Vector) -> Vector:
    """Return d error / d soft residual, by which slopes of errors become slopes of residuals."""
    step = 1e-6
    return 2 * step / (_soft(errors + step) - _soft(errors - step))


def folds(groups: Sequence[str]) -> list[list[int]]:
    """Split cases into folds; all rows of a configuration lie in one fold, as they are much alike."""
    names = sorted(set(groups))
    fold_of = {name: i % FOLDS for i, name in enumerate(names)}
    dealt = [[i for i, g in enumerate(groups) if fold_of[g] == fold] for fold in range(FOLDS)]
    return [fold for fold in dealt if fold]


def changed(base: Profile, names: Sequence[str], logs: Vector, source: str = "fit") -> Profile:
    """Return `base` with the named coefficients replaced by exp(logs)."""
    new = {name: Coefficient(float(math.exp(v)), source) for name, v in zip(names, logs, strict=True)}
    return structs.replace(base, coefficients=base.coefficients.changed(new))


def _value(base: Profile, name: str) -> float:
    found = base.coefficients.flat().get(name)
    return found.value if found is not None and found.value > 0 else PRIORS[name][0]


def fitted_profile(base: Profile, table: Table, found: Fit, count: int) -> Profile:
    """Return the base with fitted coefficients; each one's source names the old value and the table."""
    source = f"fitted to {table.name} ({counted(count, 'step')}); before: "
    stated, fitted = base.coefficients.flat(), {}
    for name, value in found.coefficients.items():
        old = stated.get(name)
        before = f"{old.value:.4g}, {old.source}" if old else "none"
        fitted[name] = Coefficient(value, source + before)
    history = f"{base.source}; coefficients {', '.join(found.coefficients)} fitted to {table.name} on {today.today()}"
    note = f"{float(np.mean(np.abs(np.expm1(found.held_out)))):.4f}"
    return structs.replace(
        base,
        name=f"{base.name} fitted to {table.name}",
        source=history,
        date=str(today.today()),
        coefficients=base.coefficients.changed(fitted),
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
    few = fit_few if rows.rest else fit_all_few
    way = fit if given is None and len(rows.cases) >= FEW else few
    found = _with_progress(rows.cases, base, only or tuple(PRIORS), way)
    if rows.rest:
        found = predicted_rest(found, base, rows.rest)
    for words in far_off(rows.rest or rows.cases, found.before):
        click.echo(f"warning: {words}", err=True)
    fitted_profile(base, read, found, len(rows.cases)).save(out)
    _report(base, found, out)


def far_off(cases: Sequence[Case], log_errors: Vector) -> list[str]:
    """Return a question for each row that no coefficient explains: most are times in milliseconds."""
    return [
        f"{case.row.id}: measured.step_time_s: {case.row.measured['step_time_s']:.4g}, simulated "
        f"{case.row.measured['step_time_s'] * math.exp(error):.4g}; is it in seconds, and of one step?"
        for case, error in zip(cases, log_errors.tolist(), strict=True)
        if abs(error) > math.log(FAR_OFF)
    ]


def predicted_rest(found: Fit, base: Profile, rest: Sequence[Case]) -> Fit:
    """Return the fit with errors on `rest`: `before` those of `base`, `held_out` those of the fitted profile."""
    fitted = changed(base, tuple(found.coefficients), np.log(list(found.coefficients.values())))
    errors = [[case.log_error(profile) for case in rest] for profile in (base, fitted)]
    return replace(found, before=np.array(errors[0]), held_out=np.array(errors[1]))


def _with_progress(cases: Sequence[Case], base: Profile, names: Sequence[str], way: Callable[..., Fit]) -> Fit:
    """The fit, with a bar on standard error if that is a terminal, else lines there if it takes long."""
    fits = {fit: 6 * (len(names) + 1), fit_few: len(names) + REFITS, fit_all_few: len(names) + REFITS * len(cases)}
    total = len(cases) * (1 + fits[way])
    if not sys.stderr.isatty():
        simulated: list[None] = []
        with lines_while(lambda: f"fitting: {len(simulated):,} of at most {total:,} steps simulated"):
            return way(cases, base, names, lambda: simulated.append(None))
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("fitting", total=total)
        return way(cases, base, names, lambda: progress.advance(task))


def _report(base: Profile, found: Fit, out: Path) -> None:
    stated = base.coefficients.flat()
    for name, value in found.coefficients.items():
        old = stated.get(name)
        print(f"{name:28s} {f'{old.value:.4g}' if old else 'not stated':>10s} -> {value:.4g}")
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
