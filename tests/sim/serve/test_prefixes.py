"""Shared prefixes on the GPU, block by block: what stays, what is found, and what may go."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.serve.cache.kv_cache import KvCache
from sim.serve.requests import Request
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from tests.sim.serve.serving_cases import finished, serving


def served(
    requests: list[Request], memory_bytes: float = 8e10, max_batch_tokens: int = 8192, prefix_cache: str = "gpu"
) -> ServingSimulation:
    inference = {"prefix_cache": prefix_cache, "kv_cache": {"block_tokens": 1}, "max_batch_tokens": max_batch_tokens}
    sim = simulate_serving(serving(inference, gpu={"memory_bytes": memory_bytes}), requests=tuple(requests))
    finished(sim)
    return sim


def test_what_nobody_reads_any_more_may_go() -> None:
    """Of ten blocks the first reader needs eight, the second two: when the first has left, six can be had."""
    cache = KvCache(blocks=10, block_tokens=16)
    cache.use("a", 0)
    assert cache.take(8)
    cache.tokens = 8 * 16
    assert cache.share("a", 0, 8) == 8
    cache.use("a", 2)
    assert (cache.available, cache.occupancy()[0]) == (2, 8)
    cache.release("a", 8)
    assert (cache.available, cache.occupancy()[0]) == (8, 2)
    assert cache.take(8)
    assert cache.prefixes["a"].blocks == 2
    cache.release("a", 2)
    assert cache.unused == 2


def test_the_longer_of_two_prompts_at_once_extends_what_the_shorter_kept() -> None:
    """Both compute everything. vLLM, which looks blocks up one by one, finds all 64 tokens for the third."""
    sim = served([Request(0.0, 40, 2, "a", 32), Request(0.0, 80, 2, "a", 64), Request(1.0, 80, 2, "a", 64)])
    assert sim.result["kv_cache"]["prefix_hit_tokens"] == 64


@pytest.mark.parametrize(
    ("requests", "max_batch_tokens"),
    [
        ([Request(0.0, 1, 1, "a", 1), Request(0.0, 1, 3, "a", 0)], 8192),
        ([Request(0.0, 1, 1, "a", 1), Request(0.0, 4, 3, "a", 3)], 2),
    ],
    ids=["kept for one who left", "held twice"],
)
def test_a_sequence_alone_gets_every_block(requests: list[Request], max_batch_tokens: int) -> None:
    """The cache has room for the longest request alone; what was kept of the other's prompt has to give way."""
    sim = served(requests, 1e6, max_batch_tokens)
    assert sim.capacity.blocks == requests[1].prompt_tokens + requests[1].output_tokens - 1


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 1e-4, 2e-4]),
            st.integers(1, 8),
            st.integers(1, 8),
            st.sampled_from("ab"),
            st.integers(0, 8),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([1, 2, 4, 8192]),
    st.sampled_from(["gpu", "cpu"]),
)
def test_every_token_is_computed_found_or_computed_again(
    drawn: list[tuple[float, int, int, str, int]], max_batch_tokens: int, prefix_cache: str
) -> None:
    """In the least cache that there may be, however often sequences are preempted."""
    requests = sorted(Request(t, p, o, name, min(p, shared)) for t, p, o, name, shared in drawn)
    sim = served(requests, 1e6, max_batch_tokens, prefix_cache)
    kv = sim.result["kv_cache"]
    assert kv["blocks_used"] <= sim.capacity.blocks
    computed = sum(i.load.tokens * i.steps for i in sim.replicas[0].iterations)
    needed = sum(r.prompt_tokens + r.output_tokens - 1 for r in requests)
    assert computed == needed - kv["prefix_hit_tokens"] + kv["recomputed_tokens"]
