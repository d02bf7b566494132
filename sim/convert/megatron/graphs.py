"""Megatron-LM's flags of CUDA graphs: what a graph holds, whole layers, parts of them, or the iteration."""

from __future__ import annotations

from typing import Any, get_args

from sim.convert.settings import Settings
from sim.inputs.training_config import GraphPart
from sim.variants.frameworks.records import framework_at

# By --cuda-graph-impl (core/transformer/transformer_config.py).
GRAPHS: dict[str, str | None] = {
    "none": None,
    "local": "layers",
    "transformer_engine": "layers",
    "full_iteration": "step",
}
PARTS = get_args(GraphPart)
SCOPES = ("cuda-graph-scope", "cuda-graph-modules")  # the newer name
# The local implementation captures both or none (`__post_init__`).
TOGETHER = {"moe_router", "moe_preprocess"}


def graphs_of(s: Settings, framework: str) -> dict[str, Any]:
    """`cuda_graphs`, and `cuda_graph_scope` where parts of layers are named."""
    graphs = s.choice("cuda-graph-impl", GRAPHS, "none")
    if graphs is None:
        return {}
    local = s.take("cuda-graph-impl", "none") == "local"
    named = " ".join(str(s.take(name) or "") for name in SCOPES).replace(",", " ").split()
    if "full_iteration" in named or graphs == "step":
        return {"cuda_graphs": "step"}
    parts = [part for part in PARTS if part in named or (local and part in TOGETHER and TOGETHER & {*named})]
    unknown = [name for name in named if name not in (*PARTS, "full")]
    if unknown or (parts and not framework_at(framework, None).captures_layers):
        s.notes.append(f"CUDA graphs of {' '.join(named)}: simulated as graphs of whole layers")
        return {"cuda_graphs": graphs}
    return {"cuda_graphs": graphs} | ({"cuda_graph_scope": parts} if parts else {})
