"""A step that is changed while it runs: clocks, links, ranks that stand still, transfers and work of others.

A computation whose clock changes goes on with what is left of it at the new speed; flows whose links change are settled
anew (`link_rates`). Nothing here happens by itself: processes on the same SimPy clock ask for it
(`sim.processes.cluster`). A step that nothing acts on has the times of `on_simpy.run_simpy`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
from simpy.events import URGENT

from sim.engine.link_rates import FULL, Flow, Flows, Sharing
from sim.engine.on_simpy import OnSimpy
from sim.graph.taskgraph import Floats, TaskGraph
from sim.programs.compile import COMPUTE

if TYPE_CHECKING:
    from simpy.events import Event


class LiveLinks(Sharing):
    """Links whose capacity changes, and flows that are no tasks of the step."""

    def __init__(self, flows: Flows, task_kind: list[int]) -> None:
        # A copy of the capacities: processes change them, and the prices' own serve other runs too.
        super().__init__(Flows(dict(flows.capacity_bytes_per_s), flows.by_task_kind), task_kind)
        self._alone = dict(self.capacity)
        self._alike: dict[tuple[tuple[int, float], ...], int] = {}

    def scale(self, link: int, factor: float) -> None:
        """Let a link carry that many times what the cluster's description says."""
        self.capacity[link] = self._alone[link] * factor
        self.limit[link] = self.capacity[link] * FULL
        self.scaled.add(link)
        # Flows that were fine before may ask too much now, though none of them came or went.
        self.changed[link] = None
        # What was worked out for this set of flows held for the old capacity.
        self._known.clear()

    def add(self, path: dict[int, float]) -> int:
        """Number of a new flow, which loads links as `path` says, bytes/s."""
        self.rate.append(1.0)
        self.since_s.append(0.0)
        self.left_s.append(0.0)
        self.paths.append(path)
        self.places.append([(link, self.users[link]) for link in path])
        # Tasks of a step have numbers from -1 on. Numbers below serve transfers, so no pattern that is known is taken
        # for another.
        self.like.append(-2 - self._alike.setdefault(tuple(path.items()), len(self._alike)))
        return len(self.paths) - 1


class Turn:
    """A wait for the compute streams of some classes of ranks; `granted` once all of them stand free for it."""

    def __init__(self, classes: Iterable[int], granted: Event) -> None:
        self.classes, self.granted = tuple(dict.fromkeys(classes)), granted
        self.missing = set(self.classes)


class LiveStep(OnSimpy):
    """A run of a graph that can be changed. `stretch`: by task, how many times as long its computation took."""

    def __init__(self, graph: TaskGraph, flows: Flows) -> None:
        self.links = LiveLinks(flows, graph.task_kind.tolist())
        super().__init__(graph, flows, self.links)
        compute = graph.streams.get(COMPUTE, -1)
        rows = [kind.rows for kind in graph.task_kinds]
        # By kind and not by task: a step has a few dozen kinds and thousands of tasks.
        self._classes = [tuple(dict.fromkeys(row[0] for row in of_kind)) for of_kind in rows]
        self._computes = [any(row[1] == compute for row in of_kind) for of_kind in rows]
        count = len(graph.classes)
        self.clock, self.paused = [1.0] * count, [0] * count
        self._under_way: list[int | None] = [None] * count  # the computation of each class
        self._since_s, self._left_s = [0.0] * count, [0.0] * count
        self._turns: list[deque[Turn]] = [deque() for _ in range(count)]
        self._queued: list[dict[int, None]] = [{} for _ in range(count)]  # ready, and not let go
        self.stretch = [1.0] * len(graph)
        self.begin_watched: dict[int, list[Event]] = {}
        self.end_watched: dict[int, list[Event]] = {}
        self._transfers: dict[int, Event] = {}
        # Transfers are numbered behind the tasks, so a number from `tasks` on is a transfer.
        self.tasks = self.left = len(graph)
        self.done = self.env.event()

    # What can be changed.

    def set_clock(self, class_index: int, speed: float) -> None:
        """Compute at that many times the step's own speed from now on."""
        # What was done so far was done at the old speed, so it is taken off before the speed changes. The same order
        # holds in `pause` and `resume`.
        self._note_progress(class_index)
        self.clock[class_index] = speed
        self._go_on(class_index)

    def pause(self, class_index: int) -> None:
        """Let computation stand still, and nothing start."""
        self._note_progress(class_index)
        # Counted, since several processes may hold one rank, and each takes back its own.
        self.paused[class_index] += 1
        self._go_on(class_index)

    def resume(self, class_index: int) -> None:
        """Take back one `pause`."""
        self._note_progress(class_index)
        self.paused[class_index] -= 1
        self._go_on(class_index)
        self._let_go(class_index)

    def scale_link(self, link: int, factor: float) -> None:
        """Let a link carry that many times what it does."""
        self.links.scale(link, factor)
        self.settle_soon()

    def take_turn(self, classes: Iterable[int]) -> Turn:
        """Queue for compute streams; until `end_turn` nothing else computes there."""
        turn = Turn(classes, self.env.event())
        # A turn enters all queues at once. Two turns then stand in one order everywhere, and never wait in a circle.
        for c in turn.classes:
            self._turns[c].append(turn)
            self._grant(c)
        return turn

    def end_turn(self, turn: Turn) -> None:
        """Give compute streams back, or leave their queues."""
        for c in turn.classes:
            self._turns[c].remove(turn)
            self._grant(c)
            self._let_go(c)

    def is_held(self, class_index: int) -> bool:
        """Whether somebody has, or waits for, the compute stream of a class."""
        return bool(self._turns[class_index])

    def transfer(self, flow: Flow, seconds: float) -> Event:
        """A flow that is no task, and takes that long alone; the event: its last byte is there."""
        number = self.links.add(flow.path)
        # No task of the step has kind -1, so nothing that is looked up by kind concerns a transfer.
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
        """Start a task, or queue it where its ranks may not begin it."""
        kind = self.task_kind[task]
        classes, computes = self._classes[kind], self._computes[kind]
        # A collective needs all of its ranks: NCCL's kernels wait for each other, so one rank that stands still holds
        # up the whole. Only computation queues for a turn, since a copy engine or a NIC needs no compute stream.
        if any(self.paused[c] or (computes and self._turns[c]) for c in classes):
            for c in classes:
                self._queued[c][task] = None
            return
        if not computes:
            super().start_task(task)
        else:
            # Only communication has rows on several classes. If a computation ever had, this says so at once.
            (c,) = classes
            self.start[task] = self._since_s[c] = self.env.now
            self._under_way[c], self._left_s[c] = task, self.seconds[task]
            # A speed that never changes keeps its exact ratio here. Start and end would give it rounded.
            if self.clock[c] != 1.0:
                self.stretch[task] = 1.0 / self.clock[c] if self.clock[c] else inf
            self._end_in(task, self.seconds[task], self.clock[c])
            if task in self.launched:
                self.launch(task)
        self._tell(self.begin_watched.pop(task, ()))

    def finish(self, event: Any) -> None:
        """A task or a transfer ends, unless the event is stale."""
        task = event.value
        if event is not self.ends[task]:
            return
        kind = self.task_kind[task]
        if task >= self.tasks or kind in self.flows:
            self.sharing.leave(task)
            self.settle_soon()
        self.end[task] = self.env.now
        # A transfer has no successors and no part in whether the step is done.
        if task >= self.tasks:
            self._transfers.pop(task).succeed()
            return
        if self._computes[kind]:
            for c in self._classes[kind]:
                # The stream is free before successors start, so whoever queues for it comes before the rank's next
                # computation.
                self._under_way[c] = None
                self._grant(c)
        self.left -= 1
        if not self.left:
            self.done.succeed()
        watchers = self.end_watched.pop(task, ())
        if watchers:  # who waits for this end wakes before anything follows it
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

    def _tell(self, watchers: Iterable[Event]) -> None:
        for event in watchers:
            if not event.triggered:
                # `succeed` would queue behind what happens at this instant. A watcher must act before the task that it
                # watches goes on.
                event._ok, event._value = True, None
                self.env.schedule(event, priority=URGENT)

    def _note_progress(self, c: int) -> None:
        """Take off what the class's computation has done since its speed last changed."""
        now_s = self.env.now
        if self._under_way[c] is not None:
            done = (now_s - self._since_s[c]) * (0.0 if self.paused[c] else self.clock[c])
            self._left_s[c], self._since_s[c] = max(0.0, self._left_s[c] - done), now_s

    def _go_on(self, c: int) -> None:
        """Let the class's computation end when what is left of it is done."""
        task = self._under_way[c]
        if task is not None:
            self.stretch[task] = -1.0  # several speeds have one ratio only once the end is known, in `stretches`
            self._end_in(task, self._left_s[c], 0.0 if self.paused[c] else self.clock[c])

    def _end_in(self, task: int, left_s: float, speed: float) -> None:
        # No event at speed zero: the computation ends only after somebody lets it go on, and the event queued before is
        # stale.
        self.ends[task] = self.at(left_s / speed, task, self.finish) if speed else None

    def _grant(self, c: int) -> None:
        """Let the next in the queue for a compute stream have it, if nothing computes there."""
        # Turns are granted in the order of asking. Whoever needs several ranks keeps those that are free and waits for
        # the rest, as a job does that has to stop all its ranks at one point.
        if self._turns[c] and self._under_way[c] is None:
            turn = self._turns[c][0]
            turn.missing.discard(c)
            if not turn.missing and not turn.granted.triggered:
                turn.granted.succeed()

    def _let_go(self, c: int) -> None:
        """Start what was queued, if it still may not, it queues again."""
        # A task queues with each of its classes. It leaves all of these queues before it starts, or another class would
        # start it again.
        queued = list(self._queued[c])
        for task in queued:
            for other in self._classes[self.task_kind[task]]:
                self._queued[other].pop(task, None)
        for task in queued:
            self.start_task(task)

    def stretches(self) -> Floats:
        """By task, how many times as long its computation took."""
        out = np.array(self.stretch)
        start, end = np.array(self.start[: self.tasks]), np.array(self.end[: self.tasks])
        seconds = np.array(self.seconds[: self.tasks])
        # A computation without seconds has no ratio, so it counts as not stretched.
        moved = np.flatnonzero((out < 0) | np.isinf(out))
        lasted = end[moved] - start[moved]
        out[moved] = np.where(seconds[moved] > 0, lasted / np.where(seconds[moved] > 0, seconds[moved], 1.0), 1.0)
        return out
