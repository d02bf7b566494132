"""Breadth-first and zero-bubble schedules of several stages per rank: validity, bubble and memory on unit times."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.actions import Kind, validate
from sim.schedules import build
from sim.schedules.unit_time import UnitTimes, evaluate
from tests.sim.schedule_facts import idle_s, in_flight

RANKS = st.integers(1, 9)
DURATION = st.integers(1, 9).map(float)


@settings(deadline=None, max_examples=40)
@given(p=RANKS, m=st.integers(1, 30), v=st.integers(2, 5))
def test_looped_bfs_is_valid_with_its_bubble_and_memory(p: int, m: int, v: int) -> None:
    """Any m; (p−1)(F + B) of a stage idle where m ≥ p, else a stage waits for the one before (v times p − m more)."""
    schedule = build("looped_bfs", p, m, v)
    validate(schedule)
    waits = (v - 1) * max(0, p - m)
    assert idle_s(evaluate(schedule)) == pytest.approx([3.0 * (p - 1 + waits)] * p)
    assert in_flight(schedule) == (v * m,) * p


@settings(deadline=None, max_examples=40)
@given(p=RANKS, rounds=st.integers(1, 5), v=st.integers(2, 5), f=DURATION, i=DURATION, w=DURATION)
def test_interleaved_zb_is_valid_with_its_bubble_and_memory(
    p: int, rounds: int, v: int, f: float, i: float, w: float
) -> None:
    """(p−1)(F + I − W) of a stage idle on every rank, where W is no longer than F and than I."""
    schedule = build("interleaved_zb", p, p * rounds, v)
    validate(schedule)
    w = min(f, i, w)
    assert idle_s(evaluate(schedule, UnitTimes(f, i, w))) == pytest.approx([(p - 1) * (f + i - w)] * p)
    assert in_flight(schedule) == tuple(v * p - rank for rank in range(p))
    assert in_flight(schedule, Kind.W) == (v * p,) * p
