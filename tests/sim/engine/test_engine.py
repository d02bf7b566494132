"""All engines on random programs, and what they say when tasks wait in a circle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sim.core.actions import Action, Kind
from sim.core.columns import ints
from sim.core.timeline import Detail, RankClass
from sim.engine import run as engine
from sim.engine.link_rates import Flow, Flows, Sharing
from sim.engine.on_simpy import run_simpy
from sim.engine.run import Times, run_contended, run_static
from sim.graph.taskgraph import GraphBuilder, Launches, TaskGraph
from topology.contention import shared_fractions

STEP = (Action(0, Kind.F, 0),)


Launch = tuple[int, int, float]  # the second starts no earlier than so many seconds after the first


def drafted(draft: GraphBuilder, launches: list[Launch]) -> TaskGraph:
    """The graph of a draft, of whose tasks some launch others."""
    graph = draft.graph()
    first, second, lag_s = ([launch[i] for launch in launches] for i in range(3))
    lags = Launches(ints(first), ints(second), np.array(lag_s, dtype=np.float64))
    steps = {"step": np.zeros(len(graph), dtype=np.int64), "steps": [STEP]}
    return replace(graph, columns=graph.columns._replace(launches=lags, **steps))


def graph_of(seconds: list[float], waits: list[list[int]], launches: list[Launch] | None = None) -> TaskGraph:
    draft = GraphBuilder((RankClass(0, (0,), 0),))
    sort = draft.table.new_kind(Detail("work"), (draft.table.row(0, "compute", "F"),))
    for s, w in zip(seconds, waits, strict=True):
        draft.add(s, w, sort)
    return drafted(draft, launches or [])


@st.composite
def programs(draw: st.DrawFn) -> TaskGraph:
    n = draw(st.integers(1, 25))
    order = draw(st.permutations(range(n)))
    place = {t: i for i, t in enumerate(order)}
    seconds = draw(st.lists(st.floats(0, 1e3, allow_nan=False), min_size=n, max_size=n))
    waits = [
        sorted(t for t in draw(st.sets(st.integers(0, n - 1), max_size=4)) if place[t] < place[i]) for i in range(n)
    ]
    launches = []
    for task in draw(st.sets(st.integers(0, n - 1), max_size=5)):
        earlier = [t for t in range(n) if place[t] < place[task]]
        if earlier:
            launches.append((draw(st.sampled_from(earlier)), task, draw(st.floats(0, 1e3, allow_nan=False))))
    return graph_of(seconds, waits, launches)


def in_python(graph: TaskGraph, flows: Flows) -> Times:
    """What `run_contended` gives where its loop was not compiled."""
    with patch.object(engine, "_events", None):
        return run_contended(graph, flows)


def assert_engines_agree(graph: TaskGraph, flows: Flows) -> None:
    """To the last bit, and the two loops in the number of their events too; where one was not compiled they are one,
    and `test_compiled_events` is skipped."""
    reference, a, b = run_simpy(graph, flows), in_python(graph, flows), run_contended(graph, flows)
    assert a == b
    assert np.array_equal(a.start_s, reference.start_s)
    assert np.array_equal(a.end_s, reference.end_s)


@settings(deadline=None, max_examples=150)
@given(programs())
def test_static_pass_equals_simpy_to_the_last_bit(graph: TaskGraph) -> None:
    assert_engines_agree(graph, Flows())


@settings(deadline=None, max_examples=60)
@given(programs())
def test_no_task_starts_before_what_it_waits_for(graph: TaskGraph) -> None:
    t = run_static(graph)
    lags = {task: (other, lag_s) for other, task, lag_s in zip(*graph.columns.launches, strict=True)}
    for task, waits in enumerate(graph.waits_of):
        ready = [t.end_s[w] for w in waits]
        if task in lags:
            other, lag_s = lags[task]
            ready.append(t.start_s[other] + lag_s)
        assert t.start_s[task] == max(ready, default=0.0)
        assert t.end_s[task] == t.start_s[task] + graph.seconds[task]


@pytest.mark.parametrize("run", [run_simpy, run_static, lambda graph: in_python(graph, Flows())])
def test_a_circle_is_reported(run: Callable[[TaskGraph], Times]) -> None:
    with pytest.raises(ValueError, match=r"2 of 3 tasks never start.*stage 0"):
        run(graph_of([1.0, 1.0, 1.0], [[], [2], [1]]))


Program = tuple[TaskGraph, Flows]


def with_flows(
    graph: TaskGraph, capacity: list[float], loads: dict[int, dict[int, float]], quiet_s: dict[int, float]
) -> Program:
    """The graph, and the given loads of some of its tasks."""
    flows = Flows(dict(enumerate(capacity)))
    for task, path in loads.items():
        graph.task_kind[task] = sort = graph.table.new_kind(Detail("flow"))
        flows.by_task_kind[sort] = Flow(quiet_s.get(task, 0.0), path)
    return graph, flows


@st.composite
def sharing_programs(draw: st.DrawFn) -> Program:
    """Programs whose tasks load up to four links, few instants and round numbers among them, so that much coincides."""
    graph = draw(programs())
    if draw(st.booleans()):
        graph.seconds[:] = np.round(graph.seconds) % 7
        graph.columns.launches.lag_s[:] = np.round(graph.columns.launches.lag_s) % 3
    capacity = draw(st.lists(st.floats(1.0, 10.0), min_size=1, max_size=4))
    loads, quiet_s = {}, {}
    for task in draw(st.sets(st.integers(0, len(graph) - 1), max_size=30)):
        links = draw(st.sets(st.integers(0, len(capacity) - 1), min_size=1))
        loads[task] = {k: capacity[k] * draw(st.sampled_from([0.25, 0.5, 0.9, 1.0])) for k in sorted(links)}
        quiet_s[task] = float(graph.seconds[task]) * draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    return with_flows(graph, capacity, loads, quiet_s)


SECONDS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.0, 2.0, 3.0]) | st.floats(0.0, 4.0, allow_nan=False)


class Ranks:
    """Ranks that act, send to each other and leave gradients running, on links out (3r), in (3r + 1) and inside."""

    def __init__(self, capacity: list[float]) -> None:
        self.draft = GraphBuilder(tuple(RankClass(r, (r,), 0) for r in range(len(capacity) // 3)))
        self.launches: list[Launch] = []
        self.flows = Flows(dict(enumerate(capacity)))
        self.last: list[dict[str, int]] = [{} for _ in self.draft.classes]
        self.inbox: list[list[int]] = [[] for _ in self.draft.classes]

    def sort(self, draw: st.DrawFn, rank: int, stream: str, seconds: float, links: list[int]) -> int:
        sort = self.draft.table.new_kind(Detail(stream), (self.draft.table.row(rank, stream, stream),))
        if links:
            load = draw(st.sampled_from([0.25, 0.5, 0.9, 1.0]))
            quiet_s = seconds * draw(st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]))
            path = {link: load * self.flows.capacity_bytes_per_s[link] for link in links}
            self.flows.by_task_kind[sort] = Flow(quiet_s, path)
        return sort

    def act(self, draw: st.DrawFn, rank: int, parts: int, two_streams: bool) -> None:
        """Compute after what has arrived; what it leaves running goes on one stream or two, in any case on the NIC."""
        last, waits, seconds = self.last[rank], self.inbox[rank], draw(SECONDS)
        self.inbox[rank] = []
        if "compute" in last:
            waits.append(last["compute"])
        task = last["compute"] = self.draft.add(seconds, waits, self.sort(draw, rank, "compute", seconds, []))
        names = ["dp", "ep"] if two_streams and parts > 1 else ["dp"] if parts else []
        for name in names:
            for _ in range(parts // len(names)):
                lag_s, other = draw(SECONDS), self.talk(draw, rank, name, [], [3 * rank, 3 * rank + 1])
                self.launches.append((task, other, lag_s))

    def talk(self, draw: st.DrawFn, rank: int, stream: str, waits: list[int], links: list[int]) -> int:
        """A communication of its own: a message, or a collective among those that actions leave running."""
        last, seconds = self.last[rank], draw(SECONDS)
        waits = [*waits, *([last[stream]] if stream in last else [])]
        last[stream] = self.draft.add(seconds, waits, self.sort(draw, rank, stream, seconds, links))
        return last[stream]


WHAT = ["act", "act", "act", "send", "send", "inside", "inside", "gather", "join"]


@st.composite
def queueing_programs(draw: st.DrawFn) -> Program:
    """Programs of ranks whose queues of gradients meet messages and each other, and are now and then waited for."""
    count = draw(st.integers(1, 4))
    ranks = Ranks([draw(st.sampled_from([1.0, 2.0, 3.0, 10.0])) for _ in range(3 * count)])
    for _ in range(draw(st.integers(1, 30))):
        what, rank = draw(st.sampled_from(WHAT)), draw(st.integers(0, count - 1))
        last = ranks.last[rank]
        done = [last["compute"]] if "compute" in last else []
        if what == "act":
            ranks.act(draw, rank, draw(st.sampled_from([0, 1, 2, 3, 4])), draw(st.integers(0, 9)) == 0)
        elif what == "send":
            to = draw(st.integers(0, count - 1))
            queue = draw(st.sampled_from(["send", "send back"]))
            ranks.inbox[to].append(ranks.talk(draw, rank, queue, done, [3 * rank, 3 * to + 1]))
        elif what == "inside":
            ranks.inbox[rank].append(ranks.talk(draw, rank, "tp", done, [3 * rank + 2]))
        elif what == "gather":
            ranks.inbox[rank].append(ranks.talk(draw, rank, "dp", [], [3 * rank, 3 * rank + 1]))
        elif "dp" in last:
            ranks.inbox[rank].append(last["dp"])
    return drafted(ranks.draft, ranks.launches), ranks.flows


@settings(deadline=None, max_examples=200)
@given(queueing_programs())
def test_what_actions_leave_running_costs_the_same_on_simpys_clock_to_the_last_bit(program: Program) -> None:
    assert_engines_agree(*program)


@settings(deadline=None, max_examples=200)
@given(sharing_programs())
def test_shared_links_cost_the_same_on_simpys_clock_to_the_last_bit(program: Program) -> None:
    assert_engines_agree(*program)


@settings(deadline=None, max_examples=100)
@given(sharing_programs())
def test_links_that_carry_everything_at_once_change_no_bit(program: Program) -> None:
    graph, flows = program
    flows.capacity_bytes_per_s = dict.fromkeys(flows.capacity_bytes_per_s, 1e4)
    a, b = run_contended(graph, flows), run_static(graph)
    assert np.array_equal(a.start_s, b.start_s)
    assert np.array_equal(a.end_s, b.end_s)


@settings(deadline=None, max_examples=100)
@given(sharing_programs())
def test_sharing_makes_nothing_earlier_and_no_link_carries_more_than_it_can(program: Program) -> None:
    graph, flows = program
    shared, alone = run_contended(graph, flows), run_static(graph)
    assert all(a >= b * (1 - 1e-9) for a, b in zip(shared.end_s, alone.end_s, strict=True))
    for link, capacity in flows.capacity_bytes_per_s.items():
        users = {
            t: flows.by_task_kind[k]
            for t, k in enumerate(graph.task_kind)
            if link in getattr(flows.by_task_kind.get(k), "path", ())
        }
        sent = sum(flow.path[link] * (graph.seconds[t] - flow.quiet_s) for t, flow in users.items())
        busy = [(shared.start_s[t] + flow.quiet_s, shared.end_s[t]) for t, flow in users.items()]
        assert sent <= capacity * covered_s(busy) * (1 + 1e-6) + 1e-6


class Recorded(Sharing):
    """Keeps each flow's rates, and looks at every link whenever they change."""

    def __init__(self, flows: Flows, sort: list[int]) -> None:
        super().__init__(flows, sort)
        self.rates: dict[int, list[tuple[float, float]]] = {}
        runs.append(self)

    def arrive(self, task: int, now_s: float, alone_end_s: float) -> None:
        super().arrive(task, now_s, alone_end_s)
        self.rates[task] = [(now_s, 1.0)]

    def settle(self, now_s: float) -> list[tuple[int, float]]:
        moved = super().settle(now_s)
        for task, _ in moved:
            self.rates[task].append((now_s, self.rate[task]))
        for link, users in self.users.items():
            carried = sum(self.rate[t] * self.paths[t][link] for t in users)
            assert carried <= self.capacity[link] * (1 + 1e-8) or len(users) == 1
        flows = sorted({t for users in self.users.values() for t in users})
        loads = [{link: load for link, load in self.paths[t].items() if link in self.over} for t in flows]
        assert [self.rate[t] for t in flows] == pytest.approx(shared_fractions(loads, self.capacity), rel=1e-9)
        return moved


runs: list[Recorded] = []


@settings(deadline=None, max_examples=100)
@given(sharing_programs())
def test_every_byte_is_sent_and_no_link_is_ever_overrun(program: Program) -> None:
    graph, flows = program
    with patch.object(engine, "Sharing", Recorded):
        times = in_python(graph, flows)
    for task, rates in runs.pop().rates.items():
        until = [*(t for t, _ in rates[1:]), times.end_s[task]]
        sent_s = sum((b - a) * rate for (a, rate), b in zip(rates, until, strict=True))
        alone_s = graph.seconds[task] - flows.by_task_kind[graph.task_kind[task]].quiet_s
        assert sent_s == pytest.approx(alone_s, rel=1e-9, abs=1e-9)


def covered_s(intervals: list[tuple[float, float]]) -> float:
    total, reached = 0.0, 0.0
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def ends(seconds: list[float], loads: list[dict[int, float]], capacity: list[float], **more: dict[int, float]) -> Any:
    """When tasks end that start together, or after a quiet time."""
    graph = graph_of(seconds, [[] for _ in seconds])
    return run_contended(*with_flows(graph, capacity, dict(enumerate(loads)), more.get("quiet_s", {}))).end_s.tolist()


def test_two_flows_on_one_link_take_twice_as_long() -> None:
    assert ends([3.0, 3.0], [{0: 10.0}, {0: 10.0}], [10.0]) == [6.0, 6.0]
    assert ends([3.0, 3.0], [{0: 5.0}, {0: 5.0}], [10.0]) == [3.0, 3.0]
    assert ends([3.0, 3.0], [{0: 10.0}, {1: 10.0}], [10.0, 10.0]) == [3.0, 3.0]


def test_three_flows_over_two_links_are_max_min_fair() -> None:
    """Bertsekas & Gallager's line: the long flow and the short one on the narrow link halve it until 20 bytes are
    through; the short one on the wide link takes the rest of that one, then all of it."""
    loads = [{0: 10.0, 1: 10.0}, {0: 10.0}, {1: 20.0}]
    assert ends([2.0, 2.0, 2.0], loads, [10.0, 20.0]) == pytest.approx([4.0, 4.0, 8 / 3])


def test_a_flow_that_arrives_midway_slows_the_other_from_then_on() -> None:
    # 10 bytes/s for 1 s, 5 until the other's 10 bytes are through at 3 s, 10 again for the last 10.
    assert ends([3.0, 2.0], [{0: 10.0}, {0: 10.0}], [10.0], quiet_s={1: 1.0}) == [4.0, 3.0]


def test_starts_and_steps_are_not_slowed() -> None:
    """Only bytes share: a flow with half of its time in steps that the other fits into is not slowed at all."""
    assert ends([4.0, 2.0], [{0: 10.0}, {0: 10.0}], [10.0], quiet_s={0: 2.0}) == [4.0, 2.0]
    assert ends([4.0, 4.0], [{0: 10.0}, {0: 10.0}], [10.0], quiet_s={0: 2.0, 1: 2.0}) == [6.0, 6.0]


def test_a_small_flow_gets_all_it_asks_for() -> None:
    assert ends([2.0, 2.0], [{0: 10.0}, {0: 2.0}], [10.0]) == pytest.approx([2.4, 2.0])
