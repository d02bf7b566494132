"""The `distillation` section of a scenario: a teacher beside the model in training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sim.inputs.input_source import UserInput
from sim.inputs.model_config import ModelConfig
from sim.inputs.parallelism import MAX_RANKS


class TeacherParallelism(UserInput):
    """The split of the teacher over the student's ranks."""

    tp: int = Field(default=1, ge=1, le=MAX_RANKS)


class Distillation(UserInput):
    """A teacher beside the student that `training` describes.

    `placement`: on the student's GPUs, or on `teacher_parallelism.tp` GPUs of its own, one step ahead.
    `prompt_len` (mode sequence): tokens that the teacher is given; it writes the rest. Null: half of seq_len.
    """

    teacher: ModelConfig
    mode: Literal["logits", "sequence"] = "logits"
    teacher_parallelism: TeacherParallelism = TeacherParallelism.model_construct()
    placement: Literal["same", "other"] = "same"
    prompt_len: int | None = Field(default=None, ge=1, le=100_000_000)

    @property
    def own_gpus(self) -> int:
        """The teacher's GPUs beside the student's; 0 where they share them."""
        return self.teacher_parallelism.tp if self.placement == "other" else 0
