"""Computes how long communications within blocks take, from how long one rank waited for them.

A rank waits only for the part that computation does not hide. So the seconds are chosen such that the simulator waits
as long in total as the rank did.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from calibrate.real_steps.block_cuts import Transfer
from calibrate.real_steps.gradient_times import Beneath, waits_s

Sort = tuple[str, int, int]  # kind, ranks, bytes
SWEEPS = 8  # over a group's kinds, each solved with the others fixed; after the fourth they change by less than 1 %
HALVINGS = 20
CLOCK_S = 1e-9  # resolution of the measured times


def seconds_of(seen: Sequence[Transfer]) -> dict[Sort, float]:
    """Return the seconds of each kind and size of one group's transfers; `seen` is in the order of their starts."""
    sorts: dict[Sort, list[Transfer]] = defaultdict(list)
    for t in seen:
        sorts[t.kind, t.ranks, t.bytes].append(t)
    alone = {sort: transfer_seconds(each) for sort, each in sorts.items()}
    return _in_turn(seen, alone) if _queued(seen) else alone


def transfer_seconds(seen: Sequence[Transfer]) -> float:
    """Return how long transfers of one kind and size take if they never wait for each other.

    A blocking transfer is waited for from its start. The wait for an asynchronous one is what computation did not
    hide, so the result solves Σ max(0, seconds − hidden) = Σ wait.
    """
    waits = sum(t.until_ns - t.from_ns for t in seen)
    covers = sorted(t.from_ns - t.start_ns for t in seen)
    below = 0
    for i, cover in enumerate(covers, 1):
        below += cover
        level = (waits + below) / i
        if i == len(covers) or level <= covers[i]:
            return level * 1e-9
    raise ValueError("no transfers")


def _queued(seen: Sequence[Transfer]) -> bool:
    """Return whether a transfer started before the one before it was waited for."""
    return any(b.start_ns < a.until_ns for a, b in pairwise(sorted(seen, key=lambda t: t.start_ns)))


def _in_turn(seen: Sequence[Transfer], first: Mapping[Sort, float]) -> dict[Sort, float]:
    """Return the seconds of transfers that are queued together in a group, such as chunks of a message.

    The simulator sends queued transfers one after another, so each takes a part of the wait for the last. Waits grow
    with the seconds of a kind. So for one kind after the other, bisection finds the largest seconds with which its
    transfers are waited for no longer than they were. A kind that was never waited for must not delay others either.
    Waits do not say how kinds share hidden time; they start from the same fraction of `first`.
    """
    sent = [Beneath(t.kind, t.ranks, t.bytes, t.start_ns, t.from_ns, t.until_ns) for t in seen]
    wanted = dict.fromkeys(first, 0.0)
    for b in sent:
        wanted[b[:3]] += (b.until_ns - b.from_ns) * 1e-9
    slack_s = CLOCK_S * len(sent)

    def waits(found: Mapping[Sort, float]) -> dict[Sort, float]:
        got = dict.fromkeys(first, 0.0)
        for b, wait_s in zip(sent, waits_s(sent, lambda b: found[b[:3]]), strict=True):
            got[b[:3]] += wait_s
        return got

    def scaled(part: float) -> dict[Sort, float]:
        return {sort: part * seconds for sort, seconds in first.items()}

    total_s = sum(wanted.values()) + slack_s
    found = scaled(_largest(1.0, lambda part: sum(waits(scaled(part)).values()) <= total_s))
    for _ in range(SWEEPS):
        for sort in found:
            now = waits(found)
            hidden = wanted[sort] <= slack_s
            most = {s: wanted[s] if s == sort else max(wanted[s], now[s]) for s in found if hidden or s == sort}

            def fits(seconds: float, sort: Sort = sort, most: Mapping[Sort, float] = most) -> bool:
                got = waits({**found, sort: seconds})
                return all(got[s] <= most[s] + slack_s for s in most)

            # A kind takes longest if it is alone in the queue, which is `first`.
            found[sort] = _largest(first[sort], fits)
    return found


def _largest(most: float, fits: Callable[[float], bool]) -> float:
    """Return the largest number up to `most` that fits, by bisection; if a number fits, all smaller ones do."""
    if fits(most):
        return most
    low, high = 0.0, most
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
