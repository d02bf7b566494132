"""Megatron-LM's flags that treat some layers or stages, or parts of layers, otherwise than the rest."""

from __future__ import annotations

from typing import Any

from sim.emit.common import Emission
from sim.inputs.rules.layers_apart import IN_SIXTEEN_BITS
from sim.inputs.trainer_names import MEGATRON_CP, MEGATRON_FUSIONS
from sim.inputs.training_config import ActivationOffload
from sim.variants.frameworks.facts import Framework
from sim.variants.frameworks.megatron import FUSED_ROUTER, facts_off
from sim.variants.optimizers import REMAINDERS


def in_sixteen_bits(e: Emission) -> dict[str, Any]:
    """Layers that stay in 16 bits, in fp8 no more at either end than a stage has (`TransformerConfig`)."""
    s, t = e.scenario, e.training
    counts = {key: getattr(t, key) for key in IN_SIXTEEN_BITS}
    if not any(counts.values()):
        return {}
    most = s.model.layers // s.parallelism.pp
    if t.precision != "nvfp4" and max(counts.values()) > most:
        e.refuse("parallelism.pp", f"keeps at most layers / pp = {most} layers in 16 bits at either end")
    return {"first-last-layers-bf16": True} | {key.replace("_", "-"): number for key, number in counts.items()}


def offloaded(e: Emission) -> dict[str, Any]:
    """Activations of layers in host memory, by Transformer Engine, without a pipeline and recomputation
    (`TransformerConfig`); or of parts of layers, by Megatron-Core."""
    offload = e.training.activation_offload
    if not isinstance(offload, ActivationOffload):
        return {}
    if offload.modules:
        return {"fine-grained-activation-offloading": True, "offload-modules": " ".join(offload.modules)}
    e.has_only("parallelism.pp", (1,), "offloads activations of whole layers without a pipeline only")
    mode = e.training.recompute.mode
    if mode != "none":
        e.refuse("training.recompute", "offloads activations of whole layers without recomputation only", mode)
    return {"cpu-offloading-num-layers": offload.layers}


def precision_aware(e: Emission) -> dict[str, Any]:
    """Halves of fp32 copies beside bf16 parameters, and then moments of another dtype."""
    t = e.training
    aware = t.master_weights == REMAINDERS
    moments = ("fp32", "bf16") if aware else ("fp32",)
    e.has_only(
        "training.optimizer_dtype",
        moments,
        "flags for other moments are written only with training.master_weights: remainders",
    )
    if t.param_dtype != "fp32":
        e.has_only("training.master_weights", (None, REMAINDERS), "keeps an fp32 master copy")
    own = {"exp-avg-dtype": t.optimizer_dtype, "exp-avg-sq-dtype": t.optimizer_dtype}
    return {"use-precision-aware-optimizer": True, **own} if aware else {}


def ends_of_pipeline(e: Emission) -> dict[str, Any]:
    """What the last stage puts off, and the first stages' parameters that are gathered beside the optimizer."""
    p = e.scenario.parallelism
    out: dict[str, Any] = {"overlap-param-gather-with-optimizer-step": p.overlap_param_gather_with_optimizer_step}
    if p.wgrad_deferral_limit is not None:
        out |= {"defer-embedding-wgrad-compute": True, "wgrad-deferral-limit": p.wgrad_deferral_limit}
    return out


def context(e: Emission) -> dict[str, Any]:
    """Context parallelism: one way for all layers, or one for each (`--cp-comm-type`), and the degrees of a2a+p2p."""
    p = e.scenario.parallelism
    if p.cp == 1:
        return {}
    methods = p.cp_method_by_layer or (p.cp_method,)
    sizes = p.hierarchical_context_parallel_sizes
    return {
        "cp-comm-type": " ".join(MEGATRON_CP[method] for method in methods),
        "hierarchical-context-parallel-sizes": " ".join(map(str, sizes)) if sizes else None,
    }


def unfused(e: Emission, framework: Framework) -> dict[str, Any]:
    """Fusions that are off."""
    off = facts_off(e.training)
    return {f"no-{name}-fusion": fact in off or not getattr(framework, fact) for name, fact in MEGATRON_FUSIONS.items()}


def fuses_router(e: Emission, framework: Framework) -> bool:
    """Tell whether Transformer Engine's kernels are the router."""
    chosen = e.training.moe_router_fusion
    return framework.router == FUSED_ROUTER if chosen is None else chosen
