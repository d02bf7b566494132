"""Weights in host memory that come to the GPU in every iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.inputs.scenario import load_scenario
from sim.prices.profiles import load_profile
from sim.serve.prices.costs import IterationCosts, iteration_costs
from sim.serve.prices.iteration_shares import HOST, LAUNCHES, priced_together
from sim.serve.prices.load import Load
from sim.serve.prices.weight_offload import layer_weight_bytes
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from tests.sim.serve.serving_cases import every_way, finished, serving

SCENARIO = Path(__file__).parents[3] / "scenarios" / "serve_weight_offload.yaml"
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


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("times", [0.5, 1.1, 5.0])
def test_weights_are_copied_while_the_gpu_drafts(prefetch: bool, times: float) -> None:
    """max(GPU + draft, copy), or all three in turn; the copy takes so many times what the GPU takes without a draft."""
    check, section = Load(20, 4, 4 * 133, (), 20, 5), {"draft": "llama3.2-1b", "tokens": 4}
    own = costs({**ONE, "speculative": section, "weight_offload": {"cpu_bytes": 1e9, "prefetch": prefetch}})
    gpu_s, draft_s = costs(ONE).stage_seconds(check)[0], own.draft_seconds(check)[0]
    copy_s = times * gpu_s
    own.offloaded = (own.offloaded[0]._replace(copy_s=copy_s),)
    expected = max(gpu_s + draft_s, copy_s) if prefetch else gpu_s + draft_s + copy_s
    assert draft_s > 0.0
    assert own.stage_seconds(check)[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("engine", ["bundled", "vllm-0.6", "vllm-0.14", "trtllm-0.6"])
@pytest.mark.parametrize("offload", [None, {"cpu_bytes": 2e9}, {"cpu_bytes": 2e9, "prefetch": False}])
@pytest.mark.parametrize(("draft", "pp"), [(None, 1), (None, 2), ({"draft": "llama3.2-1b", "tokens": 4}, 1)])
def test_shares_of_the_time_sum_to_the_iterations(
    engine: str, offload: dict[str, Any] | None, draft: dict[str, Any] | None, pp: int
) -> None:
    """At kept sizes the parts, launches, waits for weights and for the host are all of an iteration's seconds."""
    section = {"engine": engine, "weight_offload": offload, "speculative": draft, "cuda_graphs": False}
    own = costs({**ONE, **section}, parallelism={"pp": pp})
    loads = [Load(4, 4, 4 * 128, (), 4), Load(512, 0, 0, ((512, 512, 1),), 1)]
    loads += [] if pp > 1 else [Load(68, 4, 4 * 128, ((64, 64, 1),), 5)]
    for load in loads:
        found = priced_together(own, [(load, 3)])
        whole = 3 * sum(own.stage_seconds(load))
        assert sum(found.shares.values()) == pytest.approx(whole, rel=1e-9)
        if engine != "bundled" and load.decodes:
            assert any(kind == LAUNCHES for kind, _, _ in found.shares)


def costs(inference: dict[str, Any], **options: Any) -> IterationCosts:
    scenario = serving(inference, model="llama3-8b", **options)
    return iteration_costs(scenario, load_profile(scenario.calibration))


def test_launches_make_the_whole_as_uncertain_as_they_decide_it() -> None:
    """More than by the work between iterations alone, and never more than the host itself is."""
    section = {**ONE, "engine": "vllm-0.2"}
    sim = simulate_serving(serving(section))
    sigma, whole = sim.costs.host.times.uncertainty, sum(sim.shares.values())
    waits = {kind: s for (kind, _, _), s in sim.shares.items() if kind in (HOST, LAUNCHES)}
    assert waits[LAUNCHES] > 0.0
    assert sigma * waits[HOST] / whole < sim.host_uncertainty <= sigma * (1.0 + 1e-9)
