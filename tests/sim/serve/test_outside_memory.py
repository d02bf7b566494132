"""What CUDA's context and communicators leave of a GPU's memory to an engine's cache."""

from __future__ import annotations

from typing import Any

import pytest

from sim.inputs.scenario import parse_scenario
from sim.prices.profiles import load_profile
from sim.serve.memory import Capacity, cache_capacity
from sim.serve.prices.costs import iteration_costs
from sim.serve.requests import make_requests
from sim.serve.simulation import simulate_serving
from sim.variants.engines.outside_memory import CONTEXT_BYTES, GIB, PCIE_BYTES

SHOWN_BYTES = 79.11 * GIB  # of an H100


def capacity(engine: str, tp: int = 1, cluster: object = "dgx-h100", graphs: bool = True, **cache: object) -> Capacity:
    served = {
        "engine": engine,
        "precision": "bf16",
        "cuda_graphs": graphs,
        "kv_cache": {"block_tokens": 1} | cache,
        "requests": {"prompt_len": 1000, "output_len": 100, "count": 4},
    }
    section = {"model": "llama3-8b", "cluster": cluster, "inference": served, "parallelism": {"tp": tp}}
    scenario = parse_scenario(section)
    costs = iteration_costs(scenario, load_profile(scenario.calibration))
    return cache_capacity(scenario, costs, make_requests(scenario.for_serving.requests))


def room(found: Capacity) -> float:
    """Bytes that the cache has."""
    return found.room * found.stage_token_bytes


@pytest.mark.parametrize(
    ("engine", "alone", "of_two"),
    [
        ("bundled", 0.0, 0.0),
        ("vllm-0.6", 0.0, 1.58 * GIB),
        ("vllm-0.8", CONTEXT_BYTES, CONTEXT_BYTES + 1.58 * GIB),
        ("vllm-v1", 0.0, 1.58 * GIB),
        ("vllm-0.11", 0.0, 0.95 * GIB),
        ("vllm-0.33", 0.0, 0.95 * GIB),
    ],
)
def test_cache_is_what_communicators_leave(engine: str, alone: float, of_two: float) -> None:
    """A cache of 0.9 of the memory less weights and tensors is smaller by them."""
    for tp, outside in ((1, alone), (2, of_two)):
        found = capacity(engine, tp)
        left = 0.9 * SHOWN_BYTES - found.weight_bytes[0] - found.buffer_bytes[0]
        assert left - room(found) == pytest.approx(outside, abs=0.01 * GIB)


def test_sglang_has_its_share_of_what_they_leave() -> None:
    """75 % of the memory behind a context and communicators, less weights."""
    found = capacity("sglang-0.5", 8, memory_fraction=0.75)
    left = 0.75 * (SHOWN_BYTES - CONTEXT_BYTES - 2.25 * GIB) - found.weight_bytes[0]
    assert room(found) == pytest.approx(left, rel=1e-3)


def test_tensorrt_llm_has_its_share_of_what_is_free() -> None:
    found = capacity("trtllm-1.0", 2)
    free = SHOWN_BYTES - CONTEXT_BYTES - 1.58 * GIB - found.weight_bytes[0] - found.buffer_bytes[0]
    assert room(found) == pytest.approx(0.9 * free, rel=1e-3)


def test_communicators_over_pcie_have_smaller_buffers() -> None:
    cards = {"preset": "dgx-h100", "intra_node": {"kind": "pcie", "bandwidth_bytes_per_s": 2.5e10, "latency_s": 1e-5}}
    assert room(capacity("vllm-v1", 2, cards)) - room(capacity("vllm-v1", 2)) == pytest.approx(
        1.58 * GIB - PCIE_BYTES, rel=1e-3
    )


def test_a_stated_cache_fits_only_beside_them() -> None:
    """80 GiB do not fit: the rest of the GPU is the cache's, also without what vLLM's share does not count."""
    found = capacity("vllm-0.11", 2, memory_bytes=80e9)
    left = SHOWN_BYTES - CONTEXT_BYTES - 2.88 * GIB - found.weight_bytes[0] - found.buffer_bytes[0]
    assert room(found) == pytest.approx(left, rel=1e-3)


def test_a_share_of_the_whole_memory_ends_where_the_context_begins() -> None:
    found = capacity("vllm-0.11", memory_fraction=1.0)
    left = SHOWN_BYTES - CONTEXT_BYTES - found.weight_bytes[0] - found.buffer_bytes[0]
    assert room(found) == pytest.approx(left, rel=1e-3)


def test_a_server_without_room_for_a_cache_says_what_they_take() -> None:
    section = {
        "model": "llama3-8b",
        "cluster": {"preset": "dgx-h100", "gpu": {"preset": "h100-sxm", "memory_bytes": 16.5e9}},
        "inference": {"engine": "trtllm-1.0", "requests": {"prompt_len": 10, "output_len": 2, "count": 1}},
    }
    why = simulate_serving(parse_scenario(section)).outcome.does_not_start
    assert why is not None
    assert "and CUDA's context and communicators 553.0 MiB, the GPU has" in why


@pytest.mark.parametrize(
    ("engine", "graphs", "told", "share"),
    [
        ("vllm-0.19", True, None, 0.90),
        ("vllm-0.21", True, None, 0.90),  # 0.92, less what CUDA graphs take
        ("vllm-0.33", True, None, 0.90),
        ("vllm-0.33", False, None, 0.92),
        ("vllm-0.33", True, 0.9, 0.88),
        ("vllm-0.19", True, 0.95, 0.95),
    ],
)
def test_graphs_are_part_of_the_share_since_0_20(engine: str, graphs: bool, told: float | None, share: float) -> None:
    """v1/worker/gpu_worker.py of 0.20, determine_available_memory; pull request 38284: 0.9 became 0.92 with them."""
    stated: dict[str, Any] = {} if told is None else {"memory_fraction": told}
    found = capacity(engine, graphs=graphs, **stated)
    left = share * SHOWN_BYTES - found.weight_bytes[0] - found.buffer_bytes[0]
    assert room(found) == pytest.approx(left, rel=1e-4)
