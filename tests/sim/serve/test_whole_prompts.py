"""Engines that compute prompts whole, or before tokens."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.serve.requests import Request
from sim.serve.simulation import simulate_serving
from sim.variants.engines import ENGINES
from tests.sim.serve.serving_cases import WEIGHTS_AND_BUFFERS, engine_scenario, every_way, requests_of, serving

WHOLE = [name for name, engine in ENGINES.items() if engine.whole_prompts]


@settings(max_examples=20, deadline=None)
@given(requests_of, st.sampled_from(WHOLE), st.integers(20, 300), st.floats(1e5, 3e6), st.sampled_from([1, 2]))
def test_whole_prompts_are_computed_in_one_iteration(
    requests: tuple[Request, ...], engine: str, budget: int, cache_bytes: float, pp: int
) -> None:
    """However they are simulated; prompts longer than the budget raise it."""
    limits = {"max_batch_tokens": budget, "max_running_requests": 20}
    inference = {"engine": engine, "chunked_prefill": False, "prefix_cache": "none", **limits}
    s = serving(inference, gpu={"memory_bytes": WEIGHTS_AND_BUFFERS + cache_bytes}, parallelism={"pp": pp})
    for sim in every_way(s, requests):
        for load in [i.load for i in sim.replicas[0].iterations]:
            assert all(chunk == seen for chunk, seen, _ in load.prefills)
            assert load.tokens <= sim.replicas[0].scheduler.limits.batch_tokens or load.sequences == 1


@pytest.mark.parametrize(("engine", "beside"), [("vllm-0.2", False), ("vllm-0.6", False), ("trtllm", True)])
def test_whole_prompts_go_first_or_beside_tokens(engine: str, beside: bool) -> None:
    requests = (Request(0.0, 64, 40), Request(1e-4, 400, 2))
    loads = [i.load for i in simulate_serving(serving({"engine": engine}), requests=requests).replicas[0].iterations]
    assert any(load.decodes and (400, 400, 1) in load.prefills for load in loads) == beside
    assert ((400, 400, 1),) in [load.prefills for load in loads]


@pytest.mark.parametrize("engine", ["vllm-0.2", "trtllm-triton", "trtllm-1.0"])
def test_prompts_beyond_the_default_limit_are_served_beside_others(engine: str) -> None:
    """As the engine must be told to; else no request would run beside another, and eight take as long as one by one."""
    one, eight = (
        simulate_serving(
            engine_scenario(
                engine, batching="continuous", requests={"prompt_len": 9000, "output_len": 100, "count": count}
            )
        ).outcome
        for count in (1, 8)
    )
    assert eight.duration_s < 0.75 * 8 * one.duration_s
    assert any("refuses 8 of 8 prompts" in warning for warning in eight.warnings)


def test_a_prompt_that_its_engine_would_refuse_is_computed_and_said() -> None:
    s = serving({"engine": "vllm-0.2"})
    requests = (Request(0.0, 3000, 4), Request(0.0, 64, 4))
    warnings = {n: simulate_serving(s, requests=requests[n:]).outcome.warnings for n in (0, 1)}
    assert any("refuses 1 of 2 prompts" in w for w in warnings[0])
    assert not any("refuses" in w for w in warnings[1])


def test_the_documented_cost_of_prompts_first_is_simulated() -> None:
    page = (Path(__file__).parents[3] / "docs" / "serving_engines.md").read_text(encoding="utf-8")
    requests = {"prompt_len": 220, "output_len": 190, "count": 300, "rate_per_s": 24}
    sglang, vllm = "a token takes {} ms (median) on SGLang 0.5 ", "and {} ms on vLLM 0.14"
    for engine, said in (("sglang-0.5", sglang), ("vllm-0.14", vllm)):
        served = simulate_serving(engine_scenario(engine, batching="continuous", requests=requests)).outcome
        assert said.format(f"{1e3 * served.time_per_output_token_s.p50:.1f}") in page


def test_a_prompt_delays_tokens_where_prompts_go_first() -> None:
    """A long prompt that arrives later: its tokens are computed before any of those that run."""
    requests = (Request(0.0, 64, 40), Request(1e-4, 4096, 2))
    mixed, first = (
        simulate_serving(serving({"chunked_prefill": chunked, "max_batch_tokens": 512}), requests=requests)
        for chunked in (True, False)
    )
    done = [[s.first_token_s for s in sim.sequences] + [s.finish_s for s in sim.sequences] for sim in (mixed, first)]
    assert done[1][1] < done[0][1]  # no token is computed beside the chunks
    assert done[1][2] > done[0][2]  # they wait for all chunks


def test_prompts_beside_tokens_are_not_padded_to_them() -> None:
    """An engine that pads prompts computes them alone; told to compute them beside tokens, it pads none."""
    requests = (Request(0.0, 16, 60), Request(1e-3, 1025, 17))
    first, *_ = every_way(serving({"engine": "vllm-0.2.7", "chunked_prefill": True}), requests)
    assert first.sequences[1].first_token_s < first.sequences[0].finish_s


@pytest.mark.parametrize(("prompt", "output", "beyond"), [(8000, 192, 0), (8000, 193, 3), (9000, 1, 3)])
def test_requests_longer_than_the_model_are_told(prompt: int, output: int, beyond: int) -> None:
    """Llama 3 8B was made for 8,192 positions; prompt and answer have to fit in them."""
    requests = {"prompt_len": prompt, "output_len": output, "count": 3}
    scenario = engine_scenario("vllm-v1", batching="continuous", requests=requests)
    told = [
        text for text in simulate_serving(scenario).outcome.warnings if "positions that the model was made for" in text
    ]
    assert len(told) == bool(beyond)
    assert all(text.startswith(f"inference.requests: {beyond} of 3 have") for text in told)


def test_a_model_of_unknown_length_takes_any_request() -> None:
    served = simulate_serving(serving({"requests": {"prompt_len": 300_000, "output_len": 2}}))
    assert not [text for text in served.outcome.warnings if "positions that the model" in text]


@pytest.mark.parametrize("engine", ENGINES)
def test_throughput_is_continuous_in_the_prompts_length_around_the_limit(engine: str) -> None:
    """A token more of 512 changes little, below, at and beyond the tokens of an iteration."""
    rates = []
    for prompt in (448, 496, 511, 512, 513, 520):
        requests = {"prompt_len": prompt, "output_len": 32, "count": 24}
        inference = {"engine": engine, "max_batch_tokens": 512, "max_running_requests": 16, "prefix_cache": "none"}
        served = simulate_serving(serving({**inference, "requests": requests})).outcome
        rates.append(served.output_tokens_per_s)
        raised = any(w.startswith("inference.max_batch_tokens: found 512, with which") for w in served.warnings)
        cuts = not ENGINES[engine].whole_prompts or served.scenario.for_serving.chunked_prefill
        room = prompt + (16 if ENGINES[engine].prompts_beside else 0) <= 512
        assert raised is not (cuts or room)
    assert max(rates) / min(rates) < 1.35
    assert all(0.9 < b / a < 1.1 for a, b in pairwise(rates[2:]))
