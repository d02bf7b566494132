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
    missing = [len(w) for w in graph.waits]
    after = graph.successors()
    start = [-1.0] * len(graph)
    end = [-1.0] * len(graph)

    def begin(task: int) -> None:
        start[task] = env.now
        env.timeout(graph.seconds[task], value=task).callbacks.append(finish)

    def finish(event: Any) -> None:
        task: int = event.value
        end[task] = env.now
        for s in after[task]:
            missing[s] -= 1
            if missing[s] == 0:
                begin(s)

    for task, n in enumerate(missing):
        if n == 0:
            begin(task)
    env.run()
    _all_ran(graph, [i for i, t in enumerate(end) if t < 0])
    return Times(start, end, "simpy", len(graph))


def run_static(graph: TaskGraph) -> Times:
    """The same times by one pass: start = latest end of what a task waits for, end = start + seconds.

    Raises:
        ValueError: as `run_simpy`.
    """
    seconds, waits = graph.seconds, graph.waits
    missing = [len(w) for w in waits]
    after = graph.successors()
    start = [0.0] * len(graph)
    end = [-1.0] * len(graph)
    ready = [i for i, n in enumerate(missing) if n == 0]
    while ready:
        task = ready.pop()
        begin = start[task]
        end[task] = done = begin + seconds[task]
        for s in after[task]:
            if done > start[s]:
                start[s] = done
            missing[s] -= 1
            if missing[s] == 0:
                ready.append(s)
    _all_ran(graph, [i for i, t in enumerate(end) if t < 0])
    return Times(start, end, "static", 0)


def _all_ran(graph: TaskGraph, stuck: list[int]) -> None:
    if stuck:
        shown = "; ".join(graph.describe(t) for t in stuck[:5])
        raise ValueError(f"deadlock: {len(stuck)} of {len(graph)} tasks never start, the first are: {shown}")
