"""Hold the task graph of a step: tasks, their waits, and the rows of the timeline on which they are shown.

A task starts when all tasks that it waits for have ended. The order of a stream is a wait for the previous task on it,
and a collective is one task that all members wait for; so without shared links every engine gives the same times. Tasks
are columns, because a step of a large cluster has ten thousands, and making objects takes longer than running them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field

from sim.core.actions import Kind, Step
from sim.core.columns import Floats, Ints, grouped, ints, ragged
from sim.core.timeline import Detail, RankClass
from sim.programs.compile import CompiledProgram, LocalTask

# Papers on zero-bubble schedules draw F, B and W. Their B is the input gradient, which torch's schedules call I.
SHOWN = {Kind.F: "F", Kind.B: "B", Kind.I: "B", Kind.W: "W"}
TimelineRow = tuple[int, int, int]  # of the timeline: class of ranks, stream, kind (indices of `KindTable`)
# Most graphs have no launches, so they share these empty columns. Nothing writes into them.
NO_INTS: Ints = np.zeros(0, dtype=np.int64)
NO_FLOATS: Floats = np.zeros(0)


class Deadlock(ValueError):
    """Report tasks that wait for each other in a circle, or for a message or member that never comes."""


class Message(NamedTuple):
    """Hold the work of a task that sends bytes from one class of ranks to another; `seconds`: without other traffic."""

    sender: int
    receiver: int
    bytes: float
    seconds: float


class Collective(Struct, frozen=True):
    """Hold the work of a task that is a collective, or a copy to or from the host: each simulated class's part."""

    parts: tuple[tuple[int, LocalTask], ...]


class WholeAction(NamedTuple):
    """Hold the work of a task that is a whole action of a class of ranks, without communications left running."""

    class_index: int
    program: CompiledProgram


class CollectiveStep(Struct, frozen=True, eq=False):
    """Hold the work of a task that is one message of a collective (`collective_steps`).

    All messages between two members share one, which is a key of dictionaries by identity.

    `sender`, `receiver`: both classes' parts in the collective. `seconds`: of the collective alone. `chain`: the number
    of messages on its longest chain. `out`, `into`: the message's share of the collective's load on the sender's
    outgoing and on the receiver's incoming links.
    """

    sender: tuple[int, LocalTask]
    receiver: tuple[int, LocalTask]
    seconds: float
    chain: int
    out: float
    into: float


Work = Message | Collective | CollectiveStep | WholeAction


# Repeated micro-batches make thousands of tasks of a few dozen kinds, so names and loads on links belong to the kind.
class TaskKind(Struct, frozen=True):
    """Hold what all tasks of one kind share: they are the same work of the same ranks, for each micro-batch.

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

    @property
    def operators(self) -> int:
        """The operators and communications of one rank that a task is."""
        if isinstance(self.work, WholeAction):  # what it launches are tasks of their own
            program = self.work.program
            own = (task for task in program.tasks if task.stream not in program.launch_streams)
            return sum(task.detail.operators for task in own)
        return self.detail.operators


def named_actions(step: Step) -> str:
    """Return the actions of a step in words."""
    return " and ".join(f"{SHOWN[action.kind]} of stage {action.stage}" for action in step)


class KindTable(Struct, frozen=True, eq=False):
    """Hold the kinds of a step's tasks, and the names of their streams and spans, each with its index."""

    task_kinds: list[TaskKind] = field(default_factory=list)
    streams: dict[str, int] = field(default_factory=dict)
    span_kinds: dict[str, int] = field(default_factory=dict)

    def row(self, class_index: int, stream: str, kind: str) -> TimelineRow:
        """Return a row of the timeline: a class of ranks, a stream, and the kind shown there."""
        return (
            class_index,
            # Names are numbered by first use. Sorting would renumber the timeline's rows when a scenario gains a
            # stream, and pages could not be compared.
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
        """Add a kind of tasks, and return its index."""
        self.task_kinds.append(TaskKind(detail, rows, compute_s, exposed_s, named, work))
        return len(self.task_kinds) - 1


class Waits(NamedTuple):
    """Hold pairs of tasks, by column: the second waits for the end of the first. A pair may occur twice.

    Times do not depend on the order of pairs. The critical path does: of waits that end together it takes the first.
    """

    first: Ints
    second: Ints


# Gradient buckets are sent while a backward still runs. If that backward is one task, they cannot wait for its end, so
# a launch counts from its start.
class Launches(NamedTuple):
    """Hold pairs of tasks, by column: the second starts no earlier than `lag_s` after the start of the first."""

    first: Ints = NO_INTS
    second: Ints = NO_INTS
    lag_s: Floats = NO_FLOATS


class Columns(NamedTuple):
    """Hold all tasks by column.

    `seconds`. `task_kind`: an index of `KindTable.task_kinds`. `step`: an index of `steps`, -1 if there is none; for a
    message, and for tasks that run once a step, it gives only stage and micro-batch (-1 if there is none).
    """

    seconds: Floats
    task_kind: Ints
    step: Ints
    steps: list[Step]
    waits: Waits
    launches: Launches


class TimelineSlots(NamedTuple):
    """Hold the places of tasks in the timeline: `task` and `row` of each place, ordered by task; `rows`, [rows, 3]:
    class of ranks, stream and kind of each row."""

    task: Ints
    row: Ints
    rows: Ints


# `eq` is off because comparing arrays gives an array. `dict` is on because cached properties need it.
class TaskGraph(Struct, frozen=True, eq=False, dict=True):
    """Hold the tasks of these classes of ranks, and how they are shown."""

    classes: tuple[RankClass, ...]
    table: KindTable
    columns: Columns

    def __len__(self) -> int:
        return len(self.columns.seconds)

    @property
    def seconds(self) -> Floats:
        """Seconds that each task takes, `[tasks]`, without other traffic on its links."""
        return self.columns.seconds

    @property
    def task_kind(self) -> Ints:
        """The place of each task's kind in `task_kinds`, `[tasks]`."""
        return self.columns.task_kind

    @property
    def task_kinds(self) -> list[TaskKind]:
        """Kinds of tasks: what a task does, and the rows of the timeline on which it is shown."""
        return self.table.task_kinds

    @property
    def streams(self) -> dict[str, int]:
        """Names of streams, each with its number in rows of the timeline."""
        return self.table.streams

    @property
    def span_kinds(self) -> dict[str, int]:
        """Names of what the timeline shows, each with its number in rows of the timeline."""
        return self.table.span_kinds

    @cached_property
    def waits_of(self) -> list[list[int]]:
        """Return for each task the tasks that it waits for."""
        return grouped(self.columns.waits.second, self.columns.waits.first, len(self))

    @property
    def stages(self) -> Ints:
        """Return the stage of every task; -1 if there is none."""
        # A step of -1 picks the last entry, the appended -1. An overlapped pair counts as its forward, which is first.
        return ints([*(step[0].stage for step in self.columns.steps), -1])[self.columns.step]

    @property
    def micro_batches(self) -> Ints:
        """Return the micro-batch of every task; -1 if there is none."""
        return ints([*(step[0].micro_batch for step in self.columns.steps), -1])[self.columns.step]

    def details(self) -> list[Detail]:
        """Return the detail of every task."""
        # Names contain the stage but not the micro-batch, so one record serves all micro-batches.
        named: dict[tuple[int, ...], Detail] = {}
        out = []
        for task_kind, step in zip(self.task_kind.tolist(), self.columns.step.tolist(), strict=True):
            detail, name_of = self.task_kinds[task_kind].detail, self.task_kinds[task_kind].named
            if name_of is not None:
                actions = self.columns.steps[step]
                key = (task_kind, *[action[0] for action in actions])
                if key not in named:
                    work = self.task_kinds[task_kind].work
                    # What a whole action consists of is summed up for pages alone, so its kind does not hold it.
                    shown = work.program.detail if isinstance(work, WholeAction) else detail
                    named[key] = shown._replace(name=name_of(actions))
                detail = named[key]
            out.append(detail)
        return out

    @cached_property
    def slots(self) -> TimelineSlots:
        """Return the rows of the timeline that tasks occupy."""
        rows = [s.rows for s in self.task_kinds]
        counts = np.fromiter(map(len, rows), np.int64)
        # The triples are flattened, because NumPy reads a flat stream of numbers faster than nested tuples. `reshape`
        # gives three columns even to an empty table.
        table = np.fromiter(chain.from_iterable(chain.from_iterable(rows)), np.int64).reshape(-1, 3)
        return TimelineSlots(*ragged(counts, self.task_kind), table)

    @property
    def stands_for(self) -> int:
        """The number of operators and communications of all ranks that the tasks are."""
        often = np.bincount(self.task_kind, minlength=len(self.task_kinds)).tolist()
        return sum(
            number * kind.operators * sum(len(self.classes[c].ranks) for c in {c for c, *_ in kind.rows})
            for kind, number in zip(self.task_kinds, often, strict=True)
        )

    def slot_table(self) -> Ints:
        """Return `slots` as [places, 4]: task, class, stream, kind; ordered by task."""
        task, row, rows = self.slots
        return np.column_stack([task, rows[row]])

    def describe(self, task: int) -> str:
        """Describe a task in words, for error messages."""
        # Both dicts number names in the order of insertion, so a tuple of their keys maps numbers to names.
        streams, kinds, rows = tuple(self.streams), tuple(self.span_kinds), self.task_kinds[self.task_kind[task]].rows
        where = ", ".join(f"rank {self.classes[c].rank} {streams[s]} {kinds[k]}" for c, s, k in rows)
        name = self.details()[task].name
        return f"stage {self.stages[task]}, micro-batch {self.micro_batches[task]}: {name} ({where})"


class GraphBuilder:
    """Build a graph task by task, for recordings and other steps that have no schedule."""

    def __init__(self, classes: tuple[RankClass, ...]) -> None:
        self.classes, self.table = classes, KindTable()
        self.seconds: list[float] = []
        self.task_kind: list[int] = []
        self.waits: list[list[int]] = []

    def add(self, seconds: float, waits: list[int], task_kind: int) -> int:
        """Add a task that waits for `waits`, a list that may still grow; return its index."""
        self.seconds.append(seconds)
        self.waits.append(waits)
        self.task_kind.append(task_kind)
        return len(self.seconds) - 1

    def graph(self) -> TaskGraph:
        """Return the finished graph."""
        # The lists are read here, because a task may get further waits after `add`.
        counts = [len(waits) for waits in self.waits]
        first = np.fromiter(chain.from_iterable(self.waits), np.int64, sum(counts))
        waits = Waits(first, np.repeat(np.arange(len(counts)), counts))
        seconds, no_step = np.array(self.seconds, dtype=np.float64), np.full(len(counts), -1)
        return TaskGraph(
            self.classes, self.table, Columns(seconds, ints(self.task_kind), no_step, [], waits, Launches())
        )
