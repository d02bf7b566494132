"""What happens where the cache is too small: who is put out, and what it costs to come back."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.serve.prices.costs import iteration_costs
from sim.serve.prices.load import Load
from sim.serve.requests import Request
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from sim.variants.engines import ENGINES
from tests.sim.serve.serving_cases import WEIGHTS_AND_BUFFERS, finished, serving


def test_too_little_cache_preempts_the_youngest() -> None:
    scenario = serving(
        {"requests": {"prompt_len": 100, "output_len": 200, "count": 10}},
        gpu={"memory_bytes": WEIGHTS_AND_BUFFERS + 4.5e6},
    )
    sim = simulate_serving(scenario)
    kv = sim.result["kv_cache"]
    assert kv["preemptions"] > 0
    assert kv["recomputed_tokens"] > 0
    assert sim.replicas[0].sequences[0].preemptions == 0
    finished(sim)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_the_oldest_goes_on_while_the_others_are_under_way(preemption: str) -> None:
    """Three stages, room for the longest request alone: who needs a block waits for the younger ones, or all would put
    each other out for ever."""
    inference = {
        "requests": {"prompt_len": 60, "output_len": 40, "count": 8},
        "max_batch_tokens": 1,
        "kv_cache": {"block_tokens": 1},
        "preemption": preemption,
    }
    sim = simulate_serving(serving(inference, gpu={"memory_bytes": 1e6}, parallelism={"pp": 3}))
    assert sim.capacity.blocks == 99
    assert sim.result["kv_cache"]["preemptions"] > 0
    assert sim.replicas[0].sequences[0].preemptions == 0
    finished(sim)


def two_in_too_little_room(preemption: str) -> ServingSimulation:
    """Two requests of 64 and 64 tokens; the cache has room for one: two blocks of 64."""
    inference = {
        "requests": {"prompt_len": 64, "output_len": 64, "count": 2},
        "preemption": preemption,
        "kv_cache": {"block_tokens": 64},
    }
    sim = simulate_serving(serving(inference, gpu={"memory_bytes": 1e6}))
    assert sim.capacity.blocks == 2
    assert sim.result["kv_cache"]["preemptions"] == 1
    finished(sim)
    return sim


def test_swapping_costs_two_copies_and_no_computation() -> None:
    """Both prompts; the second's 64 tokens leave; the first's 63 decodes; they come back; the second's 63 decodes."""
    sim = two_in_too_little_room("swap")
    costs = iteration_costs(sim.scenario, sim.profile)
    copy = sim.costs.prices.pricing.network.host_copy(64 * sim.capacity.stage_token_bytes)
    decodes = sum(costs.stage_seconds(Load(1, 1, 65 + i, (), 1))[0] for i in range(63))
    prompts = costs.stage_seconds(Load(128, 0, 0, ((64, 64, 2),), 2))[0]
    assert sim.end_s == pytest.approx(prompts + 2 * decodes + 2 * copy, rel=1e-9)
    kv = sim.result["kv_cache"]
    assert kv["recomputed_tokens"] == 0
    assert kv["swapped_bytes"] == 64 * sim.capacity.stage_token_bytes
    assert kv["swap_s"] == pytest.approx(2 * copy)
    assert [s.kind for s in sim.timeline.spans() if s.kind.startswith("SWAP")] == ["SWAP_OUT", "SWAP_IN"]


def test_recomputing_costs_the_prompt_again_and_no_copies() -> None:
    sim = two_in_too_little_room("recompute")
    costs = iteration_costs(sim.scenario, sim.profile)
    prompts = costs.stage_seconds(Load(128, 0, 0, ((64, 64, 2),), 2))[0]
    again = costs.stage_seconds(Load(65, 0, 0, ((65, 65, 1),), 1))[0]
    first, second = (sum(costs.stage_seconds(Load(1, 1, 65 + i, (), 1))[0] for i in range(n, 63)) for n in (0, 1))
    assert sim.end_s == pytest.approx(prompts + first + again + second, rel=1e-9)
    assert sim.result["kv_cache"]["recomputed_tokens"] == 64
    assert sim.result["kv_cache"]["swapped_bytes"] == 0


def test_a_swapped_sequence_leaves_before_its_blocks_are_used_again() -> None:
    sim = two_in_too_little_room("swap")
    out, back = sim.replicas[0].scheduler.copies
    taking = next(i for i in sim.replicas[0].iterations if i.load.decodes and i.spans[0][0] >= out.start_s)
    assert taking.spans[0][0] == out.end_s
    assert back.start_s >= sim.replicas[0].sequences[0].finish_s


@pytest.mark.parametrize("engine", list(ENGINES))
def test_only_engines_that_swap_preempted_requests_are_told_to(engine: str) -> None:
    """vLLM before V1 has --preemption-mode since 0.5; TensorRT-LLM preempts nobody, which a warning says."""
    able = engine in ("bundled", "vllm-0.5", "vllm-0.6", "vllm-0.6.5") or engine.startswith("trtllm")
    inference = {"engine": engine, "preemption": "swap"}
    if able:
        serving(inference)
        return
    with pytest.raises(InputError, match=f"preemption: found 'swap'; engine {engine} swaps no requests; .* vllm-0.6.5"):
        serving(inference)


@pytest.mark.parametrize(("engine", "swaps"), [("sglang-0.4.7", False), ("sglang-0.5", True), ("vllm-v1", False)])
def test_a_decode_server_of_sglang_swaps_by_itself(engine: str, swaps: bool) -> None:
    sizes = {name: {"replicas": 1, "tp": 1} for name in ("prefill", "decode")}
    requests = {"prompt_len": 100, "output_len": 1500, "count": 12}
    inference = {"engine": engine, "requests": requests, "disaggregated": sizes, "kv_cache": {"memory_fraction": 0.9}}
    small = {"memory_bytes": 1.3 * WEIGHTS_AND_BUFFERS}
    sim = simulate_serving(serving(inference, gpu=small))
    cache = sim.result["kv_cache"]
    assert cache["preemptions"] > 0
    assert (cache["swapped_bytes"] > 0) == swaps
    assert (cache["recomputed_tokens"] > 0) != swaps
    assert all(s.generated == s.request.output_tokens for s in sim.replicas[-1].sequences)
    if swaps:
        assert sim.replicas[-1].scheduler.swap_tokens == sim.capacity.host_tokens


@pytest.mark.parametrize(
    "settings", [{"preemption": "swap"}, {"chunked_prefill": True, "max_batch_tokens": 12, "max_running_requests": 12}]
)
def test_a_request_alone_ends_where_a_sequence_goes_on_only_while_a_block_is_free(settings: dict[str, Any]) -> None:
    """In the smallest cache: put out by its own blocks it would come back again and again."""
    small = {"memory_bytes": WEIGHTS_AND_BUFFERS - 1e7}
    scenario = serving({"engine": "vllm-0.6", "kv_cache": {"block_tokens": 16}, **settings}, gpu=small)
    sim = simulate_serving(scenario, requests=(Request(0.0, 150, 9),))
    assert sim.replicas[0].counts.preemptions == 0
    finished(sim)
