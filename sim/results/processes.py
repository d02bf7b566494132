"""Processes beside a step: their part of its result, and their rows of its timeline."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from sim.core.timeline import Detail, Timeline
from sim.core.units import rank_numbers
from sim.ranks.plan import Plan
from sim.results.records import Record

MARK = "MARK"  # the kind of a mark
STREAM, MARKS = "process", "mark"
MARK_WIDTH = 1 / 300  # of the step: as wide as marks are drawn, which last no time


class Shown(Struct, frozen=True):
    """Hold a span that a process left on the timeline: `ranks` it concerns, its kind and words, from when to when."""

    process: str
    ranks: tuple[int, ...]
    kind: str
    text: str
    start_s: float
    end_s: float


class ProcessSpan(Record, frozen=True):
    """A span that a process left on the timeline; see `sim.processes.cluster.Shown`."""

    process: str
    ranks: str
    kind: str
    text: str
    start_s: float
    end_s: float


class ProcessesResult(Record, frozen=True):
    """The key `processes` of a result: their names, how long the step takes without them, what they left on its
    timeline, and what they still waited for when it ended."""

    names: tuple[str, ...]
    step_time_without_s: float
    spans: tuple[ProcessSpan, ...]
    waited_in_vain: tuple[str, ...]


class ProcessesRun(Struct, frozen=True):
    """Processes that ran beside a step. `changed`: whether they did anything that may change a time."""

    names: tuple[str, ...]
    shown: tuple[Shown, ...]
    waited: tuple[str, ...]
    changed: bool

    def rows(self, plan: Plan) -> int:
        """Return how many spans they left on the timeline of these classes of ranks."""
        return len(_rows(plan, self))


def timeline_with_processes(timeline: Timeline, plan: Plan, processes_run: ProcessesRun) -> Timeline:
    """The timeline with what processes left on it, on two streams: what lasts, and marks."""
    rows = _rows(plan, processes_run)
    if not rows:
        return timeline
    streams = (*timeline.streams, STREAM, MARKS)
    width_s = MARK_WIDTH * timeline.step_time_s
    ends_s = [shown.start_s + width_s if shown.kind == MARK else shown.end_s for _, shown in rows]
    kinds = tuple(dict.fromkeys([*timeline.kinds, *(shown.kind for _, shown in rows)]))
    details = tuple(Detail(f"{shown.process}: {shown.text}" if shown.text else shown.process) for _, shown in rows)
    count, first = len(rows), len(timeline.details)
    none = np.full(count, -1)
    new = {
        "class_index": np.array([c for c, _ in rows]),
        "stream": np.array([streams.index(MARKS if shown.kind == MARK else STREAM) for _, shown in rows]),
        "kind": np.array([kinds.index(shown.kind) for _, shown in rows]),
        "detail": np.arange(first, first + count),
        "stage": none,
        "micro_batch": none,
        "flow": none,
        "start_s": np.array([shown.start_s for _, shown in rows]),
        "end_s": np.minimum(ends_s, timeline.step_time_s),
    }
    columns: dict[str, Any] = {name: np.concatenate([getattr(timeline, name), column]) for name, column in new.items()}
    return replace(timeline, streams=streams, kinds=kinds, details=(*timeline.details, *details), **columns)


def _rows(plan: Plan, processes_run: ProcessesRun) -> list[tuple[int, Shown]]:
    """Return what processes left, by class of ranks."""
    return [(c, shown) for shown in processes_run.shown for c in dict.fromkeys(map(plan.class_of, shown.ranks))]


def processes_result(processes_run: ProcessesRun, without_s: float) -> ProcessesResult:
    """Return what the result says."""
    alike: dict[tuple[str, str, str, float, float], set[int]] = {}
    for x in processes_run.shown:
        alike.setdefault((x.process, x.kind, x.text, x.start_s, x.end_s), set()).update(x.ranks)
    spans = tuple(
        ProcessSpan(process, rank_numbers(sorted(ranks)), kind, text, start_s, end_s)
        for (process, kind, text, start_s, end_s), ranks in alike.items()
    )
    return ProcessesResult(processes_run.names, without_s, spans, processes_run.waited)
