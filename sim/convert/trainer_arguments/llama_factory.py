"""Configs of LLaMA-Factory that no reader of `TrainingArguments` understands: of its other commands and trainers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.core.errors import InputError

# Keys of mcore_adapter's arguments, which take the place of Transformers' with USE_MCA=1 (hparams/training_args.py of
# hiyouga/LLaMA-Factory, release 0.9.5): Megatron-LM trains then.
OF_MCORE = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "use_distributed_optimizer", "recompute_granularity"),
)
MCORE = (
    "is a setting of Megatron-LM, which trains in Transformers' place with LLaMA-Factory's USE_MCA=1 and is not read "
    "there: convert a launch script of Megatron-LM's or ms-swift's"
)
# By a key of hparams/model_args.py: the command that reads it, where `do_train` is not asked for.
OTHER_COMMANDS = {"export_dir": "exports a model", "infer_backend": "generates text"}
# Keys of the trainer that USE_V1=1 runs (v1/config), of which each of its examples has all.
OF_V1 = ("model", "train_dataset", "cutoff_len")

ITS_OWN = ("stage", "template")  # of which a config of LLaMA-Factory has both, or `TUNER`
DEFAULTS = {"stage": "sft", "template": None}  # of its command, which may leave them out (hparams/*_args.py)
TUNER = "finetuning_type"
BY_DEFAULT = f"{TUNER}: lora, LLaMA-Factory's default; full trains all parameters"


def is_llama_factory(values: Mapping[str, Any]) -> bool:
    """Tell whether settings are those of LLaMA-Factory."""
    return TUNER in values or {*ITS_OWN} <= values.keys()


def with_tuner(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The config with what LLaMA-Factory trains by default, and a note on it (hparams/finetuning_args.py)."""
    if TUNER in data or not {*ITS_OWN} <= data.keys():
        return data, []
    return {**data, TUNER: "lora"}, [BY_DEFAULT]


def refuse_other_use(file: Path, data: Mapping[str, Any]) -> None:
    """Raise for a config with which LLaMA-Factory does not train by Transformers' Trainer.

    Raises:
        InputError: naming the key, and what it stands for.
    """
    if (key := next((name for name in OF_MCORE if name in data), "")) != "":
        raise InputError(f"{file}: {key}: {MCORE}")
    if set(OF_V1) <= data.keys():
        raise InputError(f"{file}: is a config of LLaMA-Factory's v1 trainer (USE_V1=1), which is not read")
    if data.get("do_train") is True:
        return
    if (key := next((name for name in OTHER_COMMANDS if data.get(name)), "")) != "":
        raise InputError(f"{file}: {key}: {OTHER_COMMANDS[key]}, and trains nothing; can be converted: training")
    if data.get("do_predict") is True and "finetuning_type" in data:  # train/sft/workflow.py
        raise InputError(f"{file}: do_predict without do_train trains nothing; can be converted: training")
