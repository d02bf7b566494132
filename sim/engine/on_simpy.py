"""Run a task graph on SimPy's clock: one timeout for each task, and one for each arrival of a flow on its links.

Steps of few tasks run here (`shared_links.SIMPY_TASKS`), and steps that processes change while they run
(`live.LiveStep`). The times are those of `run.run_contended` to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sim.engine.link_rates import Flows, Sharing
from sim.engine.run import Times, after_of, launched_by, missing_of, ran
from sim.engine.simpy_events import LAST, Clock
from sim.graph.taskgraph import TaskGraph

if TYPE_CHECKING:
    from simpy.events import Event


def run_simpy(graph: TaskGraph, flows: Flows | None = None) -> Times:
    """Run a graph on SimPy's clock; with `flows`, tasks that share links slow each other down.

    Raises:
        Deadlock: if tasks wait for each other in a circle; the text names some that never ran.
    """
    flows = flows or Flows()
    run = OnSimpy(graph, flows, Sharing(flows, graph.task_kind.tolist()))
    run.begin()
    run.env.run()
    return ran(graph, run.start, run.end, "simpy", run.events)


# Timeouts with callbacks are faster than processes: SimPy would start and resume thousands of generators.
class OnSimpy:
    """Run a graph once. `start`, `end`: seconds by task, -1 before they happen; `events`: number of timeouts so far."""

    def __init__(self, graph: TaskGraph, flows: Flows, sharing: Sharing) -> None:
        # Lists are faster than arrays here: every event reads and writes single numbers.
        self.env = Clock()
        self.seconds, self.task_kind, self.flows = graph.seconds.tolist(), graph.task_kind.tolist(), flows.by_task_kind
        self.sharing, self.missing = sharing, missing_of(graph)
        self.after, self.launched = after_of(graph), launched_by(graph)
        self.start = [-1.0] * len(graph)
        self.end = [-1.0] * len(graph)
        self.events = 0
        self.ends: dict[int, Event | None] = {}  # the event that ends a task; earlier events of a flow are stale
        self._settling = False

    def begin(self) -> None:
        """Start the tasks that wait for nothing."""
        for task in [i for i, n in enumerate(self.missing) if n == 0]:
            self.start_task(task)

    def at(self, seconds: float, task: int, then: Callable[[Any], None]) -> Event:
        """Call `then` after `seconds`, with an event whose value is the task."""
        self.events += 1
        event = self.env.timeout(seconds, value=task)
        event.callbacks.append(then)
        return event

    def start_task(self, task: int) -> None:
        """Start a task, whose waits are over."""
        self.start[task] = self.env.now
        flow = self.flows.get(self.task_kind[task])
        # SimPy takes events of equal time in the order of queueing. The arrival is queued first, so that a flow whose
        # bytes take no time arrives before it leaves.
        if flow is not None:
            self.at(flow.quiet_s, task, self.arrive)
        self.ends[task] = self.at(self.seconds[task], task, self.finish)
        if task in self.launched:
            self.launch(task)

    def launch(self, task: int) -> None:
        """Release, after their lags, the tasks that wait for the start of a task."""
        for other, lag_s in self.launched[task]:
            self.at(lag_s, other, self._released)

    def _released(self, event: Any) -> None:
        self.one_less(event.value)

    def arrive(self, event: Any) -> None:
        """Let the bytes of a task begin to flow."""
        task = event.value
        # The same sum as in `run`, so that the remaining seconds are equal to the last bit.
        self.sharing.arrive(task, self.env.now, self.start[task] + self.seconds[task])
        self.settle_soon()

    def finish(self, event: Any) -> None:
        """End a task, unless the event is stale."""
        task = event.value
        # SimPy cannot cancel a timeout. A flow whose rate changed has a new one, so the old one is stale.
        if event is not self.ends[task]:
            return
        if self.task_kind[task] in self.flows:
            self.sharing.leave(task)
            # Other flows on its links may go faster now.
            self.settle_soon()
        self.end[task] = self.env.now
        for s in self.after[task]:
            self.one_less(s)

    def one_less(self, task: int) -> None:
        """Count one wait of a task as over, and start the task after its last one."""
        self.missing[task] -= 1
        if self.missing[task] == 0:
            self.start_task(task)

    def settle_soon(self) -> None:
        """Compute the flows' rates after all other events of this instant."""
        if not self._settling:
            self._settling = True
            event = self.env.prompt()
            event.callbacks.append(self._settle)
            event.happen(LAST)

    def _settle(self, _: Event) -> None:
        self._settling = False
        for task, in_s in self.sharing.settle(self.env.now):
            self.ends[task] = self.at(in_s, task, self.finish)
