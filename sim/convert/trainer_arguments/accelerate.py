"""Accelerate's settings, of its config file and of `accelerate launch`'s own flags, as `TrainingArguments` has them.

Names: accelerate/commands/config/config_args.py and commands/launch.py of release 1.15.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.core.errors import InputError

# Flags of the launcher that turn a section on, and what they mean in a config file.
KINDS = {"use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "use_megatron_lm": "MEGATRON_LM"}
OF_DEEPSPEED = ("zero_stage", "offload_optimizer_device", "offload_param_device", "deepspeed_config_file")
FSDP, PARALLEL = "fsdp_", "parallelism_config_"
OWN_FSDP = ("fsdp_config", "fsdp_transformer_layer_cls_to_wrap")  # arguments of Transformers' Trainer, too
STRATEGIES = {  # torch's ShardingStrategy, whose numbers older files have
    "1": "full_shard",
    "2": "shard_grad_op",
    "3": "no_shard",
    "4": "hybrid_shard",
    "5": "hybrid_shard_zero2",
}
DEGREES: dict[str, str] = {
    "tp_size": "tensor_parallel_size",
    "cp_size": "context_parallel_size",
    "cp_comm_strategy": "cp_comm_strategy",
    "sp_size": "sequence_parallel_size",
    "dp_shard_size": "dp_shard_size",
    "dp_replicate_size": "dp_replicate_size",
}
# Keys of sequence parallelism that say what is simulated anyhow; attention `eager` is not.
OF_ULYSSES = tuple(
    f"{kind}_{name}"
    for kind in ("cp", "sp")
    for name in ("backend", "seq_length", "seq_length_is_variable", "attn_implementation")
)
# Keys that say how ranks are started, or that are read above.
WITHOUT_EFFECT = (
    *("compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity", "machine_rank", "main_training_function"),
    *("num_machines", "num_processes", "rdzv_backend", "same_network", "tpu_env", "tpu_use_cluster", "tpu_use_sudo"),
    *("use_cpu", "main_process_ip", "main_process_port", "gpu_ids", "distributed_type", "mixed_precision"),
    *("dynamo_config", "fsdp_config", "deepspeed_config", "parallelism_config", "commands", "tpu_name", "tpu_zone"),
)


def with_flags(config: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """The config with what the launcher's flags say, which go first; those are taken out of `flags`."""
    found = dict(config)
    for flag, kind in KINDS.items():
        if flags.pop(flag, None):
            found["distributed_type"] = kind
    sections: dict[str, dict[str, Any]] = {
        "fsdp_config": {k: flags[k] for k in flags if k.startswith(FSDP) and k not in OWN_FSDP},
        "deepspeed_config": {k: flags[k] for k in OF_DEEPSPEED if k in flags},
        "parallelism_config": {k: flags[k] for k in flags if k.startswith(PARALLEL)},
    }
    if flags.pop("use_parallelism_config", None) is None and not config.get("parallelism_config"):
        sections["parallelism_config"] = {}
    if found.get("distributed_type") != "FSDP":
        sections["fsdp_config"] = {}
    if found.get("distributed_type") != "DEEPSPEED":
        sections["deepspeed_config"] = {}
    for name, given in sections.items():
        if given:
            own = found.get(name)
            found[name] = {**(own if isinstance(own, dict) else {}), **given}
            for key in given:
                del flags[key]
    if "mixed_precision" in flags:
        found["mixed_precision"] = flags.pop("mixed_precision")
    if (backend := flags.pop("dynamo_backend", None)) is not None:
        found["dynamo_config"] = {"dynamo_backend": backend}
    return found


def of_accelerate(file: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return an Accelerate config as keys of `TrainingArguments`; what these lack keeps Accelerate's name.

    Raises:
        InputError: for Megatron-LM within Accelerate.
    """
    sections = (config.get(f"{name}_config") for name in ("fsdp", "deepspeed", "dynamo", "parallelism"))
    fsdp, deepspeed, dynamo, parallel = (value if isinstance(value, dict) else {} for value in sections)
    kind, precision = config.get("distributed_type"), config.get("mixed_precision")
    if kind == "MEGATRON_LM":
        raise InputError(f"{file}: distributed_type: found MEGATRON_LM; can be converted: FSDP, DEEPSPEED, MULTI_GPU")
    found: dict[str, Any] = {key: value for key, value in config.items() if key not in WITHOUT_EFFECT}
    if precision in ("bf16", "fp16"):
        found[precision] = True
    elif precision == "fp8":
        found |= {"bf16": True, "mixed_precision": precision}  # which a note names
    if str(dynamo.get("dynamo_backend", "no")).lower() != "no":
        found["torch_compile"] = True
    found |= _degrees({str(key): value for key, value in parallel.items()})
    if kind == "FSDP":
        own = {k: v.lower() if isinstance(v, str) else v for k, v in fsdp.items()}
        own.setdefault("fsdp_version", 1)  # commands/launch.py
        strategy = str(own.pop("fsdp_sharding_strategy", "full_shard"))
        offload = " offload" if own.pop("fsdp_offload_params", False) else ""
        found |= {"fsdp": f"{STRATEGIES.get(strategy, strategy)} auto_wrap{offload}", "fsdp_config": own}
    if kind == "DEEPSPEED" and deepspeed:
        found["deepspeed"] = deepspeed.get("deepspeed_config_file") or _zero(deepspeed)
    return found


def _degrees(parallel: dict[str, Any]) -> dict[str, Any]:
    """Degrees by the names of arguments. DeepSpeed's backend is Ulysses (`sp_size`; TRL's examples of 2025 call it
    `cp_size`); torch's gathers keys and values by default (utils/dataclasses.py: `TorchContextParallelConfig`)."""
    given = {key.removeprefix(PARALLEL): value for key, value in parallel.items()}
    kept = {key for key in given if key in OF_ULYSSES and given[key] != "eager"}
    if given.get("cp_backend") == "deepspeed":
        given["sp_size"] = given.pop("cp_size", 1)
    elif type(size := given.get("cp_size")) is int and size > 1:
        given.setdefault("cp_comm_strategy", "allgather")
    return {DEGREES.get(key, PARALLEL + key): value for key, value in given.items() if key not in kept}


def _zero(own: dict[str, Any]) -> dict[str, Any]:
    """A DeepSpeed config of the few answers that Accelerate asks for."""
    zero: dict[str, Any] = {"stage": own.get("zero_stage", 2)}
    for key in ("offload_optimizer", "offload_param"):
        if (device := own.get(f"{key}_device", "none")) != "none":
            zero[key] = {"device": device}
    kept: dict[str, Any] = {key: own[key] for key in ("gradient_accumulation_steps", "gradient_clipping") if key in own}
    return {"zero_optimization": zero, **kept}
