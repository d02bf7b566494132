"""Run a step that processes change while it runs: clocks, links, paused ranks, other transfers and computations.

Processes on the same SimPy clock make the changes (`sim.processes.cluster`). After a change of clock, the rest of a
running computation takes place at the new speed. After a change of links, the rates of flows are computed anew
(`link_rates`). Without changes the times are those of `on_simpy.run_simpy`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
from simpy.events import URGENT

from sim.core.columns import Floats
from sim.core.timeline import COMPUTE
from sim.engine.link_rates import FULL, Flow, Flows, Sharing
from sim.engine.on_simpy import OnSimpy
from sim.engine.simpy_events import Prompt
from sim.graph.taskgraph import TaskGraph

if TYPE_CHECKING:
    from simpy.events import Event


class LiveLinks(Sharing):
    """Share links whose capacity changes, also among flows that are no tasks of the step."""

    def __init__(self, flows: Flows, task_kind: list[int]) -> None:
        # The capacities are copied, because processes change them and other runs use the original.
        super().__init__(Flows(dict(flows.capacity_bytes_per_s), flows.by_task_kind), task_kind)
        self._alone = dict(self.capacity)
        self._alike: dict[tuple[tuple[int, float], ...], int] = {}

    def scale(self, link: int, factor: float) -> None:
        """Set a link's capacity to `factor` times that of the cluster's description."""
        self.capacity[link] = self._alone[link] * factor
        self.limit[link] = self.capacity[link] * FULL
        self.scaled.add(link)
        # The link may be overloaded now though no flow came or went.
        self.changed[link] = None
        # Cached fractions hold for the old capacity.
        self._known.clear()

    def add(self, path: dict[int, float]) -> int:
        """Add a flow with these loads on links in bytes/s, and return its number."""
        self.rate.append(1.0)
        self.since_s.append(0.0)
        self.left_s.append(0.0)
        self.paths.append(path)
        self.places.append([(link, self.users[link]) for link in path])
        # Paths of the step's tasks are numbered from -1 on, so lower numbers cannot be confused with them.
        self.like.append(-2 - self._alike.setdefault(tuple(path.items()), len(self._alike)))
        return len(self.paths) - 1


class Turn:
    """Hold a wait for the compute streams of some classes of ranks; `granted` happens when it has all of them."""

    def __init__(self, classes: Iterable[int], granted: Event) -> None:
        self.classes, self.granted = tuple(dict.fromkeys(classes)), granted
        self.missing = set(self.classes)


class LiveStep(OnSimpy):
    """Run a graph that can be changed. `stretch`: by task, actual ÷ priced seconds of its computation."""

    def __init__(self, graph: TaskGraph, flows: Flows) -> None:
        self.links = LiveLinks(flows, graph.task_kind.tolist())
        super().__init__(graph, flows, self.links)
        compute = graph.streams.get(COMPUTE, -1)
        rows = [kind.rows for kind in graph.task_kinds]
        # Stored by kind: a step has a few dozen kinds and thousands of tasks.
        self._classes = [tuple(dict.fromkeys(row[0] for row in of_kind)) for of_kind in rows]
        self._computes = [any(row[1] == compute for row in of_kind) for of_kind in rows]
        count = len(graph.classes)
        self.clock, self.paused = [1.0] * count, [0] * count
        self._under_way: list[int | None] = [None] * count  # the running computation of each class
        self._since_s, self._left_s = [0.0] * count, [0.0] * count
        self._turns: list[deque[Turn]] = [deque() for _ in range(count)]
        self._queued: list[dict[int, None]] = [{} for _ in range(count)]  # ready tasks that may not start yet
        self.stretch = [1.0] * len(graph)
        self.begin_watched: dict[int, list[Prompt]] = {}
        self.end_watched: dict[int, list[Prompt]] = {}
        self._transfers: dict[int, Event] = {}
        # Transfers are numbered after the tasks.
        self.tasks = self.left = len(graph)
        self.done = self.env.event()

    # What can be changed.

    def set_clock(self, class_index: int, speed: float) -> None:
        """Compute at `speed` times the step's own speed from now on."""
        # Progress so far was at the old speed, so it is subtracted first; also in `pause` and `resume`.
        self._note_progress(class_index)
        self.clock[class_index] = speed
        self._go_on(class_index)

    def pause(self, class_index: int) -> None:
        """Stop a class's computation, and let none of its tasks start."""
        self._note_progress(class_index)
        # A count, because several processes may pause one rank, and each resumes once.
        self.paused[class_index] += 1
        self._go_on(class_index)

    def resume(self, class_index: int) -> None:
        """Undo one `pause`."""
        self._note_progress(class_index)
        self.paused[class_index] -= 1
        self._go_on(class_index)
        self._let_go(class_index)

    def scale_link(self, link: int, factor: float) -> None:
        """Set a link's capacity to `factor` times that of the cluster's description."""
        self.links.scale(link, factor)
        self.settle_soon()

    def take_turn(self, classes: Iterable[int]) -> Turn:
        """Queue for compute streams; from `granted` until `end_turn` nothing else computes on them."""
        turn = Turn(classes, self.env.event())
        # A turn enters all its queues at once, so two turns have one order everywhere and never wait in a circle.
        for c in turn.classes:
            self._turns[c].append(turn)
            self._grant(c)
        return turn

    def end_turn(self, turn: Turn) -> None:
        """Release a turn's compute streams, or leave their queues."""
        for c in turn.classes:
            self._turns[c].remove(turn)
            self._grant(c)
            self._let_go(c)

    def is_held(self, class_index: int) -> bool:
        """Tell whether a turn has, or waits for, the compute stream of a class."""
        return bool(self._turns[class_index])

    def transfer(self, flow: Flow, seconds: float) -> Event:
        """Start a flow that is no task and takes `seconds` alone; return the event of its end."""
        number = self.links.add(flow.path)
        # No task of the step has kind -1.
        self.task_kind.append(-1)
        self.seconds.append(seconds)
        self.start.append(self.env.now)
        self.end.append(-1.0)
        self.at(flow.quiet_s, number, self.arrive)
        self.ends[number] = self.at(seconds, number, self.finish)
        done = self._transfers[number] = self.env.event()
        return done

    # The run.

    def start_task(self, task: int) -> None:
        """Start a task, or queue it if one of its ranks may not start it."""
        kind = self.task_kind[task]
        classes, computes = self._classes[kind], self._computes[kind]
        # NCCL's kernels wait for each other, so one paused rank delays a whole collective. Only computation queues for
        # a turn, because a copy engine or a NIC needs no compute stream.
        if any(self.paused[c] or (computes and self._turns[c]) for c in classes):
            for c in classes:
                self._queued[c][task] = None
            return
        if not computes:
            super().start_task(task)
        else:
            # A computation has rows on a single class; only communication has rows on several.
            (c,) = classes
            self.start[task] = self._since_s[c] = self.env.now
            self._under_way[c], self._left_s[c] = task, self.seconds[task]
            # If the speed does not change later, this is the exact ratio. Start and end would give a rounded one.
            if self.clock[c] != 1.0:
                self.stretch[task] = 1.0 / self.clock[c] if self.clock[c] else inf
            self._end_in(task, self.seconds[task], self.clock[c])
            if task in self.launched:
                self.launch(task)
        self._tell(self.begin_watched.pop(task, ()))

    def finish(self, event: Any) -> None:
        """End a task or a transfer, unless the event is stale."""
        task = event.value
        if event is not self.ends[task]:
            return
        kind = self.task_kind[task]
        if task >= self.tasks or kind in self.flows:
            self.sharing.leave(task)
            self.settle_soon()
        self.end[task] = self.env.now
        # A transfer has no successors, and the step does not wait for it.
        if task >= self.tasks:
            self._transfers.pop(task).succeed()
            return
        if self._computes[kind]:
            for c in self._classes[kind]:
                # The stream is granted before successors start, so a queued turn precedes the rank's next computation.
                self._under_way[c] = None
                self._grant(c)
        self.left -= 1
        if not self.left:
            self.done.succeed()
        watchers = self.end_watched.pop(task, ())
        if watchers:  # they wake before any successor starts
            self._tell(watchers)
            self.at(0.0, task, self._release_now)
        else:
            self._release(task)

    def _release_now(self, event: Any) -> None:
        self._release(event.value)

    def _release(self, task: int) -> None:
        for s in self.after[task]:
            self.one_less(s)

    def _settle(self, _: Event) -> None:
        self._settling = False
        for task, in_s in self.sharing.settle(self.env.now):
            self.ends[task] = None if in_s == inf else self.at(in_s, task, self.finish)

    def _tell(self, watchers: Iterable[Prompt]) -> None:
        for event in watchers:
            if not event.triggered:
                # `succeed` would queue the event after other events of this instant. A watcher must act before the task
                # goes on.
                event.happen(URGENT)

    def _note_progress(self, c: int) -> None:
        """Subtract what the class's computation has done since its speed last changed."""
        now_s = self.env.now
        if self._under_way[c] is not None:
            done = (now_s - self._since_s[c]) * (0.0 if self.paused[c] else self.clock[c])
            self._left_s[c], self._since_s[c] = max(0.0, self._left_s[c] - done), now_s

    def _go_on(self, c: int) -> None:
        """Set the end of the class's computation anew, by its remaining seconds and its speed."""
        task = self._under_way[c]
        if task is not None:
            self.stretch[task] = -1.0  # `stretches` computes the ratio of several speeds from the end
            self._end_in(task, self._left_s[c], 0.0 if self.paused[c] else self.clock[c])

    def _end_in(self, task: int, left_s: float, speed: float) -> None:
        # At speed zero there is no end. An event that was queued before becomes stale.
        self.ends[task] = self.at(left_s / speed, task, self.finish) if speed else None

    def _grant(self, c: int) -> None:
        """Give a compute stream to the first turn in its queue, if nothing computes there."""
        # Turns are granted in the order of asking. A turn for several ranks holds those that are free while it waits
        # for the others, like a job that stops all its ranks at one point.
        if self._turns[c] and self._under_way[c] is None:
            turn = self._turns[c][0]
            turn.missing.discard(c)
            if not turn.missing and not turn.granted.triggered:
                turn.granted.succeed()

    def _let_go(self, c: int) -> None:
        """Try to start the queued tasks of a class; those that still may not start are queued again."""
        # A task is in the queue of each of its classes. It leaves all of them first, or another class would start it
        # again.
        queued = list(self._queued[c])
        for task in queued:
            for other in self._classes[self.task_kind[task]]:
                self._queued[other].pop(task, None)
        for task in queued:
            self.start_task(task)

    def stretches(self) -> Floats:
        """Return, by task, actual ÷ priced seconds of its computation."""
        out = np.array(self.stretch)
        start, end = np.array(self.start[: self.tasks]), np.array(self.end[: self.tasks])
        seconds = np.array(self.seconds[: self.tasks])
        # A computation of zero seconds has no ratio and counts as 1.
        moved = np.flatnonzero((out < 0) | np.isinf(out))
        lasted = end[moved] - start[moved]
        out[moved] = np.where(seconds[moved] > 0, lasted / np.where(seconds[moved] > 0, seconds[moved], 1.0), 1.0)
        return out
