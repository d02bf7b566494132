"""TensorRT-LLM lets a request wait while another computes what both begin with (capacityScheduler.cpp)."""

from __future__ import annotations

import pytest

from sim.serve.requests import Request
from sim.serve.results.result import ServingSimulation
from tests.sim.serve.serving_cases import every_way, serving

SHARED, OWN = 64, 8
ALONE = Request(0.0, 40, 4)


def served(requests: list[Request], engine: str = "trtllm-1.3", **inference: object) -> ServingSimulation:
    section = {"engine": engine, "kv_cache": {"block_tokens": 16}, "prefix_cache": "gpu", **inference}
    return every_way(serving(section), tuple(requests))[0]


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_shared_beginning_is_computed_once(overlaps: bool) -> None:
    """Of eight requests one computes the beginning, the others what is their own, an iteration later."""
    requests = [Request(0.0, SHARED + OWN, 4, "a", SHARED) for _ in range(8)]
    sim = served(requests, async_scheduling=overlaps)
    assert sim.result["kv_cache"]["prefix_hit_tokens"] == 7 * SHARED
    assert served(requests, "bundled").result["kv_cache"]["prefix_hit_tokens"] == 0


def test_who_shares_nothing_passes() -> None:
    requests = [Request(0.0, SHARED + OWN, 4, "a", SHARED), Request(0.0, SHARED + OWN, 4, "a", SHARED), ALONE]
    sim = served(requests)
    first, second, alone = sorted(sim.sequences, key=lambda s: s.index)
    assert first.first_token_s == alone.first_token_s < second.first_token_s


def test_less_than_a_block_is_nothing_to_wait_for() -> None:
    requests = [Request(0.0, SHARED, 4, "a", 15), Request(0.0, SHARED, 4, "a", 15)]
    first, second = served(requests).sequences
    assert first.first_token_s == second.first_token_s


def test_chunks_of_a_shared_beginning_are_waited_for() -> None:
    """A beginning in four chunks: the other request waits for all of them."""
    requests = [Request(0.0, SHARED + OWN, 4, "a", SHARED), Request(0.0, SHARED + OWN, 4, "a", SHARED)]
    sim = served(requests, chunked_prefill=True, max_batch_tokens=17)
    assert sim.result["kv_cache"]["prefix_hit_tokens"] == SHARED


def test_windows_of_some_layers_switch_it_off() -> None:
    requests = [Request(0.0, SHARED + OWN, 4, "a", SHARED), Request(0.0, SHARED + OWN, 4, "a", SHARED)]
    model = {"preset": "gpt-oss-20b", "layers": 2}
    sim = every_way(serving({"engine": "trtllm-1.3", "prefix_cache": "gpu"}, model=model), tuple(requests))[0]
    first, second = sim.sequences
    assert first.first_token_s == second.first_token_s
