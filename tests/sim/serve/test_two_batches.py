"""Two halves of a batch that overlap, and DeepEP's messages."""

from __future__ import annotations

from math import comb
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario
from sim.models.layers.experts import LOW_LATENCY_TOKENS
from sim.serve.prices.iteration_parts import Work
from sim.serve.prices.load import Load
from sim.serve.prices.two_batches import is_split, layer_seconds
from sim.serve.simulation import simulate_serving
from sim.variants.engines.kernel_facts import TwoBatches
from tests.sim.cases import scenario_with
from tests.sim.serve.serving_cases import costs_of

IN_TURNS, APART = TwoBatches(), TwoBatches(attention_apart=True)
DECODES = Load(64, 64, 64 * 2000, (), 64, 1, 64)
PROMPTS = Load(4096, 0, 0, ((2048, 2048, 2),), 2, 1, 4096)
SMS = 132


def wide(ranks: int = 16, engine: str = "sglang-0.5", overlap: bool = True, **inference: Any) -> Scenario:
    section = {"engine": engine, "two_batch_overlap": overlap, "requests": {"prompt_len": 500, "output_len": 4}}
    section |= {"all2all_backend": None if engine == "bundled" else "deepep"}
    return scenario_with(
        parallelism={"dp": ranks, "ep": ranks},
        model="deepseek-v3",
        cluster={"preset": "dgx-h200", "nodes": ranks // 8},
        inference=section | inference,
    )


@pytest.mark.parametrize("rule", [IN_TURNS, APART])
def test_without_messages_both_halves_compute_one_after_the_other(rule: TwoBatches) -> None:
    assert layer_seconds(rule, SMS, DECODES, (1.0, 2.0, 4.0, 0.0, 0.0)) == 14.0


def test_without_computing_the_messages_of_both_halves_remain() -> None:
    assert layer_seconds(IN_TURNS, SMS, DECODES, (0.0, 0.0, 0.0, 3.0, 5.0)) == 16.0
    assert layer_seconds(APART, SMS, DECODES, (0.0, 0.0, 0.0, 3.0, 5.0)) == 16.0


def test_messages_as_long_as_what_is_beside_them_are_hidden() -> None:
    assert layer_seconds(IN_TURNS, SMS, DECODES, (1.0, 2.0, 3.0, 3.0, 3.0)) == 12.0
    assert layer_seconds(APART, SMS, DECODES, (1.0, 2.0, 3.0, 1.0, 2.0)) == 12.0
    # experts do not overlap with messages where attention is cut instead
    assert layer_seconds(APART, SMS, DECODES, (0.0, 0.0, 3.0, 3.0, 3.0)) == 18.0


def test_prompts_compute_on_the_multiprocessors_that_messages_leave() -> None:
    assert layer_seconds(APART, SMS, PROMPTS, (1.0, 2.0, 4.0, 0.0, 0.0)) == pytest.approx(14.0 * 132 / 112)


def test_all_replicas_split_or_none() -> None:
    rule = TwoBatches(32, 512)
    assert [is_split(rule, Load(n, n, 0, (), n, 1, 40)) for n in (1, 10, 200)] == [False, True, True]
    assert not is_split(rule, Load(200, 200, 0, (), 200, 1, 31))
    assert is_split(rule, Load(200, 200, 0, (), 200, 1, 32))
    assert not is_split(rule, Load(511, 0, 0, ((511, 511, 1),), 1))
    assert is_split(rule, Load(512, 0, 0, ((512, 512, 1),), 1))


@pytest.mark.parametrize("load", [DECODES, PROMPTS])
@pytest.mark.parametrize("engine", ["sglang-0.5", "vllm-0.19", "bundled"])
def test_no_more_than_the_messages_can_be_hidden(engine: str, load: Load) -> None:
    costs = costs_of(wide(engine=engine))
    one, two = costs.one_batch(load)[0], costs.device_seconds(load)[0]
    layer = max(i for i, spec in enumerate(costs.specs) if any(spec.serve_exchange(costs.dims, 1)))
    sent = costs.tokens_s(Work.DISPATCH, load.tokens, layer) + costs.tokens_s(Work.COMBINE, load.tokens, layer)
    assert two > one - costs.stages[0].layers[layer] * sent
    assert two > 0.5 * one


def test_prompts_of_a_wide_group_gain_and_few_tokens_lose() -> None:
    costs = costs_of(wide(32))
    few = Load(4, 4, 4 * 2000, (), 4, 1, 4)
    assert costs.device_seconds(PROMPTS)[0] < 0.9 * costs.one_batch(PROMPTS)[0]
    assert costs.device_seconds(few)[0] > costs.one_batch(few)[0]


def test_hidden_messages_are_no_part_of_the_time() -> None:
    requests = {"prompt_len": 2000, "output_len": 2, "count": 128}
    found = [simulate_serving(wide(32, overlap=overlap, requests=requests)) for overlap in (False, True)]
    one, two = (sum(s.shares.values()) for s in found)
    assert found[1].result["comm_share"] < found[0].result["comm_share"]
    assert two < one
    for simulated in found:
        iterations = sum(end - start for r in simulated.replicas for i in r.iterations for start, end in i.spans)
        assert sum(simulated.shares.values()) == pytest.approx(iterations, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"engine": "vllm-0.6", "all2all_backend": None},
            "engine vllm-0.6 cannot do that; allowed with: bundled, vllm-0.14",
        ),
        (
            {"all2all_backend": None},
            "overlaps none of allgather_reducescatter's messages; needs all2all_backend deepep",
        ),
        ({"all2all_backend": "naive"}, "found 'naive'; engine sglang-0.5 has allgather_reducescatter, deepep"),
        ({"lora": {"adapters": 2}}, "is not simulated with inference.two_batch_overlap"),
    ],
)
def test_what_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        wide(**changes)


def test_there_must_be_messages() -> None:
    with pytest.raises(InputError, match=r"two_batch_overlap: found true; no tokens are sent to experts"):
        scenario_with(
            parallelism={"tp": 8},
            model="deepseek-v3",
            cluster="dgx-h200",
            inference={"requests": {"prompt_len": 5, "output_len": 4}, "two_batch_overlap": True},
        )


def sent_bytes(scenario: Scenario, tokens: int) -> list[float]:
    costs = costs_of(scenario)
    spec = next(spec for spec in costs.specs if any(spec.serve_exchange(costs.dims, 1)))
    return [item.bytes for way in spec.serve_exchange(costs.dims, tokens) for item in way]


def test_deep_ep_sends_a_token_to_each_expert_or_with_many_tokens_to_each_node() -> None:
    hidden, few, many = 7168, LOW_LATENCY_TOKENS, LOW_LATENCY_TOKENS + 1
    assert sent_bytes(wide(32), few) == [few * 8 * hidden * 1.0, few * 8 * hidden * 2.0]
    nodes = 4 * (1 - comb(192, 8) / comb(256, 8))  # a token's 8 of 256 experts are different ones
    assert sent_bytes(wide(32), many) == pytest.approx([many * nodes * hidden * n for n in (1, 2)])
    assert sent_bytes(wide(64), many) == pytest.approx([many * 4 * hidden * n for n in (1, 2)])  # the model's limit
    ranks = 8 * (1 - comb(224, 8) / comb(256, 8))  # of one node
    assert sent_bytes(wide(8), many) == pytest.approx([many * ranks * hidden * n for n in (1, 2)])
    assert sent_bytes(wide(32, "bundled", quantization="fp8"), many) == [many * 8 * hidden * 2.0] * 2
