"""Tasks, the streams they run on and what they wait for: a static program of the whole step.

A task starts when everything it waits for has ended; a stream's order and a collective's rendezvous are waits
like any other (the previous task on the stream; one task shared by all members), so a program without contention
is a graph and any engine that honours it gives the same times.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from sim.timeline import Detail, RankClass


class Slot(NamedTuple):
    """A row of the timeline that a task occupies: a class of ranks and a stream, shown under `kind`."""

    class_index: int
    stream: str
    kind: str


class Placed(NamedTuple):
    """What a task is, apart from when it runs. `compute_s`, `exposed_s`: of an action that stands as one task."""

    slots: tuple[Slot, ...]
    stage: int
    micro_batch: int
    detail: Detail
    compute_s: float
    exposed_s: float


@dataclass(slots=True)
class TaskGraph:
    """Columns by task: `seconds[i]`, `waits[i]` (tasks that must have ended before i starts), `placed[i]`."""

    classes: tuple[RankClass, ...]
    seconds: list[float] = field(default_factory=list)
    waits: list[list[int]] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.seconds)

    def add(self, seconds: float, waits: list[int], placed: Placed) -> int:
        """Append a task; returns its index."""
        self.seconds.append(seconds)
        self.waits.append(waits)
        self.placed.append(placed)
        return len(self.seconds) - 1

    def describe(self, task: int) -> str:
        """A task in words, for error messages."""
        p = self.placed[task]
        where = ", ".join(f"rank {self.classes[s.class_index].rank} {s.stream}" for s in p.slots)
        return f"{p.slots[0].kind} of stage {p.stage}, micro-batch {p.micro_batch} ({p.detail.name}; {where})"

    def successors(self) -> list[list[int]]:
        """Who waits for each task; a wait listed twice stands twice."""
        after: list[list[int]] = [[] for _ in self.seconds]
        for task, waits in enumerate(self.waits):
            for w in waits:
                after[w].append(task)
        return after
