"""A program compiled once per (stage, action kind): local tasks on streams, ready to be placed in time.

The same template is placed for every micro-batch. A template that starts and ends with all its streams joined
(`closed`) takes its `makespan_s` wherever it is placed, so it can stand in the task graph as one task; one that
leaves communication running past its end (gradient buckets, prefetched weights) is placed task by task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

from sim.program import BLOCK_END, Comm, Compute, Item, Program
from sim.timeline import Detail

COMPUTE = "compute"
UNEVEN = 4.0  # chosen with vTrain's single-node steps in view, where host and device take about as long
HOST_UNCERTAINTY = 0.15  # of the seconds that the device waits for the host: hosts of one generation differ by more


class Priced(NamedTuple):
    """Seconds of one item, where they come from, and the relative standard deviation of that figure.

    `host_s`: what the host needs to issue it; the device waits where the host is late. `slows`: by how much of itself
    a computation takes longer while this communication runs beside it (it occupies multiprocessors).
    """

    seconds: float
    source: str
    uncertainty: float
    algorithm: str = ""
    bus_bandwidth_bytes_per_s: float = 0.0
    host_s: float = 0.0
    slows: float = 0.0


Price = Callable[[Compute | Comm], Priced]
K = TypeVar("K")


class LocalTask(NamedTuple):
    """A task of a template. `deps` are earlier local tasks; the order on a stream is the order in the template."""

    stream: str
    kind: str  # "" for computation: the action's kind is shown
    seconds: float
    deps: tuple[int, ...]
    external: tuple[str, ...]  # handles of communications started by earlier actions
    detail: Detail
    group: str  # of a communication; "" for computation


class Launch(NamedTuple):
    """Communications on one stream that an action starts and nobody in it waits for, as one task.

    On a stream that is free from t on, they end at max(t + seconds, start of the action + lag + seconds).
    """

    stream: str
    kind: str
    lag_s: float
    seconds: float
    detail: Detail


@dataclass(frozen=True, eq=False)
class Template:
    """A compiled program. `tail`: local tasks that the action's result waits for (besides the last computation);
    `open`: communications that nothing here waits for, under the handles by which later actions may.

    `alone`: one task of `makespan_s`, with `launches` beside it, takes the same times as the tasks one by one,
    given that the streams it joins are free and it waits for `external`. `joined`: those streams. `shares` are
    (operator kind, source, uncertainty) → seconds; `parts` seconds per part of the model; `exposed_s` is communication
    with no computation beside it, when placed alone; `traffic` bytes per (kind, group); `groups` whose collectives it
    runs; `ends_s` when each task ends with all streams free at zero.
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
    shares: dict[tuple[str, str, float], float]
    parts: dict[str, float]
    traffic: dict[tuple[str, str], float]
    ends_s: list[float]

    @cached_property
    def detail(self) -> str:
        """The parts in words, longest first."""
        parts = sorted(self.parts.items(), key=lambda kv: -kv[1])
        return ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in parts[:6])

    @cached_property
    def source(self) -> str:
        """Where its seconds come from."""
        return "+".join(dict.fromkeys(s for _, s, _ in self.shares))

    @property
    def external(self) -> tuple[str, ...]:
        """Handles of communications started by earlier actions that the first task waits for."""
        return self.tasks[0].external if self.tasks else ()

    @cached_property
    def launches_apart(self) -> tuple[tuple[Launch, LocalTask], ...]:
        """`launches` as one for each communication."""
        left = {x.stream for x in self.launches}
        return tuple(
            (Launch(t.stream, t.kind, max((self.ends_s[d] for d in t.deps), default=0.0), t.seconds, t.detail), t)
            for t in self.tasks
            if t.stream in left
        )

    @cached_property
    def first_streams(self) -> frozenset[str]:
        """Streams on which something needs nothing that the template does before."""
        return frozenset(t.stream for t in self.tasks if not t.deps)


def together_s(host_s: float, device_s: float) -> float:
    """Seconds of work that the host issues in `host_s` and the device executes in `device_s`, both at once.

    The larger of the two, and more where they are close: neither issues nor executes evenly, and what one waits for
    the other is lost. (h^p + d^p)^(1/p) with p = `UNEVEN`, a fifth more than the larger where both are equal.

    >>> together_s(0.0, 3.0), round(together_s(1.0, 1.0), 2)
    (3.0, 1.19)
    """
    if host_s <= 0 or device_s <= 0:
        return device_s + host_s
    small, large = (host_s, device_s) if host_s < device_s else (device_s, host_s)
    return float(large * (1.0 + (small / large) ** UNEVEN) ** (1.0 / UNEVEN))


class _Run(NamedTuple):
    """Computations that follow each other: their seconds on the device, and the host's and device's of each block."""

    items: list[Compute]
    cuts: list[int]
    seconds: float
    blocks: list[tuple[float, float]]
    detail: Detail
    shares: dict[tuple[str, str, float], float]
    parts: dict[str, float]


def _price_run(items: list[Compute], cuts: list[int], price: Price) -> _Run:
    """The kernels of a run."""
    priced = [price(op) for op in items]
    shares: dict[tuple[str, str, float], float] = {}
    parts: dict[str, float] = {}
    for op, p in zip(items, priced, strict=True):
        source, part = (op.kind, p.source, p.uncertainty), op.name.partition(".")[0].partition(" ")[0]
        shares[source] = shares.get(source, 0.0) + p.seconds
        parts[part] = parts.get(part, 0.0) + p.seconds
    blocks = [
        (sum([p.host_s for p in priced[start:end]]), sum([p.seconds for p in priced[start:end]]))
        for start, end in pairwise((0, *cuts, len(items)))
    ]
    first, last = (op.name.partition(" ")[0] for op in (items[0], items[-1]))  # a measured block's name is its key
    name = first if len(items) == 1 else f"{first} … {last}"
    sources = "+".join(dict.fromkeys([source for _, source, _ in shares]))
    seconds = sum([device_s for _, device_s in blocks])
    return _Run(items, cuts, seconds, blocks, Detail(name, source=sources), shares, parts)


class Host:
    """Issues kernels while the device executes those before them, and makes it wait where it is late.

    What it is ahead by is credited as long as it only starts communications (`ahead`), but not from block to block
    (vTrain's times are sums of theirs), nor across one that is waited for.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A block or what follows a wait."""
        self.host_s = self.device_s = self.late_s = 0.0

    def issue(self, host_s: float, device_s: float) -> float:
        """Seconds for which the device waits for these kernels."""
        self.host_s += host_s
        self.device_s += device_s
        late_s = max(0.0, together_s(self.host_s, self.device_s) - self.device_s - self.late_s)
        self.late_s += late_s
        return late_s


def _add(total: dict[K, float], key: K, value: float) -> None:
    total[key] = total.get(key, 0.0) + value


class _Compiler:
    """Walks a program once; see `compile_program`."""

    def __init__(self, price: Price) -> None:
        self.price = price
        self.tasks: list[LocalTask] = []
        self.handles: dict[str, int] = {}
        self.waiting: list[int] = []  # communications the next computation waits for
        self.external: list[str] = []
        self.last_compute = -1
        self.run: list[Compute] = []  # computations not yet put into a task
        self.cuts: list[int] = []  # where blocks end among them
        self.known: dict[Compute, list[_Run]] = {}  # by their first computation
        self.host = Host()
        self.ends: list[float] = []  # of the tasks, with all streams free at zero
        self.free: dict[str, float] = {}
        self.beside: list[tuple[float, float, float, str]] = []  # start, end, `slows`, stream of what is not waited for
        self.shares: dict[tuple[str, str, float], float] = {}
        self.parts: dict[str, float] = {}
        self.traffic: dict[tuple[str, str], float] = {}

    def add(self, item: Item) -> None:
        if isinstance(item, Compute):
            self.run.append(item)
        elif isinstance(item, Comm):
            self._communicate(item)
        elif item is BLOCK_END:
            self.cuts.append(len(self.run))
        elif item.handle in self.handles:
            self.flush()
            self.host.start()
            self.waiting.append(self.handles.pop(item.handle))
        else:
            self.flush()
            self.host.start()
            self.external.append(item.handle)

    def _communicate(self, item: Comm) -> None:
        self.flush()
        priced = self.price(item)
        _add(self.shares, (item.kind, priced.source, priced.uncertainty), priced.seconds)
        _add(self.parts, f"{item.group} {item.kind}", priced.seconds)
        wire = (item.kind, item.group)
        self.traffic[wire] = self.traffic.get(wire, 0.0) + item.bytes
        deps = (self.last_compute, *self.waiting) if self.last_compute >= 0 else tuple(self.waiting)
        deps += (self.handles[item.after],) if item.after else ()
        detail = Detail(item.name, item.bytes, priced.bus_bandwidth_bytes_per_s, priced.source, priced.algorithm)
        index, stream = len(self.tasks), item.stream or item.group
        late_s = together_s(priced.host_s, priced.seconds) - priced.seconds
        self._end(stream, self._start(stream, deps), priced.seconds + late_s)
        if priced.slows and not item.blocking:
            end_s = self.ends[-1]
            self.beside.append((end_s - priced.seconds, end_s, priced.slows, stream))
        self._wait_for_host(late_s)
        self.tasks.append(
            LocalTask(
                stream,
                item.kind.upper(),
                priced.seconds + late_s,
                deps,
                tuple(self.external),
                detail,
                item.group,
            )
        )
        if item.blocking:
            self.host.start()
            self.waiting.append(index)
        else:
            self.handles[item.handle] = index

    def flush(self) -> None:
        """Put the computations since the last communication or wait into one task."""
        if not self.run:
            return
        deps = [d for d in (self.last_compute, *self.waiting) if d >= 0]
        run = self._known_run()
        for key, part_s in run.shares.items():
            _add(self.shares, key, part_s)
        for name, part_s in run.parts.items():
            _add(self.parts, name, part_s)
        late_s = 0.0
        for i, (host_s, device_s) in enumerate(run.blocks):
            if i > 0:
                self.host.start()
            late_s += self.host.issue(host_s, device_s)
        self._wait_for_host(late_s)
        seconds = run.seconds + late_s
        start_s = self._start(COMPUTE, deps)
        seconds += self._shared_s(start_s, seconds)
        self._end(COMPUTE, start_s, seconds)
        self.last_compute = len(self.tasks)
        self.tasks.append(LocalTask(COMPUTE, "", seconds, tuple(deps), tuple(self.external), run.detail, ""))
        self.run, self.cuts, self.waiting, self.external = [], [], [], []

    def _known_run(self) -> _Run:
        """What is known of the computations not yet put into a task; layers repeat theirs."""
        alike = self.known.setdefault(self.run[0], [])
        found = next((run for run in alike if run.items == self.run and run.cuts == self.cuts), None)
        if found is None:
            found = _price_run(self.run, self.cuts, self.price)
            alike.append(found)
        return found

    def _shared_s(self, start_s: float, seconds: float) -> float:
        """What computing takes longer for the communications beside it: those of a stream follow each other, of several
        streams the heaviest counts.
        """
        if not self.beside:
            return 0.0
        self.beside = [c for c in self.beside if c[1] > start_s]
        streams: dict[str, float] = {}
        for begin_s, end_s, slows, stream in self.beside:
            together_s = max(0.0, min(end_s, start_s + seconds) - max(begin_s, start_s))
            streams[stream] = streams.get(stream, 0.0) + slows * together_s
        shared_s = max(streams.values(), default=0.0)
        if shared_s > 0:
            key = ("host", "interpolated", HOST_UNCERTAINTY)
            self.shares[key] = self.shares.get(key, 0.0) + shared_s
        return shared_s

    def _wait_for_host(self, late_s: float) -> None:
        if late_s > 0:
            key = ("host", "interpolated", HOST_UNCERTAINTY)
            self.shares[key] = self.shares.get(key, 0.0) + late_s
            self.parts["host"] = self.parts.get("host", 0.0) + late_s

    def _start(self, stream: str, deps: Sequence[int]) -> float:
        """When a task could start that queues on this stream, with all streams free at zero."""
        start_s = self.free.get(stream, 0.0)
        for d in deps:
            if self.ends[d] > start_s:
                start_s = self.ends[d]
        return start_s

    def _end(self, stream: str, start_s: float, seconds: float) -> None:
        self.free[stream] = end_s = start_s + seconds
        self.ends.append(end_s)


def compile_program(program: Program, price: Price) -> Template:
    """Compile a program (see `sim.program` for what its order means) with the seconds that `price` gives.

    Communications that nothing in the program waits for stay open under their handles.
    """
    c = _Compiler(price)
    for item in program:
        c.add(item)
    c.flush()
    tasks, open_tasks = c.tasks, frozenset(c.handles.values())
    streams = {t.stream for t in tasks}
    left = {tasks[i].stream for i in open_tasks}
    apart = not left or _apart(tasks, left, open_tasks)
    known = not c.external and not any(t.external for t in tasks[1:])
    if known and tasks and tasks[0].external:  # what all the rest comes after
        known = all(t.deps for t in tasks[1:])
    ended = (end_s for end_s, t in zip(c.ends, tasks, strict=True) if not apart or t.stream not in left)
    makespan_s = max(ended, default=0.0)
    compute_s = sum([t.seconds for t in tasks if t.stream == COMPUTE])
    return Template(
        tuple(tasks),
        tuple(c.waiting),
        tuple(c.handles.items()),
        known and apart,
        tuple([_launch(tasks, s, c.ends) for s in sorted(left)]) if apart else (),
        frozenset(streams - left),
        frozenset([t.group for t in tasks if t.group]),
        makespan_s,
        compute_s,
        max(0.0, makespan_s - compute_s),
        c.shares,
        c.parts,
        c.traffic,
        c.ends,
    )


def _apart(tasks: Sequence[LocalTask], left: set[str], open_tasks: frozenset[int]) -> bool:
    """Whether what is left running has its streams for itself, and nothing waits for any of it."""
    if any(t.stream in left and i not in open_tasks for i, t in enumerate(tasks)):
        return False
    return all(open_tasks.isdisjoint(t.deps) for t in tasks)


def _launch(tasks: Sequence[LocalTask], stream: str, ends: Sequence[float]) -> Launch:
    """The tasks on a stream as one: it could start no earlier than its end with the stream free, less its seconds."""
    mine = [i for i, t in enumerate(tasks) if t.stream == stream]
    seconds = sum(tasks[i].seconds for i in mine)
    first = tasks[mine[0]]
    total = sum(tasks[i].detail.bytes for i in mine)
    detail = first.detail._replace(bytes=total) if len(mine) > 1 else first.detail
    return Launch(stream, first.kind, max(0.0, ends[mine[-1]] - seconds), seconds, detail)
