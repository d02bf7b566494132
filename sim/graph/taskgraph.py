"""Tasks, the streams they run on and what they wait for: a static program of the whole step.

A task starts when everything it waits for has ended; a stream's order and a collective's rendezvous are waits
like any other (the previous task on the stream; one task shared by all members), so a program without contention
is a graph and any engine that honours it gives the same times. Columns, not objects: a step of a large cluster
has ten thousands of tasks and evaluating them takes less than making objects of them would.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.actions import Action, Kind, Step
from sim.timeline import Detail, RankClass

NO_STEP: Step = (Action(-1, Kind.F, -1),)
SHOWN = {Kind.F: "F", Kind.B: "B", Kind.I: "B", Kind.W: "W"}
Ints = NDArray[np.int64]
Row = tuple[int, int, int]  # of the timeline: class of ranks, stream, kind (indices into `streams` and `kinds`)


class Sort(NamedTuple):
    """What tasks of one sort share. `rows`: those of the timeline that each occupies; a collective of several simulated
    ranks and a message have more than one. `compute_s`, `exposed_s`: of an action that stands as one task; the name in
    its `detail` is empty, for it is the step's."""

    detail: Detail
    rows: tuple[Row, ...]
    compute_s: float = 0.0
    exposed_s: float = 0.0


class Launched(NamedTuple):
    """Tasks that start no earlier than so many seconds each (`lags_s`) after another has started; the first of them
    stands `offset` behind that one."""

    offset: int
    lags_s: list[float]


@dataclass(frozen=True, slots=True, eq=False)
class Stamp:
    """A task and those that it launches: columns of them all. Those of each of `streams` stand together."""

    seconds: list[float]
    sorts: list[int]
    streams: list[str]
    launched: list[Launched]


@dataclass(slots=True)
class TaskGraph:
    """Columns by task: `seconds`, `waits` (tasks that must have ended), `sort`, and the `step` that it is part of, of
    which a message and what runs once a step have stage and micro-batch alone (-1: none).

    `launched`: by task, what starts so long after it has started; a task is launched by one other at most.
    """

    classes: tuple[RankClass, ...]
    seconds: list[float] = field(default_factory=list)
    waits: list[list[int]] = field(default_factory=list)
    sort: list[int] = field(default_factory=list)
    step: list[Step] = field(default_factory=list)
    launched: dict[int, list[Launched]] = field(default_factory=dict)
    sorts: list[Sort] = field(default_factory=list)
    streams: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.seconds)

    def add(self, seconds: float, waits: list[int], sort: int, step: Step = NO_STEP) -> int:
        """Append a task; returns its index."""
        self.seconds.append(seconds)
        self.waits.append(waits)
        self.sort.append(sort)
        self.step.append(step)
        return len(self.seconds) - 1

    def place(self, stamp: Stamp, waits: list[int], last: dict[str, int], step: Step) -> int:
        """Append a stamp's tasks, each behind the one before it on its stream; `last`: of each stream, kept up to date
        but for the first task's. Returns that one's index."""
        column, launched = self.waits, stamp.launched
        task = len(column)
        column.append(waits)
        self.seconds += stamp.seconds
        self.sort += stamp.sorts
        if not launched:
            self.step.append(step)
        else:
            self.step += [step] * len(stamp.seconds)
            self.launched[task] = launched
            for stream, (offset, lags_s) in zip(stamp.streams, launched, strict=True):
                column.append([last[stream]] if stream in last else [])
                first = task + offset
                last[stream] = end = first + len(lags_s) - 1
                if end > first:
                    column += [[i] for i in range(first, end)]
        return task

    def launchers(self) -> tuple[list[int], list[int]]:
        """The first of each group that is launched together, ascending, and what launches it."""
        pairs = sorted((other + x.offset, other) for other, groups in self.launched.items() for x in groups)
        return [first for first, _ in pairs], [other for _, other in pairs]

    @property
    def stages(self) -> list[int]:
        """The stage of every task; -1: none."""
        return [step[0][0] for step in self.step]

    @property
    def micro_batches(self) -> list[int]:
        """The micro-batch of every task; -1: none."""
        return [step[0][2] for step in self.step]

    def details(self) -> list[Detail]:
        """The detail of every task."""
        named: dict[tuple[int, ...], Detail] = {}
        out = []
        for sort, step in zip(self.sort, self.step, strict=True):
            detail = self.sorts[sort].detail
            if not detail.name:
                key = (sort, *[action[0] for action in step])
                if key not in named:
                    name = " and ".join(f"{SHOWN[action.kind]} of stage {action.stage}" for action in step)
                    named[key] = detail._replace(name=name)
                detail = named[key]
            out.append(detail)
        return out

    def row(self, class_index: int, stream: str, kind: str) -> Row:
        """A row of the timeline: a class of ranks, a stream, and the kind shown there."""
        return (
            class_index,
            self.streams.setdefault(stream, len(self.streams)),
            self.kinds.setdefault(kind, len(self.kinds)),
        )

    def new_sort(
        self, detail: Detail, rows: tuple[Row, ...] = (), compute_s: float = 0.0, exposed_s: float = 0.0
    ) -> int:
        """Index of a new sort of tasks."""
        self.sorts.append(Sort(detail, rows, compute_s, exposed_s))
        return len(self.sorts) - 1

    def slot_table(self) -> Ints:
        """The rows of the timeline that tasks occupy, as [rows, 4]: task, class, stream, kind; by task."""
        flat = chain.from_iterable([row for s in self.sorts for row in s.rows])
        rows = np.fromiter(flat, np.int64).reshape(-1, 3)
        counts = np.array([len(s.rows) for s in self.sorts], dtype=np.int64)
        sort = np.array(self.sort, dtype=np.int64)
        task, row = ragged(counts, sort)
        table = np.empty((len(task), 4), dtype=np.int64)
        table[:, 0], table[:, 1:] = task, rows[row]
        return table

    def describe(self, task: int) -> str:
        """A task in words, for error messages."""
        streams, kinds, rows = tuple(self.streams), tuple(self.kinds), self.sorts[self.sort[task]].rows
        where = ", ".join(f"rank {self.classes[c].rank} {streams[s]} {kinds[k]}" for c, s, k in rows)
        stage, _, micro_batch = self.step[task][0]
        return f"stage {stage}, micro-batch {micro_batch}: {self.details()[task].name} ({where})"

    def successors(self) -> list[list[int]]:
        """Who waits for each task; a wait listed twice stands twice."""
        after: list[list[int]] = [[] for _ in self.seconds]
        for task, waits in enumerate(self.waits):
            for w in waits:
                after[w].append(task)
        return after


def ragged(counts: Ints, picks: Ints) -> tuple[Ints, Ints]:
    """Rows of a table that consists of parts of `counts` rows each, part after part as picked: which pick a row belongs
    to, and where it stands in the table.

    >>> [x.tolist() for x in ragged(np.array([1, 2]), np.array([1, 0, 1]))]
    [[0, 0, 1, 2, 2], [1, 2, 0, 1, 2]]
    """
    many = counts[picks]
    pick = np.repeat(np.arange(len(picks)), many)
    within = np.arange(len(pick)) - np.repeat(np.cumsum(many) - many, many)
    return pick, (np.cumsum(counts) - counts)[picks[pick]] + within
