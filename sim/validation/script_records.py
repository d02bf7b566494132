"""Records of launch scripts: whose script it is, of which releases, for which rows, and what it sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sim.inputs.overrides import merge


class Sizes(NamedTuple):
    """The sizes by which a row's model is told from others."""

    layers: int
    hidden: int
    experts: int


class LaunchScript(NamedTuple):
    """Keys that `framework`'s script sets for a model, in releases from the month `since` on and before `until`.

    `gpus`, `precisions`, `recipes`, `layouts` (pp and virtual stages), `zero`, `mlp`: what the script is for, empty for
    all.
    """

    framework: str
    model: Sizes
    changes: Mapping[str, Any]
    source: str
    gpus: tuple[str, ...] = ()
    since: str = ""
    until: str = "9999"
    precisions: tuple[str, ...] = ()
    layouts: tuple[tuple[int, int], ...] = ()
    zero: tuple[int, ...] = ()
    mlp: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()


BRIDGE = "megatron_bridge"
DEEPSEEK_V3, QWEN3_30B, QWEN3_235B = Sizes(61, 7168, 256), Sizes(48, 2048, 128), Sizes(94, 4096, 128)
GPT_OSS_120B, KIMI_K2 = Sizes(36, 2880, 128), Sizes(61, 7168, 384)
LLAMA3_8B, LLAMA3_70B, LLAMA31_405B = Sizes(32, 4096, 0), Sizes(80, 8192, 0), Sizes(126, 16384, 0)
LLAMA2_13B, GPT3_5B, GPT3_20B, GPT3_175B = (Sizes(*x, 0) for x in ((40, 5120), (24, 4096), (44, 6144), (96, 12288)))
H100, DGX, NVL72 = ("h100-sxm",), ("b200-sxm", "b300-sxm"), ("gb200", "gb300")
BLACKWELL = (*DGX, *NVL72)
B200, B300, VR200 = ("b200-sxm",), ("b300-sxm",), ("vr200",)


def graphs_of(*scope: str) -> dict[str, Any]:
    """A script's `cuda_graph_scope` beside `cuda_graph_impl` transformer_engine."""
    return {"training": {"cuda_graphs": "layers", "cuda_graph_scope": list(scope)}}


GRAPHED_PARTS = graphs_of("attn", "moe_router", "moe_preprocess")
WITHOUT_ATTENTION = graphs_of("moe_router", "moe_preprocess")
WHOLE_GRAPH = {"training": {"cuda_graphs": "step", "cuda_graph_scope": []}}
# training/utils/moe_token_drop.py: apply_moe_token_drop
TOKEN_DROP = {"model": {"moe": {"capacity_factor": 1.0, "pad_to_capacity": True}}}
PAIRED = {"parallelism": {"ep_overlap": True}}
ATTENTION_IN_8_BITS = {"training": {"fp8_dot_product_attention": True}}
PROJECTED_IN_8_BITS = {"training": {"fp8_output_proj": True}}
# Scripts that set cuda_graph_impl full_iteration also set moe_a2a_overlap and cutedsl_fused_grouped_mlp.
FULL_ITERATION = merge(WHOLE_GRAPH | PAIRED, {"training": {"fused_experts": True}})
HEAD_NORMS = {"model": {"qk_norm": True}}
SHARED_BESIDE = {"training": {"moe_shared_expert_overlap": True}}  # with NCCL's exchanges, unless they pair
DEEP_EP, HYBRID_EP = ({"parallelism": {"ep_dispatcher": name}} for name in ("deepep", "hybridep"))
TP_BESIDE_WEIGHTS = {"parallelism": {"tp_overlap": "wgrad"}}  # without userbuffers, as Transformer Engine always does
NOT_RECOMPUTED = {"training": {"recompute": "none"}}
# recipes/deepseek/deepseek_v3.py: set_deepseek_v3_pipeline_model_parallel_layout; a script's Et|(tt|)*30mL on 32 stages
# and Et*4|(t*4|)*14tmL on pp 2.
DEEPSEEK_STAGES: dict[tuple[tuple[int, int], ...], list[int]] = {
    ((4, 1),): [16, 16, 16, 13],
    ((8, 1), (4, 2)): [*[8] * 7, 5],
    ((16, 1), (8, 2), (4, 4), (2, 8)): [*[4] * 15, 1],
    ((8, 4),): [1, *[2] * 30, 0],
}
LATE_STAGES = [5, *[4] * 14, 0]  # Et*5|(t*4|)*14mL of NVFP4 since August 2026


def selective(*modules: str) -> dict[str, Any]:
    """A script's `recompute_modules` beside `recompute_granularity` selective."""
    return {"training": {"recompute": {"mode": "selective", "modules": list(modules)}}}
