"""Tasks, what they wait for and the streams they are shown on: a static program of the whole step.

A task starts when everything it waits for has ended; a stream's order and a collective's rendezvous are waits
like any other (the previous task on the stream; one task shared by all members), so a program without contention
is a graph and any engine that honours it gives the same times. Columns, not objects: a step of a large cluster
has ten thousands of tasks and evaluating them takes less than making objects of them would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.actions import Kind, Step
from sim.timeline import Detail, RankClass

SHOWN = {Kind.F: "F", Kind.B: "B", Kind.I: "B", Kind.W: "W"}
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Row = tuple[int, int, int]  # of the timeline: class of ranks, stream, kind (indices into `streams` and `kinds`)
NO_INTS: Ints = np.zeros(0, dtype=np.int64)
NO_FLOATS: Floats = np.zeros(0)


class Deadlock(ValueError):
    """Tasks wait for each other in a circle, or for what never comes."""


class Sort(NamedTuple):
    """What tasks of one sort share. `rows`: those of the timeline that each occupies; a collective of several simulated
    ranks and a message have more than one. `compute_s`, `exposed_s`: of an action that stands as one task. `named`: the
    name of what belongs to a step, which its `detail` lacks."""

    detail: Detail
    rows: tuple[Row, ...]
    compute_s: float = 0.0
    exposed_s: float = 0.0
    named: Callable[[Step], str] | None = None


def named_actions(step: Step) -> str:
    """What a step does, in words."""
    return " and ".join(f"{SHOWN[action.kind]} of stage {action.stage}" for action in step)


@dataclass(frozen=True, slots=True, eq=False)
class Sorts:
    """The sorts of a step's tasks, and the streams and kinds that they are shown as, each with its index."""

    sorts: list[Sort] = field(default_factory=list)
    streams: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)

    def row(self, class_index: int, stream: str, kind: str) -> Row:
        """A row of the timeline: a class of ranks, a stream, and the kind shown there."""
        return (
            class_index,
            self.streams.setdefault(stream, len(self.streams)),
            self.kinds.setdefault(kind, len(self.kinds)),
        )

    def new_sort(
        self,
        detail: Detail,
        rows: tuple[Row, ...] = (),
        compute_s: float = 0.0,
        exposed_s: float = 0.0,
        named: Callable[[Step], str] | None = None,
    ) -> int:
        """Index of a new sort of tasks."""
        self.sorts.append(Sort(detail, rows, compute_s, exposed_s, named))
        return len(self.sorts) - 1


class Waits(NamedTuple):
    """Pairs of tasks, by column: the second waits for the end of the first. Any order; a pair may stand twice."""

    first: Ints
    second: Ints


class Launches(NamedTuple):
    """Pairs of tasks, by column: the second starts no earlier than `lag_s` after the first has started."""

    first: Ints = NO_INTS
    second: Ints = NO_INTS
    lag_s: Floats = NO_FLOATS


class Columns(NamedTuple):
    """By task its seconds, its sort and the step that it is part of, an index of `steps` (-1: none), of which a message
    and what runs once a step have stage and micro-batch alone (-1: none)."""

    seconds: Floats
    sort: Ints
    step: Ints
    steps: list[Step]
    waits: Waits
    launches: Launches


class Occupied(NamedTuple):
    """What tasks occupy of the timeline: `task` and `row` of each place, by task; `rows` [rows, 3]: class of ranks,
    stream, kind of each row."""

    task: Ints
    row: Ints
    rows: Ints


@dataclass(frozen=True, eq=False)
class TaskGraph:
    """The tasks of these classes of ranks, and what is shown of them."""

    classes: tuple[RankClass, ...]
    shown: Sorts
    columns: Columns

    def __len__(self) -> int:
        return len(self.columns.seconds)

    @property
    def seconds(self) -> Floats:
        """See `Columns`."""
        return self.columns.seconds

    @property
    def sort(self) -> Ints:
        """See `Columns`."""
        return self.columns.sort

    @property
    def sorts(self) -> list[Sort]:
        """See `Sorts`."""
        return self.shown.sorts

    @property
    def streams(self) -> dict[str, int]:
        """See `Sorts`."""
        return self.shown.streams

    @property
    def kinds(self) -> dict[str, int]:
        """See `Sorts`."""
        return self.shown.kinds

    @cached_property
    def waits_of(self) -> list[list[int]]:
        """What each task waits for."""
        return grouped(self.columns.waits.second, self.columns.waits.first, len(self))

    @property
    def stages(self) -> Ints:
        """The stage of every task; -1: none."""
        return ints([*(step[0].stage for step in self.columns.steps), -1])[self.columns.step]

    @property
    def micro_batches(self) -> Ints:
        """The micro-batch of every task; -1: none."""
        return ints([*(step[0].micro_batch for step in self.columns.steps), -1])[self.columns.step]

    def details(self) -> list[Detail]:
        """The detail of every task."""
        named: dict[tuple[int, ...], Detail] = {}
        out = []
        for sort, step in zip(self.sort.tolist(), self.columns.step.tolist(), strict=True):
            detail, name_of = self.sorts[sort].detail, self.sorts[sort].named
            if name_of is not None:
                actions = self.columns.steps[step]
                key = (sort, *[action[0] for action in actions])
                if key not in named:
                    named[key] = detail._replace(name=name_of(actions))
                detail = named[key]
            out.append(detail)
        return out

    @cached_property
    def occupied(self) -> Occupied:
        """What tasks occupy of the timeline."""
        rows = [s.rows for s in self.sorts]
        counts = np.fromiter(map(len, rows), np.int64)
        table = np.fromiter(chain.from_iterable(chain.from_iterable(rows)), np.int64).reshape(-1, 3)
        return Occupied(*ragged(counts, self.sort), table)

    def slot_table(self) -> Ints:
        """The same as [places, 4]: task, class, stream, kind; by task."""
        task, row, rows = self.occupied
        return np.column_stack([task, rows[row]])

    def describe(self, task: int) -> str:
        """A task in words, for error messages."""
        streams, kinds, rows = tuple(self.streams), tuple(self.kinds), self.sorts[self.sort[task]].rows
        where = ", ".join(f"rank {self.classes[c].rank} {streams[s]} {kinds[k]}" for c, s, k in rows)
        name = self.details()[task].name
        return f"stage {self.stages[task]}, micro-batch {self.micro_batches[task]}: {name} ({where})"


class Draft:
    """A graph task by task, for what is not made of actions."""

    def __init__(self, classes: tuple[RankClass, ...]) -> None:
        self.classes, self.shown = classes, Sorts()
        self.seconds: list[float] = []
        self.sort: list[int] = []
        self.waits: list[list[int]] = []

    def add(self, seconds: float, waits: list[int], sort: int) -> int:
        """Append a task that starts when those of `waits`, which may still grow, have ended; returns its index."""
        self.seconds.append(seconds)
        self.waits.append(waits)
        self.sort.append(sort)
        return len(self.seconds) - 1

    def graph(self) -> TaskGraph:
        """What was drafted."""
        counts = [len(waits) for waits in self.waits]
        first = np.fromiter(chain.from_iterable(self.waits), np.int64, sum(counts))
        waits = Waits(first, np.repeat(np.arange(len(counts)), counts))
        seconds, no_step = np.array(self.seconds, dtype=np.float64), np.full(len(counts), -1)
        return TaskGraph(self.classes, self.shown, Columns(seconds, ints(self.sort), no_step, [], waits, Launches()))


def grouped(keys: Ints, values: Ints, count: int) -> list[list[int]]:
    """For each key from 0 to below `count` its values, in their order.

    >>> grouped(np.array([1, 0, 1]), np.array([7, 8, 9]), 3)
    [[8], [7, 9], []]
    """
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
    many = counts[picks]
    pick = np.repeat(np.arange(len(picks)), many)
    row = ((np.cumsum(counts) - counts)[picks] - (np.cumsum(many) - many))[pick]
    row += np.arange(len(pick))
    return pick, row


def ints(values: Sequence[int] | Sequence[tuple[int, ...]]) -> Ints:
    """Numbers as a column, or as rows."""
    return np.array(values, dtype=np.int64)
