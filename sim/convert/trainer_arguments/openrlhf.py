"""OpenRLHF's command of supervised fine-tuning, `deepspeed --module openrlhf.cli.train_sft`, as DeepSpeed's settings.

Names and defaults: openrlhf/cli/train_sft.py of OpenRLHF 0.11, and its names before dots came in (0.10 and older).
DeepSpeed's configuration: utils/deepspeed/deepspeed_utils.py, `get_train_ds_config`, whose `auto` is DeepSpeed's own
default; train_batch_size counts sequences of all replicas (utils/deepspeed/deepspeed.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.convert.scripts.command_line import SWITCHES, flags_of, words_behind, words_of
from sim.convert.scripts.script_data import Script

MODULE = "openrlhf.cli.train_sft"
# By today's name: what it is here, and its former names.
NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "train.micro-batch-size": ("train_micro_batch_size_per_gpu", ("micro-train-batch-size",)),
    "train.batch-size": ("train_batch_size", ("train-batch-size",)),
    "data.max-len": ("model_max_length", ("max-len",)),
    "model.model-name-or-path": ("model_name_or_path", ("pretrain",)),
    "max-norm": ("gradient_clipping", ()),
    "ds.zero-stage": ("stage", ("zero-stage",)),
    "ds.zpg": ("zero_hpz_partition_size", ("zpg",)),
    "ds.overlap-comm": ("overlap_comm", ("overlap-comm",)),
    "ds.adam-offload": ("adam_offload", ("adam-offload",)),
    "ds.param-dtype": ("param_dtype", ("param-dtype",)),
    "ds.grad-accum-dtype": ("grad_accum_dtype", ("grad-accum-dtype",)),
    "ds.attn-implementation": ("attn_implementation", ("attn-implementation",)),
    "ds.use-liger-kernel": ("use_liger_kernel", ("use-liger-kernel",)),
    "ds.packing-samples": ("packing", ("packing-samples",)),
    "ds.tensor-parallel-size": ("autotp_size", ("ds-tensor-parallel-size",)),
    "ds.ring-attn-size": ("context_parallel_size", ("ring-attn-size",)),
    "ds.load-in-4bit": ("load_in_4bit", ("load-in-4bit",)),
    "ds.lora.rank": ("lora_r", ("lora-rank",)),
    "ds.lora.target-modules": ("lora_target_modules", ("target-modules",)),
    "ds.lora.dropout": ("lora_dropout", ("lora-dropout",)),
    "model.gradient-checkpointing-enable": ("gradient_checkpointing", ("gradient-checkpointing",)),
    "model.gradient-checkpointing-reentrant": ("use_reentrant", ("gradient-checkpointing-use-reentrant",)),
    "optim": ("optim", ()),
}
OURS = {name: ours for today, (ours, older) in NAMES.items() for name in (today, *older)}
DEFAULTS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "8",
    "train_batch_size": "128",
    "model_max_length": "2048",
    "stage": "2",
    "param_dtype": "bf16",
    "attn_implementation": "flash_attention_2",
}
OLD, FLASH = "bf16", "flash-attn"  # switches of releases before --param_dtype and --attn_implementation
LISTED = ("ds.lora.target-modules", "target-modules")
# Of data, evaluation, files, logs and schedules, today's and former names.
HARMLESS = re.compile(
    r"(data|eval|logger|ckpt|adam|muon)\..*|(lr|min-lr|save|load|logging|eval|wandb|input|output|apply|max-samples|"
    r"max-epochs|max-ckpt|dataset|disable|use-(wandb|tensorboard|ms)|learning-rate|adam|l2|seed|train\.(seed|max-epochs)|"
    r"ckpt|tokenizer|multiturn|pretrain-mode|model\.pretrain-mode|lora-alpha|ds\.lora\.alpha|bf16|flash-attn).*"
)
OF_ZERO = ("stage", "zero_hpz_partition_size", "overlap_comm")
RING = {"ring_attn_func": "varlen_llama3"}  # ring_flash_attn's `llama3` functions (models/ring_attn_utils.py)


def is_openrlhf(script: Script) -> bool:
    """Tell whether a script has this command."""
    return MODULE in script.started


def openrlhf_arguments(file: Path, script: Script) -> tuple[dict[str, Any], list[str]]:
    """DeepSpeed's settings with keys of the trainer, and notes.

    Raises:
        InputError: where the command cannot be found.
    """
    words = words_of(script)
    flags = flags_of(words_behind(file, words, MODULE), listed=LISTED)
    left = sorted(name for name in flags if name not in OURS and not HARMLESS.fullmatch(name))
    notes = [f"not expressed here: {', '.join(f'--{name}' for name in left)}"] if left else []
    return openrlhf_settings(flags), notes


def openrlhf_settings(flags: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's settings by the values of flags, those of other names left out."""
    former = {"attn_implementation": "eager"} if OLD in flags and FLASH not in flags else {}
    return _settings(DEFAULTS | former | {OURS[name]: _value(value) for name, value in flags.items() if name in OURS})


def _value(value: Any) -> Any:
    return SWITCHES.get(str(value).lower(), value)


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """The trainer's arguments as `convert_deepspeed` reads them."""
    zero: dict[str, Any] = {key: given.pop(key) for key in OF_ZERO if key in given}
    if given.pop("adam_offload", False):
        zero["offload_optimizer"] = {"device": "cpu"}
    zero = {key: int(value) if str(value).isdecimal() else value for key, value in zero.items()}
    if zero.get("zero_hpz_partition_size") == 1:  # one GPU: no part of ZeRO++
        del zero["zero_hpz_partition_size"]
    found = {"zero_optimization": zero, "gradient_clipping": 1.0, "optimizer": {"type": given.pop("optim", "adam")}}
    found |= {given.pop("param_dtype"): {"enabled": True}}
    if accumulated := given.pop("grad_accum_dtype", None):
        found["data_types"] = {"grad_accum_dtype": accumulated}
    if (parts := str(given.pop("autotp_size", "1"))) != "1":
        found["tensor_parallel"] = {"autotp_size": int(parts) if parts.isdecimal() else parts}
    if given.pop("use_reentrant", False):
        found["gradient_checkpointing_kwargs"] = {"use_reentrant": True}
    if str(given.get("lora_r", "0")) == "0":
        given = {key: value for key, value in given.items() if not key.startswith("lora_")}
    else:
        found |= {"use_lora": True, "lora_dropout": "0"}
    if str(given.get("context_parallel_size", "1")) != "1":
        found |= RING
    return found | given
