"""verl's keys of Megatron as Megatron-LM's arguments: degrees, `override_transformer_config`, `override_ddp_config` and
the optimizer's.

Names and defaults: verl 0.9.1, trainer/config/engine/megatron.yaml and optim/megatron.yaml. Its engine asks for
FlashAttention, exchanges tokens by an all-to-all, reduces gradients in fp32, and sends neither gradients nor parameters
beside computations unless `override_ddp_config` says so (workers/engine/megatron/transformer_impl.py:
`provider_overrides`, `_resolve_override_ddp_config`; utils/megatron_utils.py: `make_megatron_module`).
"""

from __future__ import annotations

import re
from typing import Any

from sim.convert.bridge.lora import OF_BRIDGE, modules_of
from sim.convert.bridge.scenario import FUSED, megatron_flags, set_sizes
from sim.convert.megatron.scenario import described
from sim.convert.settings import Machine, Settings, without_effect
from sim.convert.verl_trained import Places

OF_ENGINE = (
    *(f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model")),
    *("expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("sequence_parallel", "use_distributed_optimizer", "use_megatron_fsdp"),
)
DEFAULTS: dict[str, Any] = {
    "bf16": True,
    "optimizer": "adam",
    "sequence_parallel": True,
    "use_distributed_optimizer": True,
    "attention_backend": "flash",
    "moe_grouped_gemm": True,  # of Megatron-Bridge's providers of models with experts
    "moe_permute_fusion": True,
    "moe_token_dispatcher_type": "alltoall",
}
FSDP = {"data_parallel_sharding_strategy": "optim_grads_params", "overlap_grad_reduce": True}  # `use_megatron_fsdp`
DTYPES = {"bfloat16": {}, "bf16": {}, "float16": {"bf16": False, "fp16": True}, "fp16": {"bf16": False, "fp16": True}}


def by_megatron(
    s: Settings, at: Places, machine: Machine, sizes: dict[str, int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sections `training` and `parallelism`. `sizes`: of sequence and batches, by Megatron-Core's names; `machine`:
    with the model and all GPUs.

    Raises:
        InputError: as `described` does.
    """
    keys, written = _keys(s, at)
    merged = DEFAULTS | DTYPES.get(str(keys.pop("dtype", "bfloat16")), {}) | sizes
    merged |= FSDP if keys.get("use_megatron_fsdp") else {}
    merged |= keys
    merged["grad_reduce_in_fp32"] = keys.get("grad_reduce_in_fp32", _in_fp32(merged))
    flags, names = megatron_flags(merged, written)
    set_sizes(s.file, flags, machine)
    own = Settings(s.file, flags, written=names, notes=s.notes, text=s.text)
    found = described(own, machine, machine.gpus)
    read = own.taken | {*without_effect("megatron")}
    s.taken |= {path for key, path in written.items() if key in FUSED and merged.get(key)}
    s.taken |= {path for flag, path in names.items() if flag in read and path in s.values}
    s.taken |= {f"{at.megatron}.{key}" for key in OF_ENGINE}
    return found["training"] | _adapters(s, f"{at.model}.lora"), found["parallelism"]


def _prefixes(at: Places) -> tuple[str, ...]:
    """Where the keys of Megatron-Core's configs stand, the later ones overruling."""
    return (
        *(f"{at.megatron}.", f"{at.optimizer}.", f"{at.optimizer}.override_optimizer_config."),
        *(f"{at.megatron}.override_transformer_config.", f"{at.megatron}.override_ddp_config."),
    )


def _keys(s: Settings, at: Places) -> tuple[dict[str, Any], dict[str, str]]:
    """The values by the names of Megatron-Core's configs, and where each stands; what is null decides nothing."""
    keys: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, path, value in s.under(_prefixes(at)):
        written[name] = path
        if value is not None:
            keys[name] = _unbracketed(value)
        else:
            keys.pop(name, None)
    return keys, {name: path for name, path in written.items() if name in keys}


def _unbracketed(value: Any) -> Any:
    """A value, of a list's text its words (`["core_attn","mlp"]` of Hydra); a number or a switch as it is."""
    words = re.fullmatch(r"\[(.*)\]", value) if isinstance(value, str) else None
    return re.sub(r"[\"'\s]", "", words[1]) if words else value


def _in_fp32(merged: dict[str, Any]) -> bool:
    """Whether gradients are reduced in fp32: unless a precision-aware optimizer keeps them in 16 bits."""
    aware = merged.get("use_precision_aware_optimizer") is True
    return not (aware and str(merged.get("main_grads_dtype", "fp32")) in ("bf16", "bfloat16"))


def _adapters(s: Settings, section: str) -> dict[str, Any]:
    """LoRA, on all four matrices of a layer unless `target_modules` says otherwise (model/hf_model.yaml)."""
    rank = s.integer(f"{section}.rank", 0)
    s.taken |= {f"{section}.alpha", f"{section}.merge"}
    if not rank:
        return {}
    named = _unbracketed(s.take(f"{section}.target_modules")) or ",".join(OF_BRIDGE)
    share = s.number(f"{section}.dropout", 0.0)
    return {"lora": modules_of(s.file, rank, named.split(",")) | ({"dropout": share} if share else {})}
