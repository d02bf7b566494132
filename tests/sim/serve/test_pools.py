"""Routers and disaggregated pools against closed forms and what must hold for any workload."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario, parse_scenario
from sim.serve.prices.load import Load
from sim.serve.requests import Request
from sim.serve.results.latencies import token_gaps
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from sim.views.serving_summary import cache_lines
from tests.sim.cases import FREE_LINKS
from tests.sim.serve.serving_cases import SMALL, WEIGHTS_AND_BUFFERS, requests_of, serving, settings_of


def pools(prefill: dict[str, int], decode: dict[str, int], cluster: Any = "dgx-h100", **inference: Any) -> Scenario:
    inference.setdefault("requests", {"prompt_len": 64, "output_len": 16, "count": 8})
    inference["disaggregated"] = {"prefill": prefill, "decode": decode}
    return parse_scenario({"model": SMALL, "cluster": cluster, "calibration": "roofline", "inference": inference})


def all_left(sim: ServingSimulation) -> None:
    """Every request got its tokens, and no replica holds anything of it."""
    for s in sim.sequences:
        assert s.generated == s.request.output_tokens
        assert s.request.arrival_s <= s.first_token_s <= s.finish_s
    for r in sim.replicas:
        assert r.scheduler.cache.private == r.scheduler.cache.tokens == 0
        assert not r.scheduler.running
        assert not r.scheduler.waiting


spread = st.lists(
    st.builds(
        Request, st.floats(0, 0.05), st.integers(1, 300), st.integers(1, 60), hashes=st.just(()), adapter=st.just("")
    ),
    min_size=1,
    max_size=24,
).map(lambda rs: tuple(sorted(rs)))


@settings(max_examples=40, deadline=None)
@given(requests_of, settings_of, st.floats(1e5, 3e6), st.integers(1, 3), st.integers(1, 3))
def test_any_workload_is_served_by_two_pools(
    requests: tuple[Request, ...], inference: dict[str, Any], cache_bytes: float, first: int, second: int
) -> None:
    inference["disaggregated"] = {"prefill": {"replicas": first}, "decode": {"replicas": second}}
    scenario = serving(inference, gpu={"memory_bytes": WEIGHTS_AND_BUFFERS + cache_bytes})
    sim = simulate_serving(scenario, requests=requests)
    all_left(sim)
    assert len(sim.sequences) == len(requests)
    assert sum(t.last for t in sim.transfers) == sum(r.output_tokens > 1 for r in requests)
    for x in sim.replicas[:first]:
        for y in x.sequences:
            assert y.request in requests


@settings(max_examples=30, deadline=None)
@given(spread)
def test_prompts_take_what_they_take_without_any_tokens_after_them(requests: tuple[Request, ...]) -> None:
    """Links that take no time and room for all: the pool that prefills does not feel the other one."""
    two = simulate_serving(pools({"replicas": 2}, {"replicas": 2}, FREE_LINKS), requests=requests)
    prompts = tuple([r._replace(output_tokens=1) for r in requests])
    one = simulate_serving(serving(parallelism={"dp": 2}), requests=prompts)
    for a, b in zip(two.pools[0].replicas, one.replicas, strict=False):
        for x, y in zip(a.sequences, b.sequences, strict=True):
            assert x.first_token_s == pytest.approx(y.first_token_s, rel=1e-9)


def test_a_request_alone_takes_its_parts_and_its_transfer() -> None:
    """Prompt, copy, tokens: one after another, each as long as it takes by itself."""
    alone = simulate_serving(serving({"requests": {"prompt_len": 1000, "output_len": 32}}))
    sim = simulate_serving(pools({}, {}, requests={"prompt_len": 1000, "output_len": 32}))
    (moved,) = sim.transfers
    size = 1000 * sim.capacity.stage_token_bytes
    assert sim.capacity.stage_token_bytes == 4 * 2 * 2 * 32 * 2  # layers, keys and values, heads, their size, bytes
    assert moved.end_s - moved.start_s == pytest.approx(sim.costs.prices.pricing.network.send(0, 1, size), rel=1e-9)
    assert moved.asked_s == moved.start_s == sim.sequences[0].first_token_s
    assert sim.end_s == pytest.approx(alone.end_s + moved.end_s - moved.start_s, rel=1e-9)
    assert [s.kind for s in sim.timeline.spans()].count("KV_TRANSFER") == 1


def test_the_gap_before_the_second_token_holds_the_handover() -> None:
    """The prefill pool makes the first tokens at once, the decode pool the second ones. Between them lie the wait for
    the link, the transfer, and for the second request the first one's iteration, during which its own cache comes."""
    sim = simulate_serving(pools({"replicas": 2}, {}, requests={"prompt_len": 4000, "output_len": 2, "count": 2}))
    first, second = sim.transfers
    token_s = sim.costs.stage_seconds(Load(1, 1, 4001, (), 1))[0]
    assert first.end_s == second.start_s < second.end_s < first.end_s + token_s
    found = token_gaps(sim.replicas)
    assert found is not None
    assert found.tokens.tolist() == [1.0, 1.0]
    transfer_s = first.end_s - first.asked_s
    assert found.seconds.tolist() == pytest.approx([transfer_s + token_s, transfer_s + 2 * token_s], rel=1e-9)
    gaps, requests = sim.outcome.inter_token_latency_s, sim.outcome.time_per_output_token_s
    assert gaps.mean == pytest.approx(requests.mean, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(spread, st.integers(1, 2), st.booleans())
def test_gaps_between_tokens_add_up_to_the_time_from_first_to_last(
    requests: tuple[Request, ...], replicas: int, group: bool
) -> None:
    sim = simulate_serving(pools({"replicas": 2}, {"replicas": replicas}), requests=requests, group=group)
    found = token_gaps(sim.replicas)
    seconds, tokens = (0.0, 0) if found is None else (float(found.seconds @ found.tokens), int(found.tokens.sum()))
    assert tokens == sum(r.output_tokens - 1 for r in requests)
    assert seconds == pytest.approx(sum(s.finish_s - s.first_token_s for s in sim.sequences), rel=1e-9)


def test_transfers_that_meet_wait_for_each_other() -> None:
    """Two prompts done at once on two replicas, one link into the third."""
    sim = simulate_serving(pools({"replicas": 2}, {}, requests={"prompt_len": 4000, "output_len": 4, "count": 2}))
    first, second = sim.transfers
    assert (first.prefill, second.prefill) == (0, 1)
    assert second.asked_s == first.asked_s == first.start_s
    assert second.start_s == first.end_s
    assert sim.result["transfers"]["wait_s"]["mean"] == pytest.approx((first.end_s - first.start_s) / 2)


def test_more_gpus_on_both_sides_send_smaller_parts() -> None:
    """With tp each GPU has its heads' part of the cache: twice the GPUs, half the bytes each."""
    one, two = (simulate_serving(pools({"tp": n}, {"tp": n})) for n in (1, 2))
    assert two.result["transfers"]["bytes_per_gpu"] == one.result["transfers"]["bytes_per_gpu"] / 2
    assert two.result["pools"][1]["gpus"] == 2
    mixed = simulate_serving(pools({"tp": 2}, {"tp": 1}))
    assert mixed.result["transfers"]["bytes_per_gpu"] == one.result["transfers"]["bytes_per_gpu"]


def test_tokens_come_evenly_where_no_prompts_are_in_between() -> None:
    """DistServe's point: the same GPUs, and nobody's tokens wait for another's prompt."""
    load = {"prompt_len": 4000, "output_len": 50, "count": 40, "rate_per_s": 8, "seed": 1}
    disaggregated = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}
    together = simulate_serving(serving({"requests": load}, "llama3-8b", parallelism={"dp": 2})).outcome
    apart = simulate_serving(serving({"requests": load, "disaggregated": disaggregated}, "llama3-8b")).outcome
    assert apart.time_per_output_token_s.p99 < together.time_per_output_token_s.p99


@pytest.mark.parametrize("router", ["least_loaded", "prefix_aware"])
def test_a_router_of_one_replica_equals_none(router: str) -> None:
    requests = {"requests": {"prompt_len": 64, "output_len": 16, "count": 50, "rate_per_s": 2000}}
    none, one = (simulate_serving(serving({**requests, "router": r})) for r in ("round_robin", router))
    for a, b in zip(none.sequences, one.sequences, strict=True):
        assert (a.first_token_s, a.finish_s) == (b.first_token_s, b.finish_s)
    assert any("router" in w for w in one.result["warnings"])


def test_the_least_loaded_replica_evens_out_uneven_requests() -> None:
    """Every second request is long: dealt out in turn, one of two replicas gets all of these."""
    requests = tuple([Request(i * 1e-3, 100, 400 if i % 2 else 10) for i in range(200)])
    found = {}
    for router in ("round_robin", "least_loaded"):
        scenario = serving({"router": router, "max_running_requests": 8}, parallelism={"dp": 2})
        found[router] = simulate_serving(scenario, requests=requests)
    assert found["least_loaded"].end_s < 0.8 * found["round_robin"].end_s
    assert all(r.sequences for r in found["least_loaded"].replicas)


def test_a_prefix_goes_where_it_went_before() -> None:
    requests = tuple([Request(i * 5e-3, 500, 4, f"user{i % 7}", 480) for i in range(140)])
    rates = {}
    for router in ("round_robin", "prefix_aware"):
        scenario = serving({"router": router, "prefix_cache": "gpu"}, parallelism={"dp": 4})
        rates[router] = simulate_serving(scenario, requests=requests).outcome.kv_cache.prefix_hit_rate
    assert rates["prefix_aware"] > rates["round_robin"]
    assert rates["prefix_aware"] == pytest.approx(0.96 * 133 / 140, rel=0.01)  # all but each user's first


@pytest.mark.parametrize(
    ("inference", "parallelism", "said"),
    [
        ({"disaggregated": {"prefill": {"tp": 3}}}, {}, "inference.disaggregated.prefill.tp: found 3"),
        ({"disaggregated": {}}, {"tp": 2}, "parallelism.tp: found 2; each disaggregated pool"),
        ({"disaggregated": {}, "batching": "static"}, {}, "static batch"),
        ({"disaggregated": {"decode": {"copies": 3}}}, {}, "copies"),
        ({"router": "fastest"}, {}, "router"),
    ],
)
def test_what_is_refused(inference: dict[str, Any], parallelism: dict[str, int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        serving(inference, parallelism=parallelism)


def test_the_quick_pass_says_what_it_does_not_know() -> None:
    with pytest.raises(InputError, match=r"--engine static does not know inference.disaggregated"):
        simulate_serving(pools({}, {}), engine="static")
    with pytest.raises(InputError, match="router least_loaded"):
        simulate_serving(serving({"router": "least_loaded"}, parallelism={"dp": 2}), engine="static")


def test_the_summary_names_pools_and_transfers() -> None:
    lines = dict(cache_lines(simulate_serving(pools({"replicas": 2}, {})).outcome))
    assert lines["prefill"].startswith("2 × tp 1, which compute")
    assert lines["transfers"].startswith("8 computed prompts")


def test_a_decode_server_of_sglang_keeps_512_tokens_free_for_each_request() -> None:
    """DecodePreallocQueue: requests of 100 tokens enter while 612 are free for each, though they write 40."""
    inference = {
        "engine": "sglang-0.5",
        "max_batch_tokens": 256,
        "requests": {"prompt_len": 100, "output_len": 40, "count": 30},
        "disaggregated": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}},
        "kv_cache": {"memory_fraction": 0.9},
    }
    sim = simulate_serving(serving(inference, gpu={"memory_bytes": 0.875 * WEIGHTS_AND_BUFFERS}))
    all_left(sim)
    assert sim.result["kv_cache"]["running_max"] == sim.capacity.blocks // 612 == 4
    assert sim.result["kv_cache"]["preemptions"] == 0


EXPERTS = {"moe": {"experts": 8, "top_k": 2, "ffn": 64}}


def of_experts(size: dict[str, int]) -> Scenario:
    inference = {
        "requests": {"prompt_len": 64, "output_len": 16, "count": 8},
        "disaggregated": {"prefill": {"replicas": 1}, "decode": size},
    }
    model = SMALL | EXPERTS
    return parse_scenario({"model": model, "cluster": "dgx-h100", "calibration": "roofline", "inference": inference})


def test_replicas_of_a_pool_split_every_expert() -> None:
    """Each of four has a quarter of all experts, gathers all tokens, and waits for the others."""
    alone, split = (simulate_serving(of_experts({"replicas": 4} | own)) for own in ({}, {"expert_tp": 4}))
    whole, part = (
        sum(spec.served_elements(pool.costs.dims).experts for spec in pool.costs.specs)
        for pool in (alone.pools[1], split.pools[1])
    )
    assert whole == 4 * part
    kinds = [
        item.kind for way in split.pools[1].costs.specs[0].serve_exchange(split.pools[1].costs.dims, 8) for item in way
    ]
    assert kinds == ["all_gather", "reduce_scatter"]
    all_left(split)
    assert split.scenario.for_serving.disaggregated is not None
    assert split.scenario.for_serving.disaggregated.decode.sharing_replicas == 4


def test_a_pools_split_of_experts_must_suit_its_replicas() -> None:
    with pytest.raises(InputError, match=r"inference\.disaggregated\.decode\.expert_tp"):
        of_experts({"replicas": 4, "expert_tp": 3})
