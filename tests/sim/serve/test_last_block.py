"""The last block that a prompt finds in the cache is computed again where the model's own layer drafts.

vLLM, v1/core/single_type_kv_cache_manager.py, `find_longest_cache_hit` with `use_eagle`: the layer reads the model's
hidden states, which the cache does not hold. Since 0.33 a block's hash covers the token behind it instead
(config/vllm.py, num_hash_lookahead_tokens), so that only a block behind which prompts differ is computed again.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.inputs.serving_keys import HASHED_TOKENS
from sim.serve.requests import Request
from sim.serve.simulation import simulate_serving
from tests.sim.serve.serving_cases import SMALL, WEIGHTS_AND_BUFFERS, every_way, requests_of, serving
from tests.sim.serve.test_hashes import trees

MODEL = {**SMALL, "mtp_layers": 1}
LAYER = {"tokens": 2, "acceptance": 0.5}
APART = {**LAYER, "draft": {**SMALL, "layers": 1}}


def found(requests: list[Request], engine: str, speculative: dict[str, Any] | None) -> int:
    inference = {"engine": engine, "prefix_cache": "gpu", "kv_cache": {"block_tokens": 16}, "speculative": speculative}
    own = {key: value for key, value in inference.items() if value is not None}
    tokens: int = simulate_serving(serving(own, MODEL), requests=tuple(requests)).result["kv_cache"][
        "prefix_hit_tokens"
    ]
    return tokens


@pytest.mark.parametrize(
    ("engine", "speculative", "tokens"),
    [
        ("vllm-0.14", LAYER, 48),
        ("vllm-0.8", LAYER, 48),
        ("vllm-0.14", APART, 64),
        ("vllm-0.14", None, 64),
        ("bundled", LAYER, 64),
        ("sglang-0.5", LAYER, 64),
    ],
)
def test_of_four_blocks_the_last_is_computed_again(
    engine: str, speculative: dict[str, Any] | None, tokens: int
) -> None:
    requests = [Request(0.0, 80, 8, "a", 64), Request(1.0, 80, 8, "a", 64)]
    assert found(requests, engine, speculative) == tokens


@pytest.mark.parametrize(
    ("shared", "dropped", "ahead"),
    [(64, 48, 48), (70, 48, 64), (79, 48, 64), (80, 64, 64)],
)
def test_since_0_33_the_last_block_is_found_if_the_token_behind_it_is_shared(
    shared: int, dropped: int, ahead: int
) -> None:
    requests = [Request(0.0, 100, 8, "a", shared), Request(1.0, 100, 8, "a", shared)]
    assert found(requests, "vllm-0.29", LAYER) == dropped
    assert found(requests, "vllm-0.33", LAYER) == ahead
    assert found(requests, "vllm-0.33", APART) == shared // 16 * 16


def test_a_whole_prompt_that_was_computed_is_found_up_to_its_last_token() -> None:
    assert found([Request(0.0, 64, 8, "a", 64), Request(1.0, 64, 8, "a", 64)], "vllm-0.33", LAYER) == 48


def test_a_prefix_of_one_block_is_not_found() -> None:
    assert found([Request(0.0, 40, 8, "a", 16), Request(1.0, 40, 8, "a", 16)], "vllm-0.14", LAYER) == 0


def test_of_what_a_hash_stands_for_one_block_is_computed_again() -> None:
    requests = [Request(t, 2 * HASHED_TOKENS + 20, 8, "", 2 * HASHED_TOKENS, (1, 2)) for t in (0.0, 1.0, 2.0)]
    assert found(requests, "vllm-0.14", LAYER) == 2 * (2 * HASHED_TOKENS - 16)
    assert found(requests, "vllm-0.33", LAYER) == 2 * (2 * HASHED_TOKENS - 16)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.one_of(requests_of, trees),
    st.sampled_from([16, 128, 512]),
    st.floats(3e5, 2e7),
    st.integers(60, 3000),
    st.integers(0, 3),
    st.sampled_from(["vllm-0.14", "vllm-0.33"]),
)
def test_any_workload_is_served(
    requests: tuple[Request, ...], block: int, cache_bytes: float, budget: int, tokens: int, engine: str
) -> None:
    """All tokens come out and no block is lost, also where sequences are preempted again and again."""
    inference = {
        "engine": engine,
        "prefix_cache": "gpu",
        "kv_cache": {"block_tokens": block},
        "max_batch_tokens": budget,
        "max_running_requests": 50,
        "speculative": {"tokens": tokens + 1, "acceptance": 0.5},
    }
    scenario = serving(inference, MODEL, gpu={"memory_bytes": WEIGHTS_AND_BUFFERS + cache_bytes})
    first, *others = every_way(scenario, requests)
    assert all(sim.replicas[0].counts == first.replicas[0].counts for sim in others)
