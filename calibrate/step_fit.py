"""Fits a profile's coefficients to measured steps, some common to all steps and some near each of them.

The logarithm of a coefficient is its present value, plus a common shift, plus a shift that varies with what is run. Its
prior is a Gaussian process over steps: a common variance, and one that falls with exp(−distance) (`sim.prices.nearby`).
Each step's log(predicted ÷ measured) is 0 but for noise. The noise's loss is soft-L1, so that an outlier counts no more
than a few good rows. Errors are taken as linear in the shifts, and are simulated again after each pass. Fitting a
simulator's parameters and a process for what they do not explain is the calibration of Kennedy and O'Hagan (2001,
"Bayesian calibration of computer models", JRSS B 63).

How far the shifts may go, how much of them is common and how large the noise is, the steps decide: each choice is
fitted, and the result is the mean weighted by the probability of the errors (the evidence of MacKay 1992, "Bayesian
interpolation", Neural Computation 4(3)). So errors that agree move the coefficients far, errors that agree among like
steps move them for such steps, and errors that contradict each other hardly at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from calibrate.fitted_rows import Case
from sim.core.errors import InputError
from sim.prices.coefficients import Coefficient
from sim.prices.nearby import NearbyStep, mesh_features, nearness
from sim.prices.profile import Profile

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
FOLDS = 5
FEW = 2 * FOLDS  # cases; with fewer, each group of cases is a fold
STEP = 0.03  # change of a coefficient's logarithm from which slopes are computed: long enough to reach across kinks
PASSES = 3  # of simulating the errors and fitting again
REWEIGHTINGS = 8  # of cases by the soft-L1 loss, after which their weights no longer change

# Coefficients that may be fitted: the start if the profile has none, and the standard deviation of the logarithm. A few
# rows do not tell one part of a machine from another. So the coefficients of all kernels have wide priors and take up
# what the rows have in common.
PRIORS: Mapping[str, tuple[float, float]] = {
    "host_operator_s": (5e-5, 1.0),
    "host_collective_s": (3e-5, 1.0),
    "host_message_s": (1e-4, 1.0),
    "host_step_s": (1e-3, 0.7),
    "memory_efficiency": (0.85, 0.2),
    "memory_latency_s": (2e-6, 0.1),
    "memory_efficiency_cross_entropy": (0.85, 0.2),
    "power_at_peak": (1.2, 0.05),
    "matmul_speed": (1.0, 0.2),
    "unaligned_matmul_slowdown": (2.0, 0.5),
    "attention_speed": (1.0, 0.3),
    "attention_efficiency_64": (0.5, 0.1),
    "attention_efficiency_128": (0.5, 0.1),
    "attention_backward_share": (0.85, 0.1),
}
COMMON = (0.1, 0.3, 1.0)  # parts of these deviations that all steps have in common
LOCAL = (0.0, 0.1, 0.3, 1.0)  # parts of them that only like steps have in common
NOISES = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2)  # standard deviations of errors that no coefficient explains
USUAL_NOISE, NOISE_WIDTH = 0.03, 0.8  # prior of the noise: its median, and the standard deviation of its logarithm


@dataclass(frozen=True, slots=True)
class Fit:
    """The fitted profile, and each case's log(predicted ÷ measured): before the fit, after it, and held out of it.

    `names`: the fitted coefficients.
    """

    profile: Profile
    names: tuple[str, ...]
    before: Vector
    after: Vector
    held_out: Vector


class _Shifts(NamedTuple):
    """Shifts of the coefficients' logarithms: common [coefficients], and of each case [cases, coefficients]."""

    common: Vector
    own: Matrix


@dataclass(frozen=True, slots=True)
class _Problem:
    """Cases whose errors depend on coefficients. `before`: errors at the start [cases]; `slopes`: of the errors by the
    coefficients' logarithms [cases, coefficients]; `near`: exp(−distance) of cases; `tick`: called after each step."""

    cases: Sequence[Case]
    base: Profile
    names: tuple[str, ...]
    before: Vector
    slopes: Matrix
    near: Matrix
    tick: Callable[[], None]

    @property
    def width(self) -> Vector:
        return np.array([PRIORS[name][1] for name in self.names])

    def of(self, which: Sequence[int]) -> _Problem:
        """Return the problem of some of the cases."""
        cases = [self.cases[i] for i in which]
        near = self.near[np.ix_(which, which)]
        return replace(self, cases=cases, before=self.before[which], slopes=self.slopes[which], near=near)

    def fitted(self) -> tuple[Profile, Vector]:
        """Return the fitted profile and the cases' errors with it."""
        errors, own = self.before, np.zeros_like(self.slopes)
        for _ in range(PASSES):
            found = _posterior(errors - (self.slopes * own).sum(axis=1), self.slopes, self.width, self.near)
            own = found.common + self.near @ found.own
            errors = np.array([self._error(i, own[i]) for i in range(len(self.cases))])
        return self._profile(found), errors

    def _error(self, i: int, shifts: Vector) -> float:
        error = self.cases[i].log_error(changed(self.base, self.names, shifts))
        self.tick()
        return error

    def _profile(self, found: _Shifts) -> Profile:
        """Return the base with the common shifts, and the others near each case."""
        nearby = []
        for case, own in zip(self.cases, found.own, strict=True):
            if (features := mesh_features(case.scenario)) is not None and own.any():
                nearby.append(NearbyStep(features, dict(zip(self.names, np.exp(own).tolist(), strict=True))))
        return structs.replace(changed(self.base, self.names, found.common), nearby=(*self.base.nearby, *nearby))


def fit(cases: Sequence[Case], base: Profile, names: Sequence[str], tick: Callable[[], None] = lambda: None) -> Fit:
    """Fit those of the named coefficients of `base` that any case depends on; each fold is predicted by the others.

    `tick` is called after each simulated step.

    Raises:
        InputError: if no case depends on any of the coefficients.
    """
    problem = _problem(cases, base, names, tick)
    profile, after = problem.fitted()
    held_out = np.empty(len(cases))
    for fold in folds([c.row.group for c in cases]):
        seen = [i for i in range(len(cases)) if i not in fold]
        others, _ = problem.of(seen).fitted()
        held_out[fold] = errors_with(others, [cases[i] for i in fold], tick)
    return Fit(profile, problem.names, problem.before, after, held_out)


def fit_given(
    cases: Sequence[Case],
    rest: Sequence[Case],
    base: Profile,
    names: Sequence[str],
    tick: Callable[[], None] = lambda: None,
) -> Fit:
    """`fit` to the cases alone; `before` and `held_out` are the errors on `rest`."""
    problem = _problem(cases, base, names, tick)
    profile, after = problem.fitted()
    return Fit(profile, problem.names, errors_with(base, rest, tick), after, errors_with(profile, rest, tick))


def errors_with(profile: Profile, cases: Sequence[Case], tick: Callable[[], None] = lambda: None) -> Vector:
    """Return log(predicted ÷ measured) of each case with a profile."""
    errors = []
    for case in cases:
        errors.append(case.log_error(profile))
        tick()
    return np.array(errors)


def count_steps(cases: Sequence[Case], rest: Sequence[Case], names: Sequence[str]) -> int:
    """Return the most steps that a fit simulates."""
    count, dealt = len(cases), folds([c.row.group for c in cases])
    held = 2 * len(rest) if rest else sum(PASSES * (count - len(fold)) + len(fold) for fold in dealt)
    return count * (1 + len(names) + PASSES) + held


def _problem(cases: Sequence[Case], base: Profile, names: Sequence[str], tick: Callable[[], None]) -> _Problem:
    """Simulate errors and slopes at the start, and leave out coefficients that no case depends on."""
    steps = STEP * np.eye(len(names))
    before = errors_with(changed(base, names, np.zeros(len(names))), cases, tick)
    slopes = np.column_stack([(errors_with(changed(base, names, step), cases, tick) - before) / STEP for step in steps])
    matter = np.abs(slopes).max(axis=0) > 0
    if not matter.any():
        raise InputError(f"no step of the table depends on {', '.join(names)}")
    kept = tuple(name for name, does in zip(names, matter, strict=True) if does)
    return _Problem(cases, base, kept, before, slopes[:, matter], _nearness(cases), tick)


def _nearness(cases: Sequence[Case]) -> Matrix:
    """Return exp(−distance) between cases; 0 for those without features, near which a profile holds nothing."""
    features = [mesh_features(case.scenario) for case in cases]
    known, near = [i for i, f in enumerate(features) if f is not None], np.zeros((len(cases), len(cases)))
    described = [f for f in features if f is not None]
    for i in known:
        own = features[i]
        assert own is not None
        near[i, known] = nearness(own, described)
    return near


def _posterior(errors: Vector, slopes: Matrix, width: Vector, near: Matrix) -> _Shifts:
    """Return the mean of the shifts under every choice of variances, by the probability of the errors.

    `errors`: at the start, linear in the shifts, [cases]; `slopes` [cases, coefficients]; `near` [cases, cases].
    """
    explained = slopes * width
    alike, logs, found = explained @ explained.T, list[float](), list[_Shifts]()
    for common in COMMON:
        for local in LOCAL:
            prior = alike * (common**2 + local**2 * near)
            for noise in NOISES:
                covariance = prior + noise**2 * np.eye(len(errors))
                misfit = errors @ np.linalg.solve(covariance, errors)
                usual = (math.log(noise / USUAL_NOISE) / NOISE_WIDTH) ** 2
                logs.append(-0.5 * float(np.linalg.slogdet(covariance)[1] + misfit + usual))
                pulls = -slopes * width**2 * _weights(errors, prior, noise)[:, None]
                found.append(_Shifts(common**2 * pulls.sum(axis=0), local**2 * pulls))
    weights = np.exp(np.array(logs) - max(logs))
    return _Shifts(*(np.average(parts, axis=0, weights=weights) for parts in zip(*found, strict=True)))


def _weights(errors: Vector, prior: Matrix, noise: float) -> Vector:
    """Return (prior + noise)⁻¹ errors with the soft-L1 loss 2(sqrt(1 + z²) − 1), z = what is left of an error ÷ noise:
    each case's noise is larger by sqrt(1 + z²), found by reweighting."""
    variance = np.full(len(errors), noise**2)
    for _ in range(REWEIGHTINGS):
        weights = np.linalg.solve(prior + np.diag(variance), errors)
        left = errors - prior @ weights
        variance = noise**2 * np.sqrt(1.0 + (left / noise) ** 2)
    return np.asarray(np.linalg.solve(prior + np.diag(variance), errors), dtype=np.float64)


def folds(groups: Sequence[str]) -> list[list[int]]:
    """Split cases into folds; all rows of a configuration lie in one fold, as they are much alike."""
    names = sorted(set(groups))
    count = FOLDS if len(groups) >= FEW else len(names)
    fold_of = {name: i % count for i, name in enumerate(names)}
    dealt = [[i for i, g in enumerate(groups) if fold_of[g] == fold] for fold in range(count)]
    return [fold for fold in dealt if fold]


def changed(base: Profile, names: Sequence[str], shifts: Vector, source: str = "fit") -> Profile:
    """Return `base` with `shifts` added to the logarithms of the named coefficients, or of their starts."""
    new = {
        name: Coefficient(_value(base, name) * math.exp(shift), source)
        for name, shift in zip(names, shifts.tolist(), strict=True)
    }
    return structs.replace(base, coefficients=base.coefficients.changed(new))


def _value(base: Profile, name: str) -> float:
    found = base.coefficients.flat().get(name)
    return found.value if found is not None and found.value > 0 else PRIORS[name][0]
