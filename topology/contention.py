"""Compute how fast simultaneous transfers go when they share links max-min fairly."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

LinkId = TypeVar("LinkId", bound=Hashable)
_TOGETHER = 1e-12  # links whose levels differ by less count as full at the same time


def shared_fractions(loads: Sequence[Mapping[LinkId, float]], capacity: Mapping[LinkId, float]) -> list[float]:
    """Return each flow's speed beside the others, as a part of its speed alone.

    `loads`: the bytes/s that a flow alone puts on each link. `capacity`: each link's bytes/s. The rates on each flow's
    most loaded link grow together until a link is full or a flow is as fast as alone: progressive filling
    (D. Bertsekas, R. Gallager, "Data Networks", 2nd ed., 1992, section 6.5.2). The result depends neither on the order
    of flows nor on the number of equal links, because sums are rounded once (`fsum`) and equally full links fill
    together.

    >>> shared_fractions([{0: 10.0}, {0: 10.0}, {0: 2.0}], {0: 12.0})
    [0.5, 0.5, 1.0]
    """
    loads = [{each: bytes_per_s for each, bytes_per_s in load.items() if bytes_per_s > 0} for load in loads]
    peaks = [max(load.values(), default=0.0) for load in loads]
    fractions = [1.0] * len(loads)
    weights: dict[LinkId, dict[int, float]] = {}
    for i, load in enumerate(loads):
        for each, bytes_per_s in load.items():
            weights.setdefault(each, {})[i] = bytes_per_s / peaks[i]
    taken: dict[LinkId, list[float]] = {each: [] for each in weights}
    while weights:
        levels = {
            each: (capacity[each] - math.fsum(taken[each])) / math.fsum(growing.values())
            for each, growing in weights.items()
        }
        level = max(0.0, min(levels.values()))
        done = {i for growing in weights.values() for i in growing if peaks[i] <= level}
        if not done:
            full = [weights[each] for each, at in levels.items() if at <= level * (1 + _TOGETHER)]
            done = {i for growing in full for i in growing}
            fractions = [level / peaks[i] if i in done else f for i, f in enumerate(fractions)]
        for i in done:
            for each, bytes_per_s in loads[i].items():
                taken[each].append(bytes_per_s * fractions[i])
                del weights[each][i]
        weights = {each: growing for each, growing in weights.items() if growing}
    return fractions
