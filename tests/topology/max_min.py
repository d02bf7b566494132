"""Transfers that share links max-min fairly, written for themselves: what `topology.contention` has to agree with."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

LinkId = TypeVar("LinkId", bound=Hashable)


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
