"""Data-parallel attention with experts spread over replicas: these wait for each other, and share all tokens."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.errors import InputError
from sim.core.operator_kinds import MOE_LAYER, shape_flops
from sim.core.program import Compute, Phase
from sim.inputs.model_config import MoeConfig
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.moe.fullest import fullest_rank
from sim.prices.profiles import load_profile
from sim.prices.roofline import shape_bytes
from sim.serve.prices.costs import IterationCosts, iteration_costs
from sim.serve.prices.load import Load
from sim.serve.requests import Request
from sim.serve.simulation import simulate_serving
from tests.sim.serve.serving_cases import SMALL, WEIGHTS_AND_BUFFERS, finished, requests_of, serving, settings_of

MIXTURE = {**SMALL, "hidden": 1024, "heads": 8, "moe": {"experts": 16, "top_k": 2, "ffn": 4096}}


def shared(inference: dict[str, Any] | None = None, replicas: int = 4, ep: int = 4, **more: Any) -> Scenario:
    return serving(inference, MIXTURE, parallelism={"dp": replicas, "ep": ep}, **more)


def test_equal_replicas_take_what_each_takes_alone() -> None:
    """Four equal batches at once: nobody waits, and experts see four times one's tokens."""
    scenario = shared({"requests": {"prompt_len": 100, "output_len": 9, "count": 8}, "batching": "static"})
    sim = simulate_serving(scenario)
    costs = iteration_costs(scenario, sim.profile)
    expected = costs.stage_seconds(Load(200, 0, 0, ((100, 100, 2),), 2))[0]
    expected += sum(costs.stage_seconds(Load(2, 2, 2 * (101 + i), (), 2))[0] for i in range(8))
    assert sim.end_s == pytest.approx(expected, rel=1e-9)
    finished(sim)


def test_experts_of_one_busy_replica_see_its_tokens_alone() -> None:
    """One of four has a prompt: the pooled tokens are a quarter of what four such replicas would have."""
    scenario = shared()
    costs = iteration_costs(scenario, simulate_serving(scenario).profile)
    alone, all_alike = (costs.stage_seconds(Load(4000, 0, 0, ((4000, 4000, 1),), 1, 1, n))[0] for n in (1000, 0))
    sim = simulate_serving(scenario, requests=(Request(0.0, 4000, 1),))
    assert sim.end_s == pytest.approx(alone, rel=1e-9)
    assert alone < all_alike
    assert costs.stage_seconds(Load(4000, 0, 0, ((4000, 4000, 1),), 1, 1, 4000))[0] == all_alike


def test_a_prompt_on_one_replica_delays_the_tokens_of_the_others() -> None:
    """A long prompt comes to the second replica while the first adds tokens."""
    requests = (Request(0.0, 10, 200), Request(1e-3, 8000, 2))
    tied = simulate_serving(shared(replicas=2, ep=2), requests=requests)
    apart = simulate_serving(serving(model=MIXTURE, parallelism={"dp": 2}), requests=requests)
    gaps = []
    for sim in (tied, apart):
        starts = [i.spans[0][0] for i in sim.replicas[0].iterations]
        gaps.append(max(b - a for a, b in itertools.pairwise(starts)))
    prompt = next(i for i in tied.replicas[1].iterations if i.load.prefills)
    assert gaps[0] == pytest.approx(prompt.spans[0][1] - prompt.spans[0][0], rel=1e-6)
    assert gaps[0] > 5 * min(b - a for i in tied.replicas[0].iterations for a, b in i.spans)


@pytest.mark.parametrize(("tokens", "experts", "top_k", "ranks"), [(1, 256, 8, 8), (16, 64, 4, 4), (500, 256, 8, 16)])
def test_the_fullest_rank_of_random_choices(tokens: int, experts: int, top_k: int, ranks: int) -> None:
    """Drawn a few hundred times: copies of the fullest rank, and its experts that have any."""
    draw, local = np.random.default_rng(1), experts // ranks
    rows, groups = [], []
    for _ in range(400):
        chosen = np.concatenate([draw.permutation(experts)[:top_k] for _ in range(tokens)])
        counts = np.bincount(chosen, minlength=experts).reshape(ranks, local)
        rows.append(counts.sum(1).max())
        groups.append((counts > 0).sum(1).max())
    found = fullest_rank(MoeConfig(experts=experts, top_k=top_k, ffn=1), tokens, ranks)
    assert found[0] == pytest.approx(np.mean(rows), rel=0.12)
    assert found[1] == pytest.approx(np.mean(groups), rel=0.3)


def test_many_tokens_are_spread_evenly() -> None:
    moe = MoeConfig(experts=8, top_k=2, ffn=1)
    assert fullest_rank(moe, 10**8, 4) == (pytest.approx(5e7, rel=1e-3), 2)
    assert fullest_rank(moe, 7, 1) == (14.0, 7)  # one rank has them all: 8 · (1 - (3/4)^7) experts


def test_the_rank_with_the_most_popular_experts_decides() -> None:
    """With popularity falling as 1/rank the busiest rank has more than its even share of a prompt's tokens."""
    requests = tuple([Request(0.0, 8000, 1) for _ in range(4)])
    even, uneven = (
        simulate_serving(
            serving(model={**MIXTURE, "moe": {**MIXTURE["moe"], **more}}, parallelism={"dp": 4, "ep": 4}),
            requests=requests,
        )
        for more in ({}, {"imbalance": {"zipf": 1.0}})
    )
    assert 1.05 * even.end_s < uneven.end_s < 4 * even.end_s


def test_groups_of_replicas_do_not_wait_for_each_other() -> None:
    """Eight replicas, experts over four: a prompt in the first group does not reach the second."""
    requests = tuple([Request(0.0, 8000 if i == 0 else 10, 20) for i in range(8)])
    sim = simulate_serving(shared(replicas=8), requests=requests)
    ends = [r.sequences[0].finish_s for r in sim.replicas]
    assert min(ends[:4]) > max(ends[4:])


@settings(max_examples=30, deadline=None)
@given(requests_of, settings_of, st.floats(1e6, 6e6), st.sampled_from([(2, 2), (4, 4), (4, 2)]))
def test_any_workload_is_served(
    requests: tuple[Request, ...], inference: dict[str, Any], cache_bytes: float, layout: tuple[int, int]
) -> None:
    gpu = {"memory_bytes": 8 * WEIGHTS_AND_BUFFERS + cache_bytes}
    sim = simulate_serving(shared(inference, *layout, gpu=gpu), requests=requests)
    finished(sim)
    assert len(sim.sequences) == len(requests)


def test_the_quick_pass_does_not_know_them() -> None:
    with pytest.raises(InputError, match="replicas that share experts"):
        simulate_serving(shared(), engine="static")
    assert simulate_serving(serving(model=MIXTURE, parallelism={"tp": 4, "ep": 4}), engine="static").path == "static"


def deepseek(cluster: str, ep: int) -> IterationCosts:
    """Prices of DeepSeek-V3 in fp8 with its experts over `ep` replicas of a rank each."""
    section = {"quantization": "fp8", "requests": {"prompt_len": 8, "output_len": 8, "count": 1}}
    layout = {"dp": ep, "ep": ep}
    nodes = {"preset": cluster, "nodes": ep // 4}
    s = parse_scenario({"model": "deepseek-v3", "cluster": nodes, "parallelism": layout, "inference": section})
    return iteration_costs(s, load_profile(s.calibration))


def experts_s(cluster: str, ep: int, tokens: int) -> float:
    """What the routed experts of one rank take in a layer without the all-to-alls."""
    costs = deepseek(cluster, ep)
    layer = costs.specs[-1].serve_routed(costs.dims, tokens)
    return costs.prices.priced(tuple([op for op in layer if isinstance(op, Compute)])).seconds


@pytest.mark.parametrize("cluster", ["dgx-h100", "gb200-nvl72"])
@pytest.mark.parametrize("tokens", [128, 256])
def test_a_rank_with_fewer_experts_takes_less_for_as_many_tokens_each(cluster: str, tokens: int) -> None:
    """All-to-alls bring tokens · top_k to each rank, however many ranks there are. Measured ranks, which have the
    tokens of all, would take longer with 64 ranks than with 16."""
    few, more, many = (experts_s(cluster, ep, tokens) for ep in (8, 16, 64))
    assert many < more < few
    weights_s = 4 * 3 * 7168 * 2048 / (8e12 if cluster == "gb200-nvl72" else 3.35e12)
    flops_s = tokens * 8 * 6 * 7168 * 2048 / (5e15 if cluster == "gb200-nvl72" else 1.98e15)
    assert max(weights_s, flops_s) < many < 6 * (weights_s + flops_s)


def test_tokens_that_were_not_sent_to_a_rank_cost_it_nothing() -> None:
    """T(tokens, ep) = rest(tokens) + (T(tokens, 1) - T(tokens, ep)) / (ep - 1), the rest of the copies alone."""
    prices = deepseek("dgx-h100", 8).prices
    shape = (4096, 4096, 1536, 8, 128, 1, 64)

    def seconds(*shape: int, sent: bool = False) -> float:
        sizes = shape_flops(MOE_LAYER, shape), shape_bytes(MOE_LAYER, shape, "fp8")
        return prices.priced((Compute("x", MOE_LAYER, shape, "fp8", *sizes, Phase.FORWARD, sent_tokens=sent),)).seconds

    def work(tokens: int) -> float:
        return (seconds(tokens, *shape[1:6], 1) - seconds(tokens, *shape[1:])) / 63

    expected = work(4096) + seconds(512, *shape[1:]) - work(512)
    assert seconds(*shape, sent=True) == pytest.approx(expected)
    assert seconds(*shape, sent=True) < 0.8 * seconds(*shape)
    assert seconds(*shape[:6], 8, sent=True) == seconds(*shape[:6], 8)  # as many copies as tokens


def test_a_pool_s_replicas_share_their_experts_as_whole_replicas_do() -> None:
    """A lone prompt takes what it takes on whole replicas of the same ep; then its tokens, with the other pool's ep."""
    load = {"prompt_len": 300, "output_len": 5, "count": 1}
    pools = {"prefill": {"replicas": 4, "ep": 4}, "decode": {"replicas": 8, "ep": 8}}
    apart = simulate_serving(serving({"requests": load, "disaggregated": pools}, MIXTURE))
    wholes = [simulate_serving(shared({"requests": load}, n, n)) for n in (4, 8)]
    first, tokens = wholes[0].outcome.time_to_first_token_s.p50, wholes[1].outcome.time_per_output_token_s.p50
    assert apart.outcome.time_to_first_token_s.p50 == pytest.approx(first, rel=1e-9)
    moved = apart.transfers[0].end_s - apart.transfers[0].start_s
    assert apart.end_s == pytest.approx(first + moved + 4 * tokens, rel=1e-9)
    assert [pool.scenario.parallelism.ep for pool in apart.pools] == [4, 8]
    weights = [pool.capacity.weight_bytes for pool in apart.pools]
    assert weights == [whole.capacity.weight_bytes for whole in wholes]


def test_without_ep_a_pool_s_tensor_parallel_ranks_split_every_expert() -> None:
    pools = {"prefill": {"tp": 2}, "decode": {"tp": 4}}
    apart = simulate_serving(serving({"disaggregated": pools}, MIXTURE))
    whole = simulate_serving(serving(None, MIXTURE, parallelism={"tp": 4, "expert_tp": 4}))
    assert apart.pools[1].capacity.weight_bytes == whole.capacity.weight_bytes


def test_a_pool_s_ep_must_fit_its_ranks() -> None:
    with pytest.raises(InputError, match=r"inference.disaggregated.decode.ep: found 4; must divide tp·cp·dp \(2\)"):
        serving({"disaggregated": {"decode": {"replicas": 2, "ep": 4}}}, MIXTURE)
