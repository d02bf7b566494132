"""What launch scripts set that the tables measured with them do not say.

A table of Megatron-Bridge's throughput names model, GPU, release, precision and layout of each row, and the scripts
that ran it (its "performance recipes"). Precision of gradients, fused loss, recomputation, captured graphs, hidden
expert exchanges and biases of a named model stand in these scripts alone. `SCRIPTS` holds them, by release, as they
were read in scripts/performance of github.com/NVIDIA-NeMo/Megatron-Bridge (`configs/`, `utils/helpers.py`) and in
github.com/MooreThreads/SimuMax, none of it by what a row measured. What is not told for a release is left as the table
has it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from sim.inputs.overrides import merge

LATEST = "2100-01"


class Script(NamedTuple):
    """What a launch script sets in the scenarios of some rows.

    Its rows are those of the publication whose citation begins with `citation` and whose group matches the regular
    expression `group_pattern`: the publication names model, GPU and release there and nowhere else. `releases`: groups
    end with a release, such as 25.11, which is in [since, until).
    """

    group_pattern: str
    changes: Mapping[str, Any]
    source: str
    since: str = ""
    until: str = LATEST
    citation: str = "NVIDIA, Megatron-Bridge performance summary"
    releases: bool = True


def _modules(*names: str) -> dict[str, Any]:
    return {"recompute": {"mode": "selective", "modules": list(names)}}


SCRIPTS = (
    Script(
        "",
        {"training": {"grad_dtype": "bf16", "cross_entropy": "fused"}},
        "set_common_perf_overrides: cross_entropy_fusion_impl te; set_*_common_configs: grad_reduce_in_fp32 False",
    ),
    Script(
        "tokendrop",
        {"model": {"moe": {"capacity_factor": 1.0}}},
        "training/utils/moe_token_drop.py: apply_moe_token_drop",
    ),
    Script(
        "^DeepSeekV3.*(GB200|GB300|B200|B300)",
        {"training": _modules("mla_up_proj")},
        "configs/deepseek: recompute_modules",
    ),
    Script(
        "^DeepSeekV3(?!.*w/o MTP).*H100",
        {
            "training": _modules("mla_up_proj", "mlp"),
            "model": {"mtp_layers": 1, "moe": {"max_nodes_per_token": 4}},
            "parallelism": {"layers_per_stage": [1, *([2] * 30), 0]},
        },
        "configs/deepseek: recompute_modules, layout Et|(tt|)*30mL; DeepEP sends a token once to a node; "
        "deepseek_v3.py: moe_router_num_groups 8, moe_router_group_topk 4",
    ),
    Script(
        "^DeepSeekV3(?!.*w/o MTP).*H100",
        {"parallelism": {"ep_overlap": True}},
        "set_moe_a2a_overlap_overrides; with HybridEP, in the scripts of 2026, no longer",
        until="2026-01",
    ),
    Script(
        "^Qwen3_235B.*H100",
        {"parallelism": {"ep_overlap": True}},
        "configs/qwen: QWEN3_235B_A22B_PRETRAIN_CONFIG_H100: moe_a2a_overlap",
        since="2026-01",
    ),
    Script(
        "^Qwen3.*GB200",
        {"training": {"cuda_graphs": "step"}},
        "configs/qwen3: cuda_graph_impl local, cuda_graph_scope full_iteration, which tokens at capacity allow",
        until="2025-11",
    ),
    Script(
        "^(DeepSeekV3|Qwen3).*(GB200|GB300)",
        {"training": {"cuda_graphs": "layers"}},
        "configs: cuda_graph_impl transformer_engine, of attention, router and preprocessing; `layers` is the nearest",
        since="2026-01",
    ),
    Script(
        "^GPT OSS",
        {
            "model": {
                "bias": True,
                "mlp": "clamped_swiglu",
                "sinks": True,
                "window": 128,
                "attention_pattern": ["sliding", "full"],
                "moe": {"router_bias": True},
            }
        },
        "src/megatron/bridge/models/gpt_oss/gpt_oss_provider.py",
    ),
    Script(
        "^GPT OSS.*(H100|GB200|B200)",
        {"training": _modules("layernorm", "moe_act")},
        "configs/gpt_oss: recompute_modules",
        since="2026-01",
    ),
    Script(
        "^GPT3-5B$",
        {"model": {"dropout": 0.1}},
        "NeMo-Framework-Launcher conf/training/gpt3/5b.yaml: hidden_dropout, attention_dropout",
        citation="NVIDIA NeMo documentation, performance summary",
        releases=False,
    ),
    Script(
        "^deepseek",
        {"model": {"moe": {"capacity_factor": 1.0, "groups": 4, "top_groups": 3}}},
        "simu_tools/megatron_scripts/scripts/run_pretrain_deepseekv2.sh: moe-expert-capacity-factor, "
        "moe-pad-expert-input-to-capacity, moe-router-group-topk; moe-router-num-groups is ep, 4 or 8, alike in time",
        citation="SimuMax (Moore Threads)",
        releases=False,
    ),
)


def scripted(citation: str, group: str, scenario: dict[str, Any]) -> dict[str, Any]:
    """The scenario of a row with what its script set, which stands for what the table inferred.

    >>> scripted("NVIDIA, Megatron-Bridge performance summary", "LLAMA3_8B DGX-H100 25.11", {})
    {'training': {'grad_dtype': 'bf16', 'cross_entropy': 'fused'}}
    >>> scripted("our own runs of Megatron-Bridge", "LLAMA3_8B DGX-H100 25.11", {})
    {}
    """
    release = re.search(r" (\d\d)\.(\d\d)$", group)
    date = f"20{release[1]}-{release[2]}" if release else ""
    for script in SCRIPTS:
        mine = citation.startswith(script.citation) and bool(date) == script.releases
        if mine and script.since <= date < script.until and re.search(script.group_pattern, group):
            scenario = merge(scenario, script.changes)
    return scenario
