"""Rules on parts of layers that CUDA graphs hold (`training.cuda_graph_scope`), and on maps of tokens and experts."""

from __future__ import annotations

from sim.inputs.input_source import Problems
from sim.inputs.sections import Sections
from sim.inputs.training_config import Training
from sim.variants.frameworks.records import framework_of
from sim.variants.recipes import recipe_of

FILLS = "moe_router_padding_for_quantization"
OF_EXPERTS = ("moe", "moe_router", "moe_preprocess")


def captured_parts(sections: Sections, t: Training) -> Problems:
    """Parts that there are, and that Megatron-Core 0.16.1 captures (transformer/transformer_config.py:
    `__post_init__`)."""
    m, p, r, scope = sections.model, sections.parallelism, t.recompute, t.cuda_graph_scope
    moe = m.moe
    padded = moe is not None and moe.pad_to_capacity
    drops = moe is not None and moe.capacity_factor is not None and not padded
    by_nccl = p.ep_dispatcher in (None, "all_to_all")
    dense = any(not m.is_moe_layer(n) for n in range(m.layers))
    for bad, what in (
        (bool(scope) and m.program is not None, "a described model"),
        (bool(scope) and not framework_of(t).captures_layers, "framework megatron, megatron_bridge or nemo"),
        (bool(scope) and r.mode not in ("none", "selective"), "recompute none or selective"),
        (any(part in scope for part in OF_EXPERTS) and moe is None, "model.moe"),
        ("mlp" in scope and not dense, "a dense layer; all have experts"),
        ("mamba" in scope and m.state_space is None, "model.state_space"),
        ({"moe", "moe_router"} <= {*scope}, "moe or moe_router, not both"),
        ("moe_preprocess" in scope and "moe_router" not in scope, "moe_router beside moe_preprocess"),
        ("moe" in scope and not padded, "model.moe.pad_to_capacity for moe, whose sizes vary without it"),
        ("moe" in scope and p.ep_overlap, "parallelism.ep_overlap false for moe"),
        ("moe_preprocess" in scope and drops and by_nccl, "pad_to_capacity beside capacity_factor for moe_preprocess"),
        ("moe_preprocess" in scope and t.moe_router_padding_for_quantization and by_nccl, f"{FILLS} false"),
        ("moe_router" in scope and r.mode == "selective" and "moe" in r.modules, "recompute without module moe"),
    ):
        if bad:
            yield ("training", "cuda_graph_scope"), f"found {', '.join(scope)}; needs {what}"
            return


def filled_map(sections: Sections, t: Training) -> Problems:
    """Maps of tokens and experts are filled up for matmuls in 8 bits and fewer (transformer_config.py)."""
    moe, recipe = sections.model.moe, recipe_of(t)
    for bad, what in (
        (moe is None, "model.moe"),
        (not framework_of(t).pads_experts, "framework megatron, megatron_bridge or nemo"),
        (recipe is None, "training.precision fp8, mxfp8 or nvfp4"),
        (moe is not None and moe.capacity_factor is not None, "model.moe.capacity_factor null"),
    ):
        if t.moe_router_padding_for_quantization and bad:
            yield ("training", FILLS), f"found true; needs {what}"
