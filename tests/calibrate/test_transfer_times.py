"""How long communications take, from waits alone."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from calibrate.block_cuts import Transfer
from calibrate.transfer_times import seconds_of

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
