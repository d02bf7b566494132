"""A teacher beside a student: its costs, and its turn in the student's timeline and memory.

`sim.distillation` works the costs out and adds them to the student's result.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from msgspec.structs import replace

from sim.core.timeline import COMPUTE, Detail, RankClass, Timeline
from sim.core.units import counted
from sim.results.memory import MemoryCurve
from sim.results.records import Record


class Teacher(Record, frozen=True):
    """Costs of a teacher. Seconds of a step; bytes on a rank that holds it.

    `forward_s`: of all its micro-batches; `loss_s`: comparing both distributions, within the student's step; `send_s`:
    logits to the ranks that compare them; `generate_s`: sequence mode's generation; `cache_bytes`: of
    keys and values meanwhile.
    """

    mode: str
    placement: str
    gpus: int
    forward_s: float
    loss_s: float
    send_s: float
    generate_s: float
    parameter_bytes: float
    buffer_bytes: float
    cache_bytes: float
    generated_tokens: int

    @property
    def own_s(self) -> float:
        """Return the seconds of a step that the teacher works."""
        return self.forward_s + self.generate_s + self.send_s

    @property
    def held_bytes(self) -> float:
        """Bytes that a GPU of the teacher needs, all parts at their fullest."""
        return self.parameter_bytes + self.buffer_bytes + self.cache_bytes

    def step_s(self, student_s: float) -> float:
        """The whole step around a student's of `student_s`."""
        return max(self.own_s, student_s) if self.placement == "other" else self.own_s + student_s


class Distilled(Record, frozen=True):
    """A teacher's part of a result."""

    inlined: ClassVar = ("teacher",)
    teacher: Teacher
    student_step_s: float


def timeline_with_teacher(timeline: Timeline, teacher: Teacher) -> Timeline:
    """The student's timeline after the teacher's turn, a span on every rank; or beside it, on the teacher's ranks."""
    kind = "GENERATE" if teacher.mode == "sequence" else "TEACHER"
    text = (
        f"{counted(teacher.generated_tokens, 'token')} written" if teacher.generated_tokens else "forward, nothing kept"
    )
    same = teacher.placement == "same"
    classes = timeline.classes
    if not same:
        first = 1 + max(c.ranks[-1] for c in classes)
        classes = (*classes, RankClass(first, range(first, first + teacher.gpus), len(classes)))
    rows = np.arange(len(timeline.classes)) if same else np.array([len(timeline.classes)])
    streams = tuple(dict.fromkeys([*timeline.streams, COMPUTE]))
    kinds = tuple(dict.fromkeys([*timeline.kinds, kind]))
    new = {
        "class_index": rows,
        "stream": streams.index(COMPUTE),
        "kind": kinds.index(kind),
        "detail": len(timeline.details),
        "stage": -1,
        "micro_batch": -1,
        "flow": -1,
        "start_s": 0.0,
        "end_s": teacher.own_s,
    }
    later = dict.fromkeys(("start_s", "end_s"), teacher.own_s if same else 0.0)
    columns = {
        name: np.concatenate(
            [
                np.full(len(rows), value) if np.isscalar(value) else value,
                getattr(timeline, name) + later.get(name, 0),
            ]
        )
        for name, value in new.items()
    }
    details = (*timeline.details, Detail(f"teacher: {text}"))
    return replace(timeline, classes=classes, streams=streams, kinds=kinds, details=details, **columns)


def memory_with_teacher(curve: MemoryCurve, teacher: Teacher) -> MemoryCurve:
    """A rank's memory, the teacher's turn first; unchanged where the teacher is elsewhere.

    The gradients of the step before may still be held in that turn, as `MemoryRow.lasting` has them.
    """
    if teacher.placement != "same":
        return curve

    def column(turn: float, values: Any) -> Any:
        return np.concatenate([[turn], values])

    c, weights = curve, teacher.parameter_bytes
    return MemoryCurve(
        c.rank,
        column(0.0, c.time_s + teacher.own_s),
        column(c.parameters[0], c.parameters) + weights,
        column(c.gradients.max(), c.gradients),
        column(c.optimizer[0], c.optimizer),
        column(teacher.cache_bytes, c.activations),
        column(teacher.buffer_bytes, c.buffers),
    )
