"""Tasks, the streams they run on and what they wait for: a static program of the whole step.

A task starts when everything it waits for has ended; a stream's order and a collective's rendezvous are waits
like any other (the previous task on the stream; one task shared by all members), so a program without contention
is a graph and any engine that honours it gives the same times. Columns, not objects: a step of a large cluster
has ten thousands of tasks and evaluating them takes less than making objects of them would.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.timeline import Detail, RankClass


class Sort(NamedTuple):
    """What tasks of one sort share. `compute_s`, `exposed_s`: of an action that stands as one task."""

    detail: Detail
    compute_s: float
    exposed_s: float


@dataclass(slots=True)
class TaskGraph:
    """Columns by task: `seconds`, `waits` (tasks that must have ended), `sort`, `stage`, `micro_batch` (-1: none).

    `lags`: a task that also starts no earlier than so many seconds after another has started.
    The rows of the timeline that tasks occupy are `slots`, flat: task, class of ranks, stream, kind (indices
    into `streams` and `kinds`); a collective of several simulated ranks and a message have more than one.
    """

    classes: tuple[RankClass, ...]
    seconds: list[float] = field(default_factory=list)
    waits: list[list[int]] = field(default_factory=list)
    sort: list[int] = field(default_factory=list)
    stage: list[int] = field(default_factory=list)
    micro_batch: list[int] = field(default_factory=list)
    lags: dict[int, tuple[int, float]] = field(default_factory=dict)
    slots: array[int] = field(default_factory=lambda: array("q"))
    sorts: list[Sort] = field(default_factory=list)
    streams: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.seconds)

    def add(self, seconds: float, waits: list[int], sort: int, stage: int, micro_batch: int) -> int:
        """Append a task; returns its index."""
        self.seconds.append(seconds)
        self.waits.append(waits)
        self.sort.append(sort)
        self.stage.append(stage)
        self.micro_batch.append(micro_batch)
        return len(self.seconds) - 1

    def row(self, class_index: int, stream: str, kind: str) -> tuple[int, int, int]:
        """A row of the timeline, as `slots` refer to it: a class of ranks, a stream, and the kind shown there."""
        return (
            class_index,
            self.streams.setdefault(stream, len(self.streams)),
            self.kinds.setdefault(kind, len(self.kinds)),
        )

    def slot_table(self) -> NDArray[np.int64]:
        """The slots as [rows, 4]: task, class, stream, kind."""
        return np.array(self.slots, dtype=np.int64).reshape(-1, 4)

    def new_sort(self, detail: Detail, compute_s: float = 0.0, exposed_s: float = 0.0) -> int:
        """Index of a new sort of tasks."""
        self.sorts.append(Sort(detail, compute_s, exposed_s))
        return len(self.sorts) - 1

    def describe(self, task: int) -> str:
        """A task in words, for error messages."""
        streams, kinds = tuple(self.streams), tuple(self.kinds)
        rows = [(c, s, k) for t, c, s, k in self.slot_table().tolist() if t == task]
        where = ", ".join(f"rank {self.classes[c].rank} {streams[s]} {kinds[k]}" for c, s, k in rows)
        name = self.sorts[self.sort[task]].detail.name
        return f"stage {self.stage[task]}, micro-batch {self.micro_batch[task]}: {name} ({where})"

    def successors(self) -> list[list[int]]:
        """Who waits for each task; a wait listed twice stands twice."""
        after: list[list[int]] = [[] for _ in self.seconds]
        for task, waits in enumerate(self.waits):
            for w in waits:
                after[w].append(task)
        return after
