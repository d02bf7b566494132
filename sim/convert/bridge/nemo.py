"""NeMo's YAML before 2.0 by the names of Megatron-Bridge's: `trainer` and `model`, with `model.optim`.

Names and defaults: nemo/collections/nlp of NVIDIA/NeMo at 2.2.1 (models/language_modeling/megatron_base_model.py and
megatron_gpt_model.py, parts/megatron_trainer_builder.py); of NVIDIA/apex contrib/optimizers/distributed_fused_adam.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sim.convert.named_models import known_by_name
from sim.core.dtypes import dtype_bytes
from sim.variants.frameworks.megatron import MEGATRON, NEMO

PRECISIONS = {"bf16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "16-mixed": "fp16"}  # `trainer.precision`
MCORE, APEX = "mcore_distributed_optim", "distributed_fused_adam"  # optimizers that shard their states
BUCKET_MIB = 100.0  # Apex's default
REMAINDERS = (
    "model.optim: Apex's optimizer, simulated as Megatron-LM's: master weights take 4 bytes; beside bf16 parameters "
    "Apex keeps the other 2 alone (store_param_remainders)"
)
DATE = (
    "framework nemo: as NeMo's launcher ran it in its last releases; training.software_date of an older one, such as "
    "2024-05, brings back its kernel of attention"  # `NEMO.former`
)
FP32 = "model.megatron_amp_O2: false: parameters and their gradients are simulated in fp32, and matmuls under autocast"
# OmegaConf's `${.hidden_size}`, `${model.seq_length}` and NeMo's `${multiply:4, ${.hidden_size}}`.
NAMED = re.compile(r"\$\{[\w.]*?(\w+)\}")
PRODUCT = re.compile(r"\$\{multiply:\s*(\d+)\s*,\s*(\d+)\s*\}")


def is_nemo(data: Mapping[str, Any]) -> bool:
    """Tell whether a mapping with a section `model` is NeMo's."""
    return isinstance(data.get("trainer"), dict)


def with_values(model: Mapping[str, Any]) -> dict[str, Any]:
    """The section with whole numbers in place of texts that name other keys of it, or a multiple of one.

    >>> with_values({"hidden_size": 8, "ffn_hidden_size": "${multiply:4, ${.hidden_size}}"})
    {'hidden_size': 8, 'ffn_hidden_size': 32}
    """
    return {key: _value(value, model) if isinstance(value, str) else value for key, value in model.items()}


def _value(text: str, model: Mapping[str, Any]) -> Any:
    found = NAMED.sub(lambda name: str(number) if type(number := model.get(name[1])) is int else name[0], text)
    found = PRODUCT.sub(lambda factors: str(int(factors[1]) * int(factors[2])), found)
    return int(found) if found != text and found.isdecimal() else text


def of_nemo(data: Mapping[str, Any], merged: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that NeMo gives by other values than Megatron-LM, as flags of the latter; `merged`: the keys of
    all sections."""
    trainer, model = data["trainer"], data["model"]
    found: dict[str, Any] = {}
    if precision := PRECISIONS.get(str(trainer.get("precision"))):
        found[precision] = True
    if (clip := trainer.get("gradient_clip_val")) is not None:
        found["clip_grad"] = clip
    activation = str(merged.get("activation", ""))
    for word, key in (("swiglu", "gated_linear_unit"), ("geglu", "quick_geglu"), ("squared-relu", "squared_relu")):
        found |= {key: True} if word in activation else {}
    if merged.get("fp8") is True:
        found |= {"fp8": "e4m3" if merged.get("fp8_e4m3") else "hybrid"}
    tokenizer = model.get("tokenizer")
    if isinstance(tokenizer, dict) and known_by_name(named := str(tokenizer.get("type"))) is not None:
        found["tokenizer_model"] = named
    if merged.get("transformer_engine") is False and not merged.get("use_flash_attention"):
        found["attention_backend"] = merged.get("attention_backend", "unfused")
    found["overlap_p2p_comm"] = bool(merged.get("overlap_p2p_comm"))  # off by default (core/model_parallel_config.py)
    return found | _replicas(model, merged)


def _replicas(model: Mapping[str, Any], merged: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron-LM's flags of how replicas share states and gradients: FSDP, or the distributed optimizer."""
    if merged.get("fsdp"):
        kept = merged.get("fsdp_sharding_strategy", "full") == "grad"
        return {"use_torch_fsdp2": True, "torch_fsdp2_no_reshard_after_forward": kept, "ub_tp_comm_overlap": False}
    optimizer = optim if isinstance(optim := model.get("optim"), dict) else {}
    if optimizer.get("name") not in (MCORE, APEX):
        return {}
    apex = optimizer["name"] == APEX
    in_fp32 = str(optimizer.get("grad_sync_dtype", "fp32")) in ("fp32", "float32")
    found = {
        "use_distributed_optimizer": True,
        "grad_reduce_in_fp32": in_fp32,
        "overlap_grad_reduce": bool(optimizer.get("overlap_grad_sync", apex)),
        "overlap_param_gather": bool(optimizer.get("overlap_param_sync")),
    }
    if not apex:
        return found
    mib = optimizer.get("bucket_cap_mb", BUCKET_MIB)
    return found | {"bucket_size": int(mib * 2**20 / dtype_bytes("fp32" if in_fp32 else "bf16"))}


def adjust(training: dict[str, Any], merged: Mapping[str, Any], notes: list[str], name: object) -> None:
    """Set what no flag of Megatron-LM says in the section `training`; `name`: the optimizer's."""
    fsdp, sixteen = bool(merged.get("fsdp")), training["precision"] != "fp32"
    if fsdp and str(merged.get("fsdp_grad_reduce_dtype", 32)) in ("bf16", "bf16-mixed"):
        training["grad_reduce_dtype"] = "bf16"
    if sixteen and (fsdp or (merged.get("megatron_amp_O2") is False and name != MCORE)):
        training |= {"param_dtype": "fp32", "grad_dtype": "fp32"}
        notes += [] if fsdp else [FP32]
    elif name == APEX and sixteen:
        notes.append(REMAINDERS)
    if training["framework"] == MEGATRON.name and name != MCORE:  # which comes with Megatron-Core's own buckets
        training["framework"] = NEMO.name
        notes.append(DATE)
