"""Megatron-Bridge's and NeMo's YAML as a scenario. Most of its keys have names of Megatron-LM's arguments, and are read
as these.

Megatron-Bridge: the sections of `ConfigContainer` (src/megatron/bridge/training/config.py), whole as a run saves them
or only what overrides a recipe. NeMo before 2.0: the same under `model` and `trainer`
(examples/nlp/language_modeling/conf/megatron_gpt_config.yaml; `sim.convert.bridge.nemo`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sim.convert.bridge.lora import lora_of
from sim.convert.bridge.nemo import adjust, is_nemo, of_nemo, with_values
from sim.convert.bridge.nemo_recipe import PATHS, of_recipe
from sim.convert.bridge.overlap import of_comm_overlap
from sim.convert.bridge.saved import (
    attention_overrides,
    model_with_own_sizes,
    plain,
    runs_as_recipes,
    with_activation,
    with_graphs,
    with_vocabulary,
)
from sim.convert.megatron.model import windows_of
from sim.convert.megatron.scenario import described
from sim.convert.named_models import known_by_name
from sim.convert.scripts.script_data import NO_SCRIPT, Script
from sim.convert.settings import Converted, Machine, Settings
from sim.core.errors import InputError
from sim.inputs.model_input import load_model
from sim.inputs.rules.layers_apart import IN_SIXTEEN_BITS
from sim.inputs.rules.megatron_keys import RANK_CAPACITY, STASH
from sim.variants.frameworks.megatron import MEGATRON, MEGATRON_BRIDGE

# Sections in the order in which they overrule each other: mixed_precision sets what others hold, too (its `setup`).
# What `tokenizer` and `dataset` have, too, is the model's where it has it.
SECTIONS = ("tokenizer", "dataset", "optimizer", "model", "train", "dist", "ddp", "comm_overlap", "mixed_precision")
MARKS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers")  # one in most `model`s
OF_TRAIN = ("train_iters", "micro_batch_size", "global_batch_size")  # one in `train` beside a `model` without
RENAMED = {
    "num_moe_experts": "num-experts",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "microbatch_group_size_per_vp_stage": "microbatch-group-size-per-virtual-pipeline-stage",
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "sequence_length": "seq-length",
    "gated_linear_unit": "swiglu",
    "bucket_size": "ddp-bucket-size",
    "fp8": "fp8-format",
    "fp4": "fp4-format",
    # NeMo before 2.0
    "encoder_seq_length": "seq-length",
    "activations_checkpoint_granularity": "recompute-granularity",
    "activations_checkpoint_method": "recompute-method",
    "activations_checkpoint_num_layers": "recompute-num-layers",
    "ub_tp_comm_overlap": "tp-comm-overlap",
    "rotary_percentage": "rotary-percent",
    "qkv_bias": "add-qkv-bias",
}
INVERTED = {
    "add_bias_linear": "disable-bias-linear",
    "bias": "disable-bias-linear",
    "share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
    "grad_reduce_in_fp32": "grad-reduce-in-bf16",
    "overlap_p2p_comm": "no-overlap-p2p-communication",
}
FUSED = {  # on by default in Megatron-LM's arguments, which have a switch that turns each off
    "apply_rope_fusion": "no-rope-fusion",
    "bias_dropout_add_fusion": "no-bias-dropout-fusion",  # NeMo's name, and the next Megatron-Bridge's
    "bias_dropout_fusion": "no-bias-dropout-fusion",
    "bias_activation_fusion": "no-bias-activation-fusion",  # of whichever activation the model has
    "gradient_accumulation_fusion": "no-gradient-accumulation-fusion",
    "masked_softmax_fusion": "no-masked-softmax-fusion",
    "persist_layer_norm": "no-persist-layer-norm",
}


def _ends_in_16_bits(first: int, last: int) -> dict[str, Any]:
    """The keys of so many first and last layers in 16 bits."""
    return {"first_last_layers_bf16": True, **dict(zip(IN_SIXTEEN_BITS, (first, last), strict=True))}


# `mixed_precision` by a recipe's name (src/megatron/bridge/training/mixed_precision.py).
FP8: dict[str, dict[str, Any]] = {
    "fp8_delayed_scaling": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_param_gather": True},
    "fp8_current_scaling": {
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        "fp8_param_gather": True,
        **_ends_in_16_bits(1, 1),
    },
    "fp8_subchannel_scaling": {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    "mxfp8": {
        "fp8": "e4m3",
        "fp8_recipe": "mxfp8",
        "fp8_param_gather": True,
        "reuse_grad_buf_for_mxfp8_param_ag": True,
    },
}
NVFP4 = {"bf16": True, "fp4": "e2m1", "fp4_param_gather": True}
MIXED: dict[str, dict[str, Any]] = {
    **{f"{bits}_mixed": {bits: True} for bits in ("bf16", "fp16")},
    **{f"{bits}_with_{name}_mixed": {bits: True, **own} for bits in ("bf16", "fp16") for name, own in FP8.items()},
    "bf16_with_nvfp4_mixed": NVFP4,
    "nemotron_3_super_bf16_with_nvfp4_mixed": {**NVFP4, **_ends_in_16_bits(0, 14)},
    "nemotron_3_ultra_bf16_with_nvfp4_mixed": {**NVFP4, **_ends_in_16_bits(0, 16)},
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": {
        "bf16": True,
        **FP8["fp8_current_scaling"],
        **_ends_in_16_bits(2, 2),
    },
    "nanov2_bf16_with_fp8_current_scaling_mixed": {
        "bf16": True,
        "fp8": "hybrid",
        "fp8_recipe": "blockwise",
        "fp8_param_gather": True,
        **_ends_in_16_bits(2, 2),
    },
}
# What pretraining recipes set (`ddp` and `mixed_precision` in src/megatron/bridge/recipes), and providers of models
# with experts (models/qwen/qwen_provider.py): the rest of a YAML that only overrides one.
RECIPES = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bf16": True,
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
    "moe_token_dispatcher_type": "alltoall",
}
OF_RECIPE = (
    "what the YAML leaves to its recipe: bf16, the distributed optimizer, its messages overlapped, as pretraining "
    "recipes have them; else Megatron-LM's defaults, also of sequence parallelism and expert_tensor_parallel_size"
)
BY_MODULE = "quant_recipe"  # formats of single modules, an object
# Keys that change a step and are not simulated: a note names those that a file sets. All other keys that are not read
# name files, logs, schedules and defaults.
NOTED = (
    "activations_checkpoint_layers_per_pipeline",
    "apply_residual_connection_post_layernorm",
    "cpu_offloading_weights",
    "defer_embedding_wgrad_compute",
    "delay_wgrad_compute",
    "deterministic_mode",
    "distribute_saved_activations",
    "fp32_residual_connection",
    "fp4_param_gather",
    "fp8_param_gather",
    "fp8_params",
    "fsdp_cpu_offload",
    "fsdp_double_buffer",
    "fused_residual_rmsnorm",
    "hybrid_context_parallel",
    "keep_fp8_transpose_cache",
    "log_max_attention_logit",
    "log_num_zeros_in_grad",
    "memory_efficient_layer_norm",
    "mla_down_proj_fusion",
    "mixed_precision",  # a recipe that is not known
    "moe_expert_rank_capacity_factor",
    "moe_paged_stash",
    "moe_permute_fusion_into_hybridep",
    "moe_router_padding_for_fp8",
    "moe_router_padding_for_quantization",
    "moe_shared_expert_overlap",
    "nccl_ub",
    "num_buckets",
    "num_micro_batches_with_partial_activation_checkpoints",
    "num_microbatches_with_partial_activation_checkpoints",
    "optimizer_cuda_graph",
    "overlap_dispatch_backward_with_experts_wgrad",
    "overlap_param_gather_with_optimizer_step",
    "qk_clip",
    BY_MODULE,
    "rampup_batch_size",
    "reduce_scatter_with_fp32_accumulation",
    "suggested_communication_unit_size",
    "use_grouped_gemm_for_dense_mlp",
    "use_kitchen",
    "use_transformer_engine_op_fuser",
    "variable_seq_lengths",
)
# Likewise where they are false: parts of the overlap of tensor parallelism, which need the whole.
OF_OVERLAP = ("tp_comm_bulk_dgrad", "tp_comm_bulk_wgrad", "tp_comm_overlap_ag", "tp_comm_overlap_rs")
PADS = "moe_router_padding_for_quantization"
WIDTH_OF_SHARED, WIDTH_OF_LATENT = "moe-shared-expert-intermediate-size", "moe-latent-size"
PACKED = "packed_sequence_specs"  # of `dataset`
AS_ONE = "dataset.packed_sequence_specs: a sequence is simulated as one text; training.packing describes several"
OF_OFFLOADED_LAYERS = ("cpu_offloading_num_layers", "cpu_offloading_weights")
# Entries of a layout that lists its stages (Megatron-LM, core/transformer/enums.py: `LayerType`), in its text.
LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
OFF = (None, False, "", "none")
# Of `NOTED`, by the key of a scenario that says them.
OF_PIPELINE = {
    "defer_embedding_wgrad_compute": "wgrad_deferral_limit",
    "overlap_param_gather_with_optimizer_step": "overlap_param_gather_with_optimizer_step",
}
OF_EXPERTS = {
    "moe_expert_rank_capacity_factor": RANK_CAPACITY,
    "moe_paged_stash": STASH,
    "use_transformer_engine_op_fuser": "fused_experts",
}
OF_BERT = "bert_binary_head"  # of NeMo's megatron_bert_config.yaml


def is_bridge(data: Mapping[str, Any]) -> bool:
    """Tell whether a mapping is a config of Megatron-Bridge or NeMo."""
    model = data.get("model")
    train = data.get("train")
    sized = isinstance(train, dict) and any(mark in train for mark in OF_TRAIN)
    return isinstance(model, dict) and (sized or any(mark in model for mark in MARKS))


def convert_recipe(file: Path, data: dict[str, Any], machine: Machine) -> Converted:
    """The scenario that a recipe of NeMo 2 describes.

    Raises:
        InputError: as `of_recipe` and `convert_bridge` do.
    """
    recipe = of_recipe(file, data, machine)
    found = convert_bridge(file, recipe.sections, recipe.machine, PATHS)
    return replace(found, notes=(*found.notes, *recipe.notes))


def convert_bridge(
    file: Path,
    data: dict[str, Any],
    machine: Machine,
    paths: Mapping[str, str] | None = None,
    script: Script = NO_SCRIPT,
) -> Converted:
    """The scenario that the sections describe. `paths`: where the file has a section or a key, if elsewhere; `script`:
    the file's, if it is a script, for messages with lines.

    Raises:
        InputError: for an encoder, where the model or the number of GPUs is missing, and as `convert_megatron`.
    """
    if OF_BERT in data["model"]:
        what = "an encoder is trained on masked tokens, which is not simulated"
        raise InputError(f"{file}: model.{OF_BERT}: {what}")
    if is_nemo(data):
        data = {**data, "model": with_values(data["model"])}
    data = with_vocabulary(data)
    merged, written = _merged(data, paths or {})
    asked, machine = machine, _machine(data, machine)
    whole = str(data.get("_target_", "")).endswith("ConfigContainer")
    overrides = not is_nemo(data) and not whole
    if overrides:
        merged = RECIPES | ({"bf16": False} if merged.get("fp16") else {}) | merged
    merged |= of_comm_overlap(data, merged, whole)
    flags, names = megatron_flags(merged, written)
    set_sizes(file, flags, machine)
    s = Settings(file, flags, written=names, text=script.text, environment=script.variable)
    found = described(s, machine, _gpus(data))
    _add_lora(found, lora_of(file, data))
    if machine.model is not None and (asked.model is None or overrides):
        found["model"] = model_with_own_sizes(machine.model, data["model"], whole)
        if overrides and (own := _own_attention(file, machine.model, data["model"], flags)):
            model = found["model"]
            found["model"] = (model if isinstance(model, dict) else {"preset": model}) | own
    if whole and found["training"]["framework"] == MEGATRON.name and runs_as_recipes(data, merged):
        _run_as_recipes(found["training"], merged)
    if is_nemo(data):
        adjust(found["training"], merged, s.notes, (data["model"].get("optim") or {}).get("name"))
    if overrides:
        s.notes.append(OF_RECIPE)
    dataset = data.get("dataset")
    s.notes += [AS_ONE] if isinstance(dataset, dict) and dataset.get(PACKED) else []
    left = [written[key] for key in _not_simulated(merged, found["training"], found["parallelism"])]
    return s.converted("megatron", machine, found, left=left + _unread(s, names, left))


def _add_lora(found: dict[str, Any], lora: dict[str, Any] | None) -> None:
    """Put adapters into the section `training`. A frozen output matrix has no gradient that could be put off."""
    if lora is not None:
        found["training"]["lora"] = lora
        found["parallelism"].pop("wgrad_deferral_limit", None)


def _unread(s: Settings, names: Mapping[str, str], left: list[str]) -> list[str]:
    """Further keys than those `left` whose values nothing here says, as the file has them."""
    s.taken |= {key.replace("_", "-") for key in NOTED} & s.values.keys()  # by which no other key is meant
    unread = (s.unknown | {name for name in FUSED.values() if name in s.values}) - s.taken
    return [names[name] for name in sorted(unread) if name in names and names[name] not in left]


def _own_attention(file: Path, name: str, section: Mapping[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """What the file says of attention otherwise than the model that the user names."""
    layers = section.get("num_layers")
    windows = windows_of(Settings(file, flags), layers if type(layers) is int else load_model(name).layers)
    return attention_overrides(section, name, windows)


def _not_simulated(merged: Mapping[str, Any], training: Mapping[str, Any], parallelism: Mapping[str, Any]) -> list[str]:
    """Keys that the file sets, that change a step, and that no key of the scenario says."""
    simulated = {key for key in ("fp8_param_gather", "moe_shared_expert_overlap", PADS) if training.get(key)}
    simulated |= {"moe_router_padding_for_fp8"} if PADS in simulated else set()
    simulated |= {key for key, own in OF_EXPERTS.items() if training.get(own)}
    simulated |= {"delay_wgrad_compute"} if merged.get("overlap_moe_expert_parallel_comm") else set()
    simulated |= {"fsdp_double_buffer", "num_buckets"} if merged.get("use_megatron_fsdp") else set()  # it has units
    simulated |= {key for key, own in OF_PIPELINE.items() if own in parallelism}
    on = [key for key in NOTED if merged.get(key) not in OFF and key not in simulated]
    asked_for = OF_OVERLAP if merged.get("tp_comm_overlap") else ()
    return [*on, *(key for key in asked_for if merged.get(key) is False)]


def set_sizes(file: Path, flags: dict[str, Any], machine: Machine) -> None:
    """Take the numbers of layers and experts, and experts' widths, from `--model` where the file lacks them, as flags
    depend on them.

    Raises:
        InputError: where nothing says how many layers there are.
    """
    if machine.model is not None:
        model = load_model(machine.model)
        flags.setdefault("num-layers", model.layers)
        if model.moe is not None:
            flags.setdefault("num-experts", model.moe.experts)
            widths = {WIDTH_OF_SHARED: model.moe.shared_width or None, WIDTH_OF_LATENT: model.moe.latent}
            flags |= {name: width for name, width in widths.items() if width and name not in flags}
    elif "num-layers" not in flags:
        raise InputError(f"{file}: leaves the model to its recipe: give --model NAME (`stepsim models` lists them)")


def _run_as_recipes(training: dict[str, Any], merged: Mapping[str, Any]) -> None:
    """Name the framework of NVIDIA's recipes, which fuses routers unless the file says otherwise."""
    training.pop("moe_router_fusion", None)
    unfused = merged.get("num_moe_experts") and not merged.get("moe_router_fusion")
    training |= {"framework": MEGATRON_BRIDGE.name} | ({"moe_router_fusion": False} if unfused else {})


def _merged(data: Mapping[str, Any], paths: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The keys of all sections, and the path of each; what is null decides nothing."""
    merged: dict[str, Any] = {}
    written: dict[str, str] = {}
    model = data["model"]
    nested = {"optimizer": model.get("optim")} if isinstance(model.get("optim"), dict) else {}  # NeMo's
    for section in SECTIONS:
        values = {**nested, **data}.get(section)
        if isinstance(values, str) and section == "mixed_precision":
            if (known := values.replace("-", "_")) not in MIXED:
                merged[section], written[section] = values, section
            values = MIXED.get(known, {})
        elif isinstance(values, dict) and section == "mixed_precision" and "_target_" in values:
            values = dict.fromkeys(IN_SIXTEEN_BITS, 0) | values  # the defaults of `MixedPrecisionConfig`
        if isinstance(values, dict) and section == "mixed_precision":
            values = {"fp8_recipe": "tensorwise"} | values  # likewise
        for key, value in values.items() if isinstance(values, dict) else ():
            one = (isinstance(value, dict) or None) if key == BY_MODULE else plain(value)
            if one is not None:
                path = f"{section}.{key}"
                merged[key], written[key] = one, paths.get(path, f"{paths.get(section, section)}.{key}")
    if not merged.get("cpu_offloading"):  # the switch of `TransformerConfig`, where Megatron-LM's own is the number
        merged = {key: value for key, value in merged.items() if key not in OF_OFFLOADED_LAYERS}
    more = of_nemo(data, merged) if is_nemo(data) else with_activation(merged) | with_graphs(merged)
    return merged | more, written


def megatron_flags(merged: Mapping[str, Any], written: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Megatron-LM's flags, and how the file names each."""
    flags: dict[str, Any] = {}
    names: dict[str, str] = {}
    for key, value in merged.items():
        if key in FUSED:
            if not value:
                flags[FUSED[key]], names[FUSED[key]] = True, written.get(key, key)
            continue
        name = RENAMED.get(key) or INVERTED.get(key) or key.replace("_", "-")
        flag = not value if key in INVERTED else value
        if key == "pipeline_model_parallel_layout" and isinstance(value, list):
            stages = [stage if isinstance(stage, list) else [stage] for stage in value]
            flag = "|".join("".join(LETTERS.get(word, word) for word in map(str, stage)) for stage in stages)
        elif isinstance(flag, list):
            flag = " ".join(flag) if all(isinstance(word, str) for word in flag) else str(flag)
        if name.startswith("fp") and name.endswith("-format") and not flag:
            continue
        flags[name], names[name] = flag, written.get(key, key)
    if "num-query-groups" in flags:
        flags["group-query-attention"] = True
    return flags, names


def _machine(data: Mapping[str, Any], machine: Machine) -> Machine:
    """The machine, with the model that the file names by its Hub id or path if that is known here."""
    named = data["model"].get("hf_model_id")
    found = known_by_name(named) if machine.model is None and isinstance(named, str) else None
    return machine if found is None else replace(machine, model=found)


def _gpus(data: Mapping[str, Any]) -> int | None:
    """NeMo's nodes times its devices."""
    trainer = data.get("trainer")
    sizes = [trainer.get(key) for key in ("num_nodes", "devices")] if isinstance(trainer, dict) else []
    whole = [size for size in sizes if type(size) is int]
    return whole[0] * whole[1] if len(whole) == len(sizes) == 2 else None
