"""DeepSpeed's JSON and Transformers' `TrainingArguments` as one set of settings, which share their keys' meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.convert.scripts.named_files import found_file
from sim.convert.settings import Settings
from sim.convert.trainer_arguments.fsdp import OFF
from sim.convert.trainer_arguments.trl import take_precision
from sim.core.errors import InputError
from sim.core.files import read_text
from sim.inputs.input_source import show
from sim.inputs.yaml_input import MAX_BYTES, parse_yaml

AUTO = "auto"  # DeepSpeed's word for what Transformers fills in
# Sections and keys that DeepSpeed's JSON alone has.
OWN = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "zero_allow_untested_optimizer")
# Of these, those that arguments have, too, and the arguments' names where they differ.
BATCH_KEYS = ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "gradient_clipping")
SAME = {"train_micro_batch_size_per_gpu": "per_device_train_batch_size", "gradient_clipping": "max_grad_norm"}


def settings_of(file: Path, data: dict[str, Any]) -> tuple[Settings, bool]:
    """The arguments together with DeepSpeed's file, which goes first, and whether DeepSpeed trains."""
    own = _mapping(file, "deepspeed", data.get("deepspeed"))
    if isinstance(data.get("fsdp_config"), str):
        data = {**data, "fsdp_config": _mapping(file, "fsdp_config", data["fsdp_config"])}
    # What DeepSpeed leaves to Transformers is in TrainingArguments.
    said = {k: v for k, v in own.items() if not _is_auto(v)}
    flat = {k: v for k, v in {**data, **said}.items() if k != "deepspeed"}
    by_deepspeed = any(key in flat for key in OWN)
    s = Settings(file, {k: v for k, v in flat.items() if v != AUTO})
    s.notes += _differing(data, said)
    take_precision(s, {*flat})
    if s.flag("pure_bf16"):  # LLaMA-Factory's: loaded in bf16, and neither autocast nor copies in fp32
        s.values = {**s.values, "bf16": True, "torch_dtype": "bfloat16"}
    # Arguments have an "auto" of their own (`flash_attn`, `torch_dtype`), which nobody fills in.
    if by_deepspeed and not own and (left_open := [key for key, value in flat.items() if _is_auto(value)]):
        s.notes.append(
            f"{AUTO}: {', '.join(left_open)}: here Transformers' defaults; convert the TrainingArguments whose "
            f"`deepspeed` names this file, which have the values"
        )
    return s, by_deepspeed


def _differing(arguments: dict[str, Any], said: dict[str, Any]) -> list[str]:
    """Notes on what DeepSpeed's file and the arguments say differently (transformers/integrations/deepspeed.py:
    `fill_match`)."""
    pairs = ((key, SAME.get(key, key)) for key in BATCH_KEYS)
    return [
        f"{key}: DeepSpeed's {show(said[key])} is simulated, not {show(arguments[name])} of the arguments' {name}; "
        "Transformers' Trainer refuses two that differ"
        for key, name in pairs
        if key in said and arguments.get(name) not in (None, said[key])
    ]


def _is_auto(value: object) -> bool:
    """Tell whether a value, or whether a section is used, is left to Transformers."""
    return AUTO in (value, value.get("enabled") if isinstance(value, dict) else None)


def _mapping(file: Path, key: str, value: object) -> dict[str, Any]:
    """The mapping that `deepspeed` or `fsdp_config` of TrainingArguments is, as such, as JSON in a text
    (transformers/training_args.py: _VALID_DICT_FIELDS), or in the file that it names, beside this one or here."""
    if value in OFF:
        return {}
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise InputError(f"{file}: {key}: found {show(value)}; must be a mapping or the name of a JSON file")
    if value.lstrip().startswith("{"):
        found, where = parse_yaml(value, f"{file}: {key}")[0], f"{file}: {key}"
    else:
        named = found_file(file, value)
        if named is None:
            raise InputError(f"{file}: {key}: found {show(value)}; there is no such file, here or beside {file.name}")
        found, where = parse_yaml(read_text(named, MAX_BYTES), str(named))[0], str(named)
    if not isinstance(found, dict):
        raise InputError(f"{where}: holds no mapping; {key} is one")
    return found
