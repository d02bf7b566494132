"""The most tokens of a request (`max_request_tokens`): who is refused, who does not start, what follows from it."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import parse_scenario
from sim.serve.requests import Request
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from sim.variants.engines import ENGINES
from sim.views.headline import headline
from tests.sim.serve.serving_cases import engine_scenario, every_way, serving

LENGTHS = (Request(0.0, 64, 16), Request(0.0, 90, 10), Request(1e-4, 91, 10), Request(2e-4, 20, 10))


@pytest.mark.parametrize(
    ("engine", "served"), [("vllm-0.2", 3), ("vllm-0.6", 3), ("vllm-0.19", 3), ("trtllm-1.0", 3), ("sglang-0.5", 2)]
)
def test_longer_requests_are_refused(engine: str, served: int) -> None:
    """vLLM takes requests of exactly 100 tokens, SGLang only shorter ones. The others run as if those had not come."""
    s = serving({"engine": engine, "max_request_tokens": 100, "max_batch_tokens": 512})
    most = 100 if served == 3 else 99
    taken = tuple(r for r in LENGTHS if r.prompt_tokens + r.output_tokens <= most)
    unlimited = serving({"engine": engine, "max_batch_tokens": 512})
    for sim, alone in zip(every_way(s, LENGTHS), every_way(unlimited, taken), strict=True):
        assert (sim.outcome.requests, sim.outcome.requests_refused) == (served, 4 - served)
        assert sorted(x.finish_s for x in sim.sequences) == sorted(x.finish_s for x in alone.sequences)
        said = f"{4 - served} of 4 requests have more than 100 tokens, prompt and answer together; engine {engine}"
        assert sum(said in w for w in sim.outcome.warnings) == 1
    assert not any("refuses" in w for w in simulate_serving(s, requests=taken).outcome.warnings)


def test_an_engine_that_refuses_all_has_nothing_to_serve() -> None:
    with pytest.raises(InputError, match=r"max_request_tokens: found 50; every request .* \(the shortest 80\)"):
        simulate_serving(serving({"max_request_tokens": 50}))


def starting(engine: str, limit: int | None, tokens: float, window: int | None = None) -> ServingSimulation:
    """An engine whose cache has room for so many tokens beside weights and buffers."""
    model: dict[str, Any] = {"preset": "llama3-8b", "layers": 4, "trained_positions": 8192}
    if window is not None:
        model["window"] = window

    def served(memory_bytes: float) -> ServingSimulation:
        limits = {"max_request_tokens": limit, "max_running_requests": 64, "max_batch_tokens": 8192}
        own = {"engine": engine, **limits, "kv_cache": {"memory_fraction": 0.5}}
        return simulate_serving(serving(own, model, gpu={"memory_bytes": memory_bytes}))

    c = served(80e9).capacity
    token_bytes = 4 * 2 * 8 * 128 * 2
    return served((c.weight_bytes[0] + c.buffer_bytes[0] + tokens * token_bytes) / 0.5)


@pytest.mark.parametrize("engine", ["vllm-0.2.7", "vllm-0.6", "vllm-v1", "vllm-0.19"])
def test_vllm_does_not_start_without_room_for_the_longest_request(engine: str) -> None:
    """Blocks of 16 tokens: 4,000 take 250, 4,001 take 251."""
    for limit, starts in ((4000, True), (4001, False)):
        sim = starting(engine, limit, 250.5 * 16)
        why = f"a request may have {limit:,} tokens (inference.max_request_tokens), the cache has room for 4,000"
        assert sim.outcome.does_not_start == (None if starts else why)
        assert sim.outcome.fits_in_memory == starts
        assert any(w.startswith(f"does not start: {why}") for w in sim.outcome.warnings) is not starts
        assert (headline(sim.outcome)[0][:3] == ("Server", "does not start", why)) is not starts


def test_without_a_limit_of_its_own_the_engine_takes_the_models_positions() -> None:
    """8,192: said, and served all the same, as whoever measured such a server has given it a limit."""
    for tokens, said in ((8192, False), (8191, True)):
        result = starting("vllm-0.19", None, tokens).outcome
        words = "takes the model's 8,192 positions and does not start, as its cache has room for 8,176 tokens"
        assert any(words in w for w in result.warnings) == said
        assert result.does_not_start is None
        assert result.fits_in_memory


@pytest.mark.parametrize("engine", ["bundled", "vllm-0.2", "sglang-0.5", "trtllm-1.0"])
def test_other_engines_start(engine: str) -> None:
    assert starting(engine, 8000, 4000).outcome.does_not_start is None


def test_layers_with_a_window_need_less_room_for_a_long_request() -> None:
    """Each keeps 1,024 of its tokens."""
    assert starting("vllm-0.19", 8000, 2000).outcome.does_not_start is not None
    assert starting("vllm-0.19", 8000, 2000, window=1024).outcome.does_not_start is None


@pytest.mark.parametrize(
    ("engine", "given", "found"),
    [
        ("vllm-0.6", {"max_request_tokens": 4096}, (False, 4096)),  # the model has 131,072 positions: in chunks of 512
        ("vllm-0.6", {"max_request_tokens": 1024}, (False, 2048)),
        ("vllm-0.6", {"max_request_tokens": 32_768}, (False, 32_768)),
        ("vllm-0.6", {"max_request_tokens": 32_769}, (True, 512)),
        ("vllm-0.6.5", {"max_request_tokens": 32_769}, (True, 2048)),
        ("vllm-0.6", {"max_request_tokens": 4096, "max_batch_tokens": 5000}, (False, 5000)),
        ("vllm-v1", {"max_request_tokens": 4096}, (True, 8192)),
        ("vllm-v1", {"max_request_tokens": 4096, "chunked_prefill": False}, (False, 4096)),
        ("vllm-0.14", {"max_request_tokens": 4096, "chunked_prefill": False}, (False, 8192)),
        ("vllm-0.14", {"max_request_tokens": 20_000, "chunked_prefill": False}, (False, 20_000)),
        ("sglang-0.5", {"max_request_tokens": 4096}, (False, 8192)),
    ],
)
def test_the_budget_of_an_iteration_follows_the_limit_where_prompts_are_whole(
    engine: str, given: dict[str, Any], found: tuple[bool, int]
) -> None:
    """vLLM: max_num_batched_tokens is the larger of max_model_len and 2,048, of chunks (for more than 32,768) 512 or
    2,048; V1 has a budget of its own, and takes max_model_len without chunks, since 0.14 at least that budget."""
    s = engine_scenario(engine, model="llama3.1-8b", batching="continuous", **given)
    assert (s.for_serving.chunked_prefill, s.for_serving.max_batch_tokens) == found
    assert parse_scenario(s.model_dump(mode="json")).for_serving == s.for_serving
    assert not any("trained_positions" in w for w in s.warnings)


def test_an_unknown_length_matters_to_v1_only_without_chunks() -> None:
    model: Any = {"preset": "llama2-7b", "trained_positions": None}
    for chunked, limit in ((True, None), (False, None), (False, 4096)):
        own = {"chunked_prefill": chunked, "max_request_tokens": limit}
        s = engine_scenario("vllm-v1", model=model, batching="continuous", **own)
        assert any("trained_positions: unknown" in w for w in s.warnings) == (not chunked and limit is None)


@pytest.mark.parametrize(
    ("engine", "given", "said"),
    [
        ("vllm-v1", {"max_request_tokens": 4096, "chunked_prefill": False, "max_batch_tokens": 4095}, "4,095"),
        ("vllm-v1", {"max_request_tokens": 4096, "chunked_prefill": False, "max_batch_tokens": 4096}, ""),
        ("vllm-v1", {"max_request_tokens": 4096, "max_batch_tokens": 512}, ""),
        ("vllm-0.6", {"max_request_tokens": 4096, "max_batch_tokens": 4095}, "4,095"),
        ("vllm-0.6", {"max_batch_tokens": 100}, r"fewer than max_running_requests \(256\)"),
        ("vllm-0.14", {"max_batch_tokens": 511, "max_running_requests": 512}, "found 511; engine vllm-0.14"),
        ("vllm-0.14", {"max_batch_tokens": 512, "max_running_requests": 512}, ""),
        ("vllm-0.14", {"max_batch_tokens": 4, "batching": "static"}, ""),
        ("sglang-0.5", {"max_batch_tokens": 511, "max_running_requests": 512}, ""),
        ("bundled", {"max_batch_tokens": 511, "max_running_requests": 512}, ""),
    ],
)
def test_vllm_does_not_start_with_too_few_tokens_an_iteration(engine: str, given: dict[str, Any], said: str) -> None:
    given = {"batching": "continuous", **given}
    if said:
        with pytest.raises(InputError, match=said) as found:
            engine_scenario(engine, **given)
        assert "inference.max_batch_tokens" in str(found.value)
    else:
        assert simulate_serving(engine_scenario(engine, **given)).outcome.does_not_start is None


@pytest.mark.parametrize(("engine", "running"), [("vllm-v1", 100), ("vllm-0.28", 100), ("sglang-0.5", 1024)])
def test_left_out_no_more_requests_run_than_an_iteration_has_tokens(engine: str, running: int) -> None:
    found = engine_scenario(engine, batching="continuous", max_batch_tokens=100).for_serving.max_running_requests
    assert min(found, 1024) == running


def test_a_limit_beyond_the_models_positions_is_said() -> None:
    for limit, said in ((8192, False), (8193, True)):
        result = simulate_serving(engine_scenario("vllm-0.19", batching="continuous", max_request_tokens=limit)).outcome
        assert any("exceeds the 8,192 positions" in w for w in result.warnings) == said


def test_only_vllm_needs_room_for_the_longest() -> None:
    asked = {name for name, engine in ENGINES.items() if engine.room_for_longest}
    assert asked == {name for name in ENGINES if name.startswith("vllm")} - {"vllm-0.2"}
