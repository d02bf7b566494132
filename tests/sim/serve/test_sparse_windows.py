"""What vLLM since 0.29 finds of a shared beginning where some layers have windows.

config/cache.py: prefix_cache_retention_interval is 0, so that layers with windows keep what was before a prompt's end,
and before a place at which two prompts were seen to part (single_type_kv_cache_manager.py, reachable_block_mask).
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

WINDOWS = {**SMALL, "window": 32, "attention_pattern": ["sliding", "full"]}
CACHE: dict[str, Any] = {"prefix_cache": "gpu", "kv_cache": {"block_tokens": 16}}


def found(requests: list[Request], engine: str, model: dict[str, Any]) -> int:
    sim = simulate_serving(serving({"engine": engine, **CACHE}, model), requests=tuple(requests))
    tokens: int = sim.result["kv_cache"]["prefix_hit_tokens"]
    return tokens


@pytest.mark.parametrize(
    ("engine", "model", "tokens"),
    [
        ("vllm-0.28", WINDOWS, 3 * 64),
        ("vllm-0.29", WINDOWS, 2 * 64),  # the second request notes where they part
        ("vllm-0.29", SMALL, 3 * 64),
        ("vllm-0.29", {**SMALL, "window": 32}, 3 * 64),
        ("sglang-0.5", WINDOWS, 3 * 64),
    ],
)
def test_a_beginning_is_found_by_the_third(engine: str, model: dict[str, Any], tokens: int) -> None:
    requests = [Request(float(t), 100, 8, "a", 64) for t in range(4)]
    assert found(requests, engine, model) == tokens


def test_a_conversation_goes_on_where_its_prompt_ended() -> None:
    requests = [Request(0.0, 100, 8, "a", 100), Request(1.0, 200, 8, "a", 200), Request(2.0, 300, 8, "a", 300)]
    assert found(requests, "vllm-0.29", WINDOWS) == 96 + 192


def test_hashes_are_found_behind_the_last_window_that_is_kept() -> None:
    """The third request parts from the first two behind one hash, where no window was kept; the fourth finds it."""
    hashes = ((1, 2), (1, 2), (1, 3), (1, 4))
    requests = [
        Request(float(t), 2 * HASHED_TOKENS + 20, 8, "", 2 * HASHED_TOKENS, own) for t, own in enumerate(hashes)
    ]
    assert found(requests, "vllm-0.28", WINDOWS) == (2 + 1 + 1) * HASHED_TOKENS
    assert found(requests, "vllm-0.29", WINDOWS) == (2 + 0 + 1) * HASHED_TOKENS


@settings(max_examples=40, deadline=None)
@given(st.one_of(requests_of, trees), st.sampled_from([16, 128, 512]), st.floats(3e5, 2e7), st.integers(60, 3000))
def test_any_workload_is_served(requests: tuple[Request, ...], block: int, cache_bytes: float, budget: int) -> None:
    """All tokens come out and no block is lost, also where sequences are preempted again and again."""
    inference = {
        "engine": "vllm-0.33",
        "prefix_cache": "gpu",
        "kv_cache": {"block_tokens": block},
        "max_batch_tokens": budget,
        "max_running_requests": 50,
    }
    scenario = serving(inference, WINDOWS, gpu={"memory_bytes": WEIGHTS_AND_BUFFERS + cache_bytes})
    first, *others = every_way(scenario, requests)
    assert all(sim.replicas[0].counts == first.replicas[0].counts for sim in others)
