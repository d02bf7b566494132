"""DeepSpeed's section `zero_optimization` as keys of a scenario."""

from __future__ import annotations

from typing import Any

from sim.convert.settings import Machine, Settings
from sim.convert.trainer_arguments.deepspeed_settings import AUTO
from sim.core.dtypes import dtype_bytes
from sim.inputs.model_config import ModelConfig
from sim.inputs.model_input import load_model
from sim.variants.frameworks.deepspeed import DEEPSPEED_ZERO

UNREAD_OF_OFFLOAD = ("super_offload",)
CPU_OPTIMIZER = ("offload_optimizer", "cpu")
CPU_PARAMETERS = ("offload_param", "cpu")
FORMER_OFFLOAD = "cpu_offload"  # its name before 2021, still read (runtime/zero/config.py)
PERSISTENT = 100_000  # elements; Transformers' "auto" is ten hidden sizes
PREFETCH = "stage3_prefetch_bucket_size"
OF_STAGE_3 = "stage3_"  # before names that DeepSpeed reads without it, too (runtime/zero/config.py: `alias`)
ALIASED = (
    *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters"),
    *("max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold"),
    *("use_all_reduce_for_fetch_params", "allgather_sequential"),
)
DEFAULTS = {  # elements; the last of a rank's shard
    **dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), DEEPSPEED_ZERO.live_elements),
    "sub_group_size": DEEPSPEED_ZERO.updated_elements,
}
MICS = (
    "zero_optimization.mics_shard_size: simulated as shard_size with one all-reduce over replicas a step; DeepSpeed "
    "0.19.8 has it no more"
)
SCATTERED = {  # `reduce_scatter: false` (runtime/zero/stage_1_and_2.py: `average_tensor`; stage3.py)
    **dict.fromkeys(
        (1, 2), "all-reduces buckets, as is simulated; the simulated step also joins a bucket's parts by copies"
    ),
    3: "is not simulated; gradients are reduce-scattered",
}
IN_TURN = (  # stage_1_and_2.py: `_round_robin_reorder`
    "zero_optimization.round_robin_gradients: false is not simulated; all ranks copy gradients to the host at the same "
    "time, while DeepSpeed's ranks then copy in turn"
)
PLUS_PLUS_ON_HOST = "zero_optimization.offload_param: with ZeRO++ parameters are simulated on the GPU"
NOT_CONTIGUOUS = (
    "zero_optimization.contiguous_gradients: false is not simulated; gradients are copied into buckets that stay"
)


def zero_of(s: Settings, machine: Machine, training: dict[str, Any]) -> dict[str, Any]:
    """ZeRO's stage and buckets; numbers of elements as bytes of the dtypes of gradients and of parameters on their way
    (runtime/zero/config.py: `reduce_bucket_size`, `stage3_prefetch_bucket_size`)."""
    own = _section(s)
    _note_offloads(s, own)
    stage = own.integer("stage", 0)
    found: dict[str, Any] = {"zero": stage}
    overlaps = own.take("overlap_comm")
    if isinstance(overlaps, bool):  # without ZeRO nothing reads it (runtime/engine.py: `allreduce_gradients`)
        found["dp_sync"] = "bucketed" if overlaps and stage else "after_backward"
    # transformers/integrations/deepspeed.py, trainer_config_finalize, fills in what is "auto".
    gathered = int(dtype_bytes(training["precision"]))
    sent = int(dtype_bytes(training.get("grad_reduce_dtype", training["precision"])))
    for name, key, each, share in (
        ("reduce_bucket_size", "bucket_bytes", sent, 1.0),
        (PREFETCH, "gather_bucket_bytes", gathered, 0.9),
    ):
        if own.values.get(name) == AUTO:
            own.taken.add(name)
            found[key] = each * int(share * _model(machine).hidden ** 2)
        elif (elements := own.number(name)) is not None and stage:
            found[key] = max(1, int(each * elements))
    if stage < 3:
        found.pop("gather_bucket_bytes", None)
    elif own.values.get(PREFETCH) == 0:
        del found["gather_bucket_bytes"]
        s.notes.append(f"zero_optimization.{PREFETCH}: 0 is not simulated; parameters are gathered ahead")
    if stage == 3:
        found |= _zero_plus_plus(s, own, training)
    if own.take("reduce_scatter") is False and stage in SCATTERED:
        s.notes.append(f"zero_optimization.reduce_scatter: false {SCATTERED[stage]}")
    if not own.flag("round_robin_gradients") and stage in (1, 2) and offload_of(own.values):
        s.notes.append(IN_TURN)
    if own.take("contiguous_gradients") is False and stage > 0:
        s.notes.append(NOT_CONTIGUOUS)
    _note_persistent(s, own, stage, machine)
    given = {name: own.number(name) for name in DEFAULTS}
    s.notes += [
        f"zero_optimization.{name}: the default of {usual:,} is simulated"
        for name, usual in DEFAULTS.items()
        if stage == 3 and given[name] not in (None, usual)
    ]
    return found


def _section(s: Settings) -> Settings:
    """The section, its keys with their longer names."""
    own = s.section("zero_optimization")
    own.values = {OF_STAGE_3 * (name in ALIASED) + name: value for name, value in own.values.items()}
    return own


def _zero_plus_plus(s: Settings, own: Settings, training: dict[str, Any]) -> dict[str, Any]:
    """ZeRO++ (Wang et al. 2023, arXiv 2306.10209); MiCS, which
    DeepSpeed 0.18 has (zero/mics.py: `allreduce_mics_shard_grads` in the step's last micro-batch), is hybrid
    sharding."""
    found: dict[str, Any] = {}
    few_bits = "weights" in training.get("lora", {})
    if own.flag("zero_quantized_weights") and training["precision"] in ("bf16", "fp16") and not few_bits:
        found["param_gather_dtype"] = "int8"
    if (second := own.size("zero_hpz_partition_size", 1)) > 1:
        found["zero_hpz_partition_size"] = second
    if own.flag("zero_quantized_gradients"):
        found["zero_quantized_gradients"] = True
    if own.values.get(hierarchical := "mics_hierarchical_params_gather") is False:
        own.take(hierarchical)
    if found and training.pop("parameter_offload", False):
        s.notes.append(PLUS_PLUS_ON_HOST)
    if (shard := own.whole("mics_shard_size")) and shard > 0:
        found |= {"shard_size": shard, "all_reduce_once": True}
        s.notes.append(MICS)
    return found


def _note_offloads(s: Settings, own: Settings) -> None:
    """Say what of the offloading to the host or a disk is not simulated; `offload_of` reads what is."""
    own.take(FORMER_OFFLOAD)
    found = offload_of(own.values)
    for key in ("offload_optimizer", "offload_param"):
        value = own.take(key)
        device = value.get("device", "none") if isinstance(value, dict) else "none"
        told = found.get("optimizer_offload" if key == CPU_OPTIMIZER[0] else "parameter_offload")
        if device != "none" and not told:
            s.notes.append(f"zero_optimization.{key}: offloading to {device} is not simulated{_why_not(key, device)}")
        if isinstance(value, dict) and value.get("ratio", 1.0) != 1.0:
            s.notes.append(f"zero_optimization.{key}: ratio {value['ratio']} is not simulated; all of it is offloaded")
        note_inner(s, f"zero_optimization.{key}", value, UNREAD_OF_OFFLOAD)


def _why_not(key: str, device: str) -> str:
    """What parameters on the host lack: their optimizer there, or stage 3, without which DeepSpeed ignores them."""
    return f" without {CPU_OPTIMIZER[0]} on the cpu and stage 3" if (key, device) == CPU_PARAMETERS else ""


def offload_of(section: object) -> dict[str, Any]:
    """Return the keys for an optimizer on the host and for parameters there, where `zero_optimization` asks for them
    ("Valid only with stage 3": runtime/zero/offload_config.py)."""
    if not isinstance(section, dict):
        return {}
    optimizer, parameters = (
        isinstance(section.get(key), dict) and section[key].get("device") == device
        for key, device in (CPU_OPTIMIZER, CPU_PARAMETERS)
    )
    if not (optimizer or section.get(FORMER_OFFLOAD) is True):
        return {}
    there = {"parameter_offload": True} if parameters and section.get("stage") == 3 else {}
    return {"optimizer_offload": CPU_OPTIMIZER[1], **there}


def _note_persistent(s: Settings, own: Settings, stage: int, machine: Machine) -> None:
    """Say where ZeRO-3 keeps matrices whole on every rank, and gathers them after the update (runtime/zero/
    parameter_offload.py: `mark_persistent_parameters`; stage3.py: `persistent_parameters[0].all_gather`)."""
    name = "stage3_param_persistence_threshold"
    own.taken.add(name)
    threshold = PERSISTENT if own.values.get(name, AUTO) == AUTO else own.number(name)
    if stage < 3 or not threshold:
        return
    model = _model(machine)
    smallest = model.hidden * min(model.kv_heads * model.head_dim, model.hidden)
    if threshold >= smallest:
        s.notes.append(
            f"zero_optimization.{name}: tensors of up to {threshold:,.0f} elements stay "
            f"whole, here some of layers' matrices (the smallest has {smallest:,}); all are simulated as sharded"
        )


def note_inner(s: Settings, name: str, section: Any, unread: tuple[str, ...]) -> None:
    """Name keys of a section that are on and that nothing reads."""
    on = [f"{name}.{key}" for key in unread if isinstance(section, dict) and section.get(key)]
    s.notes += [f"not expressed here: {', '.join(on)}"] if on else []


def _model(machine: Machine) -> ModelConfig:
    return load_model(str(machine.model))
