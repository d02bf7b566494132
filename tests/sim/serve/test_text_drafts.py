"""Drafts that are looked up in a sequence's own text (n-grams): what they cost, and how often they are found."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario
from sim.serve.prices.load import Load
from sim.serve.scheduling.speculation import expected_tokens
from sim.serve.simulation import simulate_serving
from tests.sim.serve.serving_cases import SMALL, serving

REQUESTS = {"prompt_len": 200, "output_len": 100, "count": 40, "rate_per_s": 200, "seed": 3}


def drafting(engine: str, lookup: float, acceptance: float = 0.7, **more: Any) -> Scenario:
    drafts = {"tokens": 4, "lookup": lookup, "acceptance": acceptance}
    return serving({"engine": engine, "requests": REQUESTS, "speculative": drafts} | more)


def test_nothing_found_is_as_no_drafts_without_a_host() -> None:
    """No weights, no cache, no kernels: the bundled engine has the very times of one that drafts nothing."""
    nothing = simulate_serving(drafting("bundled", 0.0))
    plain = simulate_serving(serving({"engine": "bundled", "requests": REQUESTS}))
    assert [s.finish_s for s in nothing.sequences] == pytest.approx([s.finish_s for s in plain.sequences], rel=1e-12)
    assert nothing.capacity.blocks == plain.capacity.blocks


@pytest.mark.parametrize("engine", ["bundled", "vllm-0.28", "sglang-0.5.23"])
def test_every_request_gets_its_tokens_in_fewer_iterations_the_more_is_found(engine: str) -> None:
    iterations = []
    for lookup in (0.0, 0.5, 1.0):
        found = simulate_serving(drafting(engine, lookup, requests={**REQUESTS, "rate_per_s": None}))
        assert all(s.generated == s.request.output_tokens for s in found.sequences)
        iterations.append(found.outcome.iterations)
    assert iterations == sorted(iterations, reverse=True)
    assert iterations[2] < 0.6 * iterations[0]


@pytest.mark.parametrize(("engine", "of_all"), [("vllm-0.28", False), ("sglang-0.5.23", True)])
def test_only_sglang_checks_tokens_where_nothing_is_found(engine: str, of_all: bool) -> None:
    use = simulate_serving(drafting(engine, 0.4)).outcome.speculation
    assert use is not None
    most = expected_tokens(4, 0.7)
    assert use.expected_tokens_per_verification == pytest.approx(1 + 0.4 * (most - 1) if of_all else most)
    assert use.tokens_per_verification == pytest.approx(use.expected_tokens_per_verification, rel=0.06)


def test_both_engines_give_the_same_times() -> None:
    for engine in ("vllm-0.28", "sglang-0.5.23"):
        one, other = (simulate_serving(drafting(engine, 0.4), engine=how) for how in ("simpy", "static"))
        assert [s.finish_s for s in one.sequences] == pytest.approx([s.finish_s for s in other.sequences], rel=1e-9)


def test_the_gpu_waits_for_the_search() -> None:
    """On vLLM an iteration is longer by the search of every sequence and of every token of its text, and by the host's
    own work, which is beside the GPU without drafts; all of it is in the shares of the run's seconds."""
    served = simulate_serving(drafting("vllm-0.28", 1.0))
    costs = served.costs
    host = costs.host
    assert not host.overlaps
    short, long = (Load(40, 8, 8 * n, (), 40, 5) for n in (1000, 3000))
    assert host.search_s(long) - host.search_s(short) == pytest.approx(16000 * host.times.search_token_s)
    assert host.search_s(short) == pytest.approx(8 * host.times.search_s + 8000 * host.times.search_token_s)
    device_s = costs.device_seconds(short)[0]
    assert costs.stage_seconds(short)[0] == pytest.approx(device_s + host.search_s(short) + host.own_s(short))
    spent_s = sum(span[1] - span[0] for r in served.replicas for i in r.iterations for span in i.spans)
    assert sum(served.shares.values()) == pytest.approx(spent_s, rel=0.02)


def test_a_batch_with_a_sequence_without_drafts_has_no_whole_graph() -> None:
    host = simulate_serving(drafting("vllm-0.28", 0.5)).costs.host
    assert host.launches(0, Load(40, 8, 8000, (), 40, 5)) == 0
    assert host.launches(0, Load(36, 8, 8000, (), 36, 5)) == host.launches(0, Load(8, 8, 8000, (), 8)) == host.pieces[0]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"engine": "trtllm-1.0"}, "how engine trtllm-1.0 drafts from the text is not simulated"),
        ({"speculative": {"lookup": 0.5, "draft": {**SMALL, "layers": 1}}}, "names a model"),
        ({"speculative": {"lookup": 0.5, "hidden_states": 1}}, "drafts from the text read none"),
        ({"speculative": {"lookup": 1.5}}, "lookup"),
        ({"engine": "vllm-0.28", "async_scheduling": True}, "async_scheduling"),
    ],
)
def test_what_does_not_go_with_drafts_from_the_text(more: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        serving({"engine": "bundled", "speculative": {"lookup": 0.5}, **more})
