"""Launch scripts of Megatron-Bridge for models with experts (see `sim.validation.script_records`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from sim.inputs.overrides import merge
from sim.validation.script_records import (
    ATTENTION_IN_8_BITS,
    B200,
    B300,
    BLACKWELL,
    BRIDGE,
    DEEP_EP,
    DEEPSEEK_STAGES,
    DEEPSEEK_V3,
    DGX,
    FULL_ITERATION,
    GPT_OSS_120B,
    GRAPHED_PARTS,
    H100,
    HEAD_NORMS,
    HYBRID_EP,
    KIMI_K2,
    LATE_STAGES,
    LLAMA3_8B,
    NOT_RECOMPUTED,
    NVL72,
    PAIRED,
    PROJECTED_IN_8_BITS,
    QWEN3_30B,
    QWEN3_235B,
    SHARED_BESIDE,
    TOKEN_DROP,
    TP_BESIDE_WEIGHTS,
    VR200,
    WHOLE_GRAPH,
    WITHOUT_ATTENTION,
    LaunchScript,
    Sizes,
    selective,
)

# NVIDIA-NeMo/Megatron-Bridge, scripts/performance: configs of each model (`use_tokendrop`, `cuda_graph_impl`,
# `recompute_modules`, `moe_a2a_overlap`, `layout`) and utils/helpers.py. Numbers are pull requests, made
# in the month before a release. Presets bear no date: where no pull request is named, the month is that of the release
# whose layouts they have. Of scripts that set the same key the first holds.


def expert_scripts() -> Iterator[LaunchScript]:
    """Yield the scripts of models with experts. If several set a row's key, the first one's value holds."""
    yield from _dispatchers()
    yield from _vera_rubin()
    yield from _deepseek()
    for model in (QWEN3_30B, QWEN3_235B):
        yield from _qwen3(model)
    yield from _gpt_oss()
    yield from _kimi()


def _deepseek() -> Iterator[LaunchScript]:
    script = partial(LaunchScript, BRIDGE, DEEPSEEK_V3)
    mx = ("mxfp8",)
    yield from _deepseek_of_0_6(partial(script, source="perf_recipes/deepseek of 0.6.2", since="2026-08"))
    yield script(NOT_RECOMPUTED, "3983: recompute_modules []", ("gb300",), since="2026-06", precisions=mx)
    whole = merge(FULL_ITERATION, PROJECTED_IN_8_BITS)
    yield script(whole, "3983, 4226", NVL72, since="2026-06", precisions=mx)
    yield script(ATTENTION_IN_8_BITS, "3983", ("gb300",), since="2026-06", precisions=mx, zero=(1,))
    whole = merge(whole, ATTENTION_IN_8_BITS)
    yield script(whole, "4458: with virtual stages", B300, since="2026-06", precisions=mx, layouts=((8, 2),))
    yield from _deepseek_recomputed(script)
    yield script(TP_BESIDE_WEIGHTS, "recipes/deepseek/deepseek_v3.py: tp_comm_overlap False")
    # moe_router_num_groups 8, moe_router_group_topk 4
    yield script({"model": {"moe": {"max_nodes_per_token": 4}}}, "configs/deepseek", H100)
    yield script(PAIRED, "utils/helpers.py: set_moe_a2a_overlap_overrides", H100, until="2026-01")
    yield script({"model": {"mtp_layers": 1}}, "recipes/deepseek/deepseek_v3.py: mtp_num_layers")
    yield script({"model": {"moe": {"router_fp32": True}}}, "models/deepseek/deepseek_provider.py: moe_router_dtype")
    shared = "the same: moe_shared_expert_overlap; configs/deepseek: enable_deepep False"
    yield script(SHARED_BESIDE, shared, NVL72, until="2025-11")
    yield script(SHARED_BESIDE, shared, B200, until="2026-01")
    for layouts, layers in DEEPSEEK_STAGES.items():
        yield script({"parallelism": {"layers_per_stage": layers}}, "DEEPSEEK_STAGES", layouts=layouts)
    yield script(TOKEN_DROP, "configs/deepseek", BLACKWELL, until="2025-11")
    yield script(GRAPHED_PARTS, "configs/deepseek", ("gb200",), since="2026-01")
    yield script(GRAPHED_PARTS, "configs/deepseek", ("gb300",), since="2026-01", precisions=("bf16",))
    yield script(GRAPHED_PARTS, "configs/deepseek: V2 without virtual stages; 4458", B300, since="2026-04")


def _deepseek_recomputed(script: Callable[..., LaunchScript]) -> Iterator[LaunchScript]:
    """Yield scripts by what they recompute: of B200 with graphs and pairs beside it, then of each GPU."""
    mx = ("mxfp8",)
    # B200's only layout with virtual stages.
    b200 = partial(script, source="3368", gpus=B200, since="2026-04", until="2026-08", layouts=((8, 2),))
    yield b200(merge(merge(selective("mla_up_proj", "mlp"), GRAPHED_PARTS), PAIRED), precisions=mx)
    yield b200(merge(selective("mla_up_proj", "layernorm", "moe_act"), PAIRED), precisions=("nvfp4",))
    yield script(selective("mla_up_proj", "mlp"), "configs/deepseek", H100)
    yield script(selective("moe_act"), "configs/deepseek", ("gb300",), since="2026-01", precisions=("bf16",))
    mlp = partial(script, selective("mlp"), "3031", ("gb200",), "2026-04")
    yield mlp(precisions=("fp8", "nvfp4"))
    yield mlp(until="2026-06", precisions=mx)
    parts = selective("mla_up_proj", "moe_act", "layernorm")
    late = partial(script, since="2026-01", until="2026-04", precisions=("bf16",), layouts=((8, 2),))
    yield late(parts, "2175, until 2627", B300)
    yield script(selective("mla_up_proj"), "configs/deepseek", BLACKWELL)


def _deepseek_of_0_6(script: Callable[..., LaunchScript]) -> Iterator[LaunchScript]:
    """Yield scripts of release 0.6: of NVFP4, of current scaling and of B200."""
    late, low = {"parallelism": {"layers_per_stage": LATE_STAGES}}, ("nvfp4",)
    yield script(late, gpus=("gb300",), precisions=low, layouts=((2, 8),))
    whole = merge(merge(NOT_RECOMPUTED, FULL_ITERATION), ATTENTION_IN_8_BITS)
    yield script(whole, gpus=("gb300",), precisions=low)
    on_host = {"training": {"activation_offload": {"modules": ["core_attn", "attn_proj"]}}}
    ungraphed = {"training": {"cuda_graphs": "none", "cuda_graph_scope": [], "fused_experts": False}}
    again = selective("layernorm", "mla_up_proj", "moe_act")
    unpaired = {"parallelism": {"ep_overlap": False}}
    yield script(merge(merge(again, unpaired), merge(on_host, ungraphed)), gpus=("gb300",), zero=(3,))
    graphed = merge(selective("mla_up_proj"), GRAPHED_PARTS)
    yield script(graphed, gpus=B200, precisions=("mxfp8",), layouts=((8, 2),))
    yield script(selective("mla_up_proj", "layernorm", "moe_act"), gpus=("b200-sxm",), precisions=("nvfp4",))


def _kimi() -> Iterator[LaunchScript]:
    script = partial(LaunchScript, BRIDGE, KIMI_K2)
    whole = merge(NOT_RECOMPUTED, FULL_ITERATION)
    yield script(whole, "5168", ("gb300",), since="2026-08", precisions=("mxfp8",))
    yield script(selective("mla_up_proj", "mlp"), "configs/kimi", H100)
    yield script(selective("mla_up_proj"), "configs/kimi", BLACKWELL)
    yield script(WITHOUT_ATTENTION, "configs/kimi", ("gb200",), since="2026-06")
    yield script({"model": {"moe": {"router_fp32": True}}}, "models/kimi/kimi_bridge.py: moe_router_dtype")


def _qwen3(model: Sizes) -> Iterator[LaunchScript]:
    script = partial(LaunchScript, BRIDGE, model)
    # Of the 235B those with virtual stages, whose graphs are whole.
    in_8_bits = partial(script, ATTENTION_IN_8_BITS, precisions=("mxfp8",), layouts=((1, 1), (8, 3), (4, 12)))
    yield in_8_bits("4249, 4606", BLACKWELL, "2026-06")
    yield in_8_bits("perf_recipes/qwen of 0.6.2", VR200, "2026-08")
    yield script(FULL_ITERATION, "4249, 4606", BLACKWELL, since="2026-06", precisions=("mxfp8",))
    if model == QWEN3_235B:
        whole = partial(script, FULL_ITERATION, "perf_recipes/qwen of 0.6.2", since="2026-08")
        yield whole(gpus=BLACKWELL, precisions=("nvfp4",), layouts=((8, 3), (4, 12)))
    yield script(HEAD_NORMS, "models/qwen: Qwen3MoEModelProvider.qk_layernorm")
    yield script(TOKEN_DROP, "configs/qwen3", until="2025-11")
    graphed_on = BLACKWELL if model == QWEN3_30B else NVL72
    yield script(WHOLE_GRAPH, "configs/qwen3", graphed_on, until="2025-11")
    later = partial(script, source="configs/qwen", since="2026-01")
    if model == QWEN3_30B:
        h100 = partial(script, WITHOUT_ATTENTION, "2477", H100, "2026-03", precisions=("bf16",), layouts=((1, 1),))
        yield h100()
        yield later(WITHOUT_ATTENTION, gpus=("gb300", "b300-sxm"))
        yield later(WITHOUT_ATTENTION, gpus=("gb200",), precisions=("mxfp8",))
        yield later(WITHOUT_ATTENTION, gpus=B200, until="2026-03")
        yield later(WITHOUT_ATTENTION, gpus=H100, until="2026-03", precisions=("bf16",), layouts=((2, 12),))
        yield script(PAIRED, "configs/qwen: 12 virtual stages", H100, since="2026-01", layouts=((2, 12),))
        yield script(PAIRED, "perf_recipes/qwen of 0.6.2", H100, "2026-08", precisions=("bf16",))
    else:
        # Every preset of these rows' layouts that has the switch sets it; the first are of December 2025.
        yield script(PAIRED, "configs/qwen: 2,048 and 8,192 sequences", H100, since="2025-11")
        yield later(TP_BESIDE_WEIGHTS, gpus=H100)  # tp_comm_overlap False
        yield later(WITHOUT_ATTENTION, gpus=("gb300",), until="2026-04", layouts=((1, 1), (4, 12)))
        yield script(PAIRED, "configs/qwen3, until 1760", B200, "2025-11", "2026-01", layouts=((8, 2),))
        yield later(PAIRED, gpus=B300, until="2026-04", layouts=((8, 4),))
    yield later(GRAPHED_PARTS, gpus=graphed_on)


def _gpt_oss() -> Iterator[LaunchScript]:
    script = partial(LaunchScript, BRIDGE, GPT_OSS_120B, since="2026-01")
    mx = ("mxfp8",)
    unfused = {"training": {"bias_dropout_fusion": False}}
    yield LaunchScript(BRIDGE, GPT_OSS_120B, unfused, "models/gpt_oss/gpt_oss_bridge.py: bias_dropout_fusion")
    graphed = merge(NOT_RECOMPUTED, FULL_ITERATION)
    in_8_bits = merge(ATTENTION_IN_8_BITS, PROJECTED_IN_8_BITS)
    yield script(in_8_bits, "perf_recipes/gpt_oss of 0.6.2", (*NVL72, *VR200), precisions=mx, since="2026-08")
    yield script(merge(graphed, ATTENTION_IN_8_BITS), "4173", NVL72, precisions=mx, since="2026-06")
    yield script(PAIRED, "configs/gpt_oss: 1,280 sequences", ("gb200",))
    fused = merge(merge(PAIRED, ATTENTION_IN_8_BITS), {"training": {"fused_experts": True}})
    yield script(fused, "configs/gpt_oss: V2", B300, precisions=mx, since="2026-06", until="2026-08")
    yield script(GRAPHED_PARTS, "configs/gpt_oss", ("gb300", "b300-sxm"))
    yield script(selective("layernorm", "moe_act"), "configs/gpt_oss", (*H100, "gb200", "b200-sxm"))


def _dispatchers() -> Iterator[LaunchScript]:
    """Who takes tokens to experts' ranks: presets whose `moe_flex_dispatcher_backend` is used, as the dispatcher's type
    is flex (configs/*/*_llm_pretrain.py, training/flex_dispatcher_backend.py), by the pull request that chose it. With
    all others NCCL does, such as Qwen3 235B on H100 and with a few exceptions on B200."""
    script = partial(LaunchScript, BRIDGE)
    mx = ("mxfp8",)
    yield script(DEEPSEEK_V3, DEEP_EP, "configs/deepseek: enable_deepep True", H100, until="2026-01")
    low = ("mxfp8", "nvfp4")
    yield script(DEEPSEEK_V3, DEEP_EP, "3368", B200, "2026-04", "2026-08", low, ((8, 2),))
    yield script(DEEPSEEK_V3, HYBRID_EP, "2288", (*H100, *DGX), "2026-01")
    yield script(QWEN3_235B, HYBRID_EP, "3490", B300, "2026-05")
    yield script(
        QWEN3_235B, HYBRID_EP, "perf_recipes/qwen: whole graphs", B200, "2026-06", precisions=low, layouts=((8, 3),)
    )
    yield script(QWEN3_30B, HYBRID_EP, "2357", (*NVL72, *B300), "2026-02")
    yield script(QWEN3_30B, HYBRID_EP, "2477, 2499", (*H100, *B200), "2026-03", layouts=((1, 1),))
    yield script(GPT_OSS_120B, HYBRID_EP, "3561", ("gb200",), "2026-04", "2026-05")
    yield script(GPT_OSS_120B, HYBRID_EP, "4173", (*NVL72, *VR200), "2026-06", precisions=mx)
    yield script(GPT_OSS_120B, HYBRID_EP, "configs/gpt_oss: V2", B300, "2026-06")
    for model in (DEEPSEEK_V3, QWEN3_235B):
        yield script(model, HYBRID_EP, "1367", NVL72, "2025-11")
    yield script(KIMI_K2, HYBRID_EP, "configs/kimi", NVL72)
    for model in (DEEPSEEK_V3, QWEN3_30B, QWEN3_235B, KIMI_K2):
        yield script(model, HYBRID_EP, "perf_recipes of 0.6.2", VR200)


def _vera_rubin() -> Iterator[LaunchScript]:
    """Yield scripts for Vera Rubin of release 0.6.2; where two have the same layout, the one for 256 GPUs."""
    script = partial(LaunchScript, BRIDGE, source="perf_recipes of 0.6.2", gpus=VR200, since="2026-08")
    whole, mx = merge(NOT_RECOMPUTED, FULL_ITERATION), ("mxfp8",)
    wide, narrow = (partial(script, DEEPSEEK_V3, layouts=(layout,)) for layout in ((2, 8), (4, 4)))
    yield wide(ATTENTION_IN_8_BITS, precisions=("mxfp8", "nvfp4"))
    yield wide(merge(whole, PROJECTED_IN_8_BITS), precisions=mx)
    yield wide(merge(whole, {"parallelism": {"layers_per_stage": LATE_STAGES}}), precisions=("nvfp4",))
    yield wide(selective("mla_up_proj"), precisions=("fp8",))
    yield narrow(merge(selective("mla_up_proj"), FULL_ITERATION), precisions=mx)
    yield narrow(merge(selective("mlp"), GRAPHED_PARTS), precisions=("fp8", "nvfp4"))
    yield narrow(merge(selective("moe_act"), GRAPHED_PARTS), precisions=("bf16",))
    for model in (QWEN3_30B, QWEN3_235B, GPT_OSS_120B):
        yield script(model, FULL_ITERATION, precisions=mx)
    yield script(QWEN3_30B, WITHOUT_ATTENTION)
    yield script(QWEN3_235B, GRAPHED_PARTS)
    yield script(GPT_OSS_120B, GRAPHED_PARTS)
    yield script(KIMI_K2, selective("mla_up_proj"))
    yield script(LLAMA3_8B, WHOLE_GRAPH)
