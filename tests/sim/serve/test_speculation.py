"""Speculative decoding against closed forms: acceptance 0 and 1, and Leviathan's expected tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sim.core.errors import InputError
from sim.models.operators import F, gemm
from sim.models.serving.operators import served_norm
from sim.serve.memory import weight_bytes
from sim.serve.prices.costs import iteration_costs
from sim.serve.prices.load import Load
from sim.serve.requests import Request
from sim.serve.results.result import ServingSimulation
from sim.serve.scheduling.sequences import Sequence
from sim.serve.simulation import simulate_serving
from sim.views.serving_summary import cache_lines
from tests.sim.serve.serving_cases import SMALL, WEIGHTS_AND_BUFFERS, finished, requests_of, serving, settings_of

DRAFT = {**SMALL, "layers": 1, "hidden": 64, "heads": 2, "kv_heads": 1, "ffn": 128}


def drafted(
    acceptance: float, tokens: int = 4, count: int = 3, output: int = 41, seed: int = 0, **more: Any
) -> ServingSimulation:
    speculative = {"draft": DRAFT, "tokens": tokens, "acceptance": acceptance, "seed": seed}
    requests = {"prompt_len": 64, "output_len": output, "count": count}
    return simulate_serving(serving({"requests": requests, "speculative": speculative, **more}))


@pytest.mark.parametrize(("acceptance", "each"), [(0.0, 1), (1.0, 5)])
def test_an_iteration_is_the_drafts_steps_and_one_check(acceptance: float, each: int) -> None:
    """Nothing accepted: a token an iteration. Everything: five, four of them the draft's."""
    sim = drafted(acceptance)
    plain, small = (iteration_costs(serving(model=model), sim.profile) for model in (SMALL, DRAFT))
    expected = plain.stage_seconds(Load(192, 0, 0, ((64, 64, 3),), 3))[0]
    expected += small.stage_seconds(Load(192, 0, 0, ((64, 64, 3),), 3))[0]
    for done in range(0, 40, each):
        seen = 64 + done
        expected += plain.stage_seconds(Load(15, 3, 3 * (seen + 5), (), 15, 5))[0]
        expected += small.stage_seconds(Load(15, 3, 3 * (seen + 5), (), 3, 5))[0]  # over all that was checked
        expected += sum(small.stage_seconds(Load(3, 3, 3 * (seen + 1 + i), (), 3))[0] for i in range(1, 4))
    assert sim.end_s == pytest.approx(expected, rel=1e-9)
    assert sim.result["iterations"] == 1 + 40 / each
    finished(sim)


def test_slower_than_none_where_nothing_is_accepted_and_faster_where_everything_is() -> None:
    """A large model bound by its weights, whose check costs little more than a token alone."""
    requests = {"requests": {"prompt_len": 128, "output_len": 64, "count": 4}, "batching": "static"}
    found = []
    for acceptance in (0.0, None, 0.7, 1.0):
        speculative = {"draft": "llama3.2-1b", "tokens": 4, "acceptance": acceptance}
        own = {} if acceptance is None else {"speculative": speculative}
        found.append(simulate_serving(serving({**requests, **own}, "llama3-8b")).outcome.output_tokens_per_s)
    assert found == sorted(found)
    assert found[0] < found[1]


@pytest.mark.parametrize("acceptance", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_leviathans_expected_tokens(acceptance: float, tokens: int) -> None:
    use = drafted(acceptance, tokens, count=20, output=600).result["speculation"]
    expected = (1 - acceptance ** (tokens + 1)) / (1 - acceptance)
    assert use["expected_tokens_per_verification"] == pytest.approx(expected)
    assert use["tokens_per_verification"] == pytest.approx(expected, rel=0.03)


def test_a_models_own_prediction_layer_drafts() -> None:
    """Each drafted token costs a layer, a 2h → h projection, two norms, and the model's own embedding and head; the
    module's weights and its part of the cache take memory, those tables do not."""
    model = {**SMALL, "mtp_layers": 1}
    speculative = {"tokens": 2, "acceptance": 1.0}
    requests = {"prompt_len": 64, "output_len": 31, "count": 3}
    sim = simulate_serving(serving({"requests": requests, "speculative": speculative}, model))
    plain, layer = (iteration_costs(serving(model={**model, "layers": n}), sim.profile) for n in (SMALL["layers"], 1))
    h = SMALL["hidden"]

    def module_s(load: Load) -> float:
        norms = [served_norm(layer.dims, "norm", load.tokens) for _ in range(2)]
        extra = layer.prices.priced((*norms, gemm("projection", F, load.tokens, h, 2 * h, "bf16"))).seconds
        return layer.stage_seconds(load)[0] + extra

    expected = plain.stage_seconds(Load(192, 0, 0, ((64, 64, 3),), 3))[0]
    expected += module_s(Load(192, 0, 0, ((64, 64, 3),), 3))
    for done in range(0, 30, 3):
        seen = 64 + done
        expected += plain.stage_seconds(Load(9, 3, 3 * (seen + 3), (), 9, 3))[0]
        expected += module_s(Load(9, 3, 3 * (seen + 3), (), 3, 3)) + module_s(Load(3, 3, 3 * (seen + 2), (), 3))
    assert sim.end_s == pytest.approx(expected, rel=1e-9)
    more = sim.capacity.weight_bytes[0] - weight_bytes(plain.dims, plain.specs, plain.stages[0])
    tables = replace(layer.stages[0], embedding=False, head=False)
    assert more == weight_bytes(layer.dims, layer.specs, tables) + 2 * (2 * h * h + 3 * h)
    assert sim.capacity.stage_token_bytes == (SMALL["layers"] + 1) * 2 * 2 * 32 * 2  # of two heads of 32


def test_replicas_that_share_experts_share_those_of_the_prediction_layer() -> None:
    """A rejected token of a module of one layer costs less than the model's four, and replicas go on in step."""
    moe = {"experts": 8, "top_k": 2, "ffn": 256}
    speculative = {"tokens": 1, "acceptance": 0.0}
    requests = {"requests": {"prompt_len": 64, "output_len": 16, "count": 8}}
    model = {**SMALL, "moe": moe, "mtp_layers": 1}
    plain, spread = (
        simulate_serving(serving({**requests, **own}, model, parallelism={"dp": 2, "ep": 2}))
        for own in ({}, {"speculative": speculative})
    )
    assert plain.end_s < spread.end_s < 2 * plain.end_s
    assert [s.finish_s for s in spread.replicas[0].sequences] == [s.finish_s for s in spread.replicas[1].sequences]


def test_draws_are_a_requests_own() -> None:
    """What is accepted depends on request and position, not on who else is served."""
    alone, beside = drafted(0.5, count=1), drafted(0.5, count=1, max_batch_tokens=40)
    assert alone.result["speculation"] == beside.result["speculation"]
    assert drafted(0.5, seed=1).end_s != drafted(0.5, seed=2).end_s
    assert drafted(0.5, seed=1).end_s == drafted(0.5, seed=1).end_s


@settings(max_examples=50, deadline=None)
@given(
    requests_of, settings_of, st.floats(2e5, 3e6), st.floats(0, 1), st.integers(1, 6), st.sampled_from([{}, {"dp": 2}])
)
def test_any_workload_is_served(
    requests: tuple[Request, ...],
    inference: dict[str, Any],
    cache_bytes: float,
    acceptance: float,
    tokens: int,
    parallelism: dict[str, int],
) -> None:
    inference["speculative"] = {"draft": DRAFT, "tokens": tokens, "acceptance": acceptance}
    inference["router"] = "round_robin"  # the quick pass knows no other
    inference["max_batch_tokens"] += inference["max_running_requests"]  # kept for the draft model
    scenario = serving(inference, gpu={"memory_bytes": WEIGHTS_AND_BUFFERS + cache_bytes}, parallelism=parallelism)
    quick, simpy = (simulate_serving(scenario, requests=requests, engine=e) for e in ("static", "simpy"))
    finished(quick)
    finished(simpy)
    for a, b in zip(quick.sequences, simpy.sequences, strict=True):
        assert b.finish_s == pytest.approx(a.finish_s, rel=1e-9)
    waste = quick.replicas[0].states.arrays().waste
    assert 0 <= min(waste) <= max(waste) < 1


def test_the_draft_takes_memory() -> None:
    plain, sim = simulate_serving(serving()), drafted(0.5)
    small = iteration_costs(serving(model=DRAFT), sim.profile)
    more = weight_bytes(small.dims, small.specs, small.stages[0])
    assert sim.capacity.weight_bytes[0] - plain.capacity.weight_bytes[0] == more
    assert sim.capacity.stage_token_bytes - plain.capacity.stage_token_bytes == 2 * 32 * 2  # a layer of one head of 32


@pytest.mark.parametrize(
    ("inference", "parallelism", "said"),
    [
        ({"draft": "llama2-7b"}, {}, "vocabulary of 32000"),
        ({"draft": DRAFT}, {"tp": 4}, "has 2 heads"),
        ({"draft": DRAFT, "acceptance": 1.5}, {}, "acceptance"),
        ({"tokens": 3}, {}, "draft: found null; the model has no prediction layer"),
        ({"draft": "llama9"}, {}, "inference.speculative.draft"),
    ],
)
def test_what_is_refused(inference: dict[str, Any], parallelism: dict[str, int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        serving({"speculative": inference}, parallelism=parallelism)


def test_the_summary_says_what_was_accepted() -> None:
    lines = dict(cache_lines(drafted(1.0).outcome))
    assert lines["drafts"] == "96 tokens, 100.0 % accepted; 5 tokens a check (5 expected)"
    assert "drafts" not in dict(cache_lines(simulate_serving(serving()).outcome))


@pytest.mark.parametrize(("engine", "lacks"), [("vllm-0.8", 1), ("vllm-0.33", 1), ("sglang-0.5", 0), ("bundled", 0)])
def test_vllm_has_blocks_for_what_a_draft_writes(engine: str, lacks: int) -> None:
    """Beside 24 tokens six are checked, for which two blocks of 16 suffice; five more are drafted (num_lookahead_tokens
    of vLLM). No request has blocks for more than its tokens."""
    inference = {"engine": engine, "speculative": {"draft": SMALL, "tokens": 5}, "kv_cache": {"block_tokens": 16}}
    scheduler = simulate_serving(serving(inference)).replicas[0].scheduler
    assert scheduler.lacks(Sequence(Request(0.0, 24, 100), 0, computed=24, private=2), 6) == lacks
    assert scheduler.lacks(Sequence(Request(0.0, 24, 6), 0, computed=24, private=2), 6) == 0
