"""Megatron-LM's arguments of 8- and 4-bit training: the format of matmuls, and what else is in 8 bits."""

from __future__ import annotations

from typing import Any

from sim.convert.megatron.static_buffers import static_buffers
from sim.convert.settings import Settings
from sim.inputs.rules.layers_apart import IN_SIXTEEN_BITS

IN_8_BITS = "--fp8-param-gather: parameters are gathered and kept in 16 bits here, where Megatron-LM does both in 8"
LOW = ("fp8", "mxfp8", "nvfp4")
# Each with its own 8-bit parameters, or none on the GPU to cast (training/arguments.py).
OTHER_SHARDS = ("use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2", "deepspeed")
ELSEWHERE = ("optimizer-cpu-offload", "offload-optimizer-states")


def precision_of(s: Settings, recipe: Any) -> str:
    """The format of matmuls: that of 8 or 4 bits, where one is set, else the parameters'."""
    precision = "bf16" if s.flag("bf16") else "fp16" if s.flag("fp16") else "fp32"
    if s.take("fp8-format") is not None:
        precision = "mxfp8" if recipe == "mxfp8" else "fp8"
    return "nvfp4" if s.take("fp4-format") is not None else precision


def in_8_bits(s: Settings, precision: str) -> dict[str, Any]:
    """Return keys of what besides layers' matmuls is multiplied or kept in 8 bits: without 8-bit matmuls activations
    alone."""
    fused = _fused_experts(s, precision)
    attention, stored = s.flag("fp8-dot-product-attention"), s.flag("activation-func-fp8-input-store")
    return {
        "fp8_output_proj": (precision == "mxfp8" and s.flag("fp8-output-proj")) or None,
        "fp8_dot_product_attention": (attention and precision in LOW) or None,
        "activation_func_fp8_input_store": stored or None,
        "fused_experts": fused,
        **static_buffers(s, fused is True),
        "moe_router_padding_for_quantization": _fills_map(s, precision),
        "fp8_param_gather": _parameters(s, precision),
        **_in_sixteen_bits(s, precision),
    }


def _parameters(s: Settings, precision: str) -> bool | None:
    """Whether parameters are kept in 8 bits, which is simulated with the distributed optimizer; MXFP8's are only where
    they are gathered in the gradients' buffer."""
    reuse = "reuse-grad-buf-for-mxfp8-param-ag"
    if precision not in ("fp8", "mxfp8") or not s.flag("fp8-param-gather"):
        return None
    reused = precision == "fp8" or s.flag(reuse)
    others = any(s.values.get(name) for name in (*OTHER_SHARDS, *ELSEWHERE))
    if reused and s.values.get("use-distributed-optimizer") and not others:
        return True
    s.notes.append(IN_8_BITS)
    return None


def _in_sixteen_bits(s: Settings, precision: str) -> dict[str, int]:
    """Layers at either end that stay in 16 bits, one by default (training/arguments.py)."""
    keys = {key: key.replace("_", "-") for key in IN_SIXTEEN_BITS}
    if not s.flag("first-last-layers-bf16") or precision not in LOW:
        s.taken |= {*keys.values()}
        return {}
    return {key: s.integer(name, 1) for key, name in keys.items()}


def _fused_experts(s: Settings, precision: str) -> bool | None:
    """Whether Transformer Engine's kernels of experts also compute the activation: its fused operators, with gate and
    up interleaved or with a squared ReLU that weighs, in MXFP8 and NVFP4 (core/transformer/moe/experts.py:
    `_is_fused_impl_supported`)."""
    interleaved, weighs = "moe-mlp-glu-interleave-size", "use-fused-weighted-squared-relu"
    needed = weighs if s.values.get("squared-relu") else interleaved
    if precision not in ("mxfp8", "nvfp4") or not {"num-experts", needed} <= s.values.keys():
        return None
    if "moe_act" in str(s.values.get("recompute-modules")):
        s.notes.append("fused kernels of experts: simulated apart, as moe_act is recomputed")
        return None
    s.taken.add(interleaved)  # without a gate nothing is interleaved
    return (s.flag("use-transformer-engine-op-fuser") and s.flag(needed, True)) or None


def _fills_map(s: Settings, precision: str) -> bool | None:
    """Whether the router fills up each expert's rows (transformer_config.py has an older name for it, too)."""
    names = [f"moe-router-padding-for-{what}" for what in ("quantization", "fp8")]
    drops = s.values.get("moe-expert-capacity-factor") is not None
    if precision not in LOW or "num-experts" not in s.values or drops:
        return None
    return True in [s.flag(name) for name in names] or None
