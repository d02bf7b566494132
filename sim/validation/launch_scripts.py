"""What a trainer's launch scripts set for a model and a GPU, release by release, and a table of its steps leaves out.

A published table names the trainer, the release, the model's sizes and the layout; recomputed modules, captured graphs
and hidden exchanges are in the launch script alone. Each record holds these for one model of one trainer, with the
file that says so. Keys that a row states itself stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sim.inputs.overrides import merge
from topology.presets import CLUSTERS


class Sizes(NamedTuple):
    """By which a row's model is known."""

    layers: int
    hidden: int
    experts: int


class LaunchScript(NamedTuple):
    """Keys that `framework`'s script sets for a model, in releases from the month `since` on and before `until`.

    `architecture`: of the GPUs that the script is for, "" for all.
    """

    framework: str
    model: Sizes
    changes: Mapping[str, Any]
    source: str
    architecture: str = ""
    since: str = ""
    until: str = "9999"


DEEPSEEK_V3, QWEN3_30B, QWEN3_235B = Sizes(61, 7168, 256), Sizes(48, 2048, 128), Sizes(94, 4096, 128)
GPT_OSS_120B = Sizes(36, 2880, 128)
GRAPHED_PARTS = {"training": {"cuda_graphs": "layers"}}  # the nearest word for attention, router and preprocessing
WHOLE_GRAPH = {"training": {"cuda_graphs": "step"}}
# training/utils/moe_token_drop.py: apply_moe_token_drop
TOKEN_DROP = {"model": {"moe": {"capacity_factor": 1.0, "pad_to_capacity": True}}}
PAIRED = {"parallelism": {"ep_overlap": True}}
HEAD_NORMS = {"model": {"qk_norm": True}}


def _selective(*modules: str) -> dict[str, Any]:
    return {"training": {"recompute": {"mode": "selective", "modules": list(modules)}}}


# NVIDIA-NeMo/Megatron-Bridge, scripts/performance: configs of each model (`use_tokendrop`, `cuda_graph_impl`,
# `recompute_modules`, `moe_a2a_overlap`, `layout`) and utils/helpers.py.
_BRIDGE = "megatron_bridge"
SCRIPTS = (
    LaunchScript(_BRIDGE, DEEPSEEK_V3, _selective("mla_up_proj"), "configs/deepseek", "blackwell"),
    LaunchScript(_BRIDGE, DEEPSEEK_V3, _selective("mla_up_proj", "mlp"), "configs/deepseek", "hopper"),
    LaunchScript(
        _BRIDGE,
        DEEPSEEK_V3,
        # layout Et|(tt|)*30mL; moe_router_num_groups 8, moe_router_group_topk 4
        {
            "model": {"mtp_layers": 1, "moe": {"max_nodes_per_token": 4}},
            "parallelism": {"ep_overlap": True, "layers_per_stage": [1, *[2] * 30, 0]},
        },
        "configs/deepseek; utils/helpers.py: set_moe_a2a_overlap_overrides",
        "hopper",
        until="2026-01",
    ),
    LaunchScript(_BRIDGE, DEEPSEEK_V3, TOKEN_DROP, "configs/deepseek", "blackwell", until="2025-11"),
    LaunchScript(_BRIDGE, DEEPSEEK_V3, GRAPHED_PARTS, "configs/deepseek", "blackwell", since="2026-01"),
    *(
        script
        for model in (QWEN3_30B, QWEN3_235B)
        for script in (
            LaunchScript(_BRIDGE, model, HEAD_NORMS, "models/qwen: Qwen3MoEModelProvider.qk_layernorm"),
            LaunchScript(_BRIDGE, model, TOKEN_DROP, "configs/qwen3", until="2025-11"),
            LaunchScript(_BRIDGE, model, WHOLE_GRAPH, "configs/qwen3", "blackwell", until="2025-11"),
            LaunchScript(_BRIDGE, model, GRAPHED_PARTS, "configs/qwen", "blackwell", since="2026-01"),
        )
    ),
    # Every preset of these rows' layouts that has the switch `moe_a2a_overlap` sets it; the first are of December 2025.
    LaunchScript(_BRIDGE, QWEN3_235B, PAIRED, "configs/qwen: 2,048 and 8,192 sequences", "hopper", since="2025-11"),
    LaunchScript(_BRIDGE, QWEN3_30B, PAIRED, "configs/qwen: 12 virtual stages", "hopper", since="2026-01"),
    LaunchScript(_BRIDGE, GPT_OSS_120B, _selective("layernorm", "moe_act"), "configs/gpt_oss", since="2026-01"),
)


def with_launch_script(scenario: dict[str, Any]) -> dict[str, Any]:
    """A row's scenario, and under it what its trainer's script sets for this model, GPU and release.

    A row whose release or machine is not known is left as it is.
    """
    training, model = scenario.get("training"), scenario.get("model")
    if not isinstance(training, Mapping) or not isinstance(model, Mapping):
        return scenario
    framework, date, sizes = training.get("framework"), training.get("software_date"), _sizes(model)
    cluster = CLUSTERS.get(_preset(scenario.get("cluster")))
    if date is None or cluster is None:
        return scenario
    for script in SCRIPTS:
        meant = script.framework == framework and script.model == sizes and script.since <= date < script.until
        if meant and script.architecture in ("", cluster.gpu.architecture):
            scenario = merge(script.changes, scenario)
    return scenario


def _sizes(model: Mapping[str, Any]) -> Sizes:
    moe = model.get("moe")
    experts = moe.get("experts", 0) if isinstance(moe, Mapping) else 0
    return Sizes(model.get("layers", 0), model.get("hidden", 0), experts)


def _preset(cluster: object) -> str:
    return str(cluster.get("preset") if isinstance(cluster, Mapping) else cluster)
