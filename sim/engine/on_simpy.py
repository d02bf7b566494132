"""Run a task graph on SimPy's clock: a timeout for every task, and one for every arrival of a flow on its links.

Steps of few tasks run here (`shared_links.SIMPY_TASKS`), and everything that acts on a step while it runs
(`live.LiveStep`). The times are those of `run.run_contended` to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import simpy
from simpy.events import EventPriority

from sim.engine.link_rates import Flows, Sharing
from sim.engine.run import Times, after_of, launched_by, missing_of, ran
from sim.graph.taskgraph import TaskGraph

if TYPE_CHECKING:
    from simpy.events import Event

LAST = EventPriority(2)  # after everything else at an instant: SimPy's own are 0 and 1


def run_simpy(graph: TaskGraph, flows: Flows | None = None) -> Times:
    """Run a graph on SimPy's clock; with `flows`, tasks that share links slow each other down.

    Raises:
        Deadlock: if tasks wait for each other in a circle; names some that never ran.
    """
    flows = flows or Flows()
    run = OnSimpy(graph, flows, Sharing(flows, graph.task_kind.tolist()))
    run.begin()
    run.env.run()
    return ran(graph, run.start, run.end, "simpy", run.events)


# Callbacks on timeouts and no process for each task: SimPy would start and resume a generator thousands of times.
class OnSimpy:
    """One run of a graph. `start`, `end`: seconds by task, -1 for what has not happened; `events`: timeouts so far."""

    def __init__(self, graph: TaskGraph, flows: Flows, sharing: Sharing) -> None:
        # Lists and not arrays: every event reads and writes single numbers.
        self.env = simpy.Environment()
        self.seconds, self.task_kind, self.flows = graph.seconds.tolist(), graph.task_kind.tolist(), flows.by_task_kind
        self.sharing, self.missing = sharing, missing_of(graph)
        self.after, self.launched = after_of(graph), launched_by(graph)
        self.start = [-1.0] * len(graph)
        self.end = [-1.0] * len(graph)
        self.events = 0
        self.ends: dict[int, Event | None] = {}  # the event that will end a task; a flow's earlier ones are stale
        self._settling = False

    def begin(self) -> None:
        """Start what waits for nothing."""
        for task in [i for i, n in enumerate(self.missing) if n == 0]:
            self.start_task(task)

    def at(self, seconds: float, task: int, then: Callable[[Any], None]) -> Event:
        """Call `then` so many seconds from now, with an event whose value is the task."""
        self.events += 1
        event = self.env.timeout(seconds, value=task)
        event.callbacks.append(then)
        return event

    def start_task(self, task: int) -> None:
        """All that a task waits for has ended."""
        self.start[task] = self.env.now
        flow = self.flows.get(self.task_kind[task])
        # The arrival is queued before the end, and SimPy takes events of one time in that order: a flow without any
        # time to flow arrives before it leaves.
        if flow is not None:
            self.at(flow.quiet_s, task, self.arrive)
        self.ends[task] = self.at(self.seconds[task], task, self.finish)
        if task in self.launched:
            self.launch(task)

    def launch(self, task: int) -> None:
        """Let those go, after their lags, that start no earlier than a task has."""
        for other, lag_s in self.launched[task]:
            self.at(lag_s, other, self._released)

    def _released(self, event: Any) -> None:
        self.one_less(event.value)

    def arrive(self, event: Any) -> None:
        """Bytes of a task begin to flow."""
        task = event.value
        # The end is told as the sum that the passes of `run` add too, for the same bits in what is left of the flow.
        self.sharing.arrive(task, self.env.now, self.start[task] + self.seconds[task])
        self.settle_soon()

    def finish(self, event: Any) -> None:
        """A task ends, unless the event is stale."""
        task = event.value
        # SimPy cannot take a timeout back. A flow whose rate changed gets a new one, and the old one finds here that it
        # is stale.
        if event is not self.ends[task]:
            return
        if self.task_kind[task] in self.flows:
            self.sharing.leave(task)
            # Others on its links may go faster from now on.
            self.settle_soon()
        self.end[task] = self.env.now
        for s in self.after[task]:
            self.one_less(s)

    def one_less(self, task: int) -> None:
        """One of the things that a task waits for is over."""
        self.missing[task] -= 1
        if self.missing[task] == 0:
            self.start_task(task)

    def settle_soon(self) -> None:
        """Work out the rates of flows once all else has happened at this instant."""
        if not self._settling:
            self._settling = True
            event = self.env.event()
            event.callbacks.append(self._settle)
            event._ok, event._value = True, None  # as succeed() would, which schedules at its own priority
            self.env.schedule(event, priority=LAST)

    def _settle(self, _: Event) -> None:
        self._settling = False
        for task, in_s in self.sharing.settle(self.env.now):
            self.ends[task] = self.at(in_s, task, self.finish)
