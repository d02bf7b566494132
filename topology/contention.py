"""Transfers at the same time: how fast each goes when links are shared max-min fairly. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

LinkId = TypeVar("LinkId", bound=Hashable)
_TOGETHER = 1e-12  # links whose levels differ by less fill together


def shared_fractions(loads: Sequence[Mapping[LinkId, float]], capacity: Mapping[LinkId, float]) -> list[float]:
    """Of the speed that each flow has alone, the part that it keeps beside the others.

    `loads`: what a flow puts on each link when alone, bytes/s (a collective more on one link than on another). All
    grow together, by the bytes on the link that a flow loads most, until a link is full or a flow is as fast as alone:
    progressive filling (D. Bertsekas, R. Gallager, "Data Networks", 2nd ed., 1992, section 6.5.2). Sums are rounded
    once (`fsum`) and links that fill together are filled together, so the answer depends neither on the order of flows
    nor on how many equal links there are.

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
