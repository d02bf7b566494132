"""Serving: closed forms, a scheduler's rules, and what must hold for any workload."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sim.inputs.engine_file import engine_of
from sim.inputs.scenario import load_scenario
from sim.models.moe.fullest import fullest_rank
from sim.models.parameters import count_parameters
from sim.serve.prices.costs import iteration_costs
from sim.serve.prices.load import Load
from sim.serve.requests import Request
from sim.serve.results.result import ServingSimulation
from sim.serve.results.serving_warnings import waiting_at_last_arrival
from sim.serve.simulation import simulate_serving
from tests.sim.serve.serving_cases import SMALL, WEIGHTS_AND_BUFFERS, finished, requests_of, serving, settings_of


@pytest.mark.parametrize("preset", ["llama2-13b", "llama3-8b", "mixtral-8x7b"])
def test_batch_one_decode_is_bound_by_bandwidth(preset: str) -> None:
    """A token alone reads every active weight once: at least bytes / bandwidth, and little more for a large model."""
    scenario = serving({"requests": {"prompt_len": 8, "output_len": 64}}, model=preset)
    result = simulate_serving(scenario).result
    model = scenario.model
    active = count_parameters(model).active - model.vocab * model.hidden  # the look-up reads one row
    bound = 2 * active / scenario.cluster.gpu.memory_bandwidth_bytes_per_s
    per_token = result["time_per_output_token_s"]["p50"]
    kernels = model.layers * 12 * 5e-6
    assert bound <= per_token <= bound + kernels


def test_quantized_weights_speed_batch_one_decode() -> None:
    modes = ("none", "int8_weight_only", "int4_weight_only", "fp8")
    found = {}
    for mode in modes:
        scenario = serving({"requests": {"prompt_len": 8, "output_len": 16}, "quantization": mode}, model="llama2-13b")
        sim = simulate_serving(scenario)
        found[mode] = (sim.result["time_per_output_token_s"]["p50"], sim.capacity.weight_bytes[0])
    assert found["none"][0] > found["int8_weight_only"][0] > found["int4_weight_only"][0]
    assert found["fp8"][0] < found["none"][0]
    assert found["int8_weight_only"][1] == pytest.approx(found["none"][1] / 2, rel=0.04)
    assert found["int4_weight_only"][1] == pytest.approx(found["none"][1] * 0.26, rel=0.1)  # 4.125 bits, 16-bit ends


def test_llm_int8_is_slower_than_16_bits_where_batches_are_small() -> None:
    """Dettmers et al. 2022, appendix E: decomposition costs time below some 10 billion parameters."""
    requests = {"requests": {"prompt_len": 8, "output_len": 16}}
    gpu = {"peak_flops_per_s": {"fp32": 67e12, "bf16": 989e12, "fp16": 989e12, "int8": 1979e12}}
    plain = simulate_serving(serving(requests, gpu=gpu)).result
    decomposed = simulate_serving(serving({**requests, "quantization": "llm_int8"}, gpu=gpu)).result
    assert decomposed["time_per_output_token_s"]["p50"] > 1.1 * plain["time_per_output_token_s"]["p50"]


def test_active_experts() -> None:
    moe = serving(model="mixtral-8x7b").model.moe
    assert moe is not None
    assert fullest_rank(moe, 1, 1)[1] == 2
    assert fullest_rank(moe, 1000, 1)[1] == 8


def test_static_batch_is_one_prefill_and_its_decodes() -> None:
    scenario = serving({"batching": "static", "requests": {"prompt_len": 100, "output_len": 9, "count": 6}})
    sim = simulate_serving(scenario)
    costs = iteration_costs(scenario, sim.profile)
    expected = costs.stage_seconds(Load(600, 0, 0, ((100, 100, 6),), 6))[0]
    expected += sum(costs.stage_seconds(Load(6, 6, 6 * (101 + i), (), 6))[0] for i in range(8))
    assert sim.end_s == pytest.approx(expected, rel=1e-12)
    assert sim.result["iterations"] == 9
    finished(sim)


@settings(max_examples=60, deadline=None)
@given(requests_of, settings_of, st.floats(1e5, 3e6), st.sampled_from([{}, {"pp": 2}, {"dp": 2}, {"pp": 4, "tp": 2}]))
def test_any_workload_is_served(
    requests: tuple[Request, ...], inference: dict[str, Any], cache_bytes: float, parallelism: dict[str, int]
) -> None:
    """All tokens come out, no iteration exceeds its limits, no block is used that does not exist, none is lost."""
    scenario = serving(inference, gpu={"memory_bytes": WEIGHTS_AND_BUFFERS + cache_bytes}, parallelism=parallelism)
    sim = simulate_serving(scenario, requests=requests)
    finished(sim)
    served = sum(len(r.sequences) for r in sim.replicas)
    assert served == len(requests)
    computed = sum(i.load.tokens * i.steps for r in sim.replicas for i in r.iterations)
    counts = [r.counts for r in sim.replicas]
    asked = sum(r.prompt_tokens + r.output_tokens - 1 for r in requests) + sum(c.late_tokens for c in counts)
    recomputed, hits = sum(c.recomputed_tokens for c in counts), sum(c.hit_tokens for c in counts)
    if not sum(c.preemptions for c in counts):
        assert computed == asked - hits
    assert asked - hits <= computed <= asked + recomputed + sum(c.preemptions for c in counts) * 300
    for replica in sim.replicas:
        for iteration in replica.iterations:
            assert iteration.load.tokens <= inference["max_batch_tokens"]
        states = replica.states.arrays()
        assert 0 <= min(states.held) <= max(states.held) <= sim.capacity.blocks
        assert min(states.unused) >= 0
        assert 0 <= min(states.waste) <= max(states.waste) < 1
        stages = scenario.parallelism.pp if engine_of(scenario.for_serving.engine).runs_by_stage else 1
        assert max(states.running) <= inference["max_running_requests"] * stages


@settings(max_examples=40, deadline=None)
@given(requests_of, settings_of, st.sampled_from([{}, {"pp": 3}, {"dp": 2}]), st.sampled_from(["static", "simpy"]))
def test_littles_law(
    requests: tuple[Request, ...], inference: dict[str, Any], parallelism: dict[str, int], engine: Any
) -> None:
    in_turn = {"router": "round_robin"} if engine == "static" else {}  # which knows no other
    sim = simulate_serving(serving(inference | in_turn, parallelism=parallelism), requests=requests, engine=engine)
    _littles_law(sim)


WAYS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "least loaded": ({"router": "least_loaded"}, {"dp": 3}),
    "prefix aware": ({"router": "prefix_aware", "prefix_cache": "gpu"}, {"dp": 2}),
    "tiers": ({"prefix_cache": "gpu", "kv_cache": {"tiers": {"host": {"capacity_bytes": 1e6}}}}, {}),
    "prompts first": ({"engine": "vllm-0.6", "chunked_prefill": False}, {"dp": 2}),
    "a draft": ({"speculative": {"draft": {**SMALL, "layers": 1}, "tokens": 3, "acceptance": 0.6}}, {}),
    "adapters": ({"lora": {"adapters": 3, "max_loras": 2, "targets": ["qkv"]}}, {}),
    "on and off": ({"autoscaling": {"interval_s": 0.01, "upscale_delay_s": 0, "startup_s": 0.01}}, {"dp": 3}),
    "a static batch": ({"batching": "static"}, {"pp": 2}),
}


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=15, deadline=None)
@given(requests=requests_of)
def test_littles_law_however_requests_are_served(way: str, requests: tuple[Request, ...]) -> None:
    inference, parallelism = WAYS[way]
    if way == "a static batch":  # which begins with all of them
        requests = tuple([r._replace(arrival_s=0.0, prefix_id="", prefix_tokens=0) for r in requests])
    _littles_law(simulate_serving(serving(inference, parallelism=parallelism), requests=requests))


def _littles_law(sim: ServingSimulation) -> None:
    """Sequences that run, over time, are the times that each runs; and so with those that wait before them."""
    states = [r.states.arrays() for r in sim.replicas]
    spans = [(s.running, itertools.pairwise(s.time_s)) for s in states]
    running = sum(n * (b - a) for numbers, times in spans for n, (a, b) in zip(numbers, times, strict=False))
    assert running == pytest.approx(sum(s.finish_s - s.admitted_s for s in sim.sequences), rel=1e-9)
    queue, latency = sim.outcome.queue_time_s.mean, sim.outcome.request_latency_s.mean
    before_s = sim.costs.host.times.before_s(sum(s.request.prompt_tokens for s in sim.sequences) / len(sim.sequences))
    after_s = sum(s.last_after_s for s in sim.sequences) / len(sim.sequences)
    assert before_s + running / len(sim.sequences) + queue + after_s == pytest.approx(latency, rel=1e-9)


# The last one arrives as an iteration ends: by a sum whose last bit differed, it entered an iteration early or late.
AT_AN_ITERATIONS_END = (Request(0.0, 1, 20), Request(0.001953125, 1, 21), Request(0.004, 1, 1))


@settings(max_examples=60, deadline=None)
@example(AT_AN_ITERATIONS_END, {"max_running_requests": 2, "max_batch_tokens": 2, "kv_cache": {"block_tokens": 1}}, 1e5)
@given(requests_of, settings_of, st.floats(1e5, 3e6))
def test_grouping_changes_no_time(requests: tuple[Request, ...], inference: dict[str, Any], cache_bytes: float) -> None:
    scenario = serving(inference, gpu={"memory_bytes": WEIGHTS_AND_BUFFERS + cache_bytes})
    grouped, single = (simulate_serving(scenario, requests=requests, group=g) for g in (True, False))
    for a, b in zip(grouped.replicas[0].sequences, single.replicas[0].sequences, strict=True):
        assert (a.first_token_s, a.finish_s, a.preemptions) == (b.first_token_s, b.finish_s, b.preemptions)
    finished(grouped)
    assert grouped.replicas[0].counts == single.replicas[0].counts
    assert grouped.result["iterations"] == single.result["iterations"]
    _same_means(grouped.result, single.result)


def _same_means(grouped: dict[str, Any], single: dict[str, Any]) -> None:
    """For means over time, steps of a run count as equally long, which they are but for what they read of the cache."""
    for key in ("blocks_used_mean", "waste", "running_mean"):
        assert grouped["kv_cache"][key] == pytest.approx(single["kv_cache"][key], rel=0.02, abs=1e-9), key
    for key in ("p50", "p99", "mean"):
        gaps = [result["inter_token_latency_s"][key] for result in (grouped, single)]
        assert gaps[0] == pytest.approx(gaps[1], rel=1e-9, abs=1e-12), key


def test_gaps_between_tokens_grow_with_the_cache_within_a_run_of_alike_iterations() -> None:
    """3,999 of them: the longest takes more than the mean by the read of 2,000 more tokens of each of 64 caches."""
    requests = {"prompt_len": 64, "output_len": 4000, "count": 64}
    scenario = serving({"requests": requests, "batching": "static"})
    grouped, single = (simulate_serving(scenario, group=g) for g in (True, False))
    gaps = grouped.outcome.inter_token_latency_s
    assert len(grouped.replicas[0].iterations) == 2
    token_bytes = 2 * 4 * 2 * 32 * 2  # keys and values of 4 layers, 2 heads of 32, in 16 bits
    beyond_s = 64 * token_bytes * 0.49 * 4000 / 3.35e12  # from the median to the 99th percentile
    assert gaps.p99 - gaps.p50 == pytest.approx(beyond_s, rel=0.02)
    assert gaps.p99 == pytest.approx(single.outcome.inter_token_latency_s.p99, rel=1e-9)


def test_the_cache_grows_within_a_run_of_alike_iterations() -> None:
    """One sequence of up to 60 tokens holds 1, 2, 3 and 4 blocks of 16 for 16, 16, 16 and 12 iterations."""
    requests = {"requests": {"prompt_len": 1, "output_len": 60, "count": 1}}
    for group in (True, False):
        found = simulate_serving(serving(requests), group=group).outcome.kv_cache
        assert found.blocks_used_mean == pytest.approx((16 * (1 + 2 + 3) + 4 * 12) / 60, rel=0.01)
        assert found.waste == pytest.approx(1 - (60 * 61 / 2) / (16 * (16 * 6 + 4 * 12)), rel=0.02)


def test_an_idle_decode_pool_lengthens_no_gap_however_iterations_are_grouped() -> None:
    """Each request is done before the next one comes: no token waits for it."""
    inference = {"disaggregated": {}, "max_running_requests": 4}
    requests = tuple([Request(0.5 * i, 300, 1 + 2 * (i % 3)) for i in range(12)])
    grouped, single = (simulate_serving(serving(inference), requests=requests, group=g).result for g in (True, False))
    _same_means(grouped, single)
    assert single["inter_token_latency_s"]["p99"] < 0.01


def test_a_prompts_last_token_is_kept_for_others_however_iterations_are_grouped() -> None:
    """Found by the test above: a last prompt token alone looks like a decode step, but completes a prefix's block."""
    requests = (Request(0.0, 2, 2, "a", 2), Request(0.0, 3, 1, "a", 3))
    inference = {"max_running_requests": 1, "max_batch_tokens": 1, "prefix_cache": "gpu"}
    inference["kv_cache"] = {"block_tokens": 1}
    for group in (True, False):
        sim = simulate_serving(serving(inference), requests=requests, group=group)
        assert sim.result["kv_cache"]["prefix_hit_tokens"] == 2


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 500), st.integers(1, 50), st.floats(1.01, 10))
def test_more_bandwidth_is_never_slower(count: int, prompt: int, output: int, factor: float) -> None:
    requests = {"requests": {"prompt_len": prompt, "output_len": output, "count": count}, "batching": "static"}
    slow, fast = (
        simulate_serving(serving(requests, gpu={"memory_bandwidth_bytes_per_s": b})).end_s
        for b in (1e11, 1e11 * factor)
    )
    assert fast <= slow


def test_contiguous_reserves_what_paged_uses() -> None:
    """The same memory holds more sequences in pages, which waste half a block each (Kwon et al. 2023, figure 2)."""
    model = {**SMALL, "max_positions": 2048}
    results = {}
    for layout in ("paged", "contiguous"):
        inference = {"requests": {"prompt_len": 200, "output_len": 56, "count": 64}, "kv_cache": {"layout": layout}}
        scenario = serving(inference, model=model, gpu={"memory_bytes": 1e8})
        results[layout] = simulate_serving(scenario).result
    paged, contiguous = (results[k]["kv_cache"] for k in ("paged", "contiguous"))
    assert paged["waste"] < 0.05
    assert contiguous["waste"] > 0.85
    assert paged["running_max"] > 4 * contiguous["running_max"]
    assert results["paged"]["output_tokens_per_s"] > 1.5 * results["contiguous"]["output_tokens_per_s"]


def test_prefix_hits() -> None:
    """Four prompts of 160 with 128 in common, one after another: the last three find 128 each."""
    requests = tuple(Request(float(i), 160, 4, "system", 128) for i in range(4))
    gpu = simulate_serving(serving({"prefix_cache": "gpu"}), requests=requests).result
    cpu = simulate_serving(serving({"prefix_cache": "cpu"}), requests=requests).result
    none = simulate_serving(serving(), requests=requests).result
    for result in (gpu, cpu):
        assert result["kv_cache"]["prefix_hit_tokens"] == 3 * 128
        assert result["kv_cache"]["prefix_hit_rate"] == pytest.approx(0.6)
    assert none["kv_cache"]["prefix_hit_tokens"] == 0
    assert cpu["kv_cache"]["loaded_bytes"] == 3 * 128 * cpu["kv_cache"]["bytes_per_token"]
    assert cpu["kv_cache"]["load_s"] >= cpu["kv_cache"]["loaded_bytes"] / 63e9
    assert cpu["kv_cache"]["stored_bytes"] == 128 * cpu["kv_cache"]["bytes_per_token"]


def test_prefix_cache_pays_for_a_large_model() -> None:
    requests = tuple(Request(i * 0.5, 8000, 8, "system", 7900) for i in range(6))
    times = {
        mode: simulate_serving(serving({"prefix_cache": mode}, model="llama3-8b"), requests=requests).result[
            "time_to_first_token_s"
        ]["p50"]
        for mode in ("none", "gpu", "cpu")
    }
    assert times["gpu"] < times["cpu"] < times["none"]


def test_arrivals_are_waited_for() -> None:
    requests = (Request(0.0, 10, 2), Request(5.0, 10, 2))
    sim = simulate_serving(serving(), requests=requests)
    assert sim.replicas[0].sequences[1].first_token_s > 5.0
    assert sim.replicas[0].sequences[0].finish_s < 1.0


def test_rates_and_means_count_from_the_first_arrival() -> None:
    """A slice of a longer trace, which begins at 1,000 s, is the same workload.

    None arrives just as an iteration ends: which comes first then hangs on the last bit, and late times have fewer.
    """
    early, late = (
        simulate_serving(serving(), requests=tuple(Request(t + 0.0010137 * i, 64, 16) for i in range(20))).result
        for t in (0.0, 1000.0)
    )
    for part, name in ((None, "output_tokens_per_s"), ("kv_cache", "running_mean"), ("kv_cache", "blocks_used_mean")):
        a, b = (r[part][name] if part else r[name] for r in (early, late))
        assert b == pytest.approx(a, rel=1e-6), name
    assert late["duration_s"] == pytest.approx(1000 + early["duration_s"])


def test_chunked_prefill_lets_decodes_go_on() -> None:
    """While a long prompt is computed in chunks, a running sequence gets a token in every iteration."""
    requests = (Request(0.0, 8, 40), Request(1e-6, 4000, 1))
    chunked = simulate_serving(serving({"max_batch_tokens": 256}), requests=requests)
    mixed = [i for i in chunked.replicas[0].iterations if i.load.prefills and i.load.decodes]
    assert len(mixed) == 16
    assert all(i.load.tokens == 256 for i in mixed[:-1])


def test_pipeline_keeps_its_stages_busy() -> None:
    requests = {"requests": {"prompt_len": 64, "output_len": 64, "count": 64}, "max_running_requests": 64}
    sim = simulate_serving(serving(requests, parallelism={"pp": 4}))
    finished(sim)
    spans = [i.spans for i in sim.replicas[0].iterations]
    busy = max(sum(s[stage][1] - s[stage][0] for s in spans) for stage in range(4))
    assert busy > 0.8 * sim.end_s
    for stage in range(4):
        ends = [s[stage] for s in spans]
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(ends))


def test_tensor_parallel_serves_a_large_model_faster() -> None:
    requests = {"requests": {"prompt_len": 100, "output_len": 20, "count": 1}}
    times = [simulate_serving(serving(requests, model="llama3-70b", parallelism={"tp": tp})) for tp in (2, 8)]
    assert times[1].end_s < times[0].end_s
    assert times[1].result["comm_share"] > 0


def test_result_has_the_contracts_keys_and_is_json() -> None:
    sim = simulate_serving(load_scenario("scenarios/serve_llama8b.yaml", ["inference.requests.count=20"]))
    result = sim.result
    json.dumps(result, allow_nan=False)
    for key in ("request_latency_s", "time_to_first_token_s", "time_per_output_token_s"):
        assert list(result[key]) == ["p50", "p90", "p95", "p99", "mean"]
        assert 0 < result[key]["p50"] <= result[key]["p99"]
    assert result["format"] == "sim-result/1"
    assert result["output_tokens_per_s_per_gpu"] == result["output_tokens_per_s"]
    assert {"blocks_used", "waste", "preemptions", "prefix_hit_rate"} <= result["kv_cache"].keys()
    assert len(sim.timeline) == len(sim.replicas[0].iterations)
    assert sim.timeline.step_time_s == pytest.approx(sim.end_s)
    assert sim.memory[0].total.max() <= result["peak_memory_bytes"]


def test_what_does_not_fit_still_runs() -> None:
    result = simulate_serving(serving(model="llama3-70b")).result
    assert result["fits_in_memory"] is False
    assert any("does not fit" in w for w in result["warnings"])


@pytest.mark.parametrize(("rate_per_s", "waits"), [(20, False), (400, True)])
def test_requests_faster_than_they_are_served_are_warned_of(rate_per_s: float, waits: bool) -> None:
    """At 400 a second three hundred come within a second, and no more than 256 run at once."""
    set_ = ["inference.requests.count=300", f"inference.requests.rate_per_s={rate_per_s}"]
    sim = simulate_serving(load_scenario("scenarios/serve_llama8b.yaml", set_))
    said = [w for w in sim.result["warnings"] if w.startswith("requests come faster than they are served")]
    assert bool(said) is waits
    assert (waiting_at_last_arrival(sim.sequences) == 0) is not waits


@pytest.mark.parametrize(("layout", "whole"), [({"tp": 2}, True), ({"tp": 2, "ep": 2}, False), ({}, False)])
def test_experts_that_stand_whole_on_every_rank_are_warned_of(layout: dict[str, int], whole: bool) -> None:
    set_ = ["model=qwen3-30b-a3b", "inference.requests.count=2", *(f"parallelism.{k}={v}" for k, v in layout.items())]
    warned = simulate_serving(load_scenario("scenarios/serve_llama8b.yaml", set_)).result["warnings"]
    assert any("ranks holds all experts; expert_tp: 2 splits each expert" in w for w in warned) is whole


@pytest.mark.parametrize("later_s", [0.0, 5.0])
def test_waste_does_not_depend_on_when_the_first_request_comes(later_s: float) -> None:
    """A prompt of 8 tokens fills half of a block of 16 for the one iteration that it lasts."""
    found = simulate_serving(serving(), requests=(Request(later_s, 8, 1),)).outcome.kv_cache
    assert found.waste == pytest.approx(0.5)


def test_a_token_too_many_takes_no_budget_from_older_prompts_however_iterations_are_grouped() -> None:
    """A prompt that waited for its prefix is older than a request that has ended meanwhile."""
    lengths = ((2, 3, "a"), (5, 3, ""), (40, 1, ""), (40, 2, "a"), (1, 1, ""))
    requests = tuple(
        [Request(0.0, prompt, output, name, prompt if name else 0) for prompt, output, name in lengths[:4]]
    )
    requests = (*requests, Request(0.01, *lengths[4]))
    limits = {"chunked_prefill": True, "max_batch_tokens": 8, "max_running_requests": 4}
    inference = {"engine": "vllm-0.6", "prefix_cache": "cpu", "kv_cache": {"block_tokens": 1}, **limits}
    grouped, single = (simulate_serving(serving(inference), requests=requests, group=g) for g in (True, False))
    assert [s.finish_s for s in grouped.sequences] == [s.finish_s for s in single.sequences]
