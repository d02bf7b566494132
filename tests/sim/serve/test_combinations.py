"""Adapters, drafted tokens, pools and pipeline stages together: closed forms, and what holds for any workload."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.errors import InputError
from sim.serve.memory import weight_bytes
from sim.serve.prices.costs import iteration_costs
from sim.serve.prices.load import Load
from sim.serve.requests import Request
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from tests.sim.cases import FREE_LINKS, llama_like, scenario_with
from tests.sim.serve.serving_cases import (
    SMALL,
    WEIGHTS_AND_BUFFERS,
    beside,
    every_way,
    finished,
    requests_of,
    serving,
    settings_of,
)

DRAFT = llama_like(layers=1, hidden=64, heads=2, kv_heads=1, ffn=128, vocab=1024)
LORA = {"adapters": 1, "rank": 8}
ONE_EACH: dict[str, Any] = {"prefill": {}, "decode": {}}


def drafting(acceptance: float, tokens: int = 4, **more: Any) -> dict[str, Any]:
    return {"draft": DRAFT, "tokens": tokens, "acceptance": acceptance, **more}


def alone(prompt: int = 64, output: int = 41) -> dict[str, Any]:
    return {"requests": {"prompt_len": prompt, "output_len": output}}


def all_left(sim: ServingSimulation) -> None:
    """Every request got its tokens, and no replica holds anything of it."""
    for s in sim.sequences:
        assert s.generated == s.request.output_tokens
        assert s.request.arrival_s <= s.first_token_s <= s.finish_s
    for r in sim.replicas:
        s = r.scheduler
        assert s.cache.private == s.cache.tokens == 0
        assert not s.running
        assert not s.waiting
        assert s.adapters is None or not s.adapters.users


@pytest.mark.parametrize(("acceptance", "each"), [(0.0, 1), (1.0, 5)])
def test_a_pool_drafts_and_checks_what_another_has_computed(acceptance: float, each: int) -> None:
    """The prompt by model and draft, both caches' transfer, and an iteration of drafts and a check for every token, or
    for every five."""
    sim = simulate_serving(serving({**alone(), "speculative": drafting(acceptance), "disaggregated": ONE_EACH}))
    plain, small = (iteration_costs(serving(model=model), sim.profile) for model in (SMALL, DRAFT))
    prompt = Load(64, 0, 0, ((64, 64, 1),), 1)
    expected = plain.stage_seconds(prompt)[0] + small.stage_seconds(Load(64, 0, 0, ((64, 64, 1),), 1))[0]
    (moved,) = sim.transfers
    assert moved.start_s == pytest.approx(expected, rel=1e-9)
    size = 64 * (4 * 2 + 1) * 2 * 32 * 2  # layers and KV heads of model and draft, keys and values, head size, bytes
    transfer_s = sim.costs.prices.pricing.network.send(0, 1, size)
    assert moved.end_s - moved.start_s == pytest.approx(transfer_s, rel=1e-9)
    expected += transfer_s
    for done in range(0, 40, each):
        expected += plain.stage_seconds(Load(5, 1, 64 + done + 5, (), 5, 5))[0]
        expected += sum(small.stage_seconds(Load(1, 1, 64 + done + 1 + i, (), 1))[0] for i in range(4))
    assert sim.end_s == pytest.approx(expected, rel=1e-9)
    assert sim.result["pools"][0]["iterations"] == 1
    assert sim.result["pools"][1]["iterations"] == 40 / each


def test_where_drafts_are_not_handed_over_the_first_token_is_added_alone() -> None:
    """vLLM: the first of 42 tokens, which is sampled anew, then five a check; SGLang and the bundled engine have the
    first token and check from the first iteration on."""
    found = {}
    for engine in ("bundled", "sglang-0.5", "vllm-0.19"):
        given_ = {**alone(output=42), "engine": engine, "speculative": drafting(1.0), "disaggregated": ONE_EACH}
        sim = simulate_serving(serving(given_))
        found[engine] = [(i.load.tokens, i.load.queries) for i in sim.replicas[1].iterations]
    assert found["bundled"] == found["sglang-0.5"] == [(5, 5)] * 9  # the last of them for a single token
    assert found["vllm-0.19"] == [(1, 1)] + [(5, 5)] * 9


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 400), st.integers(1, 60), st.floats(0, 1), st.booleans())
def test_one_request_takes_as_long_over_links_that_take_no_time(
    prompt: int, output: int, acceptance: float, adapter: bool
) -> None:
    """Pools with free transfers are a whole replica to a request alone, with drafts and with an adapter on both."""
    more = {"speculative": drafting(acceptance)} | ({"lora": LORA} if adapter else {})

    def end_s(**pools: Any) -> float:
        inference = {**alone(prompt, output), **more, **pools}
        scenario = scenario_with(model=SMALL, cluster=FREE_LINKS, calibration="roofline", inference=inference)
        return simulate_serving(scenario).end_s

    copy_s = 0.0
    if adapter and output > 1:  # the decode replica copies the adapter once it is asked to add tokens
        scheduler = simulate_serving(serving({**alone(), "lora": LORA})).replicas[0].scheduler
        assert scheduler.adapters is not None
        copy_s = scheduler.adapters.copy_s
    assert end_s(disaggregated=ONE_EACH) == pytest.approx(end_s() + copy_s, rel=1e-6)


def test_an_adapter_is_copied_to_both_pools_and_beside_the_prompts_transfer() -> None:
    """The decode replica's next token waits for the later of the computed prompt and the adapter."""
    for prompt in (64, 4000):
        whole, sim = (
            simulate_serving(serving({**alone(prompt), "lora": LORA, **pools}))
            for pools in ({}, {"disaggregated": ONE_EACH})
        )
        (moved,) = sim.transfers
        slots = [r.scheduler.adapters for r in sim.replicas]
        waits_s = max(moved.end_s - moved.start_s, slots[1].copy_s)
        assert sim.end_s == pytest.approx(whole.end_s + waits_s, rel=1e-9)
        assert sim.outcome.lora is not None
        assert sim.outcome.lora.loads == 2


def test_a_place_is_free_once_the_prompt_is_computed() -> None:
    """One place on the prefill replica: the second adapter's prompt does not wait for the first one's slow transfer."""
    cluster = {"preset": "dgx-h100", "gpu": "h100-sxm", "intra_node": {"bandwidth_bytes_per_s": 1e8}}
    inference = {"lora": {"adapters": 2, "max_loras": 1}, "disaggregated": {"prefill": {}, "decode": {"replicas": 2}}}
    requests = tuple([Request(0.0, 500, 2, "", 0, (), name) for name in "ab"])
    given_ = {"requests": {"prompt_len": 1, "output_len": 1}, **inference}
    scenario = scenario_with(model=SMALL, cluster=cluster, calibration="roofline", inference=given_)
    sim = simulate_serving(scenario, requests=requests)
    all_left(sim)
    first, second = sorted(s.first_token_s for s in sim.sequences)
    assert second < sim.transfers[0].end_s
    assert first < second


@pytest.mark.parametrize(("acceptance", "each"), [(0.0, 1), (1.0, 5)])
def test_an_adapter_serves_the_check_and_not_the_draft(acceptance: float, each: int) -> None:
    """The model's prompt and checks with the adapter's products for all their tokens, the draft's steps without."""
    sim = simulate_serving(serving({**alone(), "speculative": drafting(acceptance), "lora": LORA}))
    finished(sim)
    adapted, small = (iteration_costs(serving(*own), sim.profile) for own in (({"lora": LORA},), (None, DRAFT)))
    slots = sim.replicas[0].scheduler.adapters
    assert slots is not None
    prompt = ((64, 64, 1),)
    expected = slots.copy_s + adapted.stage_seconds(Load(64, 0, 0, prompt, 1, adapted=64, adapters=1))[0]
    expected += small.stage_seconds(Load(64, 0, 0, prompt, 1))[0]
    for done in range(0, 40, each):
        check = Load(5, 1, 64 + done + 5, (), 5, 5, adapted=5, adapters=1)
        expected += adapted.stage_seconds(check)[0]
        expected += sum(small.stage_seconds(Load(1, 1, 64 + done + 1 + i, (), 1))[0] for i in range(4))
    assert sim.end_s == pytest.approx(expected, rel=1e-9)
    without = simulate_serving(serving({**alone(), "speculative": drafting(acceptance)}))
    more = sim.capacity.weight_bytes[0] - without.capacity.weight_bytes[0]
    assert sim.outcome.lora is not None
    assert more == sim.outcome.lora.adapter_bytes  # the draft has no adapter


def test_the_last_stage_drafts() -> None:
    """A request alone passes both stages and the message between them, then the draft's steps on the last one, whose
    GPUs alone have the draft's weights and cache."""
    plain = iteration_costs(serving(parallelism={"pp": 2}), simulate_serving(serving()).profile)
    sim = simulate_serving(serving({**alone(), "speculative": drafting(1.0)}, parallelism={"pp": 2}))
    small = iteration_costs(serving(model=DRAFT), sim.profile)

    def passed_s(load: Load) -> float:
        return sum(plain.stage_seconds(load)) + plain.send_s(0, load.tokens)

    expected = passed_s(Load(64, 0, 0, ((64, 64, 1),), 1)) + small.stage_seconds(Load(64, 0, 0, ((64, 64, 1),), 1))[0]
    for done in range(0, 40, 5):
        expected += passed_s(Load(5, 1, 64 + done + 5, (), 5, 5))
        expected += sum(small.stage_seconds(Load(1, 1, 64 + done + 1 + i, (), 1))[0] for i in range(4))
    assert sim.end_s == pytest.approx(expected, rel=1e-9)
    without = simulate_serving(serving(alone(), parallelism={"pp": 2})).capacity
    weights = [a - b for a, b in zip(sim.capacity.weight_bytes, without.weight_bytes, strict=True)]
    assert weights == [0, weight_bytes(small.dims, small.specs, small.stages[0])]
    token = [a - b for a, b in zip(sim.capacity.token_bytes, without.token_bytes, strict=True)]
    assert token == [0, 2 * 32 * 2]


def test_a_models_own_layer_on_the_last_stage_has_an_embedding_there() -> None:
    model = {**SMALL, "mtp_layers": 1}
    more = []
    for pp in (1, 2):
        own = {"speculative": {"tokens": 1, "acceptance": 1.0}}
        with_, without = (simulate_serving(serving({**alone(), **o}, model, None, {"pp": pp})) for o in (own, {}))
        more.append(with_.capacity.weight_bytes[-1] - without.capacity.weight_bytes[-1])
    assert more[1] - more[0] == 1024 * 256 * 2


def test_a_slow_last_stage_slows_its_draft() -> None:
    """A straggler among ranks 2 and 3, the last stage's, slows the draft; one on the first stage does not."""

    def draft_s(rank: int) -> float:
        given_ = {**alone(), "speculative": drafting(1.0)}
        scenario = scenario_with(
            model=SMALL,
            calibration="roofline",
            cluster="dgx-h100",
            parallelism={"tp": 2, "pp": 2},
            inference=given_,
            faults={"stragglers": [{"rank": rank, "compute_scale": 2.0}]},
        )
        (pool,) = simulate_serving(scenario).pools
        (costs,) = pool.prices
        return costs.of_stages[-1].draft_seconds(Load(5, 1, 100, (), 5, 5))[-1]

    assert draft_s(3) > 1.3 * draft_s(0)


@settings(max_examples=25, deadline=None)
@given(requests_of, settings_of, st.floats(3e5, 3e6), st.floats(0, 1), st.integers(1, 6), st.integers(0, 4))
def test_drafts_stages_and_adapters_are_served_alike_on_all_clocks(
    requests: tuple[Request, ...],
    inference: dict[str, Any],
    cache_bytes: float,
    acceptance: float,
    tokens: int,
    adapters: int,
) -> None:
    inference |= {"engine": "vllm-0.19", "preemption": "recompute", "speculative": drafting(acceptance, tokens)}
    inference["max_batch_tokens"] += inference["max_running_requests"]  # kept for the draft model
    inference |= {"lora": {"adapters": adapters, "max_loras": 2}} if adapters else {}
    gpu = {"memory_bytes": WEIGHTS_AND_BUFFERS + cache_bytes}
    every_way(serving(inference, gpu=gpu, parallelism={"pp": 2}), requests)


@settings(max_examples=40, deadline=None)
@given(requests_of, settings_of, st.floats(3e5, 3e6), st.floats(0, 1), st.integers(1, 6), st.integers(1, 4))
def test_any_workload_is_served_by_pools_with_drafts_and_adapters(
    requests: tuple[Request, ...],
    inference: dict[str, Any],
    cache_bytes: float,
    acceptance: float,
    tokens: int,
    adapters: int,
) -> None:
    """Also where few adapters have room, and few tokens."""
    inference["disaggregated"] = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}}
    inference["lora"] = {"adapters": adapters, "max_loras": 2}
    if not inference["engine"].startswith(("sglang", "vllm-0.6")):  # they have no adapters beside drafts
        inference["speculative"] = drafting(acceptance, tokens)
    scenario = serving(inference, gpu={"memory_bytes": WEIGHTS_AND_BUFFERS + cache_bytes})
    sim = simulate_serving(scenario, requests=requests)
    all_left(sim)
    assert sum(t.last for t in sim.transfers) == sum(r.output_tokens > 1 for r in requests)
    assert all(i.load.adapters <= 2 for r in sim.replicas for i in r.iterations)


def test_clients_in_a_closed_loop_keep_littles_law() -> None:
    """Four requests are always under way until the last is sent: throughput times latency is four."""
    requests = {"prompt_len": 100, "output_len": 40, "count": 200, "max_concurrency": 4, "range_ratio": 0.5}
    pools = {"prefill": {"replicas": 1}, "decode": {"replicas": 2}}
    given_ = {"requests": requests, "speculative": drafting(0.6), "lora": LORA, "disaggregated": pools}
    sim = simulate_serving(serving(given_))
    all_left(sim)
    latency_s = sum(s.finish_s - s.arrival_s for s in sim.sequences)
    last_s = max(s.arrival_s for s in sim.sequences)
    until_s = sum(min(s.finish_s, last_s) - s.arrival_s for s in sim.sequences)
    assert until_s == pytest.approx(4 * last_s, rel=1e-9)
    assert latency_s / sim.end_s == pytest.approx(4, rel=0.03)


@pytest.mark.parametrize(
    ("inference", "parallelism", "said"),
    [
        (
            {"speculative": drafting(1.0), "disaggregated": {"prefill": {"tp": 4}}},
            {},
            r"draft: has 2 heads, which disaggregated.prefill.tp \(4\) must divide",
        ),
        (
            {"speculative": drafting(1.0), "engine": "sglang-0.5"},
            {"pp": 2},
            "parallelism.pp: found 2; engine sglang-0.5 does not draft beside pipeline stages; allowed: 1",
        ),
        (
            {"speculative": drafting(1.0), "lora": LORA, "engine": "sglang-0.5"},
            {},
            "inference.lora: engine sglang-0.5 has no adapters beside inference.speculative; allowed with engine bun",
        ),
        ({"speculative": drafting(1.0), "lora": LORA, "engine": "vllm-v1"}, {}, "allowed with engine .*vllm-0.14"),
    ],
)
def test_what_engines_refuse_is_refused(inference: dict[str, Any], parallelism: dict[str, int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        serving(inference, parallelism=parallelism)


def test_a_prompt_that_found_no_room_goes_on_once_it_is_alone() -> None:
    """Two prompts enter while their adapter is copied, and fill the cache: the shorter one ends first."""
    settings_ = {"max_running_requests": 2, "max_batch_tokens": 1, "prefix_cache": "none", "preemption": "recompute"}
    inference = beside(("sglang-0.5", False), kv_cache={"block_tokens": 1}, **settings_)
    gpu = {"memory_bytes": WEIGHTS_AND_BUFFERS + 3e5}
    scenario = serving(inference | {"lora": {"adapters": 1, "max_loras": 2}}, gpu=gpu)
    all_left(simulate_serving(scenario, requests=(Request(0.0, 4, 1), Request(1e-7, 1, 1))))


def test_a_prefill_server_takes_more_once_a_prompt_has_left_for_another() -> None:
    """Its batch had been full, because two prompts of one adapter filled the cache."""
    settings_ = {"max_running_requests": 2, "max_batch_tokens": 1, "prefix_cache": "none", "preemption": "recompute"}
    inference = beside(("sglang-0.5", False), kv_cache={"block_tokens": 1}, **settings_)
    inference |= {"lora": {"adapters": 1, "max_loras": 2}}
    inference |= {"disaggregated": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}}
    scenario = serving(inference, gpu={"memory_bytes": WEIGHTS_AND_BUFFERS + 3e5})
    late = tuple(Request(0.03125, 1, 1) for _ in range(3))
    all_left(simulate_serving(scenario, requests=(Request(0.0, 22, 2), Request(1e-7, 1, 1), *late)))
