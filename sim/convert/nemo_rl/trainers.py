"""NeMo RL's two trainers as the sections `training` and `parallelism`: DTensor with FSDP2, and Megatron-Core.

DTensor keeps parameters and reduces gradients in fp32 (models/dtensor/parallelize.py; models/automodel/setup.py:
`MixedPrecisionPolicy`), checkpoints attention, MLP and norms of each layer, and its loss takes the logits as they are.
Megatron-Core's model is Megatron-Bridge's provider of the checkpoint, of which `policy.megatron_cfg` overrules what
models/megatron/setup.py names.
"""

from __future__ import annotations

from typing import Any

from sim.convert.bridge.lora import OF_BRIDGE, modules_of
from sim.convert.bridge.scenario import FUSED, megatron_flags, set_sizes
from sim.convert.megatron.scenario import described
from sim.convert.settings import FSDP_ON_HOST, Machine, Settings, without_effect, without_none
from sim.convert.trainer_arguments.adapters import layers_of
from sim.core.errors import InputError
from sim.inputs.input_source import show
from sim.inputs.model_input import load_model

MEGATRON, DTENSOR = "policy.megatron_cfg", "policy.dtensor_cfg"
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# Where the keys of Megatron-Core's configs stand, the later ones overruling.
PREFIXES = (f"{MEGATRON}.", f"{MEGATRON}.optimizer.", f"{MEGATRON}.distributed_data_parallel_config.")
FP8 = f"{MEGATRON}.fp8_cfg"
OF_FP8 = {"fp8": "fp8", "fp8_recipe": "fp8_recipe", "fp8_param": "fp8_param_gather"}
PROVIDER: dict[str, Any] = {"optimizer": "adam", "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"}
# Not passed on to Megatron-Core (`_create_megatron_config`), or without effect on a step.
UNUSED = ("use_custom_fsdp", "data_parallel_sharding_strategy", "average_in_collective", "enabled", "params_dtype")
# Of which Megatron-Core's flags would say something else.
OWN = ("activation_checkpointing", "freeze_moe_router", "train_iters", "pipeline_dtype", "defer_fp32_logits")
LOOP = (
    "policy.optimizer: foreach and fused are false, which is torch's loop over parameters; the kernels of "
    "adamw_kernels: foreach are simulated, which read and write as much"
)
GATHERED = "policy.dtensor_cfg.context_parallel_size: simulated as gathered keys and values"


def by_megatron(s: Settings, machine: Machine, sizes: dict[str, int]) -> dict[str, Any]:
    """The two sections. `sizes`: of sequence and batch, by Megatron-Core's names; `machine`: with model and GPUs.

    Raises:
        InputError: as `described` does.
    """
    keys, written = _keys(s)
    bits = _precision(s)
    s.taken.add("policy.max_grad_norm")  # of which optimizer.clip_grad is made
    s.taken.add(f"{MEGATRON}.optimizer.fp16")  # as policy.precision says
    merged = PROVIDER | sizes | {"micro_batch_size": 1, "bf16": bits == "bf16", "fp16": bits == "fp16"} | keys
    if s.flag(f"{MEGATRON}.activation_checkpointing"):
        merged |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if s.flag(f"{FP8}.enabled"):
        merged |= {name: s.take(f"{FP8}.{key}") for key, name in OF_FP8.items() if s.values.get(f"{FP8}.{key}")}
    flags, names = megatron_flags(merged, written)
    set_sizes(s.file, flags, machine)
    own = Settings(s.file, flags, written=names, notes=s.notes)
    found = described(own, machine, machine.gpus)
    read = own.taken | {*without_effect("megatron")}
    s.taken |= {path for key, path in written.items() if key in FUSED}
    s.taken |= {path for flag, path in names.items() if flag in read}
    s.taken |= {f"{prefix}{key}" for prefix in PREFIXES for key in UNUSED if not _asked(s, prefix, key)}
    if load_model(str(machine.model)).moe is None:
        s.taken.add(f"{MEGATRON}.freeze_moe_router")
        s.taken |= {f"{MEGATRON}.{key}" for key in keys if key.startswith("moe_")}
    return {"training": found["training"] | _adapters(s), "parallelism": found["parallelism"]}


def _asked(s: Settings, prefix: str, key: str) -> bool:
    return key == "use_custom_fsdp" and s.values.get(f"{prefix}{key}") is True


def _keys(s: Settings) -> tuple[dict[str, Any], dict[str, str]]:
    """The values by the names of Megatron-Core's configs, and where each stands."""
    keys: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, path, value in s.under(PREFIXES):
        if name not in (*UNUSED, *OWN):
            keys[name], written[name] = value, path
    return keys, written


def _precision(s: Settings) -> str:
    word = str(s.take("policy.precision", "bfloat16"))
    if word not in PRECISIONS:
        raise InputError(f"{s.file}: policy.precision: found {show(word)}; must be one of {', '.join(PRECISIONS)}")
    return PRECISIONS[word]


def _adapters(s: Settings) -> dict[str, Any]:
    """Megatron-Bridge's LoRA; an empty list of modules is all of them."""
    own = f"{MEGATRON}.peft"
    if not s.flag(f"{own}.enabled"):
        return {}
    named = s.take(f"{own}.target_modules") or [*OF_BRIDGE]
    share = s.number(f"{own}.dropout", 0.0)
    s.taken |= {f"{own}.{key}" for key in ("alpha", "dropout_position", "lora_A_init_method", "lora_B_init_method")}
    found = modules_of(s.file, s.size(f"{own}.dim"), named)
    return {"lora": found | ({"dropout": share} if share else {})}


def by_dtensor(s: Settings, machine: Machine, sizes: dict[str, int]) -> dict[str, Any]:
    """The two sections, as `by_megatron` has them.

    Raises:
        InputError: for experts that are split, and sizes that do not divide.
    """
    tp, cp = (s.size(f"{DTENSOR}.{kind}_parallel_size", 1) for kind in ("tensor", "context"))
    if (ep := s.size(f"{DTENSOR}.expert_parallel_size", 1)) > 1:
        why = "models of NeMo AutoModel, which split experts, are not simulated"
        raise InputError(f"{s.file}: {DTENSOR}.expert_parallel_size: found {ep}; must be 1; {why}")
    layout = {
        "dp": s.ranks(None, machine, tp * cp, "tp·cp of policy.dtensor_cfg"),
        "tp": tp if tp > 1 else None,
        "sp": True if tp > 1 and s.flag(f"{DTENSOR}.sequence_parallel") else None,
        "cp": cp if cp > 1 else None,
        "cp_method": "all_gather" if cp > 1 else None,
        "zero": 3,
        "fsdp_version": 2,
    }
    s.notes += [GATHERED] if cp > 1 else []
    s.taken.add(f"{DTENSOR}.sequence_parallel")
    return {"training": _of_dtensor(s, sizes), "parallelism": without_none(layout)}


def _of_dtensor(s: Settings, sizes: dict[str, int]) -> dict[str, Any]:
    name = str(s.take("policy.optimizer.name", "torch.optim.AdamW"))
    if name.rpartition(".")[2] not in ("AdamW", "Adam"):
        raise InputError(f"{s.file}: policy.optimizer.name: found {show(name)}; can be converted: torch.optim.AdamW")
    kernels = {kind: s.values.get(f"policy.optimizer.kwargs.{kind}") for kind in ("fused", "foreach")}
    s.taken |= {key for key in s.values if key.startswith("policy.optimizer.kwargs.")}
    if kernels["fused"] is not True and kernels["foreach"] is False:
        s.notes.append(LOOP)
    offloads = s.flag(f"{DTENSOR}.cpu_offload")
    return {
        "seq_len": sizes["seq_length"],
        "micro_batch_size": 1,
        "global_batch_size": sizes["global_batch_size"],
        "precision": _precision(s),
        "param_dtype": "fp32",
        "grad_reduce_dtype": "fp32",
        "gradient_clipping": (s.number("policy.max_grad_norm", 0.0) or 0.0) > 0,
        "attention": "fused",
        "optimizer": "adamw",
        "adamw_kernels": "fused" if kernels["fused"] is True else "foreach",
        "framework": "transformers",
        "recompute": "full" if s.flag(f"{DTENSOR}.activation_checkpointing") else "none",
        **(FSDP_ON_HOST if offloads else {}),
        **_dtensor_adapters(s),
    }


def _dtensor_adapters(s: Settings) -> dict[str, Any]:
    own = f"{DTENSOR}.lora_cfg"
    if not s.flag(f"{own}.enabled"):
        s.taken |= {key for key in s.values if key.startswith(f"{own}.")}
        return {}
    share, modules = s.number(f"{own}.dropout", 0.0), s.listed(f"{own}.target_modules")
    everything = s.flag(f"{own}.match_all_linear", not modules)
    found = [] if everything else layers_of(modules)
    if modules and not everything and not found:
        raise InputError(f"{s.file}: {own}.target_modules: found {show(modules)}; none of them is known")
    s.taken |= {f"{own}.{key}" for key in ("alpha", "dropout_position", "lora_A_init", "use_triton")}
    lora: dict[str, Any] = {"rank": s.size(f"{own}.dim")}
    return {"lora": lora | ({"targets": found} if found else {}) | ({"dropout": share} if share else {})}
