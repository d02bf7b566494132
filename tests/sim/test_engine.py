"""Both engines on random programs, and what they say when tasks wait in a circle."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine import run_simpy, run_static
from sim.taskgraph import TaskGraph
from sim.timeline import Detail, RankClass


def graph_of(seconds: list[float], waits: list[list[int]]) -> TaskGraph:
    graph = TaskGraph((RankClass(0, (0,), 0),))
    sort = graph.new_sort(Detail("work"))
    for s, w in zip(seconds, waits, strict=True):
        graph.slots.extend((graph.add(s, w, sort, 0, 0), *graph.row(0, "compute", "F")))
    return graph


@st.composite
def programs(draw: st.DrawFn) -> TaskGraph:
    n = draw(st.integers(1, 60))
    order = draw(st.permutations(range(n)))
    place = {t: i for i, t in enumerate(order)}
    seconds = draw(st.lists(st.floats(0, 1e3, allow_nan=False), min_size=n, max_size=n))
    waits = [
        sorted(t for t in draw(st.sets(st.integers(0, n - 1), max_size=4)) if place[t] < place[i]) for i in range(n)
    ]
    graph = graph_of(seconds, waits)
    for task in draw(st.sets(st.integers(0, n - 1), max_size=5)):
        earlier = [t for t in range(n) if place[t] < place[task]]
        if earlier:
            graph.lags[task] = (draw(st.sampled_from(earlier)), draw(st.floats(0, 1e3, allow_nan=False)))
    return graph


@settings(deadline=None, max_examples=300)
@given(programs())
def test_static_pass_equals_simpy_to_the_last_bit(graph: TaskGraph) -> None:
    a, b = run_static(graph), run_simpy(graph)
    assert a.start_s == b.start_s
    assert a.end_s == b.end_s


@settings(deadline=None, max_examples=100)
@given(programs())
def test_no_task_starts_before_what_it_waits_for(graph: TaskGraph) -> None:
    t = run_static(graph)
    for task, waits in enumerate(graph.waits):
        ready = [t.end_s[w] for w in waits]
        if task in graph.lags:
            other, lag_s = graph.lags[task]
            ready.append(t.start_s[other] + lag_s)
        assert t.start_s[task] == max(ready, default=0.0)
        assert t.end_s[task] == t.start_s[task] + graph.seconds[task]


@pytest.mark.parametrize("engine", [run_simpy, run_static])
def test_a_circle_is_reported(engine) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"2 of 3 tasks never start.*stage 0"):
        engine(graph_of([1.0, 1.0, 1.0], [[], [2], [1]]))
