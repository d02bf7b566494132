"""Attention and experts on GPUs of their own, against closed forms of a pipeline of micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.errors import InputError
from sim.core.program import Comm
from sim.inputs.scenario import Scenario, load_scenario
from sim.serve.memory import routed_bytes
from sim.serve.prices.afd import LayerParts, layer_parts, pipeline_seconds
from sim.serve.prices.load import Load
from sim.serve.requests import Request
from sim.serve.results.over_time import over_time
from sim.serve.simulation import simulate_serving
from tests.sim.cases import FREE_LINKS, scenario_with
from tests.sim.serve.serving_cases import SMALL, costs_of, every_way, finished, requests_of, serving, settings_of, times

MOE = {**SMALL, "moe": {"experts": 8, "top_k": 2, "ffn": 256, "shared_experts": 1}}
DECODES = Load(48, 48, 48 * 1000, (), 48, 1)


def afd(batches: int = 3, gpus: int = 4, dp: int = 1, tp: int = 1, cluster: Any = None, **inference: Any) -> Scenario:
    inference = {"afd": {"expert_gpus": gpus, "micro_batches": batches}, **inference}
    if cluster is None:
        return serving(inference, MOE, None, {"dp": dp, "tp": tp})
    inference.setdefault("requests", {"prompt_len": 64, "output_len": 16, "count": 8})
    parallelism = {"dp": dp, "tp": tp}
    return scenario_with(
        model=MOE, cluster=cluster, calibration="roofline", parallelism=parallelism, inference=inference
    )


def in_turn(layers: int, parts: LayerParts, batches: int) -> float:
    """The same by events: four servers in a ring, each of which takes the micro-batches in order."""
    free, done = [0.0] * 4, [0.0] * batches
    for _ in range(layers):
        for batch in range(batches):
            for server, seconds in enumerate(parts):
                done[batch] = free[server] = max(done[batch], free[server]) + seconds
    return max(done)


seconds = st.floats(0, 10)


@given(st.builds(LayerParts, seconds, seconds, seconds, seconds), st.integers(1, 8), st.integers(1, 20))
def test_the_formula_is_that_of_servers_in_a_ring(parts: LayerParts, batches: int, layers: int) -> None:
    assert pipeline_seconds([(layers, parts)], batches) == pytest.approx(in_turn(layers, parts, batches), abs=1e-9)


def test_a_perfect_pipeline_takes_the_longest_part_for_each_layer_of_a_micro_batch() -> None:
    """Three micro-batches and three equal parts (attention, messages both ways, experts): nobody waits."""
    parts = LayerParts(2.0, 1.0, 2.0, 1.0)
    more = pipeline_seconds([(61, parts)], 3) - pipeline_seconds([(60, parts)], 3)
    assert more == 3 * max(parts)
    for slow in (LayerParts(5.0, 1.0, 2.0, 1.0), LayerParts(2.0, 5.0, 2.0, 1.0), LayerParts(2.0, 1.0, 5.0, 1.0)):
        assert pipeline_seconds([(10, slow)], 3) == sum(slow) + 5.0 * (3 * 10 - 1)


def test_without_micro_batches_the_parts_are_added() -> None:
    assert pipeline_seconds([(7, LayerParts(2.0, 1.0, 3.0, 1.5))], 1) == 7 * 7.5
    assert pipeline_seconds([(3, LayerParts(4.0)), (7, LayerParts(2.0, 1.0, 3.0, 1.5))], 1) == 3 * 4.0 + 7 * 7.5


@pytest.mark.parametrize("tp", [1, 2])
def test_a_layers_parts_are_its_operators(tp: int) -> None:
    """Attention has all but the routed experts; these have the tokens of all replicas, an equal part on each GPU."""
    costs = costs_of(afd(1, gpus=4, dp=2, tp=tp))
    assert costs.afd is not None
    (spec,), experts, d = costs.specs, costs.afd.experts, costs.dims
    routed = {item.name for item in spec.serve_routed(d, 48)}
    rest = tuple(item for item in spec.serve_tokens(d, 48) if item.name not in routed)
    found = layer_parts(costs, costs.afd, DECODES, 0)
    attention_s = costs.prices.priced(rest).seconds + costs.attention_s(DECODES, 0)
    assert found.attention == pytest.approx(attention_s, rel=1e-9)
    own = spec.serve_routed(experts.dims, 24)  # 2 replicas · 48 tokens over 4 GPUs
    kernels = tuple(item for item in own if not isinstance(item, Comm))
    assert found.experts == pytest.approx(experts.prices.priced(kernels).seconds, rel=1e-9)
    network = costs.prices.pricing.network
    sent = max(48 / tp, 24) * 2 * 256 * 2  # tokens of the busier side, experts of each, hidden size, bytes
    assert found.dispatch == found.combine == pytest.approx(network.send(0, 2 * tp + 3, sent), rel=1e-9)


def test_one_token_alone_passes_all_parts_of_all_layers() -> None:
    scenario = afd(3, requests={"prompt_len": 64, "output_len": 2})
    sim = simulate_serving(scenario)
    costs, (prompt, token) = sim.costs, sim.replicas[0].iterations
    assert costs.afd is not None
    load = Load(1, 1, 65, (), 1)
    layers_s = 4 * layer_parts(costs, costs.afd, load, 0).together
    expected = costs.with_ends(layers_s, costs.stages[0], 1, 1)
    assert token.spans[0][1] - token.spans[0][0] == pytest.approx(expected, rel=1e-9)
    assert prompt.spans[0][1] == token.spans[0][0]


def test_messages_shorter_than_computing_are_hidden_by_three_micro_batches() -> None:
    """Free messages save of three micro-batches what only the first layer waits for, of one all of it."""
    load, saved = Load(32768, 0, 0, ((32768, 32768, 1),), 1), {}
    for batches in (1, 3):
        slow, free = (costs_of(afd(batches, cluster=c)) for c in ("dgx-h100", FREE_LINKS))
        assert slow.afd is not None
        parts = layer_parts(slow, slow.afd, load, 0)
        assert 3 * parts.longest > parts.together
        assert parts.longest in (parts.attention, parts.experts)
        saved[batches] = (slow.device_seconds(load)[0] - free.device_seconds(load)[0]) / (
            parts.dispatch + parts.combine
        )
    assert saved[1] == pytest.approx(4, rel=1e-6)
    assert saved[3] == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("tp", [1, 2])
def test_both_sides_hold_the_model(tp: int) -> None:
    """A replica and the experts' GPUs have together what a replica with all experts has."""
    inference = {"requests": {"prompt_len": 64, "output_len": 2}}
    whole = simulate_serving(serving(inference, MOE, None, {"tp": tp, "expert_tp": tp}))
    sim = simulate_serving(afd(3, tp=tp, **inference))
    experts = sim.outcome.memory[-1]
    assert (experts.ranks, experts.count) == (f"{tp}-{tp + 3}", 4)
    routed = routed_bytes(whole.costs.dims, whole.costs.specs, whole.costs.stages[0])
    assert routed * tp == experts.parameters * 4 == 4 * 8 * 3 * 256 * 256 * 2
    assert sim.capacity.weight_bytes[0] == whole.capacity.weight_bytes[0] - routed
    rate = sim.outcome.output_tokens_per_s
    assert sim.outcome.output_tokens_per_s_per_gpu == pytest.approx(rate / (tp + 4))


@settings(max_examples=25, deadline=None)
@given(requests_of, settings_of, st.integers(1, 4))
def test_one_replica_is_served_alike_on_all_clocks(
    requests: tuple[Request, ...], inference: dict[str, Any], batches: int
) -> None:
    every_way(afd(batches, **inference), requests)


@settings(max_examples=25, deadline=None)
@given(requests_of, settings_of, st.integers(1, 4), st.integers(2, 4))
def test_replicas_go_on_in_step(
    requests: tuple[Request, ...], inference: dict[str, Any], batches: int, dp: int
) -> None:
    scenario = afd(batches, dp=dp, **inference)
    first, second = (simulate_serving(scenario, requests=requests, group=group) for group in (True, False))
    finished(first)
    for a, b in zip(times(first), times(second), strict=True):
        assert a == pytest.approx(b, rel=1e-9)


def test_the_shares_of_time_are_the_iterations() -> None:
    sim = simulate_serving(afd(3, dp=2, engine="sglang-0.5"))
    whole = sum(i.spans[0][1] - i.spans[0][0] for r in sim.replicas for i in r.iterations)
    alone = sum(sim.costs.stage_seconds(i.load)[0] * i.steps for r in sim.replicas for i in r.iterations)
    assert sum(sim.shares.values()) == pytest.approx(alone, rel=1e-6)
    assert alone <= whole * (1 + 1e-9)  # whoever is done first waits for the others
    assert over_time(sim).running


def test_the_shipped_scenario_hides_messages() -> None:
    few = ("inference.requests.count=512", "inference.requests.max_concurrency=512")
    three, one = (
        simulate_serving(load_scenario("scenarios/serve_afd.yaml", (*few, f"inference.afd.micro_batches={n}")))
        for n in (3, 1)
    )
    assert three.end_s < 0.9 * one.end_s
    assert three.outcome.fits_in_memory
    assert three.outcome.engine.path == "simpy"


@pytest.mark.parametrize(
    ("inference", "model", "parallelism", "said"),
    [
        ({}, SMALL, {}, r"inference.afd: the model has no experts \(model.moe\)"),
        ({}, MOE, {"ep": 2, "dp": 2}, "parallelism.ep: found 2; parallelism is of the GPUs that compute attention"),
        ({}, MOE, {"pp": 2}, "parallelism.pp: found 2"),
        ({"afd": {"expert_gpus": 3}}, MOE, {}, r"found 3, which must divide model.moe.experts \(8\)"),
        ({"afd": {"expert_gpus": 1}}, MOE, {}, "expert_gpus: found 1; must be at least 2"),
        ({"lora": {"targets": ["qkv"]}}, MOE, {}, "inference.lora: is not simulated with inference.afd"),
        ({"disaggregated": {}}, MOE, {}, "inference.disaggregated: is not simulated with inference.afd"),
    ],
)
def test_what_is_refused(inference: dict[str, Any], model: Any, parallelism: dict[str, int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        serving({"afd": {"expert_gpus": 4}, **inference}, model, None, parallelism)


def test_too_few_gpus_are_refused() -> None:
    cluster = {"preset": "dgx-h100", "nodes": 1}
    with pytest.raises(InputError, match=r"found 4 GPUs beside 6 that compute attention; the cluster has 8"):
        afd(dp=6, cluster=cluster)
