"""Seconds of intervals, counted one by one; means that are rounded once."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sim.core.timeline import RankClass
from sim.ranks.plan import make_plan
from sim.results.metrics import Spans, joined, mean, merged, roofline_warnings, uncovered_s
from tests.sim.cases import case

intervals = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 6)), max_size=30)


def spans_of(rows: list[tuple[int, int, int]]) -> Spans:
    group, start, length = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return Spans(group, start * 1.0, (start + length) * 1.0)


def cells(rows: list[tuple[int, int, int]], group: int) -> set[int]:
    """The whole seconds that intervals of a group cover."""
    return {s for g, start, length in rows if g == group for s in range(start, start + length)}


@given(intervals)
def test_merged_stretches_cover_what_their_intervals_do(rows: list[tuple[int, int, int]]) -> None:
    out = merged(spans_of(rows))
    assert out.seconds(3).tolist() == [len(cells(rows, g)) for g in range(3)]
    assert (np.diff(out.group) >= 0).all()
    same = out.group[1:] == out.group[:-1]
    assert (out.start_s[1:] > out.end_s[:-1])[same].all()  # apart, and in order
    shuffled = merged(spans_of(rows[::-1]))
    assert all(a.tolist() == b.tolist() for a, b in zip(out, shuffled, strict=True))


@given(intervals, intervals)
def test_sets_are_merged_each_by_itself(a: list[tuple[int, int, int]], b: list[tuple[int, int, int]]) -> None:
    both = merged(joined([(spans_of(a), spans_of(b)), (spans_of(b),)], 3)).seconds(6).tolist()
    assert both == [*(len(cells(a + b, g)) for g in range(3)), *(len(cells(b, g)) for g in range(3))]
    what, by = (np.stack(spans_of([(0, *row[1:]) for row in rows])[1:], axis=1) for rows in (a, b))
    mine, others = (cells([(0, *row[1:]) for row in rows], 0) for rows in (a, b))
    assert uncovered_s(what, by) == len(mine - others)


@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.integers(1, 5)), min_size=1, max_size=6))
def test_means_are_rounded_once(rows: list[tuple[float, int]]) -> None:
    values = [value for value, _ in rows]
    plan = replace(make_plan(case()), classes=tuple(RankClass(i, range(n), 0) for i, (_, n) in enumerate(rows)))
    exact = sum(Fraction(value) * n for value, n in rows) / sum(n for _, n in rows)
    assert mean(values, plan) == float(exact)


def test_the_hosts_own_time_hides_no_roofline() -> None:
    """Of what GPUs and links take 60 % is from the roofline, whatever the host takes beside."""
    shares = {("gemm", "roofline", 0.3): 6.0, ("norm", "measured", 0.1): 4.0}
    assert roofline_warnings(shares)[0].startswith("60% of the time is priced by the roofline")
    with_host = shares | {("host_between_iterations", "host", 0.2): 30.0}
    assert roofline_warnings(with_host)[0].startswith("60% of the time beside the host's is priced by the roofline")
    assert roofline_warnings({("gemm", "roofline", 0.3): 4.0, ("norm", "measured", 0.1): 6.0}) == []
    assert roofline_warnings({("host_between_iterations", "host", 0.2): 1.0}) == []
