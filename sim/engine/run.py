"""Run a task graph without a clock, for steps of many tasks.

`on_simpy.run_simpy` runs small steps, and is the reference: SimPy's clock, a timeout per task. `run_static` computes
the same times in one pass over tasks whose waits are over, which is all there is to do where no link is shared by more
than it can carry. Where one is, `run_contended` does that pass between the arrivals and departures of flows, which
alone need a clock. All add the same numbers in the same order, so the results are equal to the last bit, as are those
of `_events.c`, which does the same wherever it could be compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from math import fsum

import numpy as np
from msgspec import Struct

from sim.engine.link_rates import FULL, Flows, Sharing, fractions
from sim.graph.taskgraph import Deadlock, Floats, TaskGraph, grouped

try:
    from sim.engine import _events
except ImportError:
    _events = None  # type: ignore[assignment]
if not hasattr(_events, "run_columns"):  # compiled from an earlier version, whose arguments were others
    _events = None  # type: ignore[assignment]

# The number also decides between equal times, so that this loop and the compiled one take events in one order.
Coming = tuple[float, int]  # when, and the task that ends, or ~task for one whose bytes begin to flow


# `eq` is written out below, since arrays have no single truth value.
class Times(Struct, frozen=True, eq=False, dict=True):
    """Start and end of every task in seconds, how the run was done and the events it took. `stretch`: where clocks
    changed (`live`), by task how many times as long its computation took."""

    start_s: Floats
    end_s: Floats
    path: str
    events: int
    stretch: Floats | None = None

    def __eq__(self, other: object) -> bool:
        """Equal to the last bit."""
        if not isinstance(other, Times) or (self.path, self.events) != (other.path, other.events):
            return False
        return np.array_equal(self.start_s, other.start_s) and np.array_equal(self.end_s, other.end_s)

    __hash__ = None  # type: ignore[assignment]

    @property
    def step_s(self) -> float:
        """End of the last task."""
        return float(self.end_s.max(initial=0.0))


def run_static(graph: TaskGraph) -> Times:
    """The same times without a clock: start = latest end of what a task waits for, end = start + seconds.

    Raises:
        Deadlock: if tasks wait for each other in a circle; names some that never ran.
    """
    return run_contended(graph, Flows())


def run_contended(graph: TaskGraph, flows: Flows) -> Times:
    """The same times as `on_simpy.run_simpy` with `flows`: passes as `run_static`'s from one arrival or departure to
    the next.

    Raises:
        Deadlock: if tasks wait for each other in a circle; names some that never ran.
    """
    run = _in_python if _events is None else _compiled
    start, end, events = run(graph, flows)
    return ran(graph, start, end, "static", events)


def _compiled(graph: TaskGraph, flows: Flows) -> tuple[Floats, Floats, int]:
    # The compiled loop writes every entry, so nothing is filled in beforehand.
    start, end = np.empty(len(graph)), np.empty(len(graph))
    waits, launches = graph.columns.waits, graph.columns.launches
    columns = (graph.seconds, graph.task_kind, *waits, *launches, start, end)
    links = (len(graph.task_kinds), flows.by_task_kind, flows.capacity_bytes_per_s)
    events = _events.run_columns(*columns, *links, FULL, fractions, _fsum_of_bytes)
    return start, end, events


def _fsum_of_bytes(doubles: bytes) -> float:
    # `fsum` rounds once, so the sum does not depend on the order of users, which differs between the two loops.
    return fsum(memoryview(doubles).cast("d"))


def _in_python(graph: TaskGraph, flows: Flows) -> tuple[list[float], list[float], int]:
    sharing, n = Sharing(flows, graph.task_kind.tolist()), len(graph)
    start, end, coming = [0.0] * n, [-1.0] * n, list[Coming]()
    release, start_first = _walker(graph, flows, start, end, coming)
    start_first()
    return start, end, _run_events(graph.seconds.tolist(), sharing, start, end, coming, release)


def _run_events(
    seconds: list[float],
    sharing: Sharing,
    start: list[float],
    end: list[float],
    coming: list[Coming],
    release: Callable[[int, float], None],
) -> int:
    """All arrivals and departures of flows, and what follows from them; returns how many there were."""
    due_s = [-1.0] * len(start)  # when a flow under way ends
    told_s = [-1.0] * len(start)  # the earliest event that asks whether it has; one that comes too early asks again
    now_s, events, changed, arrive, leave = 0.0, 0, sharing.changed, sharing.arrive, sharing.leave
    while coming:
        when_s, task = coming[0]
        if when_s != now_s:
            # Rates are settled when an instant is over. One change at a time would give flows that start together rates
            # that hold for no time at all.
            if changed:
                for moved, in_s in sharing.settle(now_s):
                    due_s[moved] = end_s = now_s + in_s
                    # An entry of a heap cannot be moved. A flow that ends earlier gets a second entry; one that ends
                    # later keeps its entry, which asks again when it comes up.
                    if end_s < told_s[moved]:
                        told_s[moved] = end_s
                        heappush(coming, (end_s, moved))
                # Settling may have put an earlier end in front.
                when_s, task = coming[0]
            now_s = when_s
        events += 1
        if task < 0:
            task = ~task
            due_s[task] = told_s[task] = end_s = start[task] + seconds[task]
            arrive(task, now_s, end_s)
            # One sift replaces a pop and a push.
            heapreplace(coming, (end_s, task))
        elif now_s < due_s[task]:
            told_s[task] = end_s = due_s[task]
            heapreplace(coming, (end_s, task))
        else:
            heappop(coming)
            # An entry that is left over from before a change of rate finds another time, or -1 for a flow that has
            # ended.
            if now_s == due_s[task]:
                due_s[task] = -1.0
                leave(task)
                release(task, now_s)
    return events


def _walker(
    graph: TaskGraph, flows: Flows, start: list[float], end: list[float], coming: list[Coming]
) -> tuple[Callable[[int, float], None], Callable[[], None]]:
    """Two functions that fill in `start` and `end` up to the next flows, whose arrivals lie ahead: one goes on from a
    flow that has ended, the other from the beginning of the step."""
    seconds, after, missing, launched = graph.seconds.tolist(), after_of(graph), missing_of(graph), launched_by(graph)
    quiet_of_kind = [-1.0] * len(graph.task_kinds)
    for task_kind, flow in flows.by_task_kind.items():
        quiet_of_kind[task_kind] = flow.quiet_s
    quiet_s = list(map(quiet_of_kind.__getitem__, graph.task_kind.tolist()))  # -1: no flow

    def release(task: int, now_s: float) -> None:
        end[task] = now_s
        for s in after[task]:
            if now_s > start[s]:
                start[s] = now_s
            # Starts are maxima, so it does not matter which of the waits ends last.
            missing[s] -= 1
            if not missing[s]:
                # A flow that launches nothing needs an entry in the heap and no walk, which would find the same.
                if quiet_s[s] >= 0.0 and s not in launched:
                    heappush(coming, (start[s] + quiet_s[s], ~s))
                else:
                    walk([s])

    def walk(ready: list[int]) -> None:
        for task in ready:  # grows while it is walked
            # All that the task waits for is over, so its start is final: no clock is needed to go on from it.
            begin = start[task]
            if task in launched:
                for s, lag_s in launched[task]:
                    if begin + lag_s > start[s]:
                        start[s] = begin + lag_s
                    missing[s] -= 1
                    if not missing[s]:
                        ready.append(s)
            # When a flow ends depends on others. The walk stops here and `release` goes on from its end.
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
    """How many things each task still waits for."""
    everything = np.concatenate([graph.columns.waits.second, graph.columns.launches.second])
    # A launch is a wait too, only for another instant. A task starts when neither is left.
    missing: list[int] = np.bincount(everything, minlength=len(graph)).tolist()
    return missing


def after_of(graph: TaskGraph) -> list[list[int]]:
    """Who waits for each task; a wait listed twice stands twice."""
    return grouped(*graph.columns.waits, len(graph))


def launched_by(graph: TaskGraph) -> dict[int, list[tuple[int, float]]]:
    """By task: who may start how long after it has started."""
    out: dict[int, list[tuple[int, float]]] = {}
    for task, other, lag_s in zip(*(column.tolist() for column in graph.columns.launches), strict=True):
        out.setdefault(task, []).append((other, lag_s))
    return out


def ran(graph: TaskGraph, start: list[float] | Floats, end: list[float] | Floats, path: str, events: int) -> Times:
    """The times of all tasks.

    Raises:
        Deadlock: if some never ran.
    """
    times = Times(np.asarray(start, dtype=np.float64), np.asarray(end, dtype=np.float64), path, events)
    # Ends begin at -1, so a task in a circle, or behind one, is still below zero.
    stuck = np.flatnonzero(times.end_s < 0).tolist()
    if stuck:
        first = "; ".join(graph.describe(t) for t in stuck[:5])
        raise Deadlock(f"deadlock: {len(stuck)} of {len(graph)} tasks never start, the first are: {first}")
    return times
