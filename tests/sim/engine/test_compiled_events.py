"""The compiled loop: where test_engine's programs do not lead, what it refuses, and that it frees what it takes."""

from __future__ import annotations

import gc
import tracemalloc
from array import array
from contextlib import suppress
from math import nextafter
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine import run as engine
from sim.engine.link_rates import FULL, Flow, Flows, fractions
from sim.engine.run import run_static
from sim.schedules import FORMS
from sim.simulation import simulate
from tests.sim.cases import case
from tests.sim.engine.test_engine import Program, assert_engines_agree, graph_of, in_python, with_flows
from topology.contention import shared_fractions

pytestmark = pytest.mark.skipif(engine._events is None, reason="sim.engine._events was not compiled here")


@st.composite
def nearly_full(draw: st.DrawFn) -> Program:
    """Flows at once on a link that together ask for the most that it carries, or a bit less or more."""
    count, capacity = draw(st.integers(2, 6)), draw(st.floats(0.1, 1e12))
    loads = [capacity * draw(st.floats(1e-3, 1.0)) / count for _ in range(count - 1)]
    last = capacity * FULL - sum(loads)
    for _ in range(draw(st.integers(0, 3))):
        last = nextafter(last, draw(st.sampled_from([0.0, 2 * capacity])))
    seconds = draw(st.lists(st.floats(0.5, 2.0), min_size=count, max_size=count))
    return with_flows(
        graph_of(seconds, [[] for _ in seconds]),
        [capacity],
        {task: {0: load} for task, load in enumerate([*loads, last])},
        {},
    )


@settings(deadline=None, max_examples=300)
@given(nearly_full())
def test_links_as_full_as_can_be_are_decided_by_exact_sums(program: Program) -> None:
    with patch.object(engine, "_fsum_of_bytes", wraps=engine._fsum_of_bytes) as exact:
        assert_engines_agree(*program)
    assert exact.called


@pytest.mark.parametrize("schedule", FORMS)
def test_on_every_schedule_both_loops_give_the_same_to_the_last_bit(schedule: str) -> None:
    links = {
        "preset": "dgx-h100",
        "gpus_per_node": 1,
        "nvlink_domain": 1,
        "inter_node": {"nics_per_node": 1, "nic_bandwidth_bytes_per_s": 1e8},
    }
    layout = {"pp": 4, "dp": 2, "zero": 1, "schedule": schedule}
    sim = simulate(case(layout, {"global_batch_size": 16}, {"layers": 8}, links), expand=True, engine="static")
    graph, flows = sim.built.graph, sim.ran.flows
    assert flows is not None
    assert in_python(graph, flows) == sim.times
    assert in_python(graph, Flows()) == run_static(graph)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.dictionaries(st.integers(0, 3), st.just(0.0) | st.floats(1.0, 1e12)), max_size=6),
    st.lists(st.floats(0.1, 1e12), min_size=4, max_size=4),
)
def test_fractions_come_back_from_bytes_as_they_are(loads: list[dict[int, float]], capacity: list[float]) -> None:
    asked = [4.0, *capacity]
    for load in loads:
        asked += [x for pair in load.items() for x in pair] + [-1.0]
    found = fractions(doubles(*asked).tobytes())
    assert memoryview(found).cast("d").tolist() == shared_fractions(loads, dict(enumerate(capacity)))


def doubles(*values: float) -> array[float]:
    return array("d", values)


def numbers(*values: int) -> array[int]:
    return array("q", values)


def run_compiled(**changes: Any) -> Any:
    """Two tasks that share a link and one that waits for both, or what `changes` makes of them."""
    program: dict[str, Any] = {
        "seconds": doubles(1.0, 2.0, 1.0),
        "sort": numbers(0, 1, 2),
        "waited_for": numbers(0, 1),
        "waiting": numbers(2, 2),
        "launcher": numbers(0),
        "launched": numbers(1),
        "lag_s": doubles(0.5),
        "start_s": doubles(0.0, 0.0, 0.0),
        "end_s": doubles(0.0, 0.0, 0.0),
        "sorts": 3,
        "by_sort": {0: Flow(0.0, {0: 1.0}), 1: Flow(0.25, {0: 1.0})},
        "capacity": {0: 1.0},
        "over": FULL,
        "fair": fractions,
        "fsum": engine._fsum_of_bytes,
    }
    return engine._events.run_columns(*{**program, **changes}.values())


ODD = [
    ({"seconds": doubles(1.0, 2.0)}, ValueError, "one length"),
    ({"sort": numbers(0)}, ValueError, "one length"),
    ({"waiting": numbers(0)}, ValueError, "one length"),
    ({"launched": numbers()}, ValueError, "one length"),
    ({"lag_s": doubles()}, ValueError, "one length"),
    ({"start_s": doubles(0.0)}, ValueError, "one length"),
    ({"end_s": doubles(0.0)}, ValueError, "one length"),
    ({"seconds": b"12345"}, ValueError, "8 bytes a row"),
    ({"sorts": -1}, ValueError, "one length"),
    ({"sorts": 2**40}, ValueError, "one length"),
    ({"waited_for": numbers(0, -1)}, IndexError, "waited for is -1"),
    ({"waited_for": numbers(0, 3)}, IndexError, "waited for is 3"),
    ({"waiting": numbers(2, 2**40)}, IndexError, "what waits is 1099511627776"),
    ({"launcher": numbers(3)}, IndexError, "waited for is 3"),
    ({"launched": numbers(-2)}, IndexError, "what waits is -2"),
    ({"seconds": [1.0, 2.0, 1.0]}, TypeError, "bytes-like"),
    ({"start_s": bytes(24)}, TypeError, "read-write"),
    ({"sort": numbers(0, 1, 3)}, IndexError, "sort is 3"),
    ({"sort": numbers(0, 1, -1)}, IndexError, "sort is -1"),
    ({"by_sort": {3: Flow(0.0, {0: 1.0})}}, IndexError, "sort is 3"),
    ({"by_sort": {0: Flow(0.0, {1: 1.0})}}, IndexError, "link is 1"),
    ({"by_sort": {0: Flow(0.0, {0: None})}}, TypeError, "are floats"),
    ({"by_sort": {0: Flow(0.0, {0: 10**400})}}, OverflowError, "too large"),
    ({"by_sort": {0: None}}, TypeError, "quiet seconds"),
    ({"capacity": {1: 1.0}}, IndexError, "a link is 1"),
    ({"capacity": {0: 0.0}}, ZeroDivisionError, "division by zero"),
    ({"fair": lambda key: b""}, TypeError, "a fraction of each flow"),
    ({"fair": None}, TypeError, "not callable"),
    ({"by_sort": {s: Flow(0.0, {0: FULL / 2}) for s in (0, 1)}, "fsum": None}, TypeError, "not callable"),
]


@pytest.mark.parametrize(("changes", "error", "message"), ODD)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    run_compiled()
    with pytest.raises(error, match=message):
        run_compiled(**changes)


def test_all_memory_is_given_back() -> None:
    """Every array is counted by tracemalloc, as are lists, numbers and bytes; also where a run ends in an error."""

    def run_all() -> None:
        fractions.cache_clear()
        run_compiled()
        for changes, error, _ in ODD:
            with suppress(error):
                run_compiled(**changes)

    run_all()
    gc.collect()
    tracemalloc.start()
    try:
        run_all()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            run_all()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 4096
    finally:
        tracemalloc.stop()


odd = st.sampled_from([0.0, 0.5, 1.0, -1.0, float("inf"), float("nan")])
some = st.integers(-2, 5) | odd | st.none()


@settings(deadline=None, max_examples=500)
@given(st.data())
def test_nonsense_is_refused_or_runs_but_never_kills_the_process(data: st.DataObject) -> None:
    n, waits, launches = (data.draw(st.integers(0, 5)) for _ in range(3))

    def column(count: int) -> array[int]:
        return numbers(*data.draw(st.lists(st.integers(-1, n), min_size=count, max_size=count)))

    changes = {
        "seconds": doubles(*data.draw(st.lists(odd, min_size=n, max_size=n))),
        "sort": numbers(*data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))),
        "waited_for": column(waits),
        "waiting": column(waits),
        "launcher": column(launches),
        "launched": column(launches),
        "lag_s": doubles(*data.draw(st.lists(odd, min_size=launches, max_size=launches))),
        "start_s": doubles(*[0.0] * n),
        "end_s": doubles(*[0.0] * n),
        "by_sort": data.draw(
            st.dictionaries(st.integers(0, 2), st.builds(Flow, some, st.dictionaries(st.integers(0, 2), some)))
        ),
        "capacity": dict(enumerate(data.draw(st.lists(some, min_size=1, max_size=3)))),
    }
    try:
        events = run_compiled(**changes)
    except (IndexError, TypeError, ValueError, ZeroDivisionError):
        return
    assert events >= 0
