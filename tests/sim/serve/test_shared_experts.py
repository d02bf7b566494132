"""Shared experts beside routed ones, and the kernels of rope and of norms on heads, as engines' sources have them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sim.core.program import Compute
from sim.inputs.scenario import Scenario, load_scenario
from sim.prices.profiles import load_profile
from sim.serve.prices.costs import IterationCosts, iteration_costs
from sim.serve.prices.iteration_parts import Key, Work
from sim.variants.engines import ENGINES

SHARED = "scenarios/serve_deepseek_v3.yaml"


def served(engine: str, *sets: str, model: str = "deepseek-v3", tp: int = 8) -> Scenario:
    written = (f"model={model}", f"parallelism={{tp: {tp}}}", f"inference.engine={engine}", "cluster=dgx-h200")
    return load_scenario(SHARED, (*written, "inference.requests={prompt_len: 100, output_len: 100}", *sets))


def costs_of(scenario: Scenario) -> IterationCosts:
    return iteration_costs(scenario, load_profile(scenario.calibration))


def layer(costs: IterationCosts, tokens: int) -> tuple[Compute, ...]:
    program = costs.specs[-1].serve_tokens(costs.dims, tokens)
    return tuple([item for item in program if isinstance(item, Compute)])


@pytest.mark.parametrize(("engine", "few", "many"), [("vllm-0.11", 0, 0), ("vllm-0.14", 1, 0), ("trtllm-1.2", 1, 1)])
def test_few_tokens_of_shared_experts_run_beside_routed_ones(engine: str, few: int, many: int) -> None:
    costs = costs_of(served(engine))
    for tokens, expected in ((256, few), (257, many)):
        found = layer(costs, tokens)
        assert sum([op.beside > 0 for op in found]) == 5 * expected
        assert sum([op.name == "shared_sum" for op in found]) == 1


def test_sglang_computes_deepseeks_shared_expert_as_a_routed_one() -> None:
    for sets, fused in (((), True), (("inference.engine=sglang-0.4.6",), True), (("parallelism.ep=8",), False)):
        costs = costs_of(served("sglang-0.5.23", *sets))
        assert costs.dims.fuses_shared is fused
        assert any(op.name == "shared_sum" for op in layer(costs, 64)) is not fused
    assert not costs_of(served("sglang-0.5.23", model="kimi-k2")).dims.fuses_shared


def test_what_runs_beside_takes_its_work_but_not_its_launches() -> None:
    """Both streams together take as long as the longer one, and the shorter one's bytes at the streamed bandwidth."""
    costs, before = costs_of(served("vllm-0.14")), costs_of(served("vllm-0.11"))
    (experts,) = [op for op in layer(costs, 64) if op.kind == "moe_layer"]
    shared = [op for op in layer(costs, 64) if op.beside]
    rest = [op for op in layer(costs, 64) if not op.beside]
    prices = costs.prices
    alone_s = sum([prices._operator(op).seconds for op in shared])
    assert prices._operator(experts).seconds > alone_s
    work_s = sum([prices._least_s(op) for op in shared])
    together_s = prices.priced((experts, *shared)).seconds
    assert together_s == pytest.approx(prices._operator(experts).seconds + work_s)
    assert work_s < 0.3 * alone_s
    in_turn_s = sum([before.prices._operator(op).seconds for op in layer(before, 64)])
    assert prices.priced((*rest, *shared)).seconds < in_turn_s + 1e-9


def test_what_takes_longer_than_what_it_runs_beside_keeps_its_time() -> None:
    costs = costs_of(served("vllm-0.14"))
    (experts,) = [op for op in layer(costs, 64) if op.kind == "moe_layer"]
    (longer,) = [op for op in layer(costs, 64) if op.beside][:1]
    prices = costs.prices
    found = prices.priced((replace(longer, beside=0), replace(experts, beside=1))).seconds
    assert found == pytest.approx(prices._operator(experts).seconds + prices._least_s(longer))


@pytest.mark.parametrize(
    ("engine", "sets", "rope", "norms"),
    [
        ("vllm-0.6", (), 1, 2),
        ("vllm-0.11", (), 2, 3),
        ("vllm-0.33", (), 1, 1),
        ("vllm-0.33", ("inference.cuda_graphs=false",), 1, 2),
        ("sglang-0.4.8", (), 1, 2),
        ("sglang-0.5.23", (), 1, 1),
        ("trtllm-1.2", (), 0, 1),
        ("bundled", (), 1, 0),
    ],
)
def test_heads_are_normed_and_roped_by_as_many_kernels_as_the_engine_has(
    engine: str, sets: tuple[str, ...], rope: int, norms: int
) -> None:
    """Qwen 3 norms its heads; Llama does not."""
    qwen = costs_of(served(engine, *sets, model="qwen3-8b", tp=1))
    names = [op.name for op in layer(qwen, 64)]
    assert (names.count("rope_cache"), names.count("head_norms")) == (rope, norms)
    llama = costs_of(served(engine, *sets, model="llama3-8b", tp=1))
    names = [op.name for op in layer(llama, 64)]
    assert (names.count("rope_cache"), names.count("head_norms")) == (rope, 0)


def test_kernels_of_rope_move_each_number_once_there_and_back() -> None:
    """However many kernels there are; norms that write their results read and write queries and keys once more."""
    for engine, passes in (("vllm-0.11", 1), ("vllm-0.33", 1), ("sglang-0.5.23", 2), ("sglang-0.4.8", 2)):
        costs = costs_of(served(engine, model="qwen3-8b", tp=1))
        found, m = layer(costs, 64), costs.dims.model
        queries_and_keys = m.head_dim * (m.heads + m.kv_heads)
        whole = queries_and_keys + m.head_dim * m.kv_heads
        assert sum([op.bytes for op in found if op.name == "rope_cache"]) == 2 * 64 * whole * 2
        assert sum([op.bytes for op in found if op.name == "head_norms"]) == passes * 64 * queries_and_keys * 2


def test_a_layer_of_qwen_takes_a_kernel_more_than_one_without_norms() -> None:
    costs = costs_of(served("vllm-0.33", model="qwen3-8b", tp=1))
    whole_s = costs.priced(Key(Work.LAYER, 0, 64, 0, 0)).seconds
    norms_s = sum([costs.prices._operator(op).seconds for op in layer(costs, 64) if op.name == "head_norms"])
    assert 1e-6 < norms_s < 0.1 * whole_s


def test_every_engine_has_at_least_as_many_kernels_with_norms() -> None:
    for engine in ENGINES.values():
        assert engine.rope_kernels.normed >= engine.rope_kernels.rope


@pytest.mark.parametrize(("engine", "kernels"), [("vllm-0.33", 2), ("sglang-0.5.23", 2), ("trtllm-1.2", 1)])
def test_latents_are_roped_and_cached_by_as_many_kernels_as_the_engine_has(engine: str, kernels: int) -> None:
    costs = costs_of(served(engine))
    assert [op.name for op in layer(costs, 64)].count("rope_cache") == kernels


def test_vllm_keeps_graphs_of_more_tokens_for_gpt_oss() -> None:
    """Its GptOssForCausalLMConfig raises max_cudagraph_capture_size to 1,024."""
    for engine, model, largest in (
        ("vllm-v1", "gpt-oss-120b", 512),
        ("vllm-0.14", "gpt-oss-120b", 1024),
        ("vllm-0.33", "gpt-oss-120b", 1024),
        ("vllm-0.33", "qwen3-8b", 512),
    ):
        assert costs_of(served(engine, model=model, tp=1)).host.graph_sizes[-1] == largest
