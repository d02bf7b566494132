"""Distillation on given texts by TRL's and ms-swift's GKD as a scenario with `distillation`.

TRL 1.16: trl/experimental/gkd (GKDConfig, `training_step`, `compute_loss`). ms-swift 4.6: arguments/rlhf_args.py and
rlhf_trainers/gkd_trainer.py. The teacher reads each text, and the student learns from its distribution alone; DeepSpeed
prepares it, too, so that ZeRO-3 shards it. With `lmbda` above 0 the student itself writes that part of the batches,
which is not simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sim.convert.named_models import named_model
from sim.convert.settings import Converted, Machine, Settings
from sim.convert.teachers import taught_by
from sim.convert.trainer_arguments.objectives import KEYS, OF_GKD, OF_SWIFT
from sim.convert.trainer_arguments.scenario import convert_deepspeed
from sim.convert.trainer_arguments.trl import NLL, TILED
from sim.core.errors import InputError
from sim.inputs.input_source import show

TEACHERS = ("teacher_model_name_or_path", "teacher_model")  # TRL's, and ms-swift's
ON_POLICY, BY_TEACHER, TOP = "lmbda", "seq_kd", "gkd_logits_topk"
USUAL_LAMBDA = 0.5
WRITES = (
    "found {}; the student writes answers in this share of the batches, which is not simulated; {}: 0, of given texts "
    "alone, can be converted"
)
# Keys of numbers alone, and of answers that nobody writes.
WITHOUT_EFFECT = (
    *("beta", "temperature", "max_new_tokens", "max_completion_length", "teacher_model_type", "teacher_deepspeed"),
    *("teacher_model_revision", "disable_dropout", "max_prompt_length", "use_vllm", "vllm_mode"),
)
ALL_LOGITS = "distillation: both models' logits are simulated whole; Liger's loss computes them in parts"
SECOND_LOSS = "distillation: the loss of next tokens is simulated, too; GKD computes it only with sft_alpha"


def convert_gkd(file: Path, data: Mapping[str, Any], machine: Machine, seq_len: int | None) -> Converted:
    """The scenario of a file or command that trains by GKD.

    Raises:
        InputError: where the student writes answers, and for a teacher that is missing or not known.
    """
    own = {*OF_GKD, *TEACHERS, TOP, *WITHOUT_EFFECT, OF_SWIFT}
    s = Settings(file, {key: value for key, value in data.items() if key in own and value is not None})
    s.taken |= {*WITHOUT_EFFECT, OF_SWIFT}
    if share := s.number(ON_POLICY, USUAL_LAMBDA):
        raise InputError(f"{s.place(ON_POLICY)}: {WRITES.format(share, ON_POLICY)}")
    if s.flag(BY_TEACHER):
        problem = "found true; the teacher writes each batch by Transformers' generate, which is not simulated"
        raise InputError(f"{s.place(BY_TEACHER)}: {problem}")
    if (top := s.take(TOP)) is not None:
        raise InputError(f"{s.place(TOP)}: found {show(top)}; a teacher is simulated with all of its logits")
    teacher = _teacher(s)
    rest = {key: value for key, value in data.items() if key not in own and key not in KEYS}
    found = convert_deepspeed(file, rest, machine, seq_len)
    s.notes += [SECOND_LOSS, ALL_LOGITS]
    layout, training = found.scenario["parallelism"], dict(found.scenario["training"])
    training.pop("cross_entropy", None)  # of next tokens alone
    taught = taught_by(teacher, layout["dp"] if layout["zero"] == 3 else 1, s.notes)
    scenario = found.scenario | {"training": training} | taught
    cluster = scenario.pop("cluster")
    notes = [note for note in found.notes if note != TILED.format(NLL)]
    return replace(found, scenario={**scenario, "cluster": cluster}, notes=(*notes, *s.notes))


def _teacher(s: Settings) -> str:
    """The teacher by its name.

    Raises:
        InputError: without one, with which the student teaches itself, and for one that is not known.
    """
    key = next((name for name in TEACHERS if name in s.values), "")
    if not key:
        raise InputError(f"{s.file}: {TEACHERS[0]}: is missing; a student that is its own teacher is not simulated")
    return named_model(s.file, s.place(key), str(s.take(key)), s.notes)
