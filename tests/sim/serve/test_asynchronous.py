"""Scheduling beside the GPU, switched on and off."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario
from sim.prices.profiles import load_profile
from sim.serve.prices.costs import iteration_costs
from sim.serve.prices.iteration_shares import _sizes
from sim.serve.prices.load import Load
from sim.serve.simulation import simulate_serving
from sim.variants.engines import ENGINES
from tests.sim.cases import scenario_with

LOAD = Load(64, 64, 64 * 500, (), 64)


def served(engine: str, told: bool | None = None, pp: int = 1, **inference: Any) -> Scenario:
    section = {"engine": engine, "requests": {"prompt_len": 100, "output_len": 20, "count": 8}}
    return scenario_with(
        parallelism={"pp": pp},
        model="llama3-8b",
        cluster="dgx-h100",
        inference=section | {"async_scheduling": told} | inference,
    )


def seconds(engine: str, told: bool | None) -> float:
    """Of an iteration of single tokens."""
    s = served(engine, told)
    return iteration_costs(s, load_profile(s.calibration)).stage_seconds(LOAD)[0]


@pytest.mark.parametrize(
    ("engine", "default"),
    [("vllm-v1", False), ("vllm-0.11", False), ("vllm-0.28", True), ("sglang-0.5", True), ("trtllm-1.0", True)],
)
def test_an_iteration_takes_the_longer_or_both(engine: str, default: bool) -> None:
    times, beside, after = ENGINES[engine].host_on("hopper"), seconds(engine, True), seconds(engine, False)
    host_s = times.iteration_s + 64 * times.sequence_s
    assert seconds(engine, None) == (beside if default else after)
    gpu_s = after - host_s
    assert gpu_s > 0
    # With whole CUDA graphs the GPU waits for no launches, which a host that overlaps would count as its own work.
    if ENGINES[engine].whole_graphs:
        assert beside == pytest.approx(max(gpu_s, host_s))


def test_a_server_told_not_to_computes_no_token_too_many() -> None:
    """SGLang learns one iteration late who has ended only where it works beside the GPU: one more of 8 requests."""
    beside, after = (simulate_serving(served("sglang-0.5", told)) for told in (None, False))
    beside_tokens, tokens = (sum(i.load.tokens for r in s.replicas for i in r.iterations) for s in (beside, after))
    assert beside_tokens == tokens + 8


@pytest.mark.parametrize(
    ("engine", "inference", "pp", "said"),
    [
        ("vllm-0.8", {}, 1, "engine vllm-0.8 cannot do that; allowed with: vllm-v1, vllm-0.11"),
        ("vllm-0.14", {}, 2, "engine vllm-0.14 cannot do that with pipeline stages"),
        ("vllm-0.11", {"speculative": {"draft": "llama3.2-1b"}}, 1, "vllm-0.11 cannot do that with drafted tokens"),
    ],
)
def test_what_cannot_be(engine: str, inference: dict[str, Any], pp: int, said: str) -> None:
    with pytest.raises(InputError, match=said):
        served(engine, True, pp, **inference)


def test_who_does_not_need_not_be_told_not_to() -> None:
    assert any("async_scheduling: of no effect" in note for note in served("vllm-0.11", False).warnings)
    assert not any("async_scheduling" in note for note in served("vllm-0.28", False).warnings)


def test_a_token_too_many_makes_no_iteration_one_with_prompts() -> None:
    """SGLang pads 100 single tokens and one that is computed for nothing to the graph of 104; without prompts it has
    graphs of such sizes alone."""
    s = served("sglang-0.5")
    costs = iteration_costs(s, load_profile(s.calibration))
    assert costs.host.padded(101) == 104
    assert [*_sizes(costs, [(Load(101, 100, 100 * 500, (), 100), 1)]).padded] == [(104, 0)]
    assert [*_sizes(costs, [(Load(101, 0, 0, ((101, 101, 1),), 1), 1)]).padded] == [(101, 0)]


@pytest.mark.parametrize(
    ("engine", "more"), [("trtllm-1.0", True), ("trtllm-1.1", True), ("trtllm-1.2", False), ("trtllm-1.3", False)]
)
def test_tensorrt_llm_knows_a_last_token_by_its_length_since_1_2(engine: str, more: bool) -> None:
    """Before, a request that ends while others run computes a token too many."""
    asked = {"prompt_len": 100, "output_len": 20, "count": 8, "range_ratio": 0.5}
    sim = simulate_serving(served(engine, requests=asked))
    needed = sum([s.request.prompt_tokens + s.request.output_tokens - 1 for s in sim.sequences])
    late = sum([i.load.tokens * i.steps for i in sim.replicas[0].iterations]) - needed
    assert late == (7 if more else 0)
