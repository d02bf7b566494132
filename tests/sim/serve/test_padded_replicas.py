"""Replicas that share experts are padded to the tokens of the fullest one, as vLLM pads them."""

from __future__ import annotations

import pytest

from sim.inputs.scenario import load_scenario
from sim.prices.profiles import load_profile
from sim.serve.prices.costs import IterationCosts, iteration_costs
from sim.serve.prices.load import Load
from sim.serve.simulation import simulate_serving

SHARED = (
    "model=deepseek-v3",
    "cluster=dgx-h200",
    "parallelism={dp: 8, ep: 8}",
    "inference.requests={prompt_len: 2000, output_len: 20, count: 24, rate_per_s: 20}",
)
DECODES, PROMPT = Load(40, 40, 40_000, (), 40), Load(3000, 0, 0, ((3000, 0, 1),), 1)


def costs_of(engine: str, *sets: str) -> IterationCosts:
    scenario = load_scenario("scenarios/serve_deepseek_v3.yaml", (*SHARED, f"inference.engine={engine}", *sets))
    return iteration_costs(scenario, load_profile(scenario.calibration))


@pytest.mark.parametrize(
    ("engine", "sets", "decoding", "prompting"),
    [
        ("vllm-0.8", (), 5, 380),  # (40 + 3000) / 8
        ("vllm-0.14", (), 40, 3000),
        ("vllm-0.14", ("inference.cuda_graphs=false",), 5, 380),
        ("vllm-0.17", (), 40, 380),  # a prompt of 3,000 tokens has no graph
        ("vllm-0.33", (), 40, 380),  # DeepSeek V3 chooses groups first, so that padding tokens choose experts
        ("sglang-0.5", (), 5, 380),  # where experts are spread padding tokens choose none
        ("sglang-0.5", ("parallelism={dp: 8, expert_tp: 8}",), 40, 380),
        ("trtllm-1.3", (), 5, 380),  # padding tokens all choose the same experts
    ],
)
def test_the_mean_replica_has_the_tokens_of_the_fullest_where_all_are_padded(
    engine: str, sets: tuple[str, ...], decoding: int, prompting: int
) -> None:
    """One of eight replicas decodes 40 sequences, for which there is a graph; or another computes a prompt, too."""
    costs = costs_of(engine, *sets)
    assert costs.host.pooled([DECODES], 8, costs.dims.ep > 1) == decoding
    assert costs.host.pooled([DECODES, PROMPT], 8, costs.dims.ep > 1) == prompting


def test_padding_tokens_that_choose_no_expert_are_no_tokens_of_them() -> None:
    costs = costs_of("vllm-0.33", "model=qwen3-235b-a22b")
    assert costs.host.pooled([DECODES], 8, costs.dims.ep > 1) == 5


def test_a_prompt_on_one_replica_fills_the_experts_of_all_until_padding_follows_the_graphs() -> None:
    """The iterations of a vLLM of 2025 with a prompt are as long as if all replicas had one."""
    found = {}
    for engine in ("vllm-0.14", "vllm-0.17"):
        scenario = load_scenario("scenarios/serve_deepseek_v3.yaml", (*SHARED, f"inference.engine={engine}"))
        found[engine] = simulate_serving(scenario).result["time_to_first_token_s"]["p50"]
    assert found["vllm-0.14"] > 1.2 * found["vllm-0.17"]
