"""Tasks, what they wait for and the streams they are shown on: a static program of the whole step.

A task starts when everything it waits for has ended; a stream's order and a collective's rendezvous are waits
like any other (the previous task on the stream; one task shared by all members), so a program without contention
is a graph and any engine that honours it gives the same times. Columns, not objects: a step of a large cluster
has ten thousands of tasks and evaluating them takes less than making objects of them would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from sim.core.actions import Kind, Step
from sim.core.timeline import Detail, RankClass
from sim.programs.compile import CompiledProgram, LocalTask

# Papers on zero-bubble schedules draw F, B and W. Their B is the input gradient, which torch's schedules call I.
SHOWN = {Kind.F: "F", Kind.B: "B", Kind.I: "B", Kind.W: "W"}
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
TimelineRow = tuple[int, int, int]  # of the timeline: class of ranks, stream, kind (indices of `KindTable`)
# Most graphs have no launches, so they share these empty columns. Nothing writes into them.
NO_INTS: Ints = np.zeros(0, dtype=np.int64)
NO_FLOATS: Floats = np.zeros(0)


class Deadlock(ValueError):
    """Tasks wait for each other in a circle, or for what never comes."""


class Message(NamedTuple):
    """The work of a task that sends bytes from one class of ranks to another; `seconds` without other traffic."""

    sender: int
    receiver: int
    bytes: float
    seconds: float


class Collective(Struct, frozen=True):
    """The work of a task that is a collective, or a copy to or from the host: the part of each simulated class."""

    parts: tuple[tuple[int, LocalTask], ...]


class WholeAction(NamedTuple):
    """The work of a task that is a whole action of one class of ranks, without the communications that it leaves
    running.
    """

    class_index: int
    program: CompiledProgram


class CollectiveStep(Struct, frozen=True):
    """What a task does that is one message of a collective (`collective_steps`).

    `sender`, `receiver`: both classes' parts in the whole, which alone takes `seconds`; the message is one of `chain`
    that follow each other. `out`, `into`: its share of what the whole puts on the sender's links out and on the
    receiver's in while bytes flow.
    """

    sender: tuple[int, LocalTask]
    receiver: tuple[int, LocalTask]
    seconds: float
    chain: int
    out: float
    into: float


Work = Message | Collective | CollectiveStep | WholeAction


# Repeated micro-batches make thousands of tasks of a few dozen kinds. What a task shows, and what it puts on links,
# therefore stands with its kind and is worked out once for all of them.
class TaskKind(Struct, frozen=True):
    """The properties that all tasks of one kind share: they are the same work of the same ranks, for each micro-batch.

    `rows`: rows of the timeline, on each of which a task has a span; a message, and a collective of several simulated
    ranks, have more than one. `compute_s`, `exposed_s`: for a task that is a whole action. `named`: gives a task's name
    from its step, if `detail` has none. `work`: the work that may use links; None for a computation, and for
    communications that were joined to one task.
    """

    detail: Detail
    rows: tuple[TimelineRow, ...]
    compute_s: float = 0.0
    exposed_s: float = 0.0
    named: Callable[[Step], str] | None = None
    work: Work | None = None


def named_actions(step: Step) -> str:
    """The actions of a step in words."""
    return " and ".join(f"{SHOWN[action.kind]} of stage {action.stage}" for action in step)


class KindTable(Struct, frozen=True, eq=False):
    """The kinds of a step's tasks, and the names of the streams and spans as which they are shown, each with its
    index."""

    task_kinds: list[TaskKind] = field(default_factory=list)
    streams: dict[str, int] = field(default_factory=dict)
    span_kinds: dict[str, int] = field(default_factory=dict)

    def row(self, class_index: int, stream: str, kind: str) -> TimelineRow:
        """A row of the timeline: a class of ranks, a stream, and the kind shown there."""
        return (
            class_index,
            # Names are numbered as they first come up. Sorting or a set would renumber the rows of the timeline when a
            # scenario gains a stream, and pages could no longer be compared.
            self.streams.setdefault(stream, len(self.streams)),
            self.span_kinds.setdefault(kind, len(self.span_kinds)),
        )

    def new_kind(
        self,
        detail: Detail,
        rows: tuple[TimelineRow, ...] = (),
        compute_s: float = 0.0,
        exposed_s: float = 0.0,
        named: Callable[[Step], str] | None = None,
        work: Work | None = None,
    ) -> int:
        """Index of a new kind of tasks."""
        self.task_kinds.append(TaskKind(detail, rows, compute_s, exposed_s, named, work))
        return len(self.task_kinds) - 1


class Waits(NamedTuple):
    """Pairs of tasks, by column: the second waits for the end of the first. A pair may stand twice.

    Times do not depend on the order of pairs. The critical path does: of waits that end together it takes the first.
    """

    first: Ints
    second: Ints


# A launch counts from a start, a wait from an end. Gradient buckets that go out while a backward still runs need the
# former where that backward is one task, whose end comes too late for them.
class Launches(NamedTuple):
    """Pairs of tasks, by column: the second starts no earlier than `lag_s` after the first has started."""

    first: Ints = NO_INTS
    second: Ints = NO_INTS
    lag_s: Floats = NO_FLOATS


class Columns(NamedTuple):
    """By task its seconds, its kind (an index of `KindTable.task_kinds`) and the step that it is part of, an index of
    `steps` (-1: none), of which a message and what runs once a step have stage and micro-batch alone (-1: none)."""

    seconds: Floats
    task_kind: Ints
    step: Ints
    steps: list[Step]
    waits: Waits
    launches: Launches


class TimelineSlots(NamedTuple):
    """What tasks occupy of the timeline: `task` and `row` of each place, by task; `rows` [rows, 3]: class of ranks,
    stream, kind of each row."""

    task: Ints
    row: Ints
    rows: Ints


# `eq` is off because arrays have no single truth value. `dict` is on because cached properties need a place to live.
class TaskGraph(Struct, frozen=True, eq=False, dict=True):
    """The tasks of these classes of ranks, and what is shown of them."""

    classes: tuple[RankClass, ...]
    table: KindTable
    columns: Columns

    def __len__(self) -> int:
        return len(self.columns.seconds)

    @property
    def seconds(self) -> Floats:
        """See `Columns`."""
        return self.columns.seconds

    @property
    def task_kind(self) -> Ints:
        """See `Columns`."""
        return self.columns.task_kind

    @property
    def task_kinds(self) -> list[TaskKind]:
        """See `KindTable`."""
        return self.table.task_kinds

    @property
    def streams(self) -> dict[str, int]:
        """See `KindTable`."""
        return self.table.streams

    @property
    def span_kinds(self) -> dict[str, int]:
        """See `KindTable`."""
        return self.table.span_kinds

    @cached_property
    def waits_of(self) -> list[list[int]]:
        """For each task the tasks that it waits for."""
        return grouped(self.columns.waits.second, self.columns.waits.first, len(self))

    @property
    def stages(self) -> Ints:
        """The stage of every task; -1: none."""
        # A step of -1 picks the last entry, so the -1 appended there answers for tasks without a step. An overlapped
        # pair counts as its forward, which stands first.
        return ints([*(step[0].stage for step in self.columns.steps), -1])[self.columns.step]

    @property
    def micro_batches(self) -> Ints:
        """The micro-batch of every task; -1: none."""
        return ints([*(step[0].micro_batch for step in self.columns.steps), -1])[self.columns.step]

    def details(self) -> list[Detail]:
        """The detail of every task."""
        # Names speak of stages and never of micro-batches. One record therefore serves all micro-batches.
        named: dict[tuple[int, ...], Detail] = {}
        out = []
        for task_kind, step in zip(self.task_kind.tolist(), self.columns.step.tolist(), strict=True):
            detail, name_of = self.task_kinds[task_kind].detail, self.task_kinds[task_kind].named
            if name_of is not None:
                actions = self.columns.steps[step]
                key = (task_kind, *[action[0] for action in actions])
                if key not in named:
                    named[key] = detail._replace(name=name_of(actions))
                detail = named[key]
            out.append(detail)
        return out

    @cached_property
    def slots(self) -> TimelineSlots:
        """The rows of the timeline that tasks occupy."""
        rows = [s.rows for s in self.task_kinds]
        counts = np.fromiter(map(len, rows), np.int64)
        # The triples are flattened first: NumPy reads a flat stream of numbers faster than nested tuples. `reshape`
        # gives an empty table its three columns too.
        table = np.fromiter(chain.from_iterable(chain.from_iterable(rows)), np.int64).reshape(-1, 3)
        return TimelineSlots(*ragged(counts, self.task_kind), table)

    def slot_table(self) -> Ints:
        """`slots` as [places, 4]: task, class, stream, kind; ordered by task."""
        task, row, rows = self.slots
        return np.column_stack([task, rows[row]])

    def describe(self, task: int) -> str:
        """A task in words, for error messages."""
        # Both dicts number their names in the order of insertion, so their keys as a tuple lead back from number to
        # name.
        streams, kinds, rows = tuple(self.streams), tuple(self.span_kinds), self.task_kinds[self.task_kind[task]].rows
        where = ", ".join(f"rank {self.classes[c].rank} {streams[s]} {kinds[k]}" for c, s, k in rows)
        name = self.details()[task].name
        return f"stage {self.stages[task]}, micro-batch {self.micro_batches[task]}: {name} ({where})"


class GraphBuilder:
    """A graph task by task, for what is not made of actions."""

    def __init__(self, classes: tuple[RankClass, ...]) -> None:
        self.classes, self.table = classes, KindTable()
        self.seconds: list[float] = []
        self.task_kind: list[int] = []
        self.waits: list[list[int]] = []

    def add(self, seconds: float, waits: list[int], task_kind: int) -> int:
        """Append a task that starts when those of `waits`, which may still grow, have ended; returns its index."""
        self.seconds.append(seconds)
        self.waits.append(waits)
        self.task_kind.append(task_kind)
        return len(self.seconds) - 1

    def graph(self) -> TaskGraph:
        """The finished graph."""
        # The lists are read here and not in `add`, since a task may learn of further waits after it was added.
        counts = [len(waits) for waits in self.waits]
        first = np.fromiter(chain.from_iterable(self.waits), np.int64, sum(counts))
        waits = Waits(first, np.repeat(np.arange(len(counts)), counts))
        seconds, no_step = np.array(self.seconds, dtype=np.float64), np.full(len(counts), -1)
        return TaskGraph(
            self.classes, self.table, Columns(seconds, ints(self.task_kind), no_step, [], waits, Launches())
        )


def grouped(keys: Ints, values: Ints, count: int) -> list[list[int]]:
    """For each key from 0 to below `count` its values, in their order.

    >>> grouped(np.array([1, 0, 1]), np.array([7, 8, 9]), 3)
    [[8], [7, 9], []]
    """
    # Lists and not arrays: the engines walk these one task at a time, and Python reads numbers from lists much faster.
    out: list[list[int]] = [[] for _ in range(count)]
    for key, value in zip(keys.tolist(), values.tolist(), strict=True):
        out[key].append(value)
    return out


def ragged(counts: Ints, picks: Ints) -> tuple[Ints, Ints]:
    """Rows of a table that consists of parts of `counts` rows each, part after part as picked: which pick a row belongs
    to, and where it stands in the table.

    >>> [x.tolist() for x in ragged(np.array([1, 2]), np.array([1, 0, 1]))]
    [[0, 0, 1, 2, 2], [1, 2, 0, 1, 2]]
    """
    return np.repeat(np.arange(len(picks)), counts[picks]), ragged_rows(counts, picks)


def ragged_rows(counts: Ints, picks: Ints) -> Ints:
    """The index in the table of each row of `ragged`."""
    many = counts[picks]
    # Three terms give that place: where the picked part begins there, less where its copy begins in the output, plus
    # the running place in the output. No loop over parts is left. Ten million rows make every column cost more to
    # allocate than to fill, so there is one beside the result.
    rows: Ints = np.repeat((np.cumsum(counts) - counts)[picks] - (np.cumsum(many) - many), many)
    rows += np.arange(len(rows))
    return rows


def ints(values: Sequence[int] | Sequence[tuple[int, ...]]) -> Ints:
    """Numbers as a column, or as rows."""
    return np.array(values, dtype=np.int64)
