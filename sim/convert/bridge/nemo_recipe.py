"""A recipe of NeMo 2 by the sections and names of Megatron-Bridge's config, which came from it.

`nemo llm pretrain --factory llama3_8b --to-yaml recipe.yaml` writes such a file, and `YamlSerializer` of NeMo-Run
(nemo_run/core/serialization/yaml.py): objects with a `_target_`, of which only the arguments that a recipe gives are
written. Defaults and classes are those of NeMo 2.4.0: lightning/pytorch/strategies/megatron_strategy.py,
lightning/pytorch/plugins/mixed_precision.py, lightning/pytorch/callbacks/megatron_comm_overlap.py, and models'
dataclasses in collections/llm/gpt/model, whose sizes are in nemo_models.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from sim.convert.named_models import known_by_name
from sim.convert.settings import Machine
from sim.core.errors import InputError
from sim.inputs.cluster_input import resolve_cluster
from sim.inputs.input_source import Source, show
from sim.inputs.model_input import load_model

_MODELS = Path(__file__).with_name("nemo_models.yaml")
STRATEGY, CONFIG = "MegatronStrategy", "model.config._target_"
API = "nemo.collections.llm.api."
OVERLAP, DROPS, DEEPEP = "MegatronCommOverlapCallback", "MegatronTokenDropCallback", "DeepEPCallback"
OF_CAPACITY = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
BY_DEEPEP = {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True, "moe_shared_expert_overlap": False}
WITH_DEEPEP = ("ampere", "hopper")
FAMILY = "family"  # of nemo_models.yaml
# Where a recipe has what the sections of Megatron-Bridge have.
PATHS = {
    "model": "model.config",
    "dist": "trainer.strategy",
    "ddp": "trainer.strategy.ddp",
    "optimizer": "optim.config",
    "mixed_precision": "trainer.plugins",
    "train": "data",
    "dataset": "data",
}
# Defaults of `GPTConfig` (collections/llm/gpt/model/base.py) that Megatron-LM's arguments have otherwise. Sums of
# weight gradients are fused where Transformer Engine is installed (`_grad_accum_fusion_available`), as in NVIDIA's
# containers.
OF_CONFIG = {
    **dict.fromkeys(("bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion", "overlap_p2p_comm"), False),
    **dict.fromkeys(("masked_softmax_fusion", "gradient_accumulation_fusion", "cross_entropy_loss_fusion"), True),
}
# Keys of the strategy that it sets in the model's config, and others that are Megatron-LM's.
OF_STRATEGY = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "use_tp_pp_dp_mapping"),
    *("num_distributed_optimizer_instances", "microbatch_group_size_per_vp_stage"),
)
# Further arguments of the strategy, which change no step, beside those of checkpoints.
HARMLESS = (
    *("_target_", "ddp", "fsdp", "gradient_as_bucket_view", "pipeline_dtype", "use_te_rng_tracker", "lazy_init"),
    *("setup_optimizers", "find_unused_parameters", "cluster_environment", "parallel_devices", "restore_config"),
    *("progress_interval", "replace_progress_bar", "save_ckpt_format", "megatron_log_level", "data_sampler"),
    *("pipeline_model_parallel_split_rank", "init_model_parallel", "use_gloo_process_groups"),
)
OF_CHECKPOINTS, SHARP = "ckpt_", "use_sharp"
BY_WORD = {"bf16": "bf16", "bf16-mixed": "bf16", "fp16": "fp16", "16": "fp16", "16-mixed": "fp16", "fp16-mixed": "fp16"}
# Of `MegatronMixedPrecision`: what it sets in the model, in `ddp` and in the optimizer.
OF_PLUGIN = {
    "grad_reduce_in_fp32": True,
    "first_last_layers_bf16": False,
    "fp8_dot_product_attention": False,
    "num_layers_at_start_in_bf16": 0,
    "num_layers_at_end_in_bf16": 0,
    "fp8_recipe": "delayed",
}
OF_OVERLAP = (
    *("tp_comm_overlap", "overlap_p2p_comm", "overlap_grad_reduce", "overlap_param_gather", "bucket_size"),
    *("overlap_param_gather_with_optimizer_step", "defer_embedding_wgrad_compute", "wgrad_deferral_limit"),
)
# Without a tokenizer a mock module has GPT-2's (collections/llm/gpt/data/mock.py).
MOCK, OF_GPT2 = "MockDataModule", 50257
WHOLE = {"_target_": "ConfigContainer"}  # no key is left to a recipe


class Recipe(NamedTuple):
    """A recipe's sections by the names of Megatron-Bridge, the machine with its GPUs, and notes."""

    sections: dict[str, Any]
    machine: Machine
    notes: tuple[str, ...]


def is_nemo_recipe(data: Mapping[str, Any]) -> bool:
    """Tell whether a mapping is a recipe of NeMo 2: its API's call, or a trainer with its strategy."""
    of_api = str(data.get("_target_", "")).startswith(API)
    return of_api or _class(_inner(_inner(data, "trainer"), "strategy")) == STRATEGY


def of_recipe(file: Path, data: Mapping[str, Any], machine: Machine) -> Recipe:
    """The recipe's sections.

    Raises:
        InputError: for a trainer without Megatron's strategy, and for a model's class whose sizes are not known here.
    """
    trainer = _inner(data, "trainer")
    strategy = _inner(trainer, "strategy")
    if _class(strategy) != STRATEGY:
        found = strategy.get("_target_", trainer.get("strategy"))
        raise InputError(f"{file}: trainer.strategy: found {show(found)}; can be converted: nemo's {STRATEGY}")
    plugin = _plugin(trainer)
    optimizer = _inner(_inner(data, "optim"), "config")
    model = _model(file, data, machine)
    ddp = strategy.get("ddp")
    sections: dict[str, Any] = {
        **WHOLE,
        "model": model,
        "dist": {key: strategy[key] for key in OF_STRATEGY if strategy.get(key) is not None} | _fsdp(strategy),
        "ddp": _ddp(ddp if isinstance(ddp, dict) else {}, optimizer),
        "optimizer": optimizer,
        "mixed_precision": plugin,
        "train": {key: _inner(data, "data").get(key) for key in ("micro_batch_size", "global_batch_size")},
        "dataset": {"packed_sequence_specs": _inner(data, "data").get("packed_sequence_specs")},
        "peft": data.get("peft", data.get("model_transform")),
        # Nothing looks at the loss while a step runs (lightning/megatron_parallel.py: MaskedTokenLossReduction).
        "rerun_state_machine": {"check_for_nan_in_loss": False},
    }
    callbacks = {_class(one): one for one in _listed(trainer, "callbacks")}
    model |= _of_experts(file, callbacks, machine)
    if (overlap := callbacks.get(OVERLAP)) is not None:
        sections["comm_overlap"] = {key: overlap[key] for key in OF_OVERLAP if overlap.get(key) is not None}
        model.pop("overlap_p2p_comm", None)  # which the callback decides by the stages
    gpus = [trainer.get("num_nodes", 1), trainer.get("devices")]
    if machine.gpus is None and all(type(number) is int for number in gpus):
        machine = replace(machine, gpus=gpus[0] * gpus[1])
    return Recipe(sections, machine, _notes(strategy))


def model_of_class(file: Path, written: str) -> dict[str, Any]:
    """The keys of a model's class, with its family's.

    Raises:
        InputError: for a class that is not known here.
    """
    name = written.rpartition(".")[2]
    for family in _models().values():
        if name in family and name != FAMILY:
            return {**OF_CONFIG, **family.get(FAMILY, {}), **family[name]}
    known = f"sizes are known of {sum(len(family) - (FAMILY in family) for family in _models().values())} classes"
    advice = "name the model by --model, or give num_layers and the other sizes beside the class"
    raise InputError(f"{file}: {CONFIG}: found {show(name)}; {known}, such as Llama3Config8B: {advice}")


@cache
def _models() -> dict[str, dict[str, dict[str, Any]]]:
    return msgspec.yaml.decode(_MODELS.read_bytes(), type=dict[str, dict[str, dict[str, Any]]])


def _model(file: Path, data: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    """The section `model`, of the class, the recipe's own keys and the data."""
    own = _inner(_inner(data, "model"), "config")
    written = {key: value for key, value in own.items() if key != "_target_"}
    sized = machine.model is not None or "num_layers" in written
    try:
        of_class = model_of_class(file, str(own.get("_target_", "")))
    except InputError:
        if not sized:
            raise
        of_class = dict(OF_CONFIG)
    model = of_class | written
    if (length := _inner(data, "data").get("seq_length")) is not None:
        model["seq_length"] = length
    if model.get("vocab_size") is None and (entries := _vocab(data)) is not None:
        model["vocab_size"] = entries
    return model


def _vocab(data: Mapping[str, Any]) -> int | None:
    """The tokenizer's entries, where the recipe says them."""
    module = _inner(data, "data")
    tokenizer = _inner(module, "tokenizer") or _inner(_inner(data, "model"), "tokenizer")
    if not tokenizer:
        return OF_GPT2 if _class(module) == MOCK else None
    size = tokenizer.get("vocab_size")
    if tokenizer.get("library") == "null" and type(size) is int:
        return size + 1  # common/tokenizers/null_tokenizer.py: the end of a document
    named = str(tokenizer.get("pretrained_model_name") or tokenizer.get("model_name"))
    return None if (found := known_by_name(named)) is None else load_model(found).vocab


def _plugin(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """The section `mixed_precision` of the trainer's plugin; without one parameters have fp32."""
    plugins = trainer.get("plugins")
    listed = plugins if isinstance(plugins, list) else [plugins]
    plugin = next((one for one in listed if isinstance(one, dict) and "precision" in one), None)
    if plugin is None:
        return {}
    found = {key: plugin.get(key, usual) for key, usual in OF_PLUGIN.items()}
    if word := BY_WORD.get(str(plugin["precision"])):
        found[word] = True
    for name in ("fp8", "fp4"):
        found |= {name: plugin[name]} if plugin.get(name) else {}
    gathers = plugin.get("fp8_param_gather", plugin.get("fp8_params"))
    return found | {"fp8_param_gather": bool(gathers)}


def _ddp(own: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """The section `ddp`: the optimizer says whether it is sharded (megatron_strategy.py: `connect`)."""
    sharded = bool(optimizer.get("use_distributed_optimizer"))
    return {**own, "use_distributed_optimizer": sharded}


def _fsdp(strategy: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's FSDP, or torch's, by the strategy's word; the latter's class is that of an older release."""
    kind = strategy.get("fsdp")
    return {"use_megatron_fsdp": True} if kind == "megatron" else {"use_torch_fsdp2": True} if kind else {}


def _of_experts(file: Path, callbacks: Mapping[str, Mapping[str, Any]], machine: Machine) -> dict[str, Any]:
    """The keys of the model that callbacks set as training starts: a capacity of experts (moe_token_drop.py), and
    DeepEP on the GPUs that it is built for (deepep.py: compute capability 8 or 9)."""
    found: dict[str, Any] = {}
    if (drops := callbacks.get(DROPS)) is not None:
        found = {key: drops.get(key, usual) for key, usual in OF_CAPACITY.items()}
    if DEEPEP in callbacks:
        gpu = resolve_cluster(machine.cluster, 1, Source(str(file), {"cluster": machine.cluster})).gpu
        found |= BY_DEEPEP if gpu.architecture in WITH_DEEPEP else {}
    return found


def _notes(strategy: Mapping[str, Any]) -> tuple[str, ...]:
    """What the strategy is told and nothing here reads."""
    given = [key for key, value in strategy.items() if value not in (None, False)]
    known = {*OF_STRATEGY, *HARMLESS}
    left = [f"trainer.strategy.{key}" for key in given if key not in known and not key.startswith(OF_CHECKPOINTS)]
    reduces = f"trainer.strategy.{SHARP}: cluster.inter_node.sharp=true has it, if NCCL finds its plugin"
    notes = [reduces] if SHARP in given else []
    left = [name for name in left if not name.endswith(f".{SHARP}")]
    return (*notes, *([f"not expressed here: {', '.join(left)}"] if left else []))


def _class(value: Any) -> str:
    return str(value.get("_target_", "")).rpartition(".")[2] if isinstance(value, dict) else ""


def _inner(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A mapping inside another; an empty one for all else."""
    return value if isinstance(value := data.get(key), dict) else {}


def _listed(data: Mapping[str, Any], key: str) -> list[Any]:
    return value if isinstance(value := data.get(key), list) else []
