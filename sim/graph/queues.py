"""Communications that queue one behind the other on links which others use now and then.

What actions leave running, gradients bucket by bucket, is most of the flows of a step and meets little else. While a
queue has its links to itself it sleeps: its tasks' times are an addition each, made when somebody asks. A flow that
comes to links of sleeping queues meets these: what becomes of it, up to its end, is worked out at once, and again if
another flow comes meanwhile; then all of them are flows among others, with an event for each arrival and departure,
until a queue has its links to itself again. Times are to the last bit those with events for everything.
"""

from __future__ import annotations

from collections import Counter
from heapq import heappush

from sim.graph.sharing import Flows, Sharing
from sim.graph.taskgraph import TaskGraph

Coming = tuple[float, int]  # when, and the task that ends, or ~task for one whose bytes begin to flow
State = tuple[int, float, float, int, float, float]
FOREVER = float("inf")
MARGIN = 1e-9  # of a time: far more than the rounding of sums


class Group:
    """Tasks of a queue that one task launches. `ready_s`: when each may start at the earliest, once that is known;
    `watched`: others wait for the last."""

    __slots__ = ("first", "lags_s", "queue", "ready_s", "watched")

    def __init__(self, queue: Queue, first: int, lags_s: list[float]) -> None:
        self.queue, self.first, self.lags_s, self.watched = queue, first, lags_s, False
        self.ready_s: list[float] | None = None


class Queue:
    """Groups in order, of which the first `entered` stand in `tasks`. `at` counts those that have ended; the next ends
    at `end_s` (-1: it has not started) and starts no earlier than `free_s`. `kept`: a task whose rate has changed;
    `watch`: where those stand that others wait for."""

    __slots__ = (
        "asleep", "at", "end_s", "entered", "free_s", "groups", "kept", "links", "meeting", "ready_s", "tasks",
        "watch",
    )  # fmt: skip

    def __init__(self, links: tuple[int, ...]) -> None:
        self.links = links
        self.groups: list[Group] = []
        self.tasks: list[int] = []
        self.ready_s: list[float] = []
        self.entered = self.at = 0
        self.watch: list[int] = []
        self.end_s, self.free_s, self.kept, self.asleep = -1.0, 0.0, -1, True
        self.meeting: Meeting | None = None


class Meeting:
    """A flow on links of sleeping queues, from the arrival of its bytes until it has ended (`until_s`, once that is
    so); `before`: the queues as they were at first."""

    __slots__ = ("before", "begin_s", "queues", "task", "until_s")

    def __init__(self, task: int, queues: tuple[Queue, ...], begin_s: float, before: list[State]) -> None:
        self.task, self.queues, self.begin_s, self.before, self.until_s = task, queues, begin_s, before, FOREVER


def plan_queues(graph: TaskGraph, flows: Flows) -> tuple[dict[int, Queue], dict[int, list[Group]]]:
    """The queue on each link that flows use, mostly empty ones, and by task the groups that it launches.

    A queue is what is launched on one stream and uses the same links; no other queue may use any of these.
    """
    queues: dict[tuple[object, ...], Queue] = {}
    launched: list[tuple[int, Group]] = []
    known: dict[int, tuple[list[int], Queue | None]] = {}  # what is placed often has one list of lags
    sort = graph.sort
    for launcher, groups in graph.launched.items():
        for first, lags_s, queued in groups:
            its = sort[first : first + len(lags_s)]
            alike = known.get(id(lags_s))
            if alike is None or alike[0] != its:
                alike = known[id(lags_s)] = (its, _queue_of(graph, flows, its, queues) if queued else None)
            if alike[1] is not None:
                launched.append((launcher, Group(alike[1], first, lags_s)))
    on_link = {link: Queue((link,)) for flow in flows.by_sort.values() for link in flow.path}
    users = Counter(link for queue in queues.values() for link in queue.links)
    alone = {queue for queue in queues.values() if all(users[link] == 1 for link in queue.links)}
    on_link.update((link, queue) for queue in alone for link in queue.links)
    out: dict[int, list[Group]] = {}
    for launcher, group in launched:
        if group.queue in alone:
            out.setdefault(launcher, []).append(group)
            group.queue.groups.append(group)
    return on_link, out


def _queue_of(
    graph: TaskGraph, flows: Flows, sorts: list[int], queues: dict[tuple[object, ...], Queue]
) -> Queue | None:
    """The queue of tasks of these sorts; None where they are no flows, or use different links."""
    paths = {tuple(flow.path) for flow in map(flows.by_sort.get, sorts) if flow is not None}
    if len(paths) != 1 or any(s not in flows.by_sort for s in sorts):
        return None
    links = paths.pop()
    return queues.setdefault((links, graph.sorts[sorts[0]].rows[0][:2]), Queue(links))


class Following:
    """The queues of one run under way; fills in `start` and `end`, and adds to `coming` what needs the clock."""

    def __init__(
        self, graph: TaskGraph, quiet_s: list[float], sharing: Sharing, start: list[float], end: list[float]
    ) -> None:
        self.seconds, self.quiet_s, self.sharing, self.start, self.end = graph.seconds, quiet_s, sharing, start, end
        self.due_s = [-1.0] * len(graph)  # when a flow under way ends; what was to come at other times is stale
        self.coming: list[Coming] = []
        self.now_s = 0.0
        self.alarms: dict[int, Queue] = {}  # by the task that others wait for

    def follow(self, queue: Queue, now_s: float) -> None:
        """All that starts and ends in a sleeping queue until now."""
        tasks, ready_s, start, end, seconds = queue.tasks, queue.ready_s, self.start, self.end, self.seconds
        at, end_s, free_s, count = queue.at, queue.end_s, queue.free_s, len(queue.tasks)
        while at < count:
            task = tasks[at]
            if end_s < 0.0:
                begin = ready_s[at]
                if free_s > begin:
                    begin = free_s
                start[task] = begin
                end_s = begin + seconds[task]
            if end_s > now_s:
                break
            end[task] = free_s = end_s
            end_s = -1.0
            at += 1
        queue.at, queue.end_s, queue.free_s = at, end_s, free_s

    def meet(self, task: int, queues: tuple[Queue, ...]) -> bool:
        """Let a flow that arrives now meet the queues on its links, if all of them sleep."""
        now_s, since_s, left_s = self.now_s, self.sharing.since_s, self.sharing.left_s
        before = []
        for queue in queues:
            if not queue.asleep or (queue.meeting is not None and queue.meeting.until_s >= now_s):
                return False
            kept = queue.kept
            before.append((queue.at, queue.end_s, queue.free_s, kept, since_s[kept], left_s[kept]))
        meeting = Meeting(task, queues, now_s, before)
        for queue in queues:
            queue.meeting = meeting
        self._work_out(meeting)
        return True

    def _work_out(self, meeting: Meeting) -> None:
        """When a meeting's flow ends if no other comes, and the queues as they are then."""
        rate = self.sharing.rate
        self._run(meeting, FOREVER)
        end_s = self.due_s[meeting.task]
        for queue in meeting.queues:
            if queue.end_s <= end_s and queue.at < len(queue.tasks):
                self.follow(queue, end_s)
            kept = queue.kept
            if rate[kept] != 1.0 and queue.end_s >= 0.0 and queue.tasks[queue.at] == kept:
                queue.end_s = end_s + self.sharing.pace(kept, 1.0, end_s)
        heappush(self.coming, (end_s, meeting.task))

    def _run(self, meeting: Meeting, until_s: float) -> None:
        """A flow and the queues that it meets, from its arrival until it ends or this time comes."""
        task, queues, now_s, sharing = meeting.task, meeting.queues, meeting.begin_s, self.sharing
        rate, like, since_s, left_s = sharing.rate, sharing.like, sharing.since_s, sharing.left_s
        end_s = self.start[task] + self.seconds[task]
        rate[task], since_s[task], left_s[task] = 1.0, now_s, end_s - now_s
        while now_s < until_s:
            next_s, flowing, kinds = FOREVER, [], [like[task]]
            for queue in queues:
                if queue.end_s <= now_s and queue.at < len(queue.tasks):
                    self.follow(queue, now_s)
                if queue.end_s < 0.0:
                    continue
                its = queue.tasks[queue.at]
                if queue.kept != its:
                    flows_s = self.start[its] + self.quiet_s[its]
                    if flows_s > now_s:
                        next_s = min(next_s, flows_s)
                        continue
                    queue.kept = its
                    rate[its], since_s[its], left_s[its] = 1.0, flows_s, queue.end_s - flows_s
                flowing.append(queue)
                kinds.append(like[its])
            mine, *theirs = sharing.fair(tuple(kinds))
            if mine != rate[task]:
                end_s = now_s + sharing.pace(task, mine, now_s)
            for queue, its_rate in zip(flowing, theirs, strict=True):
                if its_rate != rate[queue.kept]:
                    queue.end_s = now_s + sharing.pace(queue.kept, its_rate, now_s)
                if queue.end_s < next_s:
                    next_s = queue.end_s
            if end_s <= next_s:
                break
            now_s = next_s
        self.due_s[task] = end_s

    def _undo(self, meeting: Meeting) -> None:
        """The queues as they were when a meeting began; what has been added since stays."""
        sharing = self.sharing
        for queue, state in zip(meeting.queues, meeting.before, strict=True):
            queue.at, queue.end_s, queue.free_s, kept, since_s, left_s = state
            queue.kept = kept
            if kept >= 0:
                sharing.rate[kept], sharing.since_s[kept], sharing.left_s[kept] = 1.0, since_s, left_s

    def part(self, meeting: Meeting) -> None:
        """Make all that meet flows among others, as they are now."""
        task, sharing = meeting.task, self.sharing
        self._undo(meeting)
        self._run(meeting, self.now_s)
        for queue in meeting.queues:
            queue.meeting = None
            self.wake(queue)
            sharing.unsettle(queue.links)
        if meeting.until_s < FOREVER:
            self.due_s[task] = -1.0
        else:
            sharing.come_back(task)
            heappush(self.coming, (self.due_s[task], task))

    def ended(self, task: int, queues: tuple[Queue, ...]) -> None:
        """A flow on the links of these queues has ended now; they part when the instant is over."""
        meeting = queues[0].meeting
        if meeting is not None and meeting.task == task:
            meeting.until_s = self.now_s
            return
        self.sharing.leave(task)
        for queue in queues:
            if not queue.asleep and queue.at == len(queue.tasks) and self.may_sleep(queue, 0):
                queue.asleep = True

    def disturb(self, queue: Queue) -> None:
        """Another flow comes to a queue's links."""
        if queue.meeting is not None and queue.meeting.until_s >= self.now_s:
            self.part(queue.meeting)
        elif queue.asleep:
            self.wake(queue)

    def wake(self, queue: Queue) -> None:
        """Follow a queue event by event from now on."""
        now_s = self.now_s
        self.follow(queue, now_s)
        queue.asleep = False
        if queue.end_s >= 0.0:
            task = queue.tasks[queue.at]
            flows_s = self.start[task] + self.quiet_s[task]
            if flows_s > now_s:
                heappush(self.coming, (flows_s, ~task))
                return
            self.due_s[task] = queue.end_s
            if queue.kept == task:
                self.sharing.come_back(task)
            else:
                self.sharing.arrive(task, flows_s, queue.end_s)
            heappush(self.coming, (queue.end_s, task))

    def may_sleep(self, queue: Queue, flowing: int) -> bool:
        """Whether nobody else uses a queue's links, nor waits for its next tasks; `flowing`: of its own, 1 or 0."""
        users = self.sharing.users
        return all(len(users[link]) <= flowing for link in queue.links) and self._alarmed(queue)

    def _alarmed(self, queue: Queue) -> bool:
        """Whether what others wait for in a queue ends later than now; then an alarm comes before it does."""
        if queue.watch:
            begun, last = queue.end_s >= 0.0, queue.watch[0]
            base_s = queue.end_s if begun else max(queue.free_s, queue.ready_s[queue.at])
            behind = queue.tasks[queue.at + begun : last + 1]
            if not behind:
                return False
            soonest_s = base_s + sum([self.seconds[task] for task in behind])
            soonest_s = max(soonest_s, queue.ready_s[last] + self.seconds[behind[-1]]) * (1.0 - MARGIN)
            if soonest_s <= self.now_s:
                return False
            self.alarms[behind[-1]] = queue
            heappush(self.coming, (soonest_s, behind[-1]))
        return True

    def alarm(self, queue: Queue) -> None:
        """What others wait for is soon through, if nobody has slowed it."""
        if queue.asleep:
            self.disturb(queue)

    def sleep(self, queue: Queue, task: int) -> None:
        """A task that flows as fast as alone needs no event for its end if nobody comes."""
        queue.asleep, queue.kept = True, task
        self.due_s[task] = -1.0
        self.sharing.go_away(task)

    def go_on(self, queue: Queue) -> None:
        """The task at the head of a waking queue has ended now."""
        if queue.watch and queue.watch[0] == queue.at:
            del queue.watch[0]
        queue.at += 1
        queue.free_s, queue.end_s = self.now_s, -1.0
        if queue.at < len(queue.tasks):
            self._begin(queue)
        else:
            queue.asleep = self.may_sleep(queue, 0)

    def enter(self, queue: Queue, missing: list[int]) -> None:
        """All groups whose turn it is, that are launched and whose first task waits for nothing outside the queue."""
        while queue.entered < len(queue.groups):
            group = queue.groups[queue.entered]
            ready_s, first = group.ready_s, group.first
            if ready_s is None or missing[first]:
                return
            queue.entered += 1
            if self.start[first] > ready_s[0]:
                ready_s[0] = self.start[first]
            soonest_s = ready_s[-1] + self.seconds[first + len(ready_s) - 1]
            if group.watched and (queue.meeting is not None or soonest_s * (1.0 - MARGIN) <= self.now_s):
                self.disturb(queue)
            idle, meeting = queue.at == len(queue.tasks), queue.meeting
            queue.tasks += range(first, first + len(ready_s))
            queue.ready_s += ready_s
            if group.watched:
                queue.watch.append(len(queue.tasks) - 1)
            if not queue.asleep:
                if idle:
                    self._begin(queue)
            elif meeting is not None and idle and max(queue.free_s, ready_s[0]) < self.due_s[meeting.task]:
                self._undo(meeting)
                self._work_out(meeting)
            if group.watched and queue.asleep:
                self._alarmed(queue)

    def _begin(self, queue: Queue) -> None:
        task, begin_s = queue.tasks[queue.at], queue.ready_s[queue.at]
        if queue.free_s > begin_s:
            begin_s = queue.free_s
        self.start[task] = begin_s
        queue.end_s = begin_s + self.seconds[task]
        heappush(self.coming, (begin_s + self.quiet_s[task], ~task))
