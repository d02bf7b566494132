"""ms-swift's `swift sft`, `pt` and `rlhf`: Transformers' Trainer with arguments of its own, as `TrainingArguments`.

Names, defaults and presets: swift/arguments (sft_args.py, tuner_args.py, rlhf_args.py, base_args) and swift/config of
modelscope/ms-swift, November 2026; `sft_type` and `train_type` are older names of `tuner_type`. GRPO has TRL's names;
its `max_length` is that of a prompt, and `swift rollout` starts its server (rlhf_trainers/args_mixin.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from sim.convert.megatron.swift import processes_of
from sim.convert.scripts.command_line import ENDS, flags_of, words_of
from sim.convert.scripts.named_files import named_mapping
from sim.convert.scripts.script_data import Script
from sim.convert.settings import Machine
from sim.convert.trainer_arguments.accelerate import of_accelerate
from sim.convert.trainer_arguments.launched import LAUNCHERS, SERVER, accelerate_config, typed, without_server
from sim.convert.trainer_arguments.objectives import OF_SCRIPT, OF_SWIFT
from sim.core.errors import InputError

COMMAND = re.compile(r"(?m)(?:^|[\s/])swift(?:/cli)?[ \t/]+(sft|pt|rlhf|grpo|gkd)(?:\.py)?(?=[\s\\])")
LAUNCHER = re.compile(r"torchrun|torch\.distributed|accelerate|deepspeed[ \t]+-")
TYPES = ("tuner_type", "train_type", "sft_type")
MODULES = "target_modules"
LEAST_BATCH = 16  # sequences, to which gradient_accumulation_steps is chosen where it is not given
RENAMED = {
    **dict.fromkeys(("model", "model_id_or_path"), "model_name_or_path"),  # the second until 2.6
    "max_length": "cutoff_len",
    "batch_size": "per_device_train_batch_size",
    "lora_dropout_p": "lora_dropout",
    "lora_target_modules": MODULES,
    "dtype": "torch_dtype",
}
# Parameters have the dtype of the checkpoint, for most models bf16, and stay so (base_args/model_args.py:
# `_init_torch_dtype`, model/utils.py: `get_default_torch_dtype`).
DEFAULTS = {"per_device_train_batch_size": 1, "gradient_checkpointing": True, "torch_dtype": "bfloat16"}
CHECKPOINT = "gradient_checkpointing_kwargs"
ATTENTION = {"flash_attn": "flash_attention_2"}
HALF = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "float32": "fp16", "fp32": "fp16"}
_AUTO = {name: {"enabled": "auto"} for name in ("fp16", "bf16")}
_LOW = {"overlap_comm": False, "reduce_scatter": True, "reduce_bucket_size": 2e8}
_THREE = {
    "stage": 3,
    "overlap_comm": False,
    **dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), "auto"),
}
_ON_HOST = {"device": "cpu"}
# By the words of --deepspeed and --fsdp.
ZERO: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0, **_LOW},
    "zero1": {"stage": 1, **_LOW},
    "zero2": {"stage": 2, **_LOW},
    "zero2_offload": {"stage": 2, "offload_optimizer": _ON_HOST, **_LOW},
    "zero3": _THREE,
    "zero3_offload": {"offload_optimizer": _ON_HOST, "offload_param": _ON_HOST, **_THREE},
}
# By the words of releases before 3 (swift/llm/utils/argument.py and ds_config of 2.6).
_BEFORE_3 = {"overlap_comm": True}
ZERO |= {
    "default-zero2": ZERO["zero2"] | _BEFORE_3,
    "default-zero3": ZERO["zero3"] | _BEFORE_3,
    "zero2-offload": ZERO["zero2_offload"] | _BEFORE_3,
    "zero3-offload": _THREE | {"offload_param": _ON_HOST} | _BEFORE_3,
}
# What `--rlhf_type` names otherwise than TRL's commands, and GRPO's arguments that TRL's GRPOConfig has otherwise.
OBJECTIVES = {"rm": "reward"}
GRPO = "grpo"
OF_GRPO = {"cutoff_len": "max_prompt_length", "async_generate": "async_prefetch"} | {
    "reward_model": "reward_model_name_or_path",
    "vllm_enforce_eager": "enforce_eager",
}
DEFAULTS_OF_GRPO = {"gradient_accumulation_steps": 1, "temperature": 0.9}
FSDP2 = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"version": 2, "reshard_after_forward": True, "activation_checkpointing": True},
}


def is_swift(script: Script) -> bool:
    """Tell whether a script runs ms-swift's trainer of Transformers."""
    return COMMAND.search(script.started) is not None


def is_swift_config(data: Mapping[str, Any]) -> bool:
    """Tell whether a mapping holds the arguments of `swift sft`, `pt` or `rlhf`, which takes such a file."""
    of_trainer = any(name in data for name in (*TYPES, OF_SWIFT, "per_device_train_batch_size", "max_length"))
    return isinstance(data.get("model"), str) and of_trainer


def swift_arguments(file: Path, script: Script, machine: Machine) -> tuple[dict[str, Any], int | None]:
    """The arguments by the names of `TrainingArguments` and LLaMA-Factory, and the number of processes if known.

    Raises:
        InputError: for other objectives than next tokens.
    """
    found = COMMAND.search(script.started)
    if found is not None and found[1] in ("grpo", "gkd"):
        raise InputError(f"{file}: swift {found[1]}: can be converted: swift sft, pt and rlhf")
    words, server = without_server(words_of(script))
    words = _that_trains(words)
    flags = flags_of(words, listed=("target-modules", "lora-target-modules", "dataset", "loss-type", "reward-model"))
    data = _of_file(file, script, words) | {name.replace("-", "_"): typed(value) for name, value in flags.items()}
    if found is not None and found[1] == "rlhf":
        data.setdefault(OF_SWIFT, "dpo")
    config = accelerate_config(file, script, data)
    data = of_accelerate(file, config) | {name: value for name, value in data.items() if name not in LAUNCHERS}
    started = config.get("num_processes")
    processes = machine.gpus or processes_of(script) or (started if type(started) is int else None) or _alone(script)
    return arguments_of(data, server, processes), processes


def _that_trains(words: list[str]) -> list[str]:
    """The words of the commands that train, without those of others beside them (`swift infer`, `swift export`); all
    words where no command is told apart."""
    groups = [[*group] for ends, group in groupby(words, lambda word: word in ENDS) if not ends]
    trains = [group for group in groups if COMMAND.search(f"{' '.join(group)} ")]
    return [word for group in trains for word in (*group, ";")] or words


def _of_file(file: Path, script: Script, words: list[str]) -> dict[str, Any]:
    """The arguments in the file that stands behind `swift sft` (cli/main.py: `parse_yaml_args`).

    Raises:
        InputError: for a file that is not there.
    """
    behind = (after for before, after in pairwise(words) if before in ("sft", "pt", "rlhf"))
    name = next((word for word in behind if word.endswith((".yaml", ".yml", ".json"))), "")
    found = named_mapping(file, script, name) if name else {}
    if found is None:
        raise InputError(f"{file}: names {name}, which is not there: put it beside the script, or convert it")
    return found


def arguments_of(given: Mapping[str, Any], server: dict[str, Any], processes: int | None) -> dict[str, Any]:
    """The arguments by the names of `TrainingArguments` and LLaMA-Factory. `server`: what its own command says."""
    objective = str(given.get(OF_SWIFT, ""))
    data = DEFAULTS | {RENAMED.get(name, name): value for name, value in given.items()}
    kinds = [data.pop(name) for name in TYPES if name in data]
    data["tuner_type"] = kinds[0] if kinds else "lora"
    data[HALF.get(str(data.get("torch_dtype", "bf16")).lower(), "bf16")] = True
    if (attention := data.pop("attn_impl", None)) is not None:
        data["attn_implementation"] = ATTENTION.get(str(attention), attention)
    if str(data.pop("quant_bits", "")) == "4":
        data["load_in_4bit"] = True
    if (preset := ZERO.get(str(data.get("deepspeed")))) is not None:
        data["deepspeed"] = {**_AUTO, "zero_optimization": preset}
    data |= FSDP2 if data.get("fsdp") == "fsdp2" else {}
    if CHECKPOINT not in data and _is_reentrant(data, processes):
        data[CHECKPOINT] = {"use_reentrant": True}
    if objective:
        data[OF_SCRIPT] = OBJECTIVES.get(objective, objective)
    if objective == GRPO:
        return _of_grpo(data, server)
    if "gradient_accumulation_steps" not in data and processes:  # swift/trainers/arguments.py
        each = _whole(data["per_device_train_batch_size"])
        data["gradient_accumulation_steps"] = max(1, math.ceil(LEAST_BATCH / each / processes))
    return data


def _of_grpo(data: dict[str, Any], server: dict[str, Any]) -> dict[str, Any]:
    """The arguments of GRPO by TRL's names, with what the server's own command says."""
    renamed = {OF_GRPO.get(name, name): value for name, value in data.items()}
    theirs = {name.removeprefix("vllm_"): value for name, value in server.items()}
    return DEFAULTS_OF_GRPO | renamed | ({SERVER: theirs} if theirs else {})


def _is_reentrant(data: dict[str, Any], processes: int | None) -> bool:
    """Tell whether torch's reentrant checkpoint runs where no arguments of it are given: it does except with
    DistributedDataParallel (swift/trainers/mixin.py: `_fix_gradient_checkpointing`). FSDP's own switch has another
    checkpoint (accelerate/utils/fsdp_utils.py: `fsdp2_apply_ac`)."""
    if data.get("fsdp"):
        own = data.get("fsdp_config")
        return not (isinstance(own, dict) and own.get("activation_checkpointing"))
    return bool(data.get("deepspeed")) or processes == 1


def _alone(script: Script) -> int | None:
    """One process where one GPU is visible and no launcher starts more (swift/cli/main.py: `use_torchrun`)."""
    alone = (script.variable("CUDA_VISIBLE_DEVICES") or "").isdecimal()
    launched = LAUNCHER.search(script.started) or any(map(script.variable, ("NPROC_PER_NODE", "NNODES", "NODES")))
    return 1 if alone and not launched else None


def _whole(value: Any) -> int:
    return value if type(value) is int and value > 0 else 1
