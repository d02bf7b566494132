"""Price a collective from measured sizes."""

from __future__ import annotations

import math

import numpy as np

from sim.core.normal import SIGMA_PER_MAD
from sim.prices.cost import OUTSIDE_PER_OCTAVE, Cost, measured
from sim.prices.profile import CollectiveTable


def collective_cost(table: CollectiveTable, bytes_: float) -> Cost:
    """Return the cost of a collective: log-log between measured sizes; below the smallest size its seconds (latency);
    above the largest α + β·bytes, with the β of the last two sizes."""
    size, seconds, last = table.bytes, table.seconds, len(table.bytes) - 1
    above = int(size.searchsorted(bytes_))  # the first size that is not smaller
    # Beyond the last size the last spread is taken.
    spread = float(table.spread[min(above, last)])
    if above > last:
        # A large message is bound by bandwidth, so it continues with the last slope.
        slope = (seconds[-1] - seconds[-2]) / (size[-1] - size[-2]) if last > 0 else 0.0
        # If noise makes the last slope negative, the mean bandwidth of the last size replaces it.
        slope = slope if slope > 0 else seconds[-1] / size[-1]
        outside = math.log2(bytes_ / size[-1])
        # A line that bandwidth determines holds for any size, so uncertainty stops growing after three doublings.
        error = math.hypot(0.05, OUTSIDE_PER_OCTAVE * min(outside, 3.0), SIGMA_PER_MAD * spread)
        return Cost(float(seconds[-1] + slope * (bytes_ - size[-1])), "interpolated", error)
    if size[above] == bytes_:
        return measured(float(seconds[above]), spread)
    if above == 0:
        # A shorter message takes the latency, which is the smallest size's time. A line through the origin would be too
        # fast.
        return Cost(float(seconds[0]), "interpolated", math.hypot(0.1, SIGMA_PER_MAD * spread))
    size, seconds = size[above - 1 : above + 1], seconds[above - 1 : above + 1]
    # The curve between latency and bandwidth is straighter in logarithms. 1e-9 keeps a measured size of 0 finite.
    inside = np.interp(math.log(bytes_), np.log(np.maximum(size, 1e-9)), np.log(seconds))
    return Cost(float(np.exp(inside)), "interpolated", math.hypot(0.05, SIGMA_PER_MAD * spread))
