"""When the pieces of a program run, as numbers alone: what `compile_program` gives, in less time.

What an action makes of the times of its rank is linear over (max, +) (Baccelli et al. 1992, Synchronization and
Linearity, chapter 2), as each task starts when the latest of what it waits for has ended: T' = max(T + a, A + b, D + c)
for T, when what the rank has done is done, A, when what the action waits for from elsewhere is there, and D, when the
rank's data-parallel stream is free; D' likewise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sim.graph.data_parallel import DP
from sim.graph.template import COMPUTE, Host, Price, Priced, Template, together_s
from sim.program import BLOCK_END, Comm, Compute, Program

NEVER = float("-inf")
NONE: Mapping[str, float] = {}


class Task(NamedTuple):
    """As `template.LocalTask`."""

    stream: str
    seconds: float
    deps: tuple[int, ...]
    external: tuple[str, ...]


class Linear(NamedTuple):
    """What a program makes of T, A and D: three numbers for T' and three for D'."""

    done_after_done: float
    done_after_input: float
    done_after_stream: float
    stream_after_done: float
    stream_after_input: float
    stream_after_stream: float


class Timed(NamedTuple):
    """A program's tasks, those that its end waits for beside its last computation, and the communications left open, by
    handle; `linear`: None where it waits for what earlier actions left open."""

    tasks: Sequence[Task]
    tail: tuple[int, ...]
    open: Mapping[str, int]
    linear: Linear | None

    def outcome(
        self, done_s: float, input_s: float, stream_s: float, handles_s: Mapping[str, float] = NONE
    ) -> tuple[float, float]:
        """T' and D' of T, A and D."""
        x = self.linear
        if x is None:
            return _outcome(self.tasks, self.tail, done_s, input_s, stream_s, handles_s)
        return (
            max(done_s + x.done_after_done, input_s + x.done_after_input, stream_s + x.done_after_stream),
            max(done_s + x.stream_after_done, input_s + x.stream_after_input, stream_s + x.stream_after_stream),
        )


def timed(program: Program, price: Price) -> Timed:
    """The times of a program with the seconds that `price` gives."""
    run = _Run(price)
    run.walk(program)
    return _made(run.tasks, tuple(run.waiting), run.handles, run.ends)


def timed_template(template: Template) -> Timed:
    """The times of a program that is compiled already."""
    tasks = [Task(t.stream, t.seconds, t.deps, t.external) for t in template.tasks]
    return _made(tasks, template.tail, dict(template.open), template.ends_s)


def _made(tasks: list[Task], tail: tuple[int, ...], handles: Mapping[str, int], ends: Sequence[float]) -> Timed:
    """`ends`: those of the tasks if T, A and D are 0."""
    if any(t.external for t in tasks):
        return Timed(tasks, tail, handles, None)
    stream = [i for i, t in enumerate(tasks) if t.stream == DP]
    if tasks and stream == list(handles.values()) and all(tasks[i].deps for i in stream):  # nothing waits for D
        done = max([end for end, t in zip(ends, tasks, strict=True) if t.stream != DP])
        after_s, sent_s = (ends[stream[-1]], sum([tasks[i].seconds for i in stream])) if stream else (NEVER, 0.0)
        return Timed(tasks, tail, handles, Linear(done, done, NEVER, after_s, after_s, sent_s))
    alone = ((0.0, NEVER, NEVER), (NEVER, 0.0, NEVER), (NEVER, NEVER, 0.0))
    columns = [_outcome(tasks, tail, *times, NONE) for times in alone]
    numbers = (*(done_s for done_s, _ in columns), *(stream_s for _, stream_s in columns))
    return Timed(tasks, tail, handles, Linear(*numbers))


def _outcome(
    tasks: Sequence[Task],
    tail: tuple[int, ...],
    done_s: float,
    input_s: float,
    stream_s: float,
    handles_s: Mapping[str, float],
) -> tuple[float, float]:
    ends = ends_s(tasks, done_s, input_s, stream_s, handles_s)
    last = {task[0]: end for task, end in zip(tasks, ends, strict=True)}
    before_s = done_s if ends else max(done_s, input_s)  # an empty stage passes its input on
    return max([last.get(COMPUTE, before_s), *(ends[i] for i in tail)]), last.get(DP, stream_s)


def ends_s(
    tasks: Sequence[Task], done_s: float, input_s: float, stream_s: float, handles_s: Mapping[str, float]
) -> list[float]:
    """Ends of a program's tasks, as `shapes.one_by_one` has them wait."""
    ends: list[float] = []
    free = {DP: stream_s}
    rooted: set[int] = set()
    for i, (stream, seconds, deps, external) in enumerate(tasks):
        begin = max([ends[d] for d in deps]) if deps else done_s
        for handle in external:
            begin = max(begin, handles_s.get(handle, NEVER))
        if stream != DP:
            if input_s > begin and rooted.isdisjoint(deps):
                begin = input_s
            rooted.add(i)
        queued_s = free.get(stream, NEVER)
        free[stream] = end = (queued_s if queued_s > begin else begin) + seconds
        ends.append(end)
    return ends


class _Run:
    """Walks a program once, as `template._Compiler` does, whose names its own are."""

    def __init__(self, price: Price) -> None:
        self.price = price
        self.tasks: list[Task] = []
        self.handles: dict[str, int] = {}
        self.waiting: list[int] = []
        self.external: list[str] = []
        self.last_compute = -1
        self.seconds = -1.0  # of the computations not yet put into a task; below 0: there are none
        self.ends: list[float] = []
        self.free: dict[str, float] = {}
        self.beside: list[tuple[float, float, float, str]] = []

    def walk(self, program: Program) -> None:
        """All of it."""
        known: dict[int, Priced] = {}  # by identity: layers share their items
        host, host_s, device_s = Host(), 0.0, 0.0  # of the computations of a block that follow each other
        running = False
        for item in program:
            if isinstance(item, Compute):
                priced = known.get(id(item)) or known.setdefault(id(item), self.price(item))
                host_s += priced.host_s
                device_s += priced.seconds
                running = True
                continue
            if running:
                self.seconds = max(self.seconds, 0.0) + device_s + host.issue(host_s, device_s)
                host_s, device_s, running = 0.0, 0.0, False
            if not isinstance(item, Comm) or item.blocking:
                host.start()
            if isinstance(item, Comm):
                self._communicate(item, known.get(id(item)) or known.setdefault(id(item), self.price(item)))
            elif item is not BLOCK_END:
                self._flush()
                if item.handle in self.handles:
                    self.waiting.append(self.handles.pop(item.handle))
                else:
                    self.external.append(item.handle)
        if running:
            self.seconds = max(self.seconds, 0.0) + device_s + host.issue(host_s, device_s)
        self._flush()

    def _communicate(self, item: Comm, priced: Priced) -> None:
        self._flush()
        deps = (self.last_compute, *self.waiting) if self.last_compute >= 0 else tuple(self.waiting)
        deps += (self.handles[item.after],) if item.after else ()
        stream = item.stream or item.group
        end_s = self._add(Task(stream, together_s(priced.host_s, priced.seconds), deps, tuple(self.external)))
        if item.blocking:
            self.waiting.append(len(self.tasks) - 1)
            return
        self.handles[item.handle] = len(self.tasks) - 1
        if priced.slows:
            self.beside.append((end_s - priced.seconds, end_s, priced.slows, stream))

    def _flush(self) -> None:
        """Put the computations since the last communication or wait into one task."""
        if self.seconds < 0.0:
            return
        deps = (self.last_compute, *self.waiting) if self.last_compute >= 0 else tuple(self.waiting)
        seconds = self.seconds
        if self.beside:
            begin_s = max([self.free.get(COMPUTE, 0.0), *(self.ends[d] for d in deps)])
            self.beside = [c for c in self.beside if c[1] > begin_s]
            streams: dict[str, float] = {}
            for from_s, until_s, slows, stream in self.beside:
                together = max(0.0, min(until_s, begin_s + seconds) - max(from_s, begin_s))
                streams[stream] = streams.get(stream, 0.0) + slows * together
            seconds += max(streams.values(), default=0.0)
        self.last_compute = len(self.tasks)
        self._add(Task(COMPUTE, seconds, deps, tuple(self.external)))
        self.seconds, self.waiting, self.external = -1.0, [], []

    def _add(self, task: Task) -> float:
        """Append a task; its end with all streams free at zero."""
        begin = self.free.get(task.stream, 0.0)
        for d in task.deps:
            if self.ends[d] > begin:
                begin = self.ends[d]
        self.free[task.stream] = end = begin + task.seconds
        self.ends.append(end)
        self.tasks.append(task)
        return end
