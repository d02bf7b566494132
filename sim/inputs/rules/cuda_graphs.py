"""Rules on parts of layers that CUDA graphs hold (`training.cuda_graph_scope`)."""

from __future__ import annotations

from sim.inputs.input_source import Problems
from sim.inputs.rules.needs import needs_framework, unmet
from sim.inputs.sections import Sections
from sim.inputs.training_config import Training


def captured_parts(sections: Sections, t: Training) -> Problems:
    """Parts that there are, and that Megatron-Core 0.16.1 captures (transformer/transformer_config.py:
    `__post_init__`)."""
    m, p, r, scope = sections.model, sections.parallelism, t.recompute, {*t.cuda_graph_scope}
    if not scope:
        return
    moe = m.moe
    padded = moe is not None and moe.pad_to_capacity
    drops = moe is not None and moe.capacity_factor is not None and not padded
    by_nccl = p.ep_dispatcher in (None, "all_to_all")
    whole, router, prepared = "moe" in scope, "moe_router" in scope, "moe_preprocess" in scope
    dense = any(not m.is_moe_layer(n) for n in range(m.layers))
    again = r.modules if r.mode == "selective" else ()
    filled = t.moe_router_padding_for_quantization
    needs = (
        (m.program is None, "a described model"),
        needs_framework(t, lambda framework: framework.captures_layers),
        (r.mode in ("none", "selective"), "recompute none or selective"),
        (moe is not None or not (whole or router or prepared), "model.moe"),
        ("mlp" not in scope or dense, "a dense layer; all have experts"),
        ("mamba" not in scope or m.state_space is not None, "model.state_space"),
        (not (whole and router), "moe or moe_router, not both"),
        (not prepared or router, "moe_router beside moe_preprocess"),
        (not whole or padded, "model.moe.pad_to_capacity for moe, whose sizes vary without it"),
        (not (whole and p.ep_overlap), "parallelism.ep_overlap false for moe"),
        (not (prepared and drops and by_nccl), "pad_to_capacity beside capacity_factor for moe_preprocess"),
        (not (prepared and filled and by_nccl), "moe_router_padding_for_quantization false"),
        (not router or "moe" not in again, "recompute without module moe"),
    )
    yield from unmet(("training", "cuda_graph_scope"), t.cuda_graph_scope, needs)
