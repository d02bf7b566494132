"""Experts of a served model placed by popularity, with copies of the most popular ones."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.model_config import MoeConfig
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.layers import layer_specs
from sim.models.moe.eplb import BalancedExperts, place, received
from sim.models.moe.fullest import fullest_rank
from sim.serve.prices.dims import serving_dims
from sim.serve.prices.weight_offload import layer_weight_bytes
from sim.serve.simulation import simulate_serving
from tests.sim.cases import scenario_with

ZIPF = {"imbalance": {"zipf": 0.8}}


def wide(ranks: int = 16, moe: dict[str, Any] | None = None, **inference: Any) -> Scenario:
    section = {"engine": "sglang-0.5", "requests": {"prompt_len": 500, "output_len": 20, "count": 512}}
    return scenario_with(
        parallelism={"dp": ranks, "ep": ranks},
        model={"preset": "deepseek-v3", "moe": moe or {}},
        cluster={"preset": "dgx-h200", "nodes": ranks // 8},
        inference=section | inference,
    )


def test_the_example_of_deep_seek() -> None:
    """README of github.com/deepseek-ai/EPLB: 12 experts in 4 groups, 16 places on 8 GPUs of 2 nodes."""
    first = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
    second = [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]
    assert place(first, 16, 4, 2, 8) == [[5, 6], [5, 7], [8, 4], [3, 4], [10, 9], [10, 2], [0, 1], [11, 1]]
    assert place(second, 16, 4, 2, 8) == [[7, 10], [6, 8], [6, 11], [8, 9], [2, 4], [5, 1], [5, 0], [3, 1]]


def test_groups_that_nodes_do_not_divide_are_placed_as_one() -> None:
    """vLLM's rebalance_experts for 3 groups on 2 nodes, which are those of no groups."""
    weights = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
    assert place(weights, 12, 3, 2, 4) == [[10, 3, 7], [5, 8, 6], [1, 11, 2], [4, 0, 9]]


@pytest.mark.parametrize("seed", range(30))
def test_every_rank_is_full_and_every_token_is_computed_once(seed: int) -> None:
    dice = random.Random(seed)
    nodes, ranks = dice.choice([(1, 1), (1, 4), (2, 8), (4, 8)])
    experts, redundant = 32, ranks * dice.randrange(3)
    moe = MoeConfig(experts=experts, top_k=4, ffn=1, **({} if seed % 2 else ZIPF))
    balanced = BalancedExperts(redundant, nodes)
    placed = place([dice.random() for _ in range(experts)], experts + redundant, dice.choice([1, 2, 8]), nodes, ranks)
    assert {len(rank) for rank in placed} == {(experts + redundant) // ranks}
    assert {e for rank in placed for e in rank} == set(range(experts))
    loads = received(moe, balanced, ranks, 1000)
    assert sum(loads) == pytest.approx(4000)


def test_many_copies_are_nearly_even() -> None:
    moe = MoeConfig(experts=8, top_k=2, ffn=1, **ZIPF)
    assert received(moe, BalancedExperts(8 * 7), 8, 400) == pytest.approx([100.0] * 8, rel=0.01)


def test_copies_of_popular_experts_relieve_their_rank() -> None:
    moe = MoeConfig(experts=256, top_k=8, ffn=1, **ZIPF)
    even = MoeConfig(experts=256, top_k=8, ffn=1)
    fullest = [fullest_rank(moe, 4096, 32, e)[0] for e in (None, BalancedExperts(0), BalancedExperts(32))]
    assert fullest[0] > fullest[1] > 2 * fullest[2]  # the most popular expert alone has more than a rank's share
    assert fullest[2] == pytest.approx(fullest_rank(even, 4096, 32)[0], rel=0.02)


def test_popularity_matters_little_with_copies() -> None:
    even, uneven, placed, copied = (
        simulate_serving(wide(**given))
        for given in ({}, {"moe": ZIPF}, {"moe": ZIPF, "eplb": {}}, {"moe": ZIPF, "eplb": {"redundant_experts": 32}})
    )
    assert uneven.end_s > placed.end_s >= copied.end_s
    assert copied.end_s == pytest.approx(even.end_s, rel=0.03)


@pytest.mark.parametrize("engine", ["vllm-v1", "sglang-0.4.7", "sglang-0.4.8", "trtllm-1.0"])
def test_engines_that_balance_experts(engine: str) -> None:
    assert wide(engine=engine, eplb={}).for_serving.eplb is not None


def test_copies_take_memory() -> None:
    """Each of DeepSeek-V3's 58 layers has 3 · 7168 · 2048 weights in 8 bits for each expert."""
    without, copied = (
        sum(layer_weight_bytes(serving_dims(s), spec) for spec in layer_specs(s.model))
        for s in (wide(), wide(eplb={"redundant_experts": 32}))
    )
    assert copied - without == pytest.approx(2 * 58 * 3 * 7168 * 2048, rel=0.01)


def test_copies_fill_places_that_the_experts_alone_do_not() -> None:
    """288 places on 144 GPUs, as DeepSeek's decode units of 18 nodes."""
    assert wide(144, eplb={"redundant_experts": 32}).parallelism.ep == 144
    with pytest.raises(InputError, match=r"ep: found 144; must divide model\.moe\.experts \(256\)"):
        wide(144)
    with pytest.raises(InputError, match=r"must divide .* \+ inference\.eplb\.redundant_experts \(256 \+ 8\)"):
        wide(16, eplb={"redundant_experts": 8})


@pytest.mark.parametrize("eplb", [{}, {"redundant_experts": 0}])
def test_a_record_with_nothing_in_it_places_experts_by_popularity(eplb: dict[str, int]) -> None:
    plain, found = (simulate_serving(wide(moe=ZIPF, eplb=given)).end_s for given in (None, eplb))
    assert found < plain


@pytest.mark.parametrize(("moe", "eplb", "said"), [({}, {}, True), (ZIPF, {}, False), ({}, None, False)])
def test_experts_that_are_equally_popular_leave_nothing_to_place(moe: Any, eplb: Any, said: bool) -> None:
    assert any("inference.eplb: of no effect" in w for w in wide(moe=moe, eplb=eplb).warnings) == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"engine": "vllm-0.6"},
            "engine vllm-0.6 does not place experts by popularity; allowed with: bundled, vllm-v1",
        ),
        ({"disaggregated": {"prefill": {"tp": 4}, "decode": {"tp": 4}}}, "needs parallelism.ep, or a pool"),
    ],
)
def test_what_cannot_be(changes: dict[str, Any], said: str) -> None:
    given = {"model": "deepseek-v3", "cluster": "dgx-h200"}
    layout = {} if "disaggregated" in changes else {"parallelism": {"dp": 8, "ep": 8}}
    section = {"requests": {"prompt_len": 5, "output_len": 4}, "eplb": {}} | changes
    with pytest.raises(InputError, match=said):
        parse_scenario({**given, **layout, "inference": section})
