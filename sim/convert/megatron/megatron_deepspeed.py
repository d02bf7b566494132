"""Megatron-DeepSpeed's own settings as arguments of today's Megatron-LM.

microsoft/Megatron-DeepSpeed and bigscience-workshop/Megatron-DeepSpeed: megatron/arguments.py, and
`get_num_experts_per_layer` in megatron/model/transformer.py. The file of `--deepspeed_config` goes to
`deepspeed.initialize`, whose engine goes by it where it says something else than the arguments. Its keys and defaults:
deepspeed/runtime (config.py, zero/config.py, and engine.py: `get_data_types` up to release 0.16).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.convert.scripts.named_files import named_mapping
from sim.convert.scripts.script_data import Script
from sim.convert.settings import Settings
from sim.core.errors import InputError
from sim.variants.frameworks.deepspeed import DEEPSPEED_ZERO

PRECISIONS = ("bf16", "fp16")
BF16_SHARDS = "DeepSpeed's bf16 optimizer shards its states also with ZeRO stage 0 (runtime/bf16_optimizer.py): zero 1"
BATCHES = {"train_batch_size": "global-batch-size", "train_micro_batch_size_per_gpu": "micro-batch-size"}
DEFAULT_STAGE = 1  # of --zero-stage
# Keys of the file that are read elsewhere or change nothing that is simulated.
WITHOUT_EFFECT = (
    *("steps_per_print", "wall_clock_breakdown", "prescale_gradients", "dump_state", "tensorboard", "wandb"),
    *("csv_monitor", "comms_logger", "flops_profiler", "checkpoint", "zero_allow_untested_optimizer"),
    *("zero_force_ds_cpu_optimizer", "data_efficiency", "curriculum_learning", "gradient_accumulation_steps"),
    *("optimizer", "scheduler", "load_universal_checkpoint"),
    # of `zero_optimization`
    *("allgather_partitions", "allgather_bucket_size", "contiguous_gradients", "round_robin_gradients"),
    *("sub_group_size", "cpu_offload", "reduce_scatter", "stage3_param_persistence_threshold"),
    *("stage3_gather_16bit_weights_on_model_save", "elastic_checkpoint", "ignore_unused_parameters"),
)


def of_deepspeed(file: Path, script: Script, flags: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The flags with Megatron-DeepSpeed's settings by today's names; what is simulated otherwise is added to `notes`.

    Raises:
        InputError: for a file of `--deepspeed_config` that holds no mapping, that has a value which its key cannot
            have, or whose batch is not that of the flags.
    """
    # core/tensor_parallel/layers.py: LinearWithGradAccumulationAndAsyncCommunication.backward has no fused kernel.
    found = {**flags, **_experts(flags), "no-gradient-accumulation-fusion": True}
    if str(flags.get("ds-sequence-parallel-size", "1")) != "1":
        found["cp-comm-type"] = "a2a"
    if "embedding" in str(flags.get("pp-partition-method")):  # which stages count with the layers
        found |= {f"account-for-{what}-in-pipeline-split": True for what in ("embedding", "loss")}
        found["pp-partition-method"] = None
    if flags.get("cpu-optimizer"):
        found |= {"cpu-optimizer": None, "optimizer-cpu-offload": True}
    # pretrain_gpt.py: `GPTModelPipe` is a PipelineModule, with one stage, too.
    return by_engine(_config(file, script, flags, notes), found, notes, not flags.get("no-pipeline-parallel"))


def by_engine(config: Settings | None, flags: dict[str, Any], notes: list[str], piped: bool) -> dict[str, Any]:
    """The flags with what DeepSpeed's engine does by its configuration in place of what they say of it. `piped`: the
    model is a PipelineModule."""
    found = flags | _engine(config, flags, piped)
    if found["zero-stage"] == "0" and found.get("bf16"):
        found["zero-stage"] = "1"
        notes.append(BF16_SHARDS)
    return {name: value for name, value in found.items() if value is not None}


def _experts(flags: dict[str, Any]) -> dict[str, Any]:
    """Experts in every n-th layer, with other defaults than today's; None for what they replace."""
    if str(flags.get("num-experts", "1")) == "1":
        return {"num-experts": None}
    each, layers = str(flags.get("expert-interval", "2")), str(flags.get("num-layers"))
    dropless = flags.get("disable-moe-token-dropping")
    found = {
        "expert-interval": None,
        "moe-router-topk": flags.get("topk", "1"),
        "topk": None,
        "moe-token-dispatcher-type": "alltoall",
        "disable-moe-token-dropping": None,
        "moe-train-capacity-factor": "0" if dropless else flags.get("moe-train-capacity-factor", "1.0"),
    }
    if each.isdigit() and layers.isdigit() and int(each):
        dense, groups = int(each) - 1, int(layers) // int(each)
        found["moe-layer-freq"] = f"([0]*{dense}+[1]*1)*{groups}+[0]*{int(layers) % int(each)}"
    return found


def _config(file: Path, script: Script, flags: dict[str, Any], notes: list[str]) -> Settings | None:
    """The file of `--deepspeed_config`; None, and a note, where it is nowhere."""
    name = flags.get("deepspeed-config")
    config = named_mapping(file, script, name) if isinstance(name, str) else None
    if config is None:
        by = "--zero-stage" if "zero-stage" in flags else f"--zero-stage {DEFAULT_STAGE}, the default,"
        why = f"its file {name} is neither in the script nor beside it" if name else "no --deepspeed_config is given"
        notes.append(f"--deepspeed: {by} says how states are sharded, and the other flags the rest: {why}")
        return None
    return Settings(file, config, f"{name}: ", notes=notes)


def _engine(config: Settings | None, flags: dict[str, Any], piped: bool) -> dict[str, Any]:
    """Return flags by what DeepSpeed's engine does: by its config, or without one by the flags; None for flags that it
    ignores."""
    if config is None:
        return {"zero-stage": str(flags.get("zero-stage", DEFAULT_STAGE)), "deepspeed-config": None}
    zero = config.section("zero_optimization")
    stage = zero.integer("stage", 0)
    if str(flags.get("zero-stage", stage)) != str(stage):
        config.notes.append(f"{zero.written_as('stage')} {stage} is simulated, not --zero-stage {flags['zero-stage']}")
    found = {
        "zero-stage": str(stage),
        "deepspeed-config": None,
        **_batch(config, flags),
        **_precision(config, flags, stage),
        **_messages(zero, stage, piped),
        # The engine's; --clip-grad is of Megatron's optimizer. Releases before 0.19.8 may have it off by default.
        "clip-grad": str(config.number("gradient_clipping", 1.0)),
    }
    if _offloads(zero):
        found["optimizer-cpu-offload"] = True
    left = [name for name in config.left() if name.rpartition(": ")[2].rpartition(".")[2] not in WITHOUT_EFFECT]
    config.notes += [f"not expressed here: {', '.join(left)}"] if left else []
    return found


def _batch(config: Settings, flags: dict[str, Any]) -> dict[str, str]:
    """The sizes of batches, which the flags must repeat where they have them."""
    found: dict[str, str] = {}
    for key, flag in BATCHES.items():
        size = config.whole(key)
        if size is None:
            continue
        given = str(flags.get(flag, size))
        if given.isdigit() and int(given) != size:
            problem = f"found {size}, where --{flag} is {given}; must be the same number"
            raise InputError(f"{config.file}: {config.written_as(key)}: {problem}")
        found[flag] = given
    return found


def _precision(config: Settings, flags: dict[str, Any], stage: int) -> dict[str, Any]:
    """The precision of the engine, and what gradients are summed up in: with ZeRO in the same 16 bits, unless
    `data_types` says otherwise; without it bf16's in fp32.

    Raises:
        InputError: where the flags ask for 16 bits and the file for neither of the two.
    """
    sections = {name: config.section(name) for name in PRECISIONS}
    on = next((name for name, section in sections.items() if section.flag("enabled")), None)
    for section in sections.values():
        section.taken.update(section.values)  # loss scales
    given = next((name for name in PRECISIONS if flags.get(name)), None)
    if given and not on:  # DeepSpeed refuses parameters that are not in fp32, too (engine.py)
        problem = f"is off, where --{given} is given; must be {{enabled: true}}"
        raise InputError(f"{config.file}: {config.written_as(given)}: {problem}")
    if on and on != given:
        flag = f"--{given}" if given else "fp32, as no flag says otherwise"
        config.notes.append(f"{config.written_as(on)}: is simulated, because DeepSpeed's engine casts, not {flag}")
    sums = config.section("data_types").take("grad_accum_dtype") or ("fp32" if stage == 0 and on == "bf16" else on)
    in_fp32 = sums == "fp32" and on is not None
    return {
        **dict.fromkeys(PRECISIONS),
        **({on: True} if on else {}),
        "accumulate-allreduce-grads-in-fp32": True if in_fp32 else None,
        "grad-reduce-in-bf16": True if on == "bf16" and not in_fp32 else None,
    }


def _messages(zero: Settings, stage: int, piped: bool) -> dict[str, Any]:
    """Whether gradients are reduced while the backward runs, and the elements of a bucket. Without ZeRO they never are
    (runtime/engine.py: `allreduce_gradients`), nor with ZeRO-1 of a PipelineModule (`_configure_zero_optimizer`:
    "Pipeline parallelism does not support overlapped communication"), which excludes other stages."""
    default = DEEPSPEED_ZERO.bucket_bytes_of(1, 1)
    elements = zero.number("reduce_bucket_size", default)
    overlaps = zero.flag("overlap_comm", stage == 3) and (stage > 1 or (stage == 1 and not piped))
    return {"overlap-grad-reduce": True, "ddp-bucket-size": str(int(elements or default))} if overlaps else {}


def _offloads(zero: Settings) -> bool:
    """Whether the host's CPUs update the parameters. Other offloading is noted, because it is not simulated."""
    devices = {}
    for key in ("offload_optimizer", "offload_param"):
        section = zero.section(key)
        devices[key] = str(section.take("device", "none"))
        section.taken.update(section.values)  # pins and buffers
    found = devices.pop("offload_optimizer") if devices["offload_optimizer"] == "cpu" else None
    for key, device in devices.items():
        if device != "none":
            zero.notes.append(f"{zero.written_as(key)}: offloading to {device} is not simulated")
    return found is not None or zero.values.get("cpu_offload") is True
