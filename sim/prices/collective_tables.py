"""Seconds of a collective out of measured sizes."""

from __future__ import annotations

import math

import numpy as np

from sim.core.normal import SIGMA_PER_MAD
from sim.prices.cost import OUTSIDE_PER_OCTAVE, Cost, measured
from sim.prices.profile import CollectiveTable


def collective_cost(table: CollectiveTable, bytes_: float) -> Cost:
    """Seconds at a size: between sizes log-log; below the smallest that one's (latency); above the largest α + β·bytes,
    with the β of the last two sizes.
    """
    size, seconds, last = table.bytes, table.seconds, len(table.bytes) - 1
    above = int(size.searchsorted(bytes_))  # the first that is no less
    # Beyond the last size its spread is the only one that is known.
    spread = float(table.spread[min(above, last)])
    if above > last:
        # A large message is bound by bandwidth, so its marginal cost is the last slope.
        slope = (seconds[-1] - seconds[-2]) / (size[-1] - size[-2]) if last > 0 else 0.0
        # Noise may make the larger of two sizes the quicker one. The mean bandwidth of the last is then the best guess.
        slope = slope if slope > 0 else seconds[-1] / size[-1]
        outside = math.log2(bytes_ / size[-1])
        # Once bandwidth binds, the line holds as far as one likes: doubt stops growing after three doublings.
        error = math.hypot(0.05, OUTSIDE_PER_OCTAVE * min(outside, 3.0), SIGMA_PER_MAD * spread)
        return Cost(float(seconds[-1] + slope * (bytes_ - size[-1])), "interpolated", error)
    if size[above] == bytes_:
        return measured(float(seconds[above]), spread)
    if above == 0:
        # A shorter message is hardly quicker: latency is all that is left. A line through the origin would promise too
        # much.
        return Cost(float(seconds[0]), "interpolated", math.hypot(0.1, SIGMA_PER_MAD * spread))
    size, seconds = size[above - 1 : above + 1], seconds[above - 1 : above + 1]
    # A time between latency and bandwidth bends, and bends less in logarithms. 1e-9 keeps a measured size of 0 finite.
    inside = np.interp(math.log(bytes_), np.log(np.maximum(size, 1e-9)), np.log(seconds))
    return Cost(float(np.exp(inside)), "interpolated", math.hypot(0.05, SIGMA_PER_MAD * spread))
