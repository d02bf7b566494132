"""What a trainer's launch scripts set for a model and a GPU, release by release, and a table of its steps leaves out.

A published table names the trainer, the release, the model's sizes and the layout; recomputed modules, captured graphs
and hidden exchanges are in the launch script alone. Each record holds these for one model of one trainer, with the
file that says so. Keys that a row states itself stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from sim.inputs.model_input import load_model, model_presets
from sim.inputs.overrides import merge
from sim.inputs.parallelism import form_of
from sim.schedules import FORMS
from sim.variants.optimizers import REMAINDERS
from topology.presets import CLUSTERS


class Sizes(NamedTuple):
    """By which a row's model is known."""

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


DEEPSEEK_V3, QWEN3_30B, QWEN3_235B = Sizes(61, 7168, 256), Sizes(48, 2048, 128), Sizes(94, 4096, 128)
GPT_OSS_120B, KIMI_K2 = Sizes(36, 2880, 128), Sizes(61, 7168, 384)
LLAMA3_8B, LLAMA3_70B, LLAMA31_405B = Sizes(32, 4096, 0), Sizes(80, 8192, 0), Sizes(126, 16384, 0)
LLAMA2_13B, GPT3_5B, GPT3_20B, GPT3_175B = (Sizes(*x, 0) for x in ((40, 5120), (24, 4096), (44, 6144), (96, 12288)))
H100, DGX, NVL72 = ("h100-sxm",), ("b200-sxm", "b300-sxm"), ("gb200", "gb300")
BLACKWELL = (*DGX, *NVL72)
B200, B300, VR200 = ("b200-sxm",), ("b300-sxm",), ("vr200",)


def _graphs_of(*scope: str) -> dict[str, Any]:
    """A script's `cuda_graph_scope` beside `cuda_graph_impl` transformer_engine."""
    return {"training": {"cuda_graphs": "layers", "cuda_graph_scope": list(scope)}}


GRAPHED_PARTS = _graphs_of("attn", "moe_router", "moe_preprocess")
WITHOUT_ATTENTION = _graphs_of("moe_router", "moe_preprocess")
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
# Layers whose activations wait on the host, by GPU and precision. The 405B's on GB200 are those of autumn 2025, when
# tables have it in this layout; later they were 95 and 92.
OFFLOADED_LAYERS = {
    LLAMA3_70B: {
        ("gb200", "bf16"): 20,
        ("gb200", "fp8"): 40,
        ("gb300", "bf16"): 30,
        ("gb300", "fp8"): 20,
        ("b200-sxm", "fp8"): 5,
        ("vr200", "bf16"): 30,
    },
    LLAMA31_405B: {
        ("gb200", "fp8"): 80,
        ("gb300", "bf16"): 40,
        ("b300-sxm", "bf16"): 40,
        ("vr200", "bf16"): 40,
        ("gb300", "fp8"): 10,
    },
}


def _selective(*modules: str) -> dict[str, Any]:
    return {"training": {"recompute": {"mode": "selective", "modules": list(modules)}}}


# NVIDIA-NeMo/Megatron-Bridge, scripts/performance: configs of each model (`use_tokendrop`, `cuda_graph_impl`,
# `recompute_modules`, `moe_a2a_overlap`, `layout`) and utils/helpers.py. Numbers are pull requests, made
# in the month before a release. Presets bear no date: where no pull request is named, the month is that of the release
# whose layouts they have. Of scripts that set the same key the first holds.
_BRIDGE = "megatron_bridge"
_WIDER = ("bf16", "fp8", "mxfp8")  # than nvfp4


def _deepseek() -> Iterator[LaunchScript]:
    script = partial(LaunchScript, _BRIDGE, DEEPSEEK_V3)
    mx = ("mxfp8",)
    yield from _deepseek_of_0_6(partial(script, source="perf_recipes/deepseek of 0.6.2", since="2026-08"))
    yield script(NOT_RECOMPUTED, "3983: recompute_modules []", ("gb300",), since="2026-06", precisions=mx)
    whole = merge(FULL_ITERATION, PROJECTED_IN_8_BITS)
    yield script(whole, "3983, 4226, 4458", ("gb200", "gb300", "b300-sxm"), since="2026-06", precisions=mx)
    graphed = merge(GRAPHED_PARTS, PAIRED)
    yield script(  # of B200's layouts the only one with virtual stages
        merge(_selective("mla_up_proj", "mlp"), graphed),
        "configs/deepseek",
        B200,
        since="2026-06",
        until="2026-08",
        precisions=mx,
        layouts=((8, 2),),
    )
    yield script(_selective("mla_up_proj", "mlp"), "configs/deepseek", H100)
    yield script(_selective("moe_act"), "configs/deepseek", ("gb300",), since="2026-01", precisions=("bf16",))
    yield script(_selective("mla_up_proj"), "configs/deepseek", BLACKWELL)
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
    yield script(GRAPHED_PARTS, "4458", ("b300-sxm",), since="2026-06")


def _deepseek_of_0_6(script: Callable[..., LaunchScript]) -> Iterator[LaunchScript]:
    """Of NVFP4, of current scaling and of B200."""
    late, low = {"parallelism": {"layers_per_stage": LATE_STAGES}}, ("nvfp4",)
    yield script(late, gpus=("gb300",), precisions=low, layouts=((2, 8),))
    whole = merge(merge(NOT_RECOMPUTED, FULL_ITERATION), ATTENTION_IN_8_BITS)
    yield script(whole, gpus=("gb300",), precisions=low)
    yield script(ATTENTION_IN_8_BITS, gpus=("gb300", *B300), precisions=("mxfp8",), zero=(1,))
    on_host = {"training": {"activation_offload": {"modules": ["core_attn", "attn_proj"]}}}
    ungraphed = {"training": {"cuda_graphs": "none", "cuda_graph_scope": [], "fused_experts": False}}
    again = _selective("layernorm", "mla_up_proj", "moe_act")
    unpaired = {"parallelism": {"ep_overlap": False}}
    yield script(merge(merge(again, unpaired), merge(on_host, ungraphed)), gpus=("gb300",), zero=(3,))
    graphed = merge(_selective("mla_up_proj"), GRAPHED_PARTS)
    yield script(graphed, gpus=B200, precisions=("mxfp8",), layouts=((8, 2),))
    yield script(_selective("mlp"), gpus=("gb200",), precisions=("fp8", "nvfp4"))
    yield script(_selective("mla_up_proj", "layernorm", "moe_act"), gpus=("b200-sxm",), precisions=("nvfp4",))


def _kimi() -> Iterator[LaunchScript]:
    script = partial(LaunchScript, _BRIDGE, KIMI_K2)
    whole = merge(NOT_RECOMPUTED, FULL_ITERATION)
    yield script(whole, "5168", ("gb300",), since="2026-08", precisions=("mxfp8",))
    yield script(_selective("mla_up_proj", "mlp"), "configs/kimi", H100)
    yield script(_selective("mla_up_proj"), "configs/kimi", BLACKWELL)
    yield script(WITHOUT_ATTENTION, "configs/kimi", ("gb200",), since="2026-06")
    yield script({"model": {"moe": {"router_fp32": True}}}, "models/kimi/kimi_bridge.py: moe_router_dtype")


def _qwen3(model: Sizes) -> Iterator[LaunchScript]:
    script = partial(LaunchScript, _BRIDGE, model)
    in_8_bits = partial(script, ATTENTION_IN_8_BITS, "perf_recipes/qwen of 0.6.2", precisions=("mxfp8",))
    # Of the 235B those with virtual stages, whose graphs are whole.
    yield in_8_bits((*BLACKWELL, *VR200), "2026-08", layouts=((1, 1), (8, 3), (4, 12)))
    yield script(FULL_ITERATION, "4249, 4606", BLACKWELL, since="2026-06", precisions=("mxfp8",))
    if model == QWEN3_235B:
        whole = partial(script, FULL_ITERATION, "perf_recipes/qwen of 0.6.2", since="2026-08")
        yield whole(gpus=BLACKWELL, precisions=("nvfp4",), layouts=((8, 3), (4, 12)))
    yield script(HEAD_NORMS, "models/qwen: Qwen3MoEModelProvider.qk_layernorm")
    yield script(TOKEN_DROP, "configs/qwen3", until="2025-11")
    yield script(WHOLE_GRAPH, "configs/qwen3", BLACKWELL, until="2025-11")
    later = partial(script, source="configs/qwen", since="2026-01")
    if model == QWEN3_30B:
        h100 = partial(script, WITHOUT_ATTENTION, "2477", H100, "2026-03", precisions=("bf16",), layouts=((1, 1),))
        yield h100()
        yield later(WITHOUT_ATTENTION, gpus=("gb300", "b300-sxm"))
        yield later(WITHOUT_ATTENTION, gpus=("gb200",), precisions=("mxfp8",))
    yield later(GRAPHED_PARTS, gpus=BLACKWELL if model == QWEN3_30B else NVL72)


def _gpt_oss() -> Iterator[LaunchScript]:
    script = partial(LaunchScript, _BRIDGE, GPT_OSS_120B, since="2026-01")
    mx = ("mxfp8",)
    graphed = merge(NOT_RECOMPUTED, FULL_ITERATION)
    in_8_bits = merge(ATTENTION_IN_8_BITS, PROJECTED_IN_8_BITS)
    yield script(in_8_bits, "perf_recipes/gpt_oss of 0.6.2", (*NVL72, *VR200), precisions=mx, since="2026-08")
    yield script(graphed, "4173", NVL72, precisions=mx, since="2026-06")
    yield script(PAIRED, "configs/gpt_oss: 1,280 sequences", ("gb200",))
    yield script(PAIRED, "configs/gpt_oss", B300, precisions=mx, since="2026-06", until="2026-08")
    yield script(GRAPHED_PARTS, "configs/gpt_oss", ("gb300", "b300-sxm"))
    yield script(_selective("layernorm", "moe_act"), "configs/gpt_oss", (*H100, "gb200", "b200-sxm"))


def _parameters() -> Iterator[LaunchScript]:
    """What recipes of all releases say of parameters, their gradients and the optimizer's states."""
    kept = {"training": {"fp8_param_gather": True}}
    script = partial(LaunchScript, _BRIDGE, changes=kept, source="training/mixed_precision.py: fp8_param_gather")
    for model in (DEEPSEEK_V3, QWEN3_30B, QWEN3_235B, GPT_OSS_120B, LLAMA3_8B, LLAMA3_70B, LLAMA31_405B):
        yield script(model, precisions=("fp8", "mxfp8"), recipes=("default", "tensorwise", "mxfp8"), zero=(1,))
    script = partial(LaunchScript, _BRIDGE, DEEPSEEK_V3)
    yield script({"training": {"optimizer_dtype": "bf16"}}, "recipes/deepseek/deepseek_v3.py: exp_avg_dtype")
    remainders, bf16 = {"training": {"master_weights": REMAINDERS}}, ("bf16",)
    yield script(remainders, "the same: use_precision_aware_optimizer", precisions=bf16, zero=(1,))
    yield script({"parallelism": {"dp_sync": "after_backward"}}, "configs/deepseek: overlap_grad_reduce False", H100)


def _dispatchers() -> Iterator[LaunchScript]:
    """Who takes tokens to experts' ranks: presets whose `moe_flex_dispatcher_backend` is used, as the dispatcher's type
    is flex (configs/*/*_llm_pretrain.py, training/flex_dispatcher_backend.py), by the pull request that chose it. With
    all others NCCL does, such as Qwen3 235B on H100 and with a few exceptions on B200."""
    script = partial(LaunchScript, _BRIDGE)
    mx = ("mxfp8",)
    yield script(DEEPSEEK_V3, DEEP_EP, "configs/deepseek: enable_deepep True", H100, until="2026-01")
    low = ("mxfp8", "nvfp4")
    yield script(DEEPSEEK_V3, DEEP_EP, "configs/deepseek: V2", B200, "2026-06", "2026-08", low, ((8, 2),))
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
    """Of 0.6.2, those for 256 GPUs where two have the same layout."""
    script = partial(LaunchScript, _BRIDGE, source="perf_recipes of 0.6.2", gpus=VR200, since="2026-08")
    whole, mx = merge(NOT_RECOMPUTED, FULL_ITERATION), ("mxfp8",)
    wide, narrow = (partial(script, DEEPSEEK_V3, layouts=(layout,)) for layout in ((2, 8), (4, 4)))
    yield wide(ATTENTION_IN_8_BITS, precisions=("mxfp8", "nvfp4"))
    yield wide(merge(whole, PROJECTED_IN_8_BITS), precisions=mx)
    yield wide(merge(whole, {"parallelism": {"layers_per_stage": LATE_STAGES}}), precisions=("nvfp4",))
    yield wide(_selective("mla_up_proj"), precisions=("fp8",))
    yield narrow(merge(_selective("mla_up_proj"), FULL_ITERATION), precisions=mx)
    yield narrow(merge(_selective("mlp"), GRAPHED_PARTS), precisions=("fp8", "nvfp4"))
    yield narrow(merge(_selective("moe_act"), GRAPHED_PARTS), precisions=("bf16",))
    for model in (QWEN3_30B, QWEN3_235B, GPT_OSS_120B):
        yield script(model, FULL_ITERATION, precisions=mx)
    yield script(QWEN3_30B, WITHOUT_ATTENTION)
    yield script(QWEN3_235B, GRAPHED_PARTS)
    yield script(GPT_OSS_120B, GRAPHED_PARTS)
    yield script(KIMI_K2, _selective("mla_up_proj"))
    yield script(LLAMA3_8B, WHOLE_GRAPH)


def _llama() -> Iterator[LaunchScript]:
    """The offloads are of the scripts with `use_megatron_fsdp`."""
    script = partial(LaunchScript, _BRIDGE)
    yield script(LLAMA3_8B, WHOLE_GRAPH, "configs/llama: 16 and 8 bits", BLACKWELL, "2026-01", precisions=_WIDER)
    yield script(LLAMA3_8B, WHOLE_GRAPH, "configs/llama", ("gb300",), since="2026-01")
    yield script(
        LLAMA3_8B,
        {"training": {"recompute": {"mode": "full", "layers": 5}}},
        "configs/llama: recompute_num_layers",
        H100,
        precisions=("fp8",),
        layouts=((1, 1),),
        zero=(1,),
    )
    nvfp4 = _graphs_of("attn", "mlp")
    yield script(LLAMA3_70B, nvfp4, "4127", ("gb200",), since="2026-06", precisions=("nvfp4",))
    yield script(LLAMA3_70B, WHOLE_GRAPH, "configs/llama", ("b200-sxm",), since="2026-01", precisions=("bf16",))
    for model, offloaded in OFFLOADED_LAYERS.items():
        for (gpu, precision), layers in offloaded.items():
            offload = {"training": {"activation_offload": {"layers": layers}}}
            source = "configs/llama: cpu_offloading_num_layers"
            yield script(model, offload, source, (gpu,), precisions=(precision,), layouts=((1, 1),), zero=(3,))


# NVIDIA/NeMo-Framework-Launcher of 2024. examples/training/gpt and llama: grad_sync_dtype=bf16; conf/training/gpt3:
# hidden_dropout, attention_dropout. The scripts of Nemotron, whose 8B has as many layers and the same width as Llama's,
# sum in fp32.
BF16_SUMS = {"training": {"grad_dtype": "bf16"}}
NEMO_SCRIPTS = {
    "gelu": ((GPT3_5B, GPT3_20B, GPT3_175B), merge(BF16_SUMS, {"model": {"dropout": 0.1}})),
    "swiglu": ((LLAMA3_8B, LLAMA2_13B, LLAMA3_70B), BF16_SUMS),
}


def _nemo() -> Iterator[LaunchScript]:
    """Llama 2 7B and 70B have as many layers and the same width as Llama 3 8B and 70B."""
    for mlp, (models, changes) in NEMO_SCRIPTS.items():
        for model in models:
            yield LaunchScript("nemo", model, changes, "examples/training", since="2024", until="2025", mlp=(mlp,))


SCRIPTS = (
    *_parameters(),
    *_dispatchers(),
    *_vera_rubin(),
    *_deepseek(),
    *_qwen3(QWEN3_30B),
    *_qwen3(QWEN3_235B),
    # Every preset of these rows' layouts that has the switch `moe_a2a_overlap` sets it; the first are of December 2025.
    LaunchScript(_BRIDGE, QWEN3_235B, PAIRED, "configs/qwen: 2,048 and 8,192 sequences", H100, since="2025-11"),
    LaunchScript(
        _BRIDGE, QWEN3_30B, PAIRED, "configs/qwen: 12 virtual stages", H100, since="2026-01", layouts=((2, 12),)
    ),
    LaunchScript(_BRIDGE, QWEN3_30B, PAIRED, "perf_recipes/qwen of 0.6.2", H100, "2026-08", precisions=("bf16",)),
    *_gpt_oss(),
    *_kimi(),
    *_llama(),
    *_nemo(),
)


def with_launch_script(scenario: dict[str, Any]) -> dict[str, Any]:
    """A row's scenario, and under it what its trainer's script sets for this model, GPU and release.

    The scripts pre-train. A row with adapters, and one whose release or machine is not known, is left as it is.
    """
    training, model = scenario.get("training"), scenario.get("model")
    if not isinstance(training, Mapping) or not isinstance(model, Mapping):
        return scenario
    framework, date, sizes = training.get("framework"), training.get("software_date"), _sizes(model)
    cluster = CLUSTERS.get(_preset(scenario.get("cluster")))
    if date is None or cluster is None or "lora" in training:
        return scenario
    layout = scenario.get("parallelism")
    layout = layout if isinstance(layout, Mapping) else {}
    pairs = _pairs(layout)
    row = {
        "gpus": cluster.gpu.name,
        "precisions": training.get("precision", "bf16"),
        "recipes": training.get("fp8_recipe") or "default",
        "layouts": (layout.get("pp", 1), layout.get("virtual_stages") or 1),
        "zero": layout.get("zero", 0),
        "mlp": model.get("mlp", "swiglu"),
    }
    for script in SCRIPTS:
        meant = script.framework == framework and script.model == sizes and script.since <= date < script.until
        meant = meant and (pairs or "ep_overlap" not in script.changes.get("parallelism", {}))
        if meant and all(value in (getattr(script, key) or [value]) for key, value in row.items()):
            scenario = merge(script.changes, scenario)
    return scenario


def _pairs(layout: Mapping[str, Any]) -> bool:
    """Tell whether a row's schedule has pairs in which expert exchanges hide: a script that hides them is for no other
    layout."""
    schedule = layout.get("schedule")
    known = schedule if isinstance(schedule, str) and schedule in FORMS else "1f1b"
    return form_of(known, layout.get("pp", 1), True).pairs


def _sizes(model: Mapping[str, Any]) -> Sizes:
    """Return a model's sizes, those of the shipped one that it names where it gives none of its own."""
    if model.get("preset") in model_presets():
        shipped = load_model(model["preset"])
        of_preset: dict[str, Any] = {"layers": shipped.layers, "hidden": shipped.hidden}
        of_preset |= {} if shipped.moe is None else {"moe": {"experts": shipped.moe.experts}}
        model = merge(of_preset, {key: value for key, value in model.items() if key != "preset"})
    moe = model.get("moe")
    experts = moe.get("experts", 0) if isinstance(moe, Mapping) else 0
    return Sizes(model.get("layers", 0), model.get("hidden", 0), experts)


def _preset(cluster: object) -> str:
    return str(cluster.get("preset") if isinstance(cluster, Mapping) else cluster)
