"""Megatron-LM's flags of experts."""

from __future__ import annotations

from typing import Any

from sim.emit.common import Emission
from sim.models.moe.routing import dispatcher_of, expert_nodes
from sim.variants.frameworks.records import framework_of


def experts(e: Emission) -> dict[str, Any]:
    """Sizes, router, exchange and layout of experts; nothing for a model without."""
    moe, p = e.scenario.model.moe, e.scenario.parallelism
    if moe is None:
        return {}
    flex = dispatcher_of(p).once_to_a_place
    if flex and p.ep_dispatcher == "deepep":
        e.notes.append("moe-token-dispatcher-type flex: DeepEP; releases before 0.15 need moe-enable-deepep too")
    dense, layers = moe.dense_layers, e.scenario.model.layers
    groups, top_groups = moe.groups, moe.top_groups
    if groups is None and moe.max_nodes_per_token is not None:
        groups = expert_nodes(p, e.scenario.cluster.domain_gpus)
        top_groups = min(groups, moe.max_nodes_per_token)
    return {
        "num-experts": moe.experts,
        "moe-router-topk": moe.top_k,
        "moe-ffn-hidden-size": moe.ffn,
        "moe-grouped-gemm": e.training.moe_grouped_gemm is None,
        "moe-permute-fusion": framework_of(e.training).maps_copies,
        "moe-token-dispatcher-type": "flex" if flex else "alltoall",
        "moe-flex-dispatcher-backend": p.ep_dispatcher if flex and p.ep_dispatcher != "deepep" else None,
        "moe-router-force-load-balancing": True,
        "expert-model-parallel-size": p.ep,
        "expert-tensor-parallel-size": p.expert_tp,
        "moe-shared-expert-intermediate-size": moe.shared_width or None,
        "moe-layer-freq": f'"([0]*{dense}+[1]*{layers - dense})"' if dense else None,
        "moe-expert-capacity-factor": moe.capacity_factor or None,
        "moe-pad-expert-input-to-capacity": moe.pad_to_capacity,
        "moe-router-dtype": "fp32" if moe.router_fp32 else None,
        "moe-router-num-groups": groups,
        "moe-router-group-topk": None if groups is None else top_groups,
        "overlap-moe-expert-parallel-comm": p.ep_overlap,
        "delay-wgrad-compute": p.ep_overlap and p.delay_wgrad_compute,
        "moe-shared-expert-overlap": e.training.moe_shared_expert_overlap,
        "moe-router-padding-for-quantization": e.training.moe_router_padding_for_quantization,
    }
