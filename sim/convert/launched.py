"""Transformers' `TrainingArguments` on a command line: `torchrun`, `deepspeed` or `accelerate launch` with a script.

Accelerate's config file, where the command names one, says processes and FSDP or DeepSpeed
(accelerate/commands/config/config_args.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.convert.command_line import flags_of, require_one, words_of
from sim.convert.objectives import refuse_script
from sim.core.errors import InputError
from sim.core.files import read_text
from sim.inputs.yaml_input import MAX_BYTES, parse_yaml

MARK = "per_device_train_batch_size"  # which nearly every command sets
SWITCHES = {"true": True, "false": False}
# Arguments of launchers, none of which the training script sees.
LAUNCHERS = (
    *("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "standalone", "rdzv_backend"),
    *("rdzv_endpoint", "rdzv_id", "num_processes", "num_machines", "machine_rank", "main_process_ip"),
    *("main_process_port", "config_file", "num_gpus", "num_nodes", "hostfile", "include"),
)
PROCESSES = (("num_processes", None), ("nproc_per_node", "nnodes"), ("num_gpus", "num_nodes"))


def is_launched(text: str) -> bool:
    """Tell whether a text is a command with Transformers' arguments."""
    return f"--{MARK}" in text.replace("-per-device-train-batch-size", "-" + MARK)


def launched_arguments(file: Path, text: str) -> tuple[dict[str, Any], int | None]:
    """The arguments as `TrainingArguments` in a file has them, and the number of processes if the command says it.

    Raises:
        InputError: for a config file of Accelerate that is not there, and a script that trains for something else than
            next tokens.
    """
    words = words_of(file, text, ends=True)
    refuse_script(file, words)
    require_one(file, words, MARK.replace("_", "-"))
    flags = {name.replace("-", "_"): _typed(value) for name, value in flags_of(words).items()}
    if flags.get("deepspeed") is True:
        flags |= _deepspeed_chat(flags)
    config = _accelerate(file, flags.get("config_file"))
    data = _of_accelerate(config) | {name: value for name, value in flags.items() if name not in LAUNCHERS}
    processes = config.get("num_processes")
    for each, nodes in PROCESSES:
        if type(count := flags.get(each)) is int:
            many = flags.get(nodes, 1) if nodes else 1
            processes = count * many if type(many) is int else None
            break
    return data, processes if type(processes) is int else None


def _deepspeed_chat(flags: dict[str, Any]) -> dict[str, Any]:
    """What DeepSpeed's examples say by flags of their own (DeepSpeedExamples, applications/DeepSpeed-Chat)."""
    zero: dict[str, Any] = {"stage": flags.pop("zero_stage", 0)}
    if flags.pop("offload", False):
        zero["offload_optimizer"] = {"device": "cpu"}
    precision = str(flags.pop("dtype", "fp16"))
    return {"deepspeed": {"zero_optimization": zero}, precision: True}


def _typed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return int(value) if value.isdecimal() else SWITCHES.get(value.lower(), value)


def _accelerate(file: Path, name: Any) -> dict[str, Any]:
    if not isinstance(name, str):
        return {}
    found = next((path for path in (file.parent / name, Path(name)) if path.is_file()), None)
    if found is None:
        raise InputError(f"{file}: --config_file: found '{name[:100]}'; no such file, here or beside {file.name}")
    data: Any = parse_yaml(read_text(found, MAX_BYTES), str(found))[0]
    if not isinstance(data, dict):
        raise InputError(f"{found}: holds no mapping; a config of Accelerate does")
    return data


def _of_accelerate(config: dict[str, Any]) -> dict[str, Any]:
    """What Accelerate's config says, as `TrainingArguments` would."""
    found: dict[str, Any] = {}
    if (precision := config.get("mixed_precision")) in ("bf16", "fp16"):
        found[precision] = True
    kind, fsdp, deepspeed = (config.get(key) for key in ("distributed_type", "fsdp_config", "deepspeed_config"))
    if kind == "FSDP":
        own = {k: v.lower() if isinstance(v, str) else v for k, v in (fsdp if isinstance(fsdp, dict) else {}).items()}
        strategy = str(own.pop("fsdp_sharding_strategy", "full_shard"))
        offload = " offload" if own.pop("fsdp_offload_params", False) else ""
        found |= {"fsdp": f"{strategy} auto_wrap{offload}", "fsdp_config": own}
    if kind == "DEEPSPEED" and isinstance(deepspeed, dict):
        found["deepspeed"] = deepspeed.get("deepspeed_config_file") or _zero(deepspeed)
    return found


def _zero(own: dict[str, Any]) -> dict[str, Any]:
    """A DeepSpeed config of the few answers that Accelerate asks for."""
    zero: dict[str, Any] = {"stage": own.get("zero_stage", 2)}
    for key in ("offload_optimizer", "offload_param"):
        if (device := own.get(f"{key}_device", "none")) != "none":
            zero[key] = {"device": device}
    kept: dict[str, Any] = {key: own[key] for key in ("gradient_accumulation_steps", "gradient_clipping") if key in own}
    return {"zero_optimization": zero, **kept}
