"""Transfers at the same time: how fast each goes when links are shared max-min fairly. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

LinkId = TypeVar("LinkId", bound=Hashable)
_TOGETHER = 1e-12  # links whose levels differ by less fill together


def max_min_rates(flows: Sequence[Sequence[LinkId]], capacity: Mapping[LinkId, float]) -> list[float]:
    """Rate of each flow, in the unit of `capacity`; a flow is the links it passes.

    Progressive filling (D. Bertsekas, R. Gallager, "Data Networks", 2nd ed., 1992, section 6.5.2): all rates
    grow together until a link is full; its flows stop there, the rest grow on. The result is max-min fair: a
    flow could only be faster at the cost of one that is no faster. A flow of no links is `inf`; one that
    passes a link twice counts once on it. Raises `ValueError` for a link without a capacity, or one below
    zero.

    >>> max_min_rates([["a"], ["a", "b"], ["b"]], {"a": 1.0, "b": 3.0})
    [0.5, 0.5, 2.5]
    """
    rates = [float("inf")] * len(flows)
    users: dict[LinkId, set[int]] = {}
    for index, flow in enumerate(flows):
        for each in flow:
            users.setdefault(each, set()).add(index)
    left = {each: _capacity(each, capacity) for each in users}
    while users:
        full = min(users, key=lambda each: left[each] / len(users[each]))
        rate = left[full] / len(users[full])
        for index in users.pop(full):
            rates[index] = rate
            for each in set(flows[index]) - {full}:
                left[each] = max(0.0, left[each] - rate)
                users[each].discard(index)
        users = {each: sharing for each, sharing in users.items() if sharing}
    return rates


def shared_fractions(loads: Sequence[Mapping[LinkId, float]], capacity: Mapping[LinkId, float]) -> list[float]:
    """Of the speed that each flow has alone, the part that it keeps beside the others.

    `loads`: what a flow puts on each link when alone, bytes/s (a collective more on one link than on another). As in
    `max_min_rates` all grow together, by the bytes on the link that a flow loads most, until a link is full or a flow
    as fast as alone. Sums are rounded once (`fsum`) and links that fill together are filled together, so the answer
    depends neither on the order of flows nor on how many equal links there are.

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


def transfer_seconds(
    flows: Sequence[Sequence[LinkId]], sizes_bytes: Sequence[float], capacity: Mapping[LinkId, float]
) -> list[float]:
    """When each of several transfers ends that start together; what is left shares anew as each one ends.

    Latency is left out. A transfer over a link of no capacity never ends: `inf`.
    """
    left = dict(enumerate(sizes_bytes))
    ends = [0.0] * len(flows)
    now_s = 0.0
    while left:
        active = list(left)
        rates = dict(zip(active, max_min_rates([flows[index] for index in active], capacity), strict=True))
        needed = {index: left[index] / rates[index] if rates[index] else float("inf") for index in active}
        step_s = min(needed.values())
        now_s += step_s
        for index in active:
            if needed[index] <= step_s * (1 + 1e-12):
                ends[index] = now_s
                del left[index]
            else:
                left[index] -= rates[index] * step_s
    return ends


def _capacity(each: LinkId, capacity: Mapping[LinkId, float]) -> float:
    if each not in capacity or not capacity[each] >= 0:
        raise ValueError(f"link {each!r} has capacity {capacity.get(each)}; every link passed needs one ≥ 0")
    return capacity[each]
