"""Seconds with where they come from and how sure they are."""

from __future__ import annotations

from typing import NamedTuple

from sim.core.normal import SIGMA_PER_MAD

REPEAT_UNCERTAINTY = 0.02  # a quiet machine repeats a median within 2-3 % at another time
OUTSIDE_PER_OCTAVE = 0.1  # of doubt for each doubling beyond the measured sizes


class Cost(NamedTuple):
    """`source`: measured | interpolated | roofline | topology. `uncertainty`: relative standard deviation."""

    seconds: float
    source: str
    uncertainty: float


def measured(seconds: float, spread: float) -> Cost:
    """A median of measured times; `spread` is their median absolute deviation in parts of it."""
    # A few repetitions in a row may agree by luck. The floor keeps such a point from looking surer than it is.
    return Cost(seconds, "measured", max(SIGMA_PER_MAD * spread, REPEAT_UNCERTAINTY))
