"""The most tokens of one prompt in an iteration: vLLM's long_prefill_token_threshold."""

from __future__ import annotations

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import parse_scenario
from sim.serve.requests import Request
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from sim.variants.engines import ENGINES
from tests.sim.serve.serving_cases import serving

TWO = (Request(0.0, 1000, 4), Request(0.0, 100, 4))


def _ran(engine: str, limit: int | None, requests: tuple[Request, ...]) -> ServingSimulation:
    inference = {"engine": engine, "max_batch_tokens": 512, "max_running_requests": 8, "max_prompt_tokens": limit}
    return simulate_serving(serving(inference), requests=requests)


def _chunks(sim: ServingSimulation) -> list[list[int]]:
    """Tokens of the prompts' chunks in each iteration that has any."""
    loads = [i.load for i in sim.replicas[0].iterations if i.load.prefills]
    return [[q for q, _, alike in load.prefills for _ in range(alike)] for load in loads]


def test_a_short_prompt_finds_room_beside_a_long_one() -> None:
    """Of 512 tokens an iteration the long prompt takes them all; with a limit of 128 the short one enters at once."""
    assert _chunks(_ran("vllm-0.14", None, TWO)) == [[512], [488, 24], [76]]
    limited = _ran("vllm-0.14", 128, TWO)
    assert _chunks(limited) == [[128, 100], *[[128]] * 6, [104]]
    first, second = limited.sequences
    assert second.first_token_s < first.first_token_s


@pytest.mark.parametrize(("engine", "chunks"), [("vllm-0.14", [128] * 7 + [104]), ("vllm-0.31", [512, 488])])
def test_a_lone_request_has_no_limit_since_032(engine: str, chunks: list[int]) -> None:
    assert [c for some in _chunks(_ran(engine, 128, TWO[:1])) for c in some] == chunks


@pytest.mark.parametrize("engine", ["sglang-0.5", "trtllm-1.2", "bundled", "vllm-0.6"])
def test_engines_without_the_limit_refuse_it_and_name_those_with_it(engine: str) -> None:
    with pytest.raises(
        InputError, match=rf"inference.max_prompt_tokens: found 128; .*{engine} has no limit.*vllm-0.14"
    ):
        serving({"engine": engine, "max_prompt_tokens": 128, "chunked_prefill": True})
    assert ENGINES[engine].prompt_limit == "none"


@pytest.mark.parametrize(
    ("engine", "length", "tokens"),
    [
        ("sglang-0.5.11", 6000, [12_000] * 4),
        ("sglang-0.5.14", 6000, [16_384, 16_384, 15_232]),
        ("sglang-0.5.11", 8192, [8192] * 8),
        ("sglang-0.5.14", 8192, [16_384] * 4),
    ],
)
def test_a_prompt_beyond_the_most_of_an_iteration_is_cut_by_sglang_since_0_5_14(
    engine: str, length: int, tokens: list[int]
) -> None:
    """Chunks of a B200 have as many tokens as max_prefill_tokens. srt/managers/schedule_policy.py, add_one_req: a
    prompt with as many tokens as are left of these waits, since 0.5.14 without chunks alone."""
    requests = {"prompt_len": length, "output_len": 2, "count": 8}
    inference = {"engine": engine, "requests": requests}
    sim = simulate_serving(parse_scenario({"model": "llama3.1-8b", "cluster": "dgx-b200", "inference": inference}))
    assert [one.load.tokens for one in sim.replicas[0].iterations if one.load.prefills] == tokens
