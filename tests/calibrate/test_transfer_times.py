"""How long communications take, from waits alone."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

pytest.importorskip("torch")

from calibrate.real_steps.block_cuts import Transfer
from calibrate.real_steps.gradient_times import Beneath, waits_s
from calibrate.real_steps.transfer_times import seconds_of

MS = 1_000_000


def transfer(kind: str, posted: float, wanted: float, ended: float) -> Transfer:
    """Milliseconds."""
    return Transfer(kind, ("tp", 0), 2, 64, round(posted * MS), round(wanted * MS), round(ended * MS))


def test_one_at_a_time_takes_what_is_waited_and_covered() -> None:
    """Of 3 ms one has 2 beside computing, another all, a third is blocking."""
    seen = [transfer("send_recv", 0, 2, 3), transfer("send_recv", 10, 15, 15), transfer("send_recv", 20, 20, 23)]
    assert seconds_of(seen) == {("send_recv", 2, 64): pytest.approx(3e-3)}


def test_chunks_that_are_on_their_way_together_share_what_is_waited_for() -> None:
    """Four gathers of 1 ms posted at once, with half a millisecond of computing on each: the queue is never empty."""
    seen = [transfer("all_gather", 0, begin, end) for begin, end in ((0, 1), (1.5, 2), (2.5, 3), (3.5, 4))]
    assert seconds_of(seen) == {("all_gather", 2, 64): pytest.approx(1e-3, rel=1e-4)}


def test_two_sorts_in_one_queue() -> None:
    """A gather of 2 ms, then two sums of 1 ms behind it, all posted at once: they end at 2, 3 and 4 ms."""
    both = [transfer("all_gather", 0, 0, 2), *(transfer("reduce_scatter", 0, 2.5 + i, 3 + i) for i in (0, 1))]
    found = seconds_of(both)
    assert found["all_gather", 2, 64] == pytest.approx(2e-3, rel=1e-3)
    assert found["reduce_scatter", 2, 64] == pytest.approx(1e-3, rel=1e-3)


def test_hidden_transfers_take_as_long_as_stays_hidden() -> None:
    """Two gathers that nobody waits for, at 10 and 20 ms: as the first says, 10 ms each at most."""
    seen = [transfer("all_gather", 0, 10, 10), transfer("all_gather", 1, 20, 20)]
    assert seconds_of(seen) == {("all_gather", 2, 64): pytest.approx(10e-3, rel=1e-4)}


def test_a_hidden_sort_shares_the_queue_with_one_that_is_waited_for() -> None:
    """Posted at once and waited for in turn: 3 ms for both, of which each has a part."""
    found = seconds_of([transfer("reduce_scatter", 0, 3, 3), transfer("all_gather", 0, 0, 3)])
    assert min(found.values()) > 0.5e-3
    assert sum(found.values()) == pytest.approx(3e-3, rel=1e-3)


@pytest.mark.parametrize("seed", range(12))
def test_queues_drawn_at_random_are_waited_for_as_long(seed: int) -> None:
    """Ten transfers of up to three sorts, sent one after another: every sort's waits come out as they were."""
    seen = drawn(random.Random(seed))
    found = seconds_of(seen)
    sent = [Beneath(t.kind, t.ranks, t.bytes, t.start_ns, t.from_ns, t.until_ns) for t in seen]
    got: dict[str, float] = defaultdict(float)
    was: dict[str, float] = defaultdict(float)
    for b, wait_s in zip(sent, waits_s(sent, lambda b: found[b[:3]]), strict=True):
        got[b.op] += wait_s
        was[b.op] += (b.until_ns - b.from_ns) * 1e-9
    assert got == pytest.approx(was, abs=5e-5)
    assert min(found.values()) > 1e-5


def drawn(rng: random.Random) -> list[Transfer]:
    """Transfers of 0.25 to 2 ms, waited for in the order in which they were posted."""
    times = {
        kind: rng.randint(1, 8) / 4 for kind in ("all_gather", "reduce_scatter", "all_reduce")[: rng.randint(1, 3)]
    }
    now = free = 0.0
    seen: list[Transfer] = []
    posted: list[tuple[str, float, float]] = []
    for i in range(10):
        kind = rng.choice(list(times))
        free = max(free, now) + times[kind]
        posted.append((kind, now, free))
        now += rng.randint(0, 8) / 4
        while posted and (i == 9 or rng.random() < 0.6):
            kind, start, end = posted.pop(0)
            seen.append(transfer(kind, start, now, max(now, end)))
            now = max(now, end) + rng.randint(0, 6) / 4
    return seen
