"""Weights in host memory that come to the GPU in every iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.inputs.scenario import load_scenario
from sim.serve.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from sim.serve.weight_offload import layer_weight_bytes
from tests.sim.serving_cases import every_way, finished, serving

SCENARIO = Path(__file__).parents[2] / "scenarios" / "serve_weight_offload.yaml"
ONE = {"requests": {"prompt_len": 8, "output_len": 32}}


def served(offload: dict[str, Any] | None, inference: dict[str, Any] = ONE, **options: Any) -> ServingSimulation:
    sim = simulate_serving(serving({**inference, "weight_offload": offload}, **options))
    finished(sim)
    return sim


@pytest.mark.parametrize("prefetch", [True, False])
def test_nothing_offloaded_changes_nothing(prefetch: bool) -> None:
    none, empty = served(None), served({"cpu_bytes": 0, "prefetch": prefetch})
    assert none.end_s == empty.end_s
    assert none.capacity == empty.capacity


def test_a_lone_token_takes_what_pcie_needs_for_the_weights() -> None:
    """All layers of Llama 3 8B in host memory: bytes / bandwidth, and a latency for each layer."""
    sim = served({"cpu_bytes": 1e18}, model="llama3-8b")
    costs, gpu = sim.costs, sim.scenario.cluster.gpu
    size = 32 * layer_weight_bytes(costs.dims, costs.specs[0])
    per_token = sim.outcome.time_per_output_token_s.p50
    expected = size / gpu.host_bandwidth_bytes_per_s + 32 * gpu.launch_overhead_s
    assert per_token == pytest.approx(expected, rel=1e-9)
    assert sim.outcome.weight_offload is not None
    assert sim.outcome.weight_offload.host_bytes == size
    plain = served(None, model="llama3-8b")
    slower = served({"cpu_bytes": 1e18, "prefetch": False}, model="llama3-8b")
    both = per_token + plain.outcome.time_per_output_token_s.p50
    assert slower.outcome.time_per_output_token_s.p50 == pytest.approx(both, rel=1e-9)


def test_copies_hide_behind_enough_computing() -> None:
    """Long prompts: with prefetch an iteration takes what it takes with all weights on the GPU."""
    prompts = {"requests": {"prompt_len": 4000, "output_len": 1, "count": 8}}
    plain, sim = (served(o, prompts, model="llama3-8b") for o in (None, {"cpu_bytes": 4e9}))
    assert sim.end_s == plain.end_s


def test_the_cache_has_the_room_that_the_weights_leave() -> None:
    plain, sim = (served(o, model="llama3-8b") for o in (None, {"cpu_bytes": 8e9}))
    room = 2 * layer_weight_bytes(sim.costs.dims, sim.costs.specs[0])
    assert plain.capacity.weight_bytes[0] - sim.capacity.weight_bytes[0] == 8e9
    assert sim.capacity.buffer_bytes[0] - plain.capacity.buffer_bytes[0] == room
    gained = (sim.capacity.blocks_fit - plain.capacity.blocks_fit) * 16 * sim.capacity.stage_token_bytes
    assert gained == pytest.approx(8e9 - room, rel=1e-3)


@settings(max_examples=20, deadline=None)
@given(st.floats(0, 2e7), st.booleans(), st.sampled_from([{}, {"pp": 2}, {"tp": 2}, {"dp": 2}]), st.integers(1, 20))
def test_both_clocks_agree(cpu_bytes: float, prefetch: bool, parallelism: dict[str, int], count: int) -> None:
    requests = {"requests": {"prompt_len": 50, "output_len": 20, "count": count, "rate_per_s": 2000}}
    scenario = serving(
        {**requests, "weight_offload": {"cpu_bytes": cpu_bytes, "prefetch": prefetch}}, parallelism=parallelism
    )
    every_way(scenario)


def test_the_shipped_scenario_fits_by_offloading_alone() -> None:
    sim = simulate_serving(load_scenario(SCENARIO)).outcome
    assert sim.fits_in_memory
    assert not simulate_serving(load_scenario(SCENARIO, ("inference.weight_offload=null",))).outcome.fits_in_memory
