"""Whether memory suffices: the one rule, which every verdict, proposal, search and page asks.

What torch's allocator reserves, as trainers log it, is compared with what CUDA, its context and NCCL leave of the GPU
(`sim.results.beside_allocator`). A prediction has an error, so a peak near the limit fits with some odds only.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

# Standard deviations of predicted ÷ measured bytes, as a part of 1.
PEAK_UNCERTAINTY = 0.03  # of allocated bytes: rounding, small tensors and temporaries left out
RESERVED_UNCERTAINTY = 0.07  # fragmentation besides, which depends on the order of sizes and streams
SURE = 0.95  # odds from which a step is said to fit without a word more
EVEN = 0.5  # of a prediction at its limit

State = Literal["fits", "tight", "does not fit"]


class Fit(NamedTuple):
    """Hold the verdict, and the odds that a real run fits, from 0 to 1."""

    state: State
    odds: float

    @property
    def fits(self) -> bool:
        """Tell whether it is not said that it does not fit."""
        return self.state != "does not fit"

    @property
    def likely(self) -> bool:
        """Tell whether the prediction itself is within the limit: what is proposed is."""
        return self.odds >= EVEN


def judge(
    reserved_bytes: float, limit_bytes: float, uncertainty: float = RESERVED_UNCERTAINTY, least_odds: float = EVEN
) -> Fit:
    """Judge bytes against a limit; `uncertainty`: of the bytes, 0 where they are exact.

    What has odds below `least_odds` does not fit; above, they decide between `fits` and `tight`.

    >>> [judge(size, 80.0).state for size in (60.0, 78.0, 81.0)]
    ['fits', 'tight', 'does not fit']
    >>> round(judge(78.0, 80.0).odds, 2)
    0.64
    """
    within = reserved_bytes <= limit_bytes
    if not uncertainty or reserved_bytes <= 0.0:
        return Fit("fits", 1.0) if within else Fit("does not fit", 0.0)
    odds = 0.5 * math.erfc(-math.log(limit_bytes / reserved_bytes) / (uncertainty * math.sqrt(2.0)))
    return Fit("does not fit" if odds < least_odds else "fits" if odds >= SURE else "tight", odds)
