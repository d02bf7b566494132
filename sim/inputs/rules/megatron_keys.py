"""Rules on keys of `training` that Megatron-Core has under the same names: fusions, routers and experts."""

from __future__ import annotations

from sim.inputs.input_source import Problems
from sim.inputs.rules.needs import needs_framework, unmet
from sim.inputs.sections import Sections
from sim.inputs.training_config import ActivationOffload, Training
from sim.variants.frameworks.megatron import FUSIONS, has_fusions
from sim.variants.frameworks.records import framework_of
from sim.variants.recipes import recipe_of

RANK_CAPACITY, STASH = "moe_expert_rank_capacity_factor", "moe_paged_stash_buffer_size_factor_cuda"


def router_fusion(sections: Sections, t: Training) -> Problems:
    """Megatron-Core's router, fused or not (`moe_router_fusion` of TransformerConfig)."""
    if t.moe_router_fusion is not None:
        needs = ((sections.model.moe is not None, "model.moe"), needs_framework(t, has_fusions))
        yield from unmet(("training", "moe_router_fusion"), t.moe_router_fusion, needs)


def fusions(sections: Sections, t: Training) -> Problems:
    """Fusions of Megatron-Core that are off (`FUSIONS`)."""
    for key in FUSIONS:
        if getattr(t, key) is False:
            described = (sections.model.program is None, "a described model; a captured program runs what it ran")
            yield from unmet(("training", key), False, (needs_framework(t, has_fusions), described))


def of_megatron(sections: Sections, t: Training) -> Problems:
    """Keys that Megatron-Core alone has (transformer/attention.py: `split_qkv`, when one kernel is possible;
    distributed/finalize_model_grads.py: `num_tokens`)."""
    m = sections.model
    described = (m.program is None, "a described model")
    if t.fused_single_qkv_rope:
        plain = not m.qk_norm and m.mla is None and not m.attention_gate and t.packing is None
        needs = (
            needs_framework(t, has_fusions),
            (m.positions == "rope", "model.positions rope"),
            (plain, "queries without norms, gates and latents, and no training.packing"),
            (t.attention == "fused", "training.attention fused"),
            described,
        )
        yield from unmet(("training", "fused_single_qkv_rope"), True, needs)
    if t.calculate_per_token_loss:
        yield from unmet(("training", "calculate_per_token_loss"), True, (needs_framework(t, has_fusions), described))


def shared_experts_beside(sections: Sections, t: Training) -> Problems:
    """Megatron-Core's shared experts beside the exchanges (transformer_config.py: `moe_shared_expert_overlap`)."""
    if not t.moe_shared_expert_overlap:
        return
    moe, p, r = sections.model.moe, sections.parallelism, t.recompute
    by_nccl = p.ep_dispatcher in (None, "all_to_all")
    needs = (
        (
            by_nccl or framework_of(t).shares_beside_libraries,
            "parallelism.ep_dispatcher all_to_all before Megatron-Core 0.18 (June 2026)",
        ),
        (moe is not None and moe.shared_width > 0, "model.moe with shared experts"),
        (moe is None or moe.latent is None, "model.moe without latent"),
        needs_framework(t, lambda framework: framework.sends_probabilities),
        (not p.ep_overlap, "parallelism.ep_overlap false"),
        (r.mode != "selective" or "shared_experts" not in r.modules, "recompute without module shared_experts"),
    )
    yield from unmet(("training", "moe_shared_expert_overlap"), True, needs)


def filled_map(sections: Sections, t: Training) -> Problems:
    """Maps of tokens and experts are filled up for matmuls in 8 bits and fewer (transformer_config.py)."""
    if not t.moe_router_padding_for_quantization:
        return
    moe = sections.model.moe
    needs = (
        (moe is not None, "model.moe"),
        needs_framework(t, lambda framework: framework.pads_experts),
        (recipe_of(t) is not None, "training.precision fp8, mxfp8 or nvfp4"),
        (moe is None or moe.capacity_factor is None, "model.moe.capacity_factor null"),
    )
    yield from unmet(("training", "moe_router_padding_for_quantization"), True, needs)


def static_buffers(sections: Sections, t: Training) -> Problems:
    """Buffers of HybridEP for fused experts (transformer_config.py: "requires use_transformer_engine_op_fuser"), and a
    stash of what these keep, which does not wait on the host as well (the same file: `moe_paged_stash`)."""
    offload = t.activation_offload
    named = offload.modules if isinstance(offload, ActivationOffload) else ()
    modules = offload is True or {"expert_fc1", "moe_act"} & {*named}
    capacity, stash = t.moe_expert_rank_capacity_factor, t.moe_paged_stash_buffer_size_factor_cuda
    if capacity is not None:
        needs = (
            (sections.parallelism.ep_dispatcher == "hybridep", "parallelism.ep_dispatcher hybridep"),
            (t.fused_experts, "training.fused_experts true"),
        )
        yield from unmet(("training", RANK_CAPACITY), capacity, needs)
    if stash is not None:
        needs = (
            (capacity is not None, f"training.{RANK_CAPACITY}"),
            (not modules, "activation_offload without layers' experts"),
        )
        yield from unmet(("training", STASH), stash, needs)


MEGATRON_KEYS = (router_fusion, fusions, of_megatron, shared_experts_beside, filled_map, static_buffers)
