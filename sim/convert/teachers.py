"""The section `distillation` for a teacher that a trainer shards over its ranks as it shards the student."""

from __future__ import annotations

from typing import Any

from sim.inputs.model_input import load_model

WITHIN = 8  # GPUs of a node
CUT = (
    "distillation.teacher_parallelism: the teacher is cut into {} by tensor parallelism in the simulation; the trainer "
    "shards it over {} ranks and gathers each layer"
)


def taught_by(teacher: Any, shards: int, notes: list[str]) -> dict[str, Any]:
    """The section, with a note where the teacher is sharded over ranks (`shards`): its memory is then that of so many
    parts as tensor parallelism can have within a node."""
    model = load_model(teacher)
    fits = (n for n in (WITHIN, 4, 2) if not (shards % n or model.heads % n or model.ffn % n))
    tp = next(fits, 1)
    if shards > 1:
        notes.append(CUT.format(tp, shards))
    return {"distillation": {"teacher": teacher, **({"teacher_parallelism": {"tp": tp}} if tp > 1 else {})}}
