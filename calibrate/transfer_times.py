"""How long communications within blocks take, from what one rank waited for them.

A time is right if the simulator waits as long in all as the rank did. Ranks see only what computing does not cover.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from calibrate.block_cuts import Transfer
from calibrate.gradient_times import Beneath, waits_s

Sort = tuple[str, int, int]  # kind, ranks, bytes
SWEEPS = 4  # over the sorts of a group, each solved beside the others: they move by less than 1 % after the second
HALVINGS = 20


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

    By halving for one sort after the other, as a sort's waits grow with its seconds.
    """
    sent = [Beneath(t.kind, t.ranks, t.bytes, t.start_ns, t.from_ns, t.until_ns) for t in seen]
    found, wanted = dict(first), dict.fromkeys(first, 0.0)
    for b in sent:
        wanted[b[:3]] += (b.until_ns - b.from_ns) * 1e-9
    for _ in range(SWEEPS):
        for sort in found:
            # Alone in the queue it takes longest: what it shares with others is then all its own.
            low, high = 0.0, first[sort]
            for _ in range(HALVINGS):
                found[sort] = (low + high) / 2
                waits = waits_s(sent, lambda b: found[b[:3]])
                got = sum(w for b, w in zip(sent, waits, strict=True) if b[:3] == sort)
                low, high = (found[sort], high) if got < wanted[sort] else (low, found[sort])
    return found
