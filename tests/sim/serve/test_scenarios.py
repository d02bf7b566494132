"""Every shipped serving scenario, and what it is there to show."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sim.inputs.scenario import load_scenario
from sim.serve.simulation import simulate_serving

SCENARIOS = Path(__file__).parents[3] / "scenarios"
NAMES = sorted(p.stem for p in SCENARIOS.glob("serve_*.yaml"))


@cache
def result(name: str, *overrides: str) -> dict[str, Any]:
    return simulate_serving(load_scenario(SCENARIOS / f"{name}.yaml", overrides)).result


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_scenario(name: str) -> None:
    r = result(name)
    assert r["fits_in_memory"]
    assert 0 < r["time_to_first_token_s"]["p50"] < r["request_latency_s"]["p50"] < r["duration_s"] * (1 + 1e-12)
    assert r["duration_interval_s"][0] < r["duration_s"] < r["duration_interval_s"][1]
    assert r["kv_cache"]["blocks_used"] <= r["kv_cache"]["blocks"]
    assert r["peak_memory_bytes"] == max(m["peak"] for m in r["memory"])


def test_pages_against_contiguous_cache() -> None:
    paged, contiguous = result("serve_llama8b"), result("serve_contiguous")
    assert paged["kv_cache"]["waste"] < 0.02 < 0.8 < contiguous["kv_cache"]["waste"]
    assert paged["time_to_first_token_s"]["p99"] < 0.5 * contiguous["time_to_first_token_s"]["p99"]


def test_prefix_caches_find_the_same_and_the_host_costs_transfers() -> None:
    gpu, host = result("serve_prefix_gpu"), result("serve_prefix_cpu")
    none = result("serve_prefix_gpu", "inference.prefix_cache=none")
    assert gpu["kv_cache"]["prefix_hit_rate"] == pytest.approx(host["kv_cache"]["prefix_hit_rate"], abs=0.02)
    assert gpu["kv_cache"]["prefix_hit_rate"] > 0.8
    first = [r["time_to_first_token_s"]["p50"] for r in (gpu, host, none)]
    assert first == sorted(first)
    assert first[2] > 2 * first[1]


def test_four_bits_speed_up_a_lone_request() -> None:
    ratio = (
        result("serve_batch1")["time_per_output_token_s"]["p50"]
        / result("serve_batch1_int4")["time_per_output_token_s"]["p50"]
    )
    assert 2 < ratio < 4


def test_preemption_scenario_preempts() -> None:
    assert result("serve_preemption")["kv_cache"]["preemptions"] > 0


def test_swapping_loses_no_tokens() -> None:
    swapped, recomputed = result("serve_swap")["kv_cache"], result("serve_preemption")["kv_cache"]
    assert swapped["preemptions"] > 0
    assert swapped["recomputed_tokens"] == 0 < recomputed["recomputed_tokens"]
    assert swapped["swapped_bytes"] > 0 == recomputed["swapped_bytes"]


def test_thousands_of_requests_in_runs() -> None:
    sim = simulate_serving(load_scenario(SCENARIOS / "serve_llama8b.yaml", ["inference.requests.count=3000"]))
    assert sim.result["requests"] == 3000
    assert len(sim.replicas[0].iterations) < 0.7 * sim.result["iterations"]  # runs of alike ones are one


def test_experts_with_few_tokens_cost_their_weights() -> None:
    """128 tokens a step of DeepSeek-V3: far above reading an eighth of all weights, far below ten times that."""
    scenario = load_scenario(SCENARIOS / "serve_deepseek_v3.yaml")
    weights = result("serve_deepseek_v3")["memory"][0]["parameters"]
    bound = weights / scenario.cluster.gpu.memory_bandwidth_bytes_per_s
    assert bound < result("serve_deepseek_v3")["time_per_output_token_s"]["p50"] < 5 * bound
