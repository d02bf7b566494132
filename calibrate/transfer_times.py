"""How long communications within blocks take, from what one rank waited for them.

A time is right if the simulator waits as long in all as the rank did. Ranks see only what computing does not cover.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from calibrate.block_cuts import Transfer
from calibrate.gradient_times import Beneath, waits_s

Sort = tuple[str, int, int]  # kind, ranks, bytes
SWEEPS = 8  # over the sorts of a group, each solved beside the others: they move by less than 1 % after the fourth
HALVINGS = 20
CLOCK_S = 1e-9  # to which times are known


def seconds_of(seen: Sequence[Transfer]) -> dict[Sort, float]:
    """Seconds of each sort of one group's transfers, in the order in which the rank made them."""
    sorts: dict[Sort, list[Transfer]] = defaultdict(list)
    for t in seen:
        sorts[t.kind, t.ranks, t.bytes].append(t)
    alone = {sort: transfer_seconds(each) for sort, each in sorts.items()}
    return _in_turn(seen, alone) if _queued(seen) else alone


def transfer_seconds(seen: Sequence[Transfer]) -> float:
    """How long transfers of one sort take that never wait for each other.

    A blocking one is waited for from its start. Of an asynchronous one only what is not covered by computing is
    seen: the answer solves Σ max(0, seconds − cover) = Σ wait.
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
    """Whether one was posted while the one before it was not yet waited for."""
    return any(b.start_ns < a.until_ns for a, b in pairwise(sorted(seen, key=lambda t: t.start_ns)))


def _in_turn(seen: Sequence[Transfer], first: Mapping[Sort, float]) -> dict[Sort, float]:
    """Of transfers that lie in a group's queue together, as chunks of a message do: the simulator sends one after
    another, so each takes a part of what the last is waited for.

    By halving for one sort after the other, as waits grow with a sort's seconds: the largest that let its transfers be
    waited for no longer than they were. Where they were not waited for at all they must not hold up others either.
    Waits do not say how sorts share time that is hidden; the start, one part of `first` for all, decides that.
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

            # Alone in the queue it takes longest: what it shares with others is then all its own.
            found[sort] = _largest(first[sort], fits)
    return found


def _largest(most: float, fits: Callable[[float], bool]) -> float:
    """The largest number up to `most` that fits, as all below it do."""
    if fits(most):
        return most
    low, high = 0.0, most
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
