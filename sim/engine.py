"""Run a task graph in time.

`run_simpy` is the reference: SimPy's clock, a timeout per task. `run_static` computes the same times in one pass
in topological order, which is all there is to do where no resource is shared between tasks at changing rates;
both add the same numbers in the same order, so the results are equal to the last bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sim.taskgraph import TaskGraph


class Times(NamedTuple):
    """Start and end of every task in seconds, how the run was done and the events it took."""

    start_s: list[float]
    end_s: list[float]
    path: str
    events: int


def run_simpy(graph: TaskGraph) -> Times:
    """Replay a graph on SimPy's clock.

    Raises:
        ValueError: if tasks wait for each other in a circle; names some that never ran.
    """
    import simpy

    env = simpy.Environment()
    missing = _missing(graph)
    after, lagging = graph.successors(), _lagging(graph)
    start = [-1.0] * len(graph)
    end = [-1.0] * len(graph)
    events = 0

    def begin(task: int) -> None:
        nonlocal events
        start[task] = env.now
        events += 1
        env.timeout(graph.seconds[task], value=task).callbacks.append(finish)
        for other, lag_s in lagging.get(task, ()):
            events += 1
            env.timeout(lag_s, value=other).callbacks.append(release)

    def release(event: Any) -> None:
        task: int = event.value
        missing[task] -= 1
        if missing[task] == 0:
            begin(task)

    def finish(event: Any) -> None:
        end[event.value] = env.now
        for s in after[event.value]:
            missing[s] -= 1
            if missing[s] == 0:
                begin(s)

    for task in [i for i, n in enumerate(missing) if n == 0]:
        begin(task)
    env.run()
    _all_ran(graph, end)
    return Times(start, end, "simpy", events)


def run_static(graph: TaskGraph) -> Times:
    """The same times by one pass: start = latest end of what a task waits for, end = start + seconds.

    Raises:
        ValueError: as `run_simpy`.
    """
    seconds = graph.seconds
    missing = _missing(graph)
    after, lagging = graph.successors(), _lagging(graph)
    start = [0.0] * len(graph)
    end = [-1.0] * len(graph)
    ready = [i for i, n in enumerate(missing) if n == 0]
    for task in ready:  # grows while it is walked
        begin = start[task]
        end[task] = done = begin + seconds[task]
        for s in after[task]:
            if done > start[s]:
                start[s] = done
            missing[s] -= 1
            if missing[s] == 0:
                ready.append(s)
        if task in lagging:
            for s, lag_s in lagging[task]:
                start[s] = max(start[s], begin + lag_s)
                missing[s] -= 1
                if missing[s] == 0:
                    ready.append(s)
    _all_ran(graph, end)
    return Times(start, end, "static", 0)


def _missing(graph: TaskGraph) -> list[int]:
    """How many things each task still waits for."""
    missing = [len(w) for w in graph.waits]
    for task in graph.lags:
        missing[task] += 1
    return missing


def _lagging(graph: TaskGraph) -> dict[int, list[tuple[int, float]]]:
    """By task: who may start how long after it has started."""
    out: dict[int, list[tuple[int, float]]] = {}
    for task, (other, lag_s) in graph.lags.items():
        out.setdefault(other, []).append((task, lag_s))
    return out


def _all_ran(graph: TaskGraph, end: list[float]) -> None:
    if len(end) and min(end) < 0:
        stuck = [i for i, t in enumerate(end) if t < 0]
        shown = "; ".join(graph.describe(t) for t in stuck[:5])
        raise ValueError(f"deadlock: {len(stuck)} of {len(graph)} tasks never start, the first are: {shown}")
