"""Experts split by tensor parallelism over replicas: every rank has a part of each expert and needs every token."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sim.core.errors import InputError
from sim.core.program import Comm, Compute
from sim.inputs.scenario import Scenario
from sim.models.layers import layer_specs
from sim.prices.profiles import load_profile
from sim.serve.prices.costs import iteration_costs
from sim.serve.prices.dims import serving_dims
from sim.serve.prices.iteration_parts import Work
from sim.serve.simulation import simulate_serving
from sim.variants.engines import ENGINES
from tests.sim.cases import scenario_with

HIDDEN = 7168


def spread(engine: str = "sglang-0.5", backend: str | None = None, **parallelism: int) -> Scenario:
    section = {
        "engine": engine,
        "all2all_backend": backend,
        "requests": {"prompt_len": 500, "output_len": 20, "count": 64},
    }
    return scenario_with(
        parallelism=parallelism,
        model="deepseek-v3",
        cluster="dgx-h200",
        calibration="h200-sxm",
        inference=section,
    )


def messages(scenario: Scenario, tokens: int) -> list[tuple[str, str, float]]:
    """Kind, group and bytes of each message of a layer with experts."""
    spec = next(s for s in layer_specs(scenario.model) if any(s.serve_exchange(serving_dims(scenario), 1)))
    there, back = spec.serve_exchange(serving_dims(scenario), tokens)
    return [(m.kind, m.group, m.bytes) for m in (*there, *back) if isinstance(m, Comm)]


@pytest.mark.parametrize(
    ("engine", "width", "sums"),
    [("sglang-0.5", 2, False), ("vllm-v1", 2, True), ("vllm-0.14", 2, False), ("vllm-0.28", 1, False)],
)
@pytest.mark.parametrize("tokens", [16, 1024])
@pytest.mark.parametrize("group", ["ep", "expert_tp"])
def test_every_token_is_gathered_once_and_its_sum_scattered(
    engine: str, width: int, sums: bool, tokens: int, group: str
) -> None:
    """Of eight replicas: all their tokens and a result of each in 16 bits, whichever experts they chose. vLLM 0.28
    gathers tokens that are quantized already; vLLM 0.9 sums up all results on every rank."""
    whole = 8 * tokens * HIDDEN * 2.0
    back = "all_reduce" if sums else "reduce_scatter"
    expected = [("all_gather", group, whole * width / 2), (back, group, whole)]
    assert messages(spread(engine, dp=8, **{group: 8}), tokens) == expected
    assert messages(spread(engine, tp=2, dp=4, **{group: 8}), tokens) == [(*m[:2], m[2] / 2) for m in expected]


@pytest.mark.parametrize(
    ("engine", "layout", "kinds"),
    [
        ("sglang-0.4.8", {"dp": 8, "ep": 8}, ["all_gather", "reduce_scatter"]),
        ("sglang-0.5", {"dp": 8, "ep": 8}, ["all_reduce", "all_reduce"]),
        ("sglang-0.5.10", {"dp": 8, "ep": 8}, ["all_reduce", "reduce_scatter"]),
        ("sglang-0.5.10", {"dp": 4, "tp": 2, "ep": 8}, ["all_reduce", "all_reduce"]),
        ("vllm-0.28", {"dp": 8, "ep": 8}, ["all_gather", "reduce_scatter"]),
    ],
)
def test_sglang_sums_up_all_tokens_where_prompts_are_among_them(
    engine: str, layout: dict[str, int], kinds: list[str]
) -> None:
    scenario = spread(engine, **layout)
    costs = iteration_costs(scenario, load_profile(scenario.calibration))
    dims, spec = replace(costs.dims, prompts=True), costs.specs[-1]
    assert [m.kind for way in spec.serve_exchange(dims, 64) for m in way if isinstance(m, Comm)] == kinds
    # an iteration with prompts takes what its messages take more
    prompts, tokens = (
        sum(p * n for n, p in zip(costs.stages[0].layers, each, strict=True))
        for each in (
            [costs.prices.priced(s.serve_tokens(d, 64)).comm_s for s in costs.specs] for d in (dims, costs.dims)
        )
    )
    own, others = costs._without_attention_s(64, 1, True)[0], costs._without_attention_s(64, 1, False)[0]
    assert own - others == pytest.approx(prompts - tokens, abs=1e-6)
    assert (prompts != tokens) == ("all_reduce" in kinds)  # which may be quicker, in kernels of the engine's own


def test_experts_over_some_ranks_and_split_over_others_are_gathered_for_both() -> None:
    """All ranks need all tokens: first those of the ranks with other experts, then those of the ranks beside."""
    own = 1024 * HIDDEN * 2.0
    assert messages(spread("sglang-0.5", dp=8, ep=4, expert_tp=2), 1024) == [
        ("all_gather", "ep", 4 * own),
        ("all_gather", "expert_tp", 8 * own),
        ("reduce_scatter", "expert_tp", 8 * own),
        ("reduce_scatter", "ep", 4 * own),
    ]


@pytest.mark.parametrize(
    ("engine", "backend"),
    [
        ("bundled", "all_to_all"),
        ("vllm-v1", "naive"),
        ("vllm-0.28", "allgather_reducescatter"),
        ("sglang-0.5", "allgather_reducescatter"),
        ("trtllm-1.0", "allgather_reducescatter"),
        ("trtllm-1.3", "deepep"),
    ],
)
def test_engines_send_as_the_backend_that_is_their_default(engine: str, backend: str) -> None:
    names = (None, backend, ENGINES[engine].all2all[1])
    own, same, other = (messages(spread(engine, name, dp=8, ep=8), 1024) for name in names)
    assert own == same != other


def test_a_rank_that_gathers_computes_as_one_of_a_whole_server() -> None:
    """It has all tokens: those of other ranks' experts are sorted out by it as well, unlike with an all-to-all."""
    gathered, sent = (spread("sglang-0.5", name, dp=8, ep=8) for name in (None, "deepep"))
    ops = [
        next(
            op
            for spec in layer_specs(s.model)
            if spec.mlp is not None
            for op in spec.serve_routed(replace(serving_dims(s), one_kernel=True), 64)
            if isinstance(op, Compute) and op.name == "experts"
        )
        for s in (gathered, sent)
    ]
    assert [op.sent_tokens for op in ops] == [False, True]


def test_who_splits_every_expert_cannot_be_sent_copies() -> None:
    with pytest.raises(InputError, match=r"found 'deepep'; each rank has a part of every expert \(ep 1\)"):
        spread("sglang-0.5", "deepep", dp=8, expert_tp=8)


def test_a_backend_without_messages_is_named() -> None:
    noted = spread("vllm-0.28", "deepep", tp=8).warnings
    assert any("inference.all2all_backend: of no effect" in note for note in noted)


def test_copies_that_an_all_to_all_brings_are_gathered_by_who_split_their_expert() -> None:
    sent = 1024 * 8 * HIDDEN * 2.0  # each token to its eight experts
    assert messages(spread("bundled", dp=8, ep=4, expert_tp=2), 1024) == [
        ("all_to_all", "ep", sent),
        ("all_gather", "expert_tp", 2 * sent),
        ("reduce_scatter", "expert_tp", 2 * sent),
        ("all_to_all", "ep", sent),
    ]


def test_they_take_time() -> None:
    """At least what a rank of eight receives over NVLink, each way."""
    scenario = spread(dp=8, expert_tp=8)
    costs = iteration_costs(scenario, load_profile(scenario.calibration))
    spec = next(s for s in costs.specs if any(s.serve_exchange(costs.dims, 1)))
    there, back = spec.serve_exchange(costs.dims, 1024)
    bound = 7 * 1024 * HIDDEN * 2.0 / 450e9
    assert costs.prices.priced(there).seconds > bound
    assert costs.prices.priced(back).seconds > bound
    number = costs.specs.index(spec)
    assert min(costs.tokens_s(work, 1024, number) for work in (Work.DISPATCH, Work.COMBINE)) > bound


@pytest.mark.parametrize(("engine", "split"), [("sglang-0.5", 8), ("vllm-0.28", 1), ("trtllm-1.0", 1)])
@pytest.mark.parametrize("group", ["ep", "expert_tp"])
def test_sglang_splits_shared_experts_over_the_same_ranks(engine: str, split: int, group: str) -> None:
    """DeepSeek-V3's: three matrices of 7,168 x 2,048 in each of 58 layers; as many multiplications either way."""
    scenario = spread(engine, dp=8, **{group: 8})
    dims = serving_dims(scenario)
    assert scenario.model.moe is not None
    without = scenario.model.moe.model_copy(update={"shared_experts": 0})
    spec, alone = (
        next(s for s in layer_specs(model) if any(s.serve_exchange(dims, 1)))
        for model in (scenario.model, scenario.model.model_copy(update={"moe": without}))
    )
    assert spec.served_elements(dims).linear - alone.served_elements(dims).linear == 3 * HIDDEN * 2048 / split
    whole, rest = (sum(op.flops for op in s.serve_tokens(dims, 64) if isinstance(op, Compute)) for s in (spec, alone))
    assert whole - rest == pytest.approx(2 * 64 * 3 * HIDDEN * 2048, rel=0.01)


def test_replicas_are_served_to_the_end() -> None:
    assert simulate_serving(spread(dp=8, expert_tp=8)).result["requests"] == 64
