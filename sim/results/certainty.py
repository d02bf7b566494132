"""The 90 % interval of a step time or of a served workload, and in words what it is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from msgspec import Struct

from sim.core.normal import NINETY_BY_MEAN, NINETY_PERCENT
from sim.core.shipped import shipped_profiles
from sim.inputs.scenario import Scenario
from sim.prices.likeness import Features, features_of
from sim.prices.profile import Profile
from sim.results.evidence import SERVING, Width, interval_factor, published, sort_of
from sim.results.metrics import interval
from topology.presets import GPUS
from topology.spec import GpuSpec

HELD_OUT = "held_out_mean_abs_error"  # a fitted profile's setting: of rows that the fit did not see


class StepInterval(Struct, frozen=True):
    """Seconds, and what the width comes from."""

    low_s: float
    high_s: float
    why: str


def step_interval(
    scenario: Scenario, profile: Profile, step_s: float, shares: Mapping[tuple[str, str, float], float]
) -> StepInterval:
    """The interval of a step of `step_s` seconds; `shares`: its seconds by operator kind, source and uncertainty.

    A profile fitted to steps has the error on those that its fit did not see; others are as `interval_by_evidence`.
    """
    fitted = profile.settings.get(HELD_OUT)
    if isinstance(fitted, int | float):
        factor = math.exp(NINETY_BY_MEAN * fitted)
        return StepInterval(step_s / factor, step_s * factor, "errors on steps that the profile's fit did not see")
    own = None if scenario.model.program is not None else features_of(scenario)
    return interval_by_evidence(scenario, profile, step_s, shares, own)


def interval_by_evidence(
    scenario: Scenario,
    profile: Profile,
    seconds: float,
    shares: Mapping[tuple[str, str, float], float],
    own: Features | None,
    more: float = 0.0,
) -> StepInterval:
    """The interval of `seconds`, of which `shares` are by operator kind, source and uncertainty.

    A profile of one's own has the uncertainty of its points; a shipped one the simulator's errors on published rows
    that are like `own`, and where none is of a GPU with the same multiprocessors at least the prices' own. `more`: a
    standard deviation, as a part of 1, that errors on other rows do not hold.
    """
    low_s, high_s = interval(seconds, dict(shares))
    words = "uncertainty of the prices"
    if own is None or profile.bare or not is_shipped(scenario, profile.name):
        return StepInterval(low_s, high_s, words)
    width = _width(scenario, sort_of(own))
    if width is None:
        return StepInterval(low_s, high_s, words)
    factor = math.exp(math.hypot(math.log(width.factor), NINETY_PERCENT * more))
    if not all(_published(gpu, own.kind == SERVING) for gpu in scenario.cluster.gpus):
        low_s, high_s = min(low_s, seconds / factor), max(high_s, seconds * factor)
        return StepInterval(low_s, high_s, f"{words}, and {width.why}")
    return StepInterval(seconds / factor, seconds * factor, width.why)


def is_shipped(scenario: Scenario, profile: str) -> bool:
    """Tell whether the profile of this name is the shipped one: one's own, measured on the same kind of machine, may
    have its name, but the scenario names its file."""
    return scenario.calibration == profile and profile in shipped_profiles()


def _width(scenario: Scenario, own: Features) -> Width | None:
    """Return the width of a workload's interval; the widest, if the cluster has several kinds of GPUs."""
    widths = [_width_of(own._replace(gpu=g.name, architecture=g.architecture)) for g in scenario.cluster.gpus]
    return max((width for width in widths if width is not None), key=lambda width: width.factor, default=None)


@lru_cache(maxsize=256)
def _width_of(features: Features) -> Width | None:
    """`interval_factor`, kept: a search asks for it for thousands of steps with the same features."""
    return interval_factor(features)


def _published(gpu: GpuSpec, serving: bool) -> bool:
    """Tell whether published workloads of this kind ran on the multiprocessors of `gpu`."""
    return any(gpu.same_multiprocessors(other) for other in _published_gpus(serving))


@lru_cache(maxsize=2)
def _published_gpus(serving: bool) -> tuple[GpuSpec, ...]:
    found = dict.fromkeys(row.features.gpu for row in published() if (row.features.kind == SERVING) == serving)
    return tuple(GPUS[name] for name in found)
