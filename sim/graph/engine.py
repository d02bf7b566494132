"""Run a task graph in time.

`run_simpy` is the reference: SimPy's clock, a timeout per task. `run_static` computes the same times in one pass
in topological order, which is all there is to do where no link is shared by more than it can carry. Where one is,
`run_contended` does that pass between the arrivals and departures of flows, which alone need a clock. All add the same
numbers in the same order, so the results are equal to the last bit.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import chain
from typing import Any, NamedTuple

from sim.graph.queues import Following, Queue, plan_queues
from sim.graph.sharing import Flows, Sharing
from sim.graph.taskgraph import TaskGraph


class Times(NamedTuple):
    """Start and end of every task in seconds, how the run was done and the events it took."""

    start_s: list[float]
    end_s: list[float]
    path: str
    events: int


def run_simpy(graph: TaskGraph, flows: Flows | None = None) -> Times:
    """Replay a graph on SimPy's clock; with `flows`, tasks that share links slow each other down.

    Raises:
        ValueError: if tasks wait for each other in a circle; names some that never ran.
    """
    run = _OnSimpy(graph, flows or Flows())
    run.run()
    _all_ran(graph, run.end)
    return Times(run.start, run.end, "simpy", run.events)


class _OnSimpy:
    def __init__(self, graph: TaskGraph, flows: Flows) -> None:
        import simpy
        from simpy.events import EventPriority

        self.env = simpy.Environment()
        self.last = EventPriority(2)  # after everything else at an instant: SimPy's own are 0 and 1
        self.graph, self.flows, self.sharing = graph, flows.by_sort, Sharing(flows, graph.sort)
        self.missing, self.after, self.lagging = _missing(graph), graph.successors(), _lagging(graph)
        self.start = [-1.0] * len(graph)
        self.end = [-1.0] * len(graph)
        self.events = 0
        self.ends: dict[int, Any] = {}  # the event that will end a task; a flow's earlier ones are stale
        self.settling = False

    def run(self) -> None:
        for task in [i for i, n in enumerate(self.missing) if n == 0]:
            self._begin(task)
        self.env.run()

    def _after(self, seconds: float, task: int, then: Any) -> Any:
        self.events += 1
        event = self.env.timeout(seconds, value=task)
        event.callbacks.append(then)
        return event

    def _begin(self, task: int) -> None:
        self.start[task] = self.env.now
        flow = self.flows.get(self.graph.sort[task])
        if flow is not None:
            self._after(flow.quiet_s, task, self._arrive)
        self.ends[task] = self._after(self.graph.seconds[task], task, self._finish)
        for other, lag_s in self.lagging.get(task, ()):
            self._after(lag_s, other, self._release)

    def _arrive(self, event: Any) -> None:
        task = event.value
        self.sharing.arrive(task, self.env.now, self.start[task] + self.graph.seconds[task])
        self._settle_soon()

    def _finish(self, event: Any) -> None:
        task = event.value
        if event is not self.ends[task]:
            return
        if self.graph.sort[task] in self.flows:
            self.sharing.leave(task)
            self._settle_soon()
        self.end[task] = self.env.now
        for s in self.after[task]:
            self._one_less(s)

    def _release(self, event: Any) -> None:
        self._one_less(event.value)

    def _one_less(self, task: int) -> None:
        self.missing[task] -= 1
        if self.missing[task] == 0:
            self._begin(task)

    def _settle_soon(self) -> None:
        if not self.settling:
            self.settling = True
            event = self.env.event()
            event.callbacks.append(self._settle)
            event._ok, event._value = True, None  # as succeed() would, which schedules at its own priority
            self.env.schedule(event, priority=self.last)

    def _settle(self, event: Any) -> None:
        self.settling = False
        for task, in_s in self.sharing.settle(self.env.now):
            self.ends[task] = self._after(in_s, task, self._finish)


def run_static(graph: TaskGraph) -> Times:
    """The same times by one pass: start = latest end of what a task waits for, end = start + seconds.

    Raises:
        ValueError: as `run_simpy`.
    """
    return _in_order(graph) or _as_they_come(graph)


def _in_order(graph: TaskGraph) -> Times | None:
    """The times where every task waits for earlier ones alone, as `sim.graph.build` numbers them; else None."""
    start: list[float] = [0.0] * len(graph)
    end: list[float] = []
    launched = graph.launched
    try:
        for task, (begin, seconds, waits) in enumerate(zip(start, graph.seconds, graph.waits, strict=True)):
            for w in waits:
                if end[w] > begin:
                    begin = end[w]
            start[task] = begin
            end.append(begin + seconds)
            if task in launched:
                for first, lags_s, _ in launched[task]:
                    if first <= task:
                        return None
                    for s, lag_s in enumerate(lags_s, first):
                        start[s] = max(start[s], begin + lag_s)
    except IndexError:
        return None
    return Times(start, end, "static", 0)


def _as_they_come(graph: TaskGraph) -> Times:
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


def run_contended(graph: TaskGraph, flows: Flows) -> Times:
    """The same times as `run_simpy` with `flows`: passes as `run_static`'s from one arrival or departure to the next.

    Raises:
        ValueError: as `run_simpy`.
    """
    run = _Contended(graph, flows)
    events = run.run()
    _all_ran(graph, run.end)
    return Times(run.start, run.end, "static", events)


class _Contended:
    def __init__(self, graph: TaskGraph, flows: Flows) -> None:
        n, sort = len(graph), graph.sort
        self.graph, self.start, self.end, self.sharing = graph, [0.0] * n, [-1.0] * n, Sharing(flows, sort)
        quiet_s = [-1.0] * len(graph.sorts)  # -1: no flow
        for s, flow in flows.by_sort.items():
            quiet_s[s] = flow.quiet_s
        self.quiet_s = list(map(quiet_s.__getitem__, sort))
        self.following = Following(graph, self.quiet_s, self.sharing, self.start, self.end)
        self.on_link, self.groups = plan_queues(graph, flows)
        self.queues = tuple(dict.fromkeys(self.on_link.values()))
        self.meets = {s: tuple({self.on_link[x]: None for x in flow.path}) for s, flow in flows.by_sort.items()}
        self.queue_of: list[Queue | None] = [None] * n  # tasks in queues
        self.lagging, self.missing, self.after = self._edges()

    def _edges(self) -> tuple[dict[int, list[tuple[int, float]]], list[int], list[list[int]]]:
        """Who starts so long after each task, how many things each waits for, and who waits for it: all without what
        stands behind others in a queue."""
        graph, queue_of, waits = self.graph, self.queue_of, self.graph.waits
        missing, nobody = list(map(len, waits)), list[int]()
        after, others = [nobody] * len(waits), list[int]()  # first in their group, behind others
        for queue in self.queues:
            before = -1
            for group in queue.groups:
                first, count = group.first, len(group.lags_s)
                queue_of[first : first + count] = [queue] * count
                if waits[first] == [before]:
                    missing[first] = 0
                else:
                    others.append(first)
                before = first + count - 1
        for task in chain((t for t, queue in enumerate(queue_of) if queue is None), others):
            for w in waits[task]:
                if after[w] is nobody:
                    after[w] = [task]
                else:
                    after[w].append(task)
        for queue in self.queues:
            for group in queue.groups:
                group.watched = after[group.first + len(group.lags_s) - 1] is not nobody
        lagging = {
            launcher: [x for first, lags_s, _ in groups if queue_of[first] is None for x in enumerate(lags_s, first)]
            for launcher, groups in graph.launched.items()
        }
        for pairs in lagging.values():
            for task, _ in pairs:
                missing[task] += 1
        return lagging, missing, after

    def run(self) -> int:
        """From the first task to the last; returns how many events that took."""
        following, sharing = self.following, self.sharing
        coming, due_s = following.coming, following.due_s
        self._walk([task for task, n in enumerate(self.missing) if not n and self.queue_of[task] is None])
        now_s, events = 0.0, 0
        while coming:
            when_s, task = coming[0]
            if when_s != now_s:
                if sharing.changed:
                    self._settle(now_s)
                    when_s, task = coming[0]
                following.now_s = now_s = when_s
            heappop(coming)
            events += 1
            if task < 0:
                self._arrived(~task, now_s)
            elif now_s == due_s[task]:
                due_s[task] = -1.0
                self._ended(task, now_s)
            elif task in following.alarms:
                following.alarm(following.alarms[task])
        for queue in self.queues:
            if queue.asleep:
                following.follow(queue, float("inf"))
        return events

    def _settle(self, now_s: float) -> None:
        """New ends of all whose rates change."""
        following = self.following
        for task, in_s in self.sharing.settle(now_s):
            queue, end_s = self.queue_of[task], now_s + in_s
            if queue is not None:
                queue.end_s = end_s
                if self.sharing.rate[task] == 1.0 and following.may_sleep(queue, 1):
                    following.sleep(queue, task)
                    continue
            following.due_s[task] = end_s
            heappush(following.coming, (end_s, task))

    def _arrived(self, task: int, now_s: float) -> None:
        """The bytes of a task begin to flow."""
        queue, following = self.queue_of[task], self.following
        end_s = self.start[task] + self.graph.seconds[task]
        if queue is None:
            queues = self.meets[self.graph.sort[task]]
            if following.meet(task, queues):
                return
            for other in queues:
                following.disturb(other)
        elif following.may_sleep(queue, 0):
            queue.asleep, queue.kept = True, -1
            return
        following.due_s[task] = end_s
        self.sharing.arrive(task, now_s, end_s)
        heappush(following.coming, (end_s, task))

    def _ended(self, task: int, now_s: float) -> None:
        """A flow is through: who waits for it, and what stands behind it, may start."""
        following, queue = self.following, self.queue_of[task]
        self.end[task] = now_s
        if queue is None:
            following.ended(task, self.meets[self.graph.sort[task]])
        else:
            self.sharing.leave(task)
            following.go_on(queue)
        start, missing, ready = self.start, self.missing, []
        for s in self.after[task]:
            if now_s > start[s]:
                start[s] = now_s
            missing[s] -= 1
            if not missing[s]:
                ready.append(s)
        self._walk(ready)

    def _walk(self, ready: list[int]) -> None:
        """Fill in `start` and `end` up to the next flows, whose arrivals lie ahead."""
        start, end, seconds, after, missing = self.start, self.end, self.graph.seconds, self.after, self.missing
        quiet_s, lagging, groups, following = self.quiet_s, self.lagging, self.groups, self.following
        for task in ready:  # grows while it is walked
            queue = self.queue_of[task]
            if queue is not None:
                following.enter(queue, missing)
                continue
            begin = start[task]
            if task in lagging:
                for s, lag_s in lagging[task]:
                    if begin + lag_s > start[s]:
                        start[s] = begin + lag_s
                    missing[s] -= 1
                    if not missing[s]:
                        ready.append(s)
                for group in groups.get(task, ()):
                    group.ready_s = [begin + lag_s for lag_s in group.lags_s]
                    following.enter(group.queue, missing)
            wait_s = quiet_s[task]
            if wait_s >= 0.0:
                heappush(following.coming, (begin + wait_s, ~task))
                continue
            end[task] = done = begin + seconds[task]
            for s in after[task]:
                if done > start[s]:
                    start[s] = done
                missing[s] -= 1
                if not missing[s]:
                    ready.append(s)


def _missing(graph: TaskGraph) -> list[int]:
    """How many things each task still waits for."""
    missing = list(map(len, graph.waits))
    for groups in graph.launched.values():
        for first, lags_s, _ in groups:
            for task in range(first, first + len(lags_s)):
                missing[task] += 1
    return missing


def _lagging(graph: TaskGraph) -> dict[int, list[tuple[int, float]]]:
    """By task: who may start how long after it has started."""
    return {
        task: [each for first, lags_s, _ in groups for each in enumerate(lags_s, first)]
        for task, groups in graph.launched.items()
    }


def _all_ran(graph: TaskGraph, end: list[float]) -> None:
    if len(end) and min(end) < 0:
        stuck = [i for i, t in enumerate(end) if t < 0]
        shown = "; ".join(graph.describe(t) for t in stuck[:5])
        raise ValueError(f"deadlock: {len(stuck)} of {len(graph)} tasks never start, the first are: {shown}")
