"""Hold seconds with their source and uncertainty."""

from __future__ import annotations

from typing import NamedTuple

from sim.core.normal import SIGMA_PER_MAD

REPEAT_UNCERTAINTY = 0.02  # medians of a quiet machine on two days differ by 2 to 3 %
OUTSIDE_PER_OCTAVE = 0.1  # uncertainty added for each doubling beyond the measured sizes


class Cost(NamedTuple):
    """Hold a cost. `source`: measured | interpolated | roofline | topology. `uncertainty`: relative σ."""

    seconds: float
    source: str
    uncertainty: float


def measured(seconds: float, spread: float) -> Cost:
    """Return the cost of a measured median; `spread`: median absolute deviation ÷ median."""
    # Repetitions in a row may agree by chance, so the uncertainty has a floor.
    return Cost(seconds, "measured", max(SIGMA_PER_MAD * spread, REPEAT_UNCERTAINTY))
