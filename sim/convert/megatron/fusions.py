"""What Megatron-LM's arguments join in one kernel, and what they leave apart."""

from __future__ import annotations

from typing import Any

from sim.convert.settings import Settings
from sim.variants.frameworks.megatron import ROUTERS, has_fusions
from sim.variants.frameworks.records import framework_at


def fusions(s: Settings, framework: str) -> dict[str, Any]:
    """The loss, experts' matmuls, and sums of weight gradients; None where a key is to be left out."""
    return {
        "cross_entropy": _loss(s, framework),
        "moe_grouped_gemm": _grouped_experts(s, framework),
        "moe_router_fusion": _fused_router(s, framework),
        "moe_shared_expert_overlap": _shared_beside(s, framework),
        **_switched_off(s, framework),
        **_switched_on(s, framework),
        "gradient_accumulation_fusion": _accumulation_fusion(s, framework),
    }


def _grouped_experts(s: Settings, framework: str) -> bool | None:
    """Off by default, where the framework can run experts by themselves; fused operators need them grouped."""
    fused = {"use-transformer-engine-op-fuser", "moe-mlp-glu-interleave-size"} <= s.values.keys()
    grouped = s.flag("moe-grouped-gemm") or fused or "num-experts" not in s.values
    return None if grouped or not framework_at(framework, None).runs_experts_apart else False


def _fused_router(s: Settings, framework: str) -> bool | None:
    """On where the script turns it on for a router that the framework does not fuse."""
    fuses = "num-experts" in s.values and s.flag("moe-router-fusion")
    return True if fuses and framework_at(framework, None).router == ROUTERS[False] else None


def _switched_off(s: Settings, framework: str) -> dict[str, Any]:
    """Fusions that the script turns off (megatron/training/arguments.py: `core_transformer_config_from_args`); the
    switch of an activation that the model has not does nothing."""
    apart = {name: s.flag(f"no-bias-{name}-fusion") for name in ("gelu", "swiglu", "activation")}  # the last: Bridge's
    off = {
        "apply_rope_fusion": s.flag("no-rope-fusion"),
        "bias_activation_fusion": apart["activation"] or apart["swiglu" if s.values.get("swiglu") else "gelu"],
        "bias_dropout_fusion": s.flag("no-bias-dropout-fusion"),
    }
    return {key: False for key, flag in off.items() if flag and has_fusions(framework_at(framework, None))}


def _switched_on(s: Settings, framework: str) -> dict[str, Any]:
    """What the script turns on that frameworks of Megatron-Core alone have."""
    keys = ("fused_single_qkv_rope", "calculate_per_token_loss")
    own = has_fusions(framework_at(framework, None))
    return {key: True for key in keys if own and s.flag(key.replace("_", "-"))}


def _shared_beside(s: Settings, framework: str) -> bool | None:
    """On where the script has shared experts; else left to the notes."""
    flag, width = "moe-shared-expert-overlap", s.values.get("moe-shared-expert-intermediate-size")
    simulated = "num-experts" in s.values and width and framework_at(framework, None).sends_probabilities
    other = s.values.get("overlap-moe-expert-parallel-comm") or s.values.get("moe-latent-size")
    if not s.values.get(flag) or not simulated or other or "shared_experts" in str(s.values.get("recompute-modules")):
        return None
    return s.flag(flag) or None


def _accumulation_fusion(s: Settings, framework: str) -> bool | None:
    """Off where the script turns it off; None where the framework has none."""
    off = s.flag("no-gradient-accumulation-fusion")
    return False if off and framework_at(framework, None).accumulates_in_matmul else None


def _loss(s: Settings, framework: str) -> str:
    """The loss in separate operators, in compiled parts (native, the default), or as Transformer Engine's kernels."""
    engine = s.choice("cross-entropy-fusion-impl", {"native": False, "te": True}, "native")
    if not s.flag("cross-entropy-loss-fusion"):
        return "unfused"
    if engine:
        return "fused"
    return "unfused" if framework_at(framework, None).native_loss is None else "native"
