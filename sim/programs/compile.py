"""A program compiled once per stage and kind of action: local tasks on streams, ready to be placed in time.

The same compiled program is placed for every micro-batch. If all its streams are joined at its start and at its end
(`alone`), it takes `makespan_s` wherever it is placed, so one task of the graph can represent it. If communication runs
past its end (gradient buckets, prefetched weights), it is placed task by task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

from msgspec import Struct

from sim.core.program import BLOCK_END, Comm, Compute, ModelPart, Program
from sim.core.timeline import COMPUTE, DP, Detail
from sim.prices.price import Price
from sim.programs import priced_items
from sim.programs.priced_items import Host, K, Label, OfPart, Run, Sent, Shares, Spent, add_all, price_comm, price_run
from topology.collectives import Choice

HOST_UNCERTAINTY = 0.15  # of the seconds that the device waits for the host: hosts of one generation differ by more


class LocalTask(NamedTuple):
    """A task of a compiled program. `deps`: earlier tasks of the program that it waits for; tasks of one stream run in
    the program's order. `early`: it needs no input, as gathers of parameters unless their framework has them wait."""

    stream: str
    kind: str  # of a communication, as the program names it ("all_reduce"); "" for computation
    seconds: float
    deps: tuple[int, ...]
    external: tuple[str, ...]  # handles of communications started by earlier actions
    detail: Detail
    group: str  # of a communication; "" for computation
    choice: Choice | None = None  # what the seconds of a collective assume; see `Priced`
    early: bool = False


class Launch(NamedTuple):
    """Communications on one stream that an action starts and nobody in it waits for, as one task.

    On a stream that is free from t on, they end at max(t + seconds, start of the action + lag + seconds).
    """

    stream: str
    kind: str
    lag_s: float
    seconds: float
    detail: Detail


class CompiledProgram(Struct, frozen=True, eq=False, dict=True):
    """A compiled program. `tail`: local tasks that the action's result waits for (besides the last computation);
    `open`: communications that nothing here waits for, under the handles by which later actions may.

    `alone`: one task of `makespan_s`, with `launches` beside it, takes the same times as the tasks one by one,
    given that the streams it joins are free and it waits for `external`. `joined`: those streams. `exposed_s` is
    communication with no computation beside it, when placed alone; `groups` whose collectives it runs; `ends_s` when
    each task ends with all streams free at zero; `spent` what each task's seconds consist of.
    """

    tasks: tuple[LocalTask, ...]
    tail: tuple[int, ...]
    open: tuple[tuple[str, int], ...]
    alone: bool
    launches: tuple[Launch, ...]
    joined: frozenset[str]
    groups: frozenset[str]
    makespan_s: float
    compute_s: float
    exposed_s: float
    ends_s: list[float]
    spent: list[Spent]

    # A search compiles thousands of programs and asks for their times alone: sums over `spent` are made when asked for.

    @cached_property
    def shares(self) -> Shares:
        """Seconds by (operator kind, source, uncertainty)."""
        total: Shares = {}
        host = ("host", "interpolated", HOST_UNCERTAINTY)
        for x in self.spent:
            add_all(total, x.priced.by(priced_items.share))
            for seconds in (x.late_s, x.shared_s):
                if seconds > 0:
                    total[host] = total.get(host, 0.0) + seconds
        return total

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds by operator; what the device waits for the host is `host`."""
        return self._summed(priced_items.name, lambda priced: "host", [1.0] * len(self.spent))

    @cached_property
    def operators(self) -> dict[tuple[str, str], float]:
        """Seconds by (operator, phase); otherwise as `parts`, but what computing takes longer beside communications is
        spread over the operators of its task."""
        return self._summed(priced_items.operator, lambda priced: ("host", priced.phase), self._longer)

    @cached_property
    def by_part(self) -> dict[OfPart, float]:
        """Seconds by part of the model and, of communication, group; otherwise as `operators`."""
        return self._summed(priced_items.of_part, lambda priced: (ModelPart.HOST, ""), self._longer)

    @cached_property
    def _longer(self) -> list[float]:
        return [x.longer for x in self.spent]

    def _summed(self, label: Label[K], host: Callable[[Run | Sent], K], longer: Sequence[float]) -> dict[K, float]:
        total: dict[K, float] = {}
        for x, factor in zip(self.spent, longer, strict=True):
            # This runs for each task of each program, so it calls no function that adds.
            for key, seconds in x.priced.by(label).items():
                total[key] = total.get(key, 0.0) + seconds * factor
            if x.late_s > 0:
                key = host(x.priced)
                total[key] = total.get(key, 0.0) + x.late_s
        return total

    @cached_property
    def traffic(self) -> dict[tuple[str, str], float]:
        """Bytes by (kind, group)."""
        total: dict[tuple[str, str], float] = {}
        for x in self.spent:
            if isinstance(x.priced, Sent):
                key = (x.priced.item.kind, x.priced.item.group)
                total[key] = total.get(key, 0.0) + x.priced.item.bytes
        return total

    @cached_property
    def detail(self) -> Detail:
        """The sources of the program's seconds, and its parts in words, longest first; the name is left out."""
        parts = sorted(self.parts.items(), key=lambda kv: -kv[1])
        note = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in parts[:6])
        return Detail("", source="+".join(dict.fromkeys(s for _, s, _ in self.shares)), note=note)

    @property
    def external(self) -> tuple[str, ...]:
        """Handles of communications started by earlier actions that the first task waits for."""
        return self.tasks[0].external if self.tasks else ()

    @cached_property
    def done_s(self) -> float:
        """When the action's result is there, all streams being free at zero."""
        return self._done_s(self.ends_s)

    @cached_property
    def after_input_s(self) -> float:
        """Seconds from the input's arrival to the result, if all earlier data-parallel communication has ended."""
        if not self.begins_early:
            return self.done_s
        free: dict[str, float] = {}
        ends: list[float] = []
        for task in self.tasks:
            start_s = max([free.get(task.stream, 0.0), *[ends[d] for d in task.deps]])
            free[task.stream] = end_s = start_s + (task.seconds if task.stream != DP else 0.0)
            ends.append(end_s)
        return self._done_s(ends)

    def _done_s(self, ends: Sequence[float]) -> float:
        computed = [end_s for end_s, task in zip(ends, self.tasks, strict=True) if task.stream == COMPUTE]
        return max([0.0, *computed[-1:], *[ends[i] for i in self.tail]])

    @cached_property
    def launches_apart(self) -> tuple[tuple[Launch, LocalTask], ...]:
        """`launches` as one for each communication."""
        return tuple(
            (Launch(t.stream, t.kind, max((self.ends_s[d] for d in t.deps), default=0.0), t.seconds, t.detail), t)
            for t in self.tasks
            if t.stream in self.launch_streams
        )

    @cached_property
    def launch_streams(self) -> frozenset[str]:
        """Streams of `launches`."""
        return frozenset([launch.stream for launch in self.launches])

    @cached_property
    def distinct(self) -> tuple[list[LocalTask], list[int]]:
        """Tasks that differ in more than what they wait for, which is left out; and for each task which of them it is.

        Layers repeat their tasks, so a long program has few.
        """
        numbers: dict[LocalTask, int] = {}
        number_of_task = [numbers.setdefault(t._replace(deps=(), external=()), len(numbers)) for t in self.tasks]
        return list(numbers), number_of_task

    @cached_property
    def begins_early(self) -> bool:
        """Whether a task that needs no input waits for no earlier task of the program."""
        return any(t.early for t in self.tasks if not t.deps)


class _Compiler:
    """Walks a program once; see `compile_program`."""

    def __init__(self, price: Price) -> None:
        self.price = price
        self.tasks: list[LocalTask] = []
        self.handles: dict[str, int] = {}
        self.waiting: list[int] = []  # communications the next computation waits for
        self.external: list[str] = []
        self.last_compute: tuple[int, ...] = ()
        self.run: list[Compute] = []  # computations not yet put into a task
        self.cuts: list[int] = []  # where blocks end among them
        self.runs: dict[Compute, list[Run]] = {}  # by their first computation
        self.sent: dict[Comm, Sent] = {}  # layers repeat their communications
        self.host = Host()
        self.ends: list[float] = []  # of the tasks, with all streams free at zero
        self.free: dict[str, float] = {}
        self.beside: list[tuple[float, float, float, str]] = []  # start, end, `slows`, stream of what is not waited for
        self.spent: list[Spent] = []

    def walk(self, program: Program) -> None:
        """Compile all items of a program."""
        for item in program:
            if isinstance(item, Compute):
                self.run.append(item)
            elif isinstance(item, Comm):
                self._communicate(item)
            elif item is BLOCK_END:
                self.cuts.append(len(self.run))
            else:
                self._wait(item.handle)
        self._compute()

    def _wait(self, handle: str) -> None:
        self._compute()
        self.host.start()
        if handle in self.handles:
            self.waiting.append(self.handles.pop(handle))
        else:
            self.external.append(handle)

    def _communicate(self, item: Comm) -> None:
        if self.run:
            self._compute()
        sent = self.sent.get(item)
        if sent is None:
            sent = self.sent[item] = price_comm(item, self.price)
        deps, index = (*self.last_compute, *self.waiting), len(self.tasks)
        if item.after:
            deps += (self.handles[item.after],)
        self.spent.append(Spent(sent, sent.late_s, 0.0))
        stream, seconds, choice = sent.stream, sent.seconds, sent.priced.choice
        early = stream == DP and not item.behind_input
        end_s = self._queue(stream, self._start(stream, deps), seconds)
        self.tasks.append(
            LocalTask(stream, item.kind, seconds, deps, tuple(self.external), sent.detail, item.group, choice, early)
        )
        if item.blocking:
            self.host.start()
            self.waiting.append(index)
            return
        self.handles[item.handle] = index
        if sent.priced.slows:
            self.beside.append((end_s - sent.priced.seconds, end_s, sent.priced.slows, stream))

    def _compute(self) -> None:
        """Put the computations since the last communication or wait into one task."""
        if not self.run:
            return
        deps, run, late_s, shared_s = (*self.last_compute, *self.waiting), self._priced_run(), 0.0, 0.0
        for i, (host_s, device_s) in enumerate(run.blocks):
            if i > 0:
                self.host.start()
            late_s += self.host.issue(host_s, device_s)
        seconds = run.seconds + late_s
        start_s = self._start(COMPUTE, deps)
        if self.beside:
            shared_s = self._shared_s(start_s, seconds)
            seconds += shared_s
        self._queue(COMPUTE, start_s, seconds)
        self.spent.append(Spent(run, late_s, shared_s))
        self.last_compute = (len(self.tasks),)
        self.tasks.append(LocalTask(COMPUTE, "", seconds, deps, tuple(self.external), run.detail, ""))
        self.run, self.cuts, self.waiting, self.external = [], [], [], []

    def _priced_run(self) -> Run:
        """The computations not yet put into a task; layers repeat theirs."""
        alike = self.runs.setdefault(self.run[0], [])
        for run in alike:
            if run.items == self.run and run.cuts == self.cuts:
                return run
        alike.append(price_run(self.run, self.cuts, self.price))
        return alike[-1]

    def _shared_s(self, start_s: float, seconds: float) -> float:
        """Extra seconds of computation because of communication beside it: the largest of the sums by stream."""
        self.beside = [c for c in self.beside if c[1] > start_s]
        streams, until_s = dict[str, float](), start_s + seconds
        for begin_s, end_s, slows, stream in self.beside:
            # Most of many communications in a queue begin later.
            if begin_s < until_s:
                together_s = min(end_s, until_s) - max(begin_s, start_s)
                streams[stream] = streams.get(stream, 0.0) + slows * together_s
        return max(streams.values(), default=0.0)

    def _start(self, stream: str, deps: Sequence[int]) -> float:
        """When a task could start that queues on this stream, with all streams free at zero."""
        start_s = self.free.get(stream, 0.0)
        for d in deps:
            if self.ends[d] > start_s:
                start_s = self.ends[d]
        return start_s

    def _queue(self, stream: str, start_s: float, seconds: float) -> float:
        """Occupy a stream; when it is free again."""
        self.free[stream] = end_s = start_s + seconds
        self.ends.append(end_s)
        return end_s


def compile_program(program: Program, price: Price) -> CompiledProgram:
    """Compile a program (see `sim.core.program` for what its order means) with the seconds that `price` gives.

    Communications that nothing in the program waits for stay open under their handles.
    """
    c = _Compiler(price)
    c.walk(program)
    tasks, open_tasks = c.tasks, frozenset(c.handles.values())
    left = {tasks[i].stream for i in open_tasks}
    apart = not left or _apart(tasks, left, open_tasks)
    known = not c.external and not any(t.external for t in tasks[1:])
    if known and tasks and tasks[0].external:  # what all the rest comes after
        known = all(t.deps for t in tasks[1:])
    # a stream is free again when its last task ends
    ended = [end_s for stream, end_s in c.free.items() if not apart or stream not in left]
    makespan_s = max(ended, default=0.0)
    compute_s = sum([t.seconds for t in tasks if t.stream == COMPUTE])
    return CompiledProgram(
        tuple(tasks),
        tuple(c.waiting),
        tuple(c.handles.items()),
        known and apart,
        tuple([_launch(tasks, s, c.ends) for s in sorted(left)]) if apart else (),
        frozenset(c.free.keys() - left),
        frozenset([t.group for t in tasks if t.group]),
        makespan_s,
        compute_s,
        max(0.0, makespan_s - compute_s),
        c.ends,
        c.spent,
    )


def _apart(tasks: Sequence[LocalTask], left: set[str], open_tasks: frozenset[int]) -> bool:
    """True if the communications left running have their streams to themselves and no task waits for them."""
    if any(t.stream in left and i not in open_tasks for i, t in enumerate(tasks)):
        return False
    return all(open_tasks.isdisjoint(t.deps) for t in tasks)


def _launch(tasks: Sequence[LocalTask], stream: str, ends: Sequence[float]) -> Launch:
    """The tasks on a stream as one: it could start no earlier than its end with the stream free, less its seconds."""
    mine = [i for i, t in enumerate(tasks) if t.stream == stream]
    seconds = sum(tasks[i].seconds for i in mine)
    first = tasks[mine[0]]
    details = [tasks[i].detail for i in mine]
    total, operators = sum(d.bytes for d in details), sum(d.operators for d in details)
    detail = first.detail._replace(bytes=total, operators=operators) if len(mine) > 1 else first.detail
    return Launch(stream, first.kind, max(0.0, ends[mine[-1]] - seconds), seconds, detail)
