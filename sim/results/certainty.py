"""The 90 % interval of a step time, and in words what it is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from msgspec import Struct

from sim.core.normal import NINETY_BY_MEAN
from sim.core.shipped import shipped_profiles
from sim.inputs.scenario import Scenario
from sim.prices.profile import Profile
from sim.results.evidence import Features, Width, features_of, interval_factor, published, sort_of
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

    A profile fitted to steps has the error on those that its fit did not see; another of one's own the uncertainty of
    its points; a shipped one the simulator's errors on published steps, and where none is of a GPU with the same
    multiprocessors at least the prices' own.
    """
    low_s, high_s = interval(step_s, dict(shares))
    own = "uncertainty of the prices"
    fitted = profile.settings.get(HELD_OUT)
    if isinstance(fitted, int | float):
        factor = math.exp(NINETY_BY_MEAN * fitted)
        return StepInterval(step_s / factor, step_s * factor, "errors on steps that the profile's fit did not see")
    if scenario.model.program is not None or profile.bare or profile.name not in shipped_profiles():
        return StepInterval(low_s, high_s, own)
    width = _width(scenario)
    if width is None:
        return StepInterval(low_s, high_s, own)
    if not all(_published(gpu) for gpu in scenario.cluster.gpus):
        low_s, high_s = min(low_s, step_s / width.factor), max(high_s, step_s * width.factor)
        return StepInterval(low_s, high_s, f"{own}, and {width.why}")
    return StepInterval(step_s / width.factor, step_s * width.factor, width.why)


def _width(scenario: Scenario) -> Width | None:
    """Return the width of a step's interval; the widest, if the cluster has several kinds of GPUs."""
    own = sort_of(features_of(scenario))
    widths = [_width_of(own._replace(gpu=g.name, architecture=g.architecture)) for g in scenario.cluster.gpus]
    return max((width for width in widths if width is not None), key=lambda width: width.factor, default=None)


@lru_cache(maxsize=256)
def _width_of(sort: Features) -> Width | None:
    """A search asks it of thousands of steps of one sort."""
    return interval_factor(sort)


def _published(gpu: GpuSpec) -> bool:
    """Tell whether published steps ran on the multiprocessors of `gpu`."""
    return any(gpu.same_multiprocessors(other) for other in _published_gpus())


@lru_cache(maxsize=1)
def _published_gpus() -> tuple[GpuSpec, ...]:
    return tuple(GPUS[name] for name in dict.fromkeys(row.features.gpu for row in published()))
