"""Run a task graph without an event queue, for steps of many tasks.

`on_simpy.run_simpy` runs small steps and is the reference: SimPy's clock, one timeout for each task. `run_static`
computes the same times in one pass over the tasks in the order of their waits; that suffices if no link is overloaded.
Otherwise `run_contended` runs such passes from one start or end of a flow to the next, since only flows need a clock.
`_events.c` is the same loop in C. All of them add the same numbers in the same order, so they give the same times to
the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from math import fsum

import numpy as np
from msgspec import Struct

from sim.core.columns import Floats, grouped
from sim.engine.link_rates import FULL, Flows, Sharing, fractions
from sim.graph.taskgraph import Deadlock, TaskGraph

try:
    from sim.engine import _events
except ImportError:
    _events = None  # type: ignore[assignment]
if not hasattr(_events, "run_columns"):  # compiled from an earlier version with other arguments
    _events = None  # type: ignore[assignment]

# The task's number orders events of equal time, so that this loop and the compiled one take them in one order.
Coming = tuple[float, int]  # time in seconds, and the task that ends, or ~task if its bytes begin to flow


# `__eq__` is written below, because comparing arrays gives an array.
class Times(Struct, frozen=True, eq=False, dict=True):
    """Hold the start and end of every task in seconds, the engine (`path`) and the number of its events.

    `stretch`: if clocks changed (`live`), by task how many times as long its computation took.
    """

    start_s: Floats
    end_s: Floats
    path: str
    events: int
    stretch: Floats | None = None

    def __eq__(self, other: object) -> bool:
        """Tell whether times are equal to the last bit."""
        if not isinstance(other, Times) or (self.path, self.events) != (other.path, other.events):
            return False
        return np.array_equal(self.start_s, other.start_s) and np.array_equal(self.end_s, other.end_s)

    __hash__ = None  # type: ignore[assignment]

    @property
    def step_s(self) -> float:
        """Return the end of the last task."""
        return float(self.end_s.max(initial=0.0))


def run_static(graph: TaskGraph) -> Times:
    """Run a graph as if no link were overloaded: start = latest end of the tasks waited for, end = start + seconds.

    Raises:
        Deadlock: if tasks wait for each other in a circle; the text names some that never ran.
    """
    return run_contended(graph, Flows())


def run_contended(graph: TaskGraph, flows: Flows) -> Times:
    """Run a graph with shared links, from one arrival or departure of a flow to the next.

    The times are those of `on_simpy.run_simpy` with the same `flows`.

    Raises:
        Deadlock: if tasks wait for each other in a circle; the text names some that never ran.
    """
    run = _in_python if _events is None else _compiled
    start, end, events = run(graph, flows)
    return ran(graph, start, end, "static", events)


def _compiled(graph: TaskGraph, flows: Flows) -> tuple[Floats, Floats, int]:
    # The compiled loop writes every entry, so the arrays need no initial values.
    start, end = np.empty(len(graph)), np.empty(len(graph))
    waits, launches = graph.columns.waits, graph.columns.launches
    columns = (graph.seconds, graph.task_kind, *waits, *launches, start, end)
    links = (len(graph.task_kinds), flows.by_task_kind, flows.capacity_bytes_per_s)
    events = _events.run_columns(*columns, *links, FULL, fractions, _fsum_of_bytes)
    return start, end, events


def _fsum_of_bytes(doubles: bytes) -> float:
    # `fsum` rounds once, so the sum does not depend on the order of flows, which differs between the two loops.
    return fsum(memoryview(doubles).cast("d"))


def _in_python(graph: TaskGraph, flows: Flows) -> tuple[list[float], list[float], int]:
    sharing, n = Sharing(flows, graph.task_kind.tolist()), len(graph)
    start, end, coming = [0.0] * n, [-1.0] * n, list[Coming]()
    release, start_first = _walker(graph, flows, start, end, coming)
    start_first()
    return start, end, _run_events(graph.seconds.tolist(), sharing, start, coming, release)


def _run_events(
    seconds: list[float],
    sharing: Sharing,
    start: list[float],
    coming: list[Coming],
    release: Callable[[int, float], None],
) -> int:
    """Process all arrivals and departures of flows, and return the number of events."""
    due_s = [-1.0] * len(start)  # when a running flow ends, by its current rate
    told_s = [-1.0] * len(start)  # time of the flow's earliest entry in the heap; one that is too early is put back
    now_s, events, changed, arrive, leave = 0.0, 0, sharing.changed, sharing.arrive, sharing.leave
    while coming:
        when_s, task = coming[0]
        if when_s != now_s:
            # Rates are computed once after all events of an instant, because rates between them hold for no time.
            if changed:
                _settle(sharing, now_s, due_s, told_s, coming)
                # The new rates may have put an earlier end first.
                when_s, task = coming[0]
            now_s = when_s
        events += 1
        if task < 0:
            task = ~task
            due_s[task] = told_s[task] = end_s = start[task] + seconds[task]
            arrive(task, now_s, end_s)
            # One `heapreplace` is faster than a pop and a push.
            heapreplace(coming, (end_s, task))
        elif now_s < due_s[task]:
            told_s[task] = end_s = due_s[task]
            heapreplace(coming, (end_s, task))
        else:
            heappop(coming)
            # An entry from before a change of rate has another time than the flow, which has -1 if it has ended.
            if now_s == due_s[task]:
                due_s[task] = -1.0
                leave(task)
                release(task, now_s)
    return events


def _settle(sharing: Sharing, now_s: float, due_s: list[float], told_s: list[float], coming: list[Coming]) -> None:
    """Set the ends of the flows whose rates changed at `now_s`; the lists are those of `_run_events`."""
    for moved, in_s in sharing.settle(now_s):
        due_s[moved] = end_s = now_s + in_s
        # An entry of a heap cannot be moved. A flow that ends earlier gets a second entry; one that ends later keeps
        # its entry, which is put back when it comes up.
        if end_s < told_s[moved]:
            told_s[moved] = end_s
            heappush(coming, (end_s, moved))


def _quiet_s(graph: TaskGraph, flows: Flows) -> list[float]:
    """Return by task the seconds before its bytes flow (`Flow.quiet_s`); -1 where the task is no flow."""
    of_kind = [-1.0] * len(graph.task_kinds)
    for task_kind, flow in flows.by_task_kind.items():
        of_kind[task_kind] = flow.quiet_s
    return list(map(of_kind.__getitem__, graph.task_kind.tolist()))


def _walker(
    graph: TaskGraph, flows: Flows, start: list[float], end: list[float], coming: list[Coming]
) -> tuple[Callable[[int, float], None], Callable[[], None]]:
    """Return two functions that fill in `start` and `end` up to the next flows, whose arrivals go into `coming`.

    The first one goes on from a flow that has ended, the second one from the beginning of the step.
    """
    seconds, after, missing, launched = graph.seconds.tolist(), after_of(graph), missing_of(graph), launched_by(graph)
    quiet_s = _quiet_s(graph, flows)

    def release(task: int, now_s: float) -> None:
        end[task] = now_s
        for s in after[task]:
            if now_s > start[s]:
                start[s] = now_s
            # Starts are maxima, so the order of ends does not matter.
            missing[s] -= 1
            if not missing[s]:
                # A flow that launches nothing needs no walk, only its entry in the heap.
                if quiet_s[s] >= 0.0 and s not in launched:
                    heappush(coming, (start[s] + quiet_s[s], ~s))
                else:
                    walk([s])

    def walk(ready: list[int]) -> None:
        for task in ready:  # grows while it is walked
            # All waits of the task are over, so its start is final.
            begin = start[task]
            if task in launched:
                for s, lag_s in launched[task]:
                    if begin + lag_s > start[s]:
                        start[s] = begin + lag_s
                    missing[s] -= 1
                    if not missing[s]:
                        ready.append(s)
            # A flow's end depends on other flows. The walk stops here, and `release` goes on from the flow's end.
            if quiet_s[task] >= 0.0:
                heappush(coming, (begin + quiet_s[task], ~task))
                continue
            end[task] = done = begin + seconds[task]
            for s in after[task]:
                if done > start[s]:
                    start[s] = done
                missing[s] -= 1
                if not missing[s]:
                    ready.append(s)

    return release, lambda: walk([task for task, n in enumerate(missing) if not n])


def missing_of(graph: TaskGraph) -> list[int]:
    """Return the number of waits of each task."""
    everything = np.concatenate([graph.columns.waits.second, graph.columns.launches.second])
    # A launch is a wait for another task's start.
    missing: list[int] = np.bincount(everything, minlength=len(graph)).tolist()
    return missing


def after_of(graph: TaskGraph) -> list[list[int]]:
    """Return the tasks that wait for each task; a wait that is listed twice appears twice."""
    return grouped(*graph.columns.waits, len(graph))


def launched_by(graph: TaskGraph) -> dict[int, list[tuple[int, float]]]:
    """Return by task the tasks that may start a lag after its start, each with the lag in seconds."""
    out: dict[int, list[tuple[int, float]]] = {}
    for task, other, lag_s in zip(*(column.tolist() for column in graph.columns.launches), strict=True):
        out.setdefault(task, []).append((other, lag_s))
    return out


def ran(graph: TaskGraph, start: list[float] | Floats, end: list[float] | Floats, path: str, events: int) -> Times:
    """Return the times of all tasks.

    Raises:
        Deadlock: if some never ran.
    """
    times = Times(np.asarray(start, dtype=np.float64), np.asarray(end, dtype=np.float64), path, events)
    # Ends are -1 at first, so a task in a circle, or one that waits for it, is still negative.
    stuck = np.flatnonzero(times.end_s < 0).tolist()
    if stuck:
        first = "; ".join(graph.describe(t) for t in stuck[:5])
        raise Deadlock(f"deadlock: {len(stuck)} of {len(graph)} tasks never start, the first are: {first}")
    return times
