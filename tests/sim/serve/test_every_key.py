"""Each key that a scenario of serving gives changes its result, is refused, or is warned about."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.overrides import merge
from sim.inputs.parallelism import Parallelism
from sim.inputs.scenario import parse_scenario
from sim.inputs.workloads import Inference
from sim.schedules import FORMS
from sim.serve.simulation import simulate_serving
from tests.sim.serve.serving_cases import SMALL

BASE = {
    "model": {**SMALL, "layers": 6},
    "cluster": {"preset": "dgx-h100", "nodes": 1},
    "calibration": "roofline",
    "parallelism": {"tp": 2, "pp": 2, "dp": 2},
    "inference": {
        "engine": "vllm-0.19",
        "max_batch_tokens": 512,
        "requests": {"prompt_len": 300, "output_len": 20, "range_ratio": 0.9, "count": 24, "rate_per_s": 1000},
    },
}
# A value other than the one that a key has where it is left out.
LAYOUT: dict[str, list[Any]] = {
    "dp": [1],
    "tp": [1],
    "sp": [True],
    "cp": [2],
    "pp": [1],
    "ep": [2],
    "expert_tp": [2],
    "zero": [1, 2, 3],
    "zero_hpz_partition_size": [2],
    "zero_quantized_gradients": [True],
    "outer_dp_sharding_strategy": ["optim"],
    "shard_size": [1],
    "reshard_after_forward": [False],
    "fsdp_version": [1, 2],
    "backward_prefetch": [False],
    "fsdp_double_buffer": [True],
    "accumulate_unsharded": [True],
    "all_reduce_once": [True],
    "accumulate_in_a_row": [True],
    "schedule": sorted(set(FORMS) - {"1f1b"}),
    "schedule_memory": [2.0],
    "virtual_stages": [3],
    "micro_batch_group": [2],
    "layers_per_stage": [[1, 5]],
    "mtp_stage": [0],
    "dp_sync": ["after_backward", "per_parameter", "reduce_broadcast"],
    "bucket_bytes": [10**6],
    "gather_bucket_bytes": [10**6],
    "param_gather_overlap": [False],
    "overlap_param_gather_with_optimizer_step": [True],
    "param_gather_dtype": ["bf16"],
    "cp_method": ["all_gather", "all_to_all", "all_to_all_ring"],
    "cp_method_by_layer": [["all_gather"]],
    "hierarchical_context_parallel_sizes": [[1, 1]],
    "cp_split": ["contiguous", "striped"],
    "tp_overlap": ["wgrad", "full"],
    "tp_overlap_except": [["qkv"]],
    "ep_overlap": [True],
    "delay_wgrad_compute": [False],
    "wgrad_deferral_limit": [2],
    "ep_dispatch_dtype": ["fp8"],
    "ep_dispatcher": ["deepep", "all_to_all"],
    "p2p_overlap": [True],
    "p2p_scatter": [True],
    "rank_order": ["pp-tp-cp-dp"],
}
SECTION: dict[str, list[Any]] = {
    "requests": [{"prompt_len": 300, "output_len": 21}],
    "engine": ["sglang-0.5"],
    "max_request_tokens": [310],
    "precision": ["fp8"],
    "quantization": ["fp8", "int4", "mxfp4_experts", "nvfp4", "nvfp4_experts"],
    "attention": ["unfused"],
    "decode_attention": ["per_head"],
    "batching": ["static"],
    "max_running_requests": [2],
    "max_batch_tokens": [64],
    "max_prompt_tokens": [64],
    "chunked_prefill": [False],
    "cuda_graphs": [False],
    "cuda_graph_max_size": [1],
    "cuda_graph_sizes": [[1]],
    "preemption": ["swap"],
    "capacity_policy": ["max_utilization"],
    "schedule_conservativeness": [0.5],
    "batch_wait": [{"iterations": 9, "tokens_ratio": 0.9}],
    "balanced_prompts": [{}],
    "prefix_cache": ["none"],
    "router": ["round_robin", "one_queue"],
    "all2all_backend": ["deepep"],
    "dense_over_replicas": [False],
    "head_over_replicas": [False],
    "async_scheduling": [False],
    "two_batch_overlap": [True],
    "stream_interval": [20],
    "eplb": [{}],
    "speculative": [
        {"tokens": 2, "acceptance": 0.5, "draft": {**SMALL, "layers": 1}},
        {"tokens": 2, "acceptance": 0.5, "draft": {**SMALL, "layers": 1}, "hidden_states": 3},
        {"tokens": 2, "draft": {**SMALL, "layers": 1}, "branches": 2, "tree_tokens": 5},
        {"tokens": 2, "lookup": 0.5},
    ],
    "weight_offload": [{"cpu_bytes": 10**7}],
    "sampling": [{"temperature": 0.6, "top_p": 0.9}],
    "lora": [{"adapters": 4, "rank": 8}],
    "afd": [{"expert_gpus": 2}],
    "disaggregated": [{"prefill": {"replicas": 1}, "decode": {"replicas": 1}}],
    "autoscaling": [{"min_replicas": 1}],
    "kv_cache": [{"memory_fraction": 0.01}, {"max_tokens": 2000}, {"memory_bytes": 10**7}],
}
# Heard only where blocks run out, prompts share beginnings, or heads share keys: test_preemption.py, test_prefixes.py,
# test_prices.py.
ELSEWHERE = {"preemption", "prefix_cache", "decode_attention"}


def ran(data: Any) -> tuple[str, set[str]]:
    """What a result says without its own scenario and its warnings, and these."""
    result = {**simulate_serving(parse_scenario(data)).result}
    warnings = set(result.pop("warnings"))
    for key in ("scenario", "engine"):
        result.pop(key)
    return json.dumps(result, sort_keys=True, default=str), warnings


def said(section: str, key: str, value: Any, usual: tuple[str, set[str]]) -> bool:
    """Whether a key is heard."""
    try:
        result, warnings = ran(merge(BASE, {section: {key: value}}))
    except InputError as error:
        return key in str(error) or str(value) in str(error)
    return result != usual[0] or any(key in text for text in warnings - usual[1])


def test_every_key_has_a_value_here() -> None:
    assert set(LAYOUT) == set(Parallelism.model_fields)
    assert set(SECTION) == set(Inference.model_fields)


def test_no_key_is_ignored_in_silence() -> None:
    usual = ran(BASE)
    for section, keys in (("parallelism", LAYOUT), ("inference", SECTION)):
        for key, values in keys.items():
            for value in values if key not in ELSEWHERE else ():
                assert said(section, key, value, usual), (key, value)


@pytest.mark.parametrize("pp", [1, 2])
def test_no_schedule_changes_what_is_served(pp: int) -> None:
    """Engines give a rank layers in a row."""
    base = merge(BASE, {"parallelism": {"pp": pp}})
    usual, _ = ran(base)
    for schedule in FORMS:
        result, warnings = ran(merge(base, {"parallelism": {"schedule": schedule}}))
        assert result == usual
        assert ("parallelism.schedule: of no effect on serving" in warnings) == (schedule != "1f1b")
