"""Slow ranks and links of a serving workload against closed forms."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.inputs.scenario import Scenario
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from tests.sim.cases import FREE_LINKS, scenario_with, slow

MODEL = {"layers": 8, "hidden": 1024, "heads": 8, "vocab": 1024, "mlp": "swiglu"}


def serving(faults: dict[str, Any] | None, cluster: Any = "dgx-h100", **parallelism: int) -> Scenario:
    requests = {"prompt_len": 200, "output_len": 20, "count": 8}
    return scenario_with(
        parallelism=parallelism,
        model=MODEL,
        cluster=cluster,
        inference={"requests": requests},
        calibration="roofline",
        faults=faults,
    )


def busy(sim: ServingSimulation, replica: int, stage: int) -> float:
    return sum(end - start for x in sim.replicas[replica].iterations for start, end in [x.spans[stage]])


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 7), st.sampled_from([1.1, 1.3, 2.0]))
def test_tensor_parallel_ranks_decode_at_the_slowest_ones_pace(tp: int, rank: int, scale: float) -> None:
    """Links that take no time: everything takes `scale` times as long, whichever rank is slow."""
    healthy = simulate_serving(serving(None, FREE_LINKS, tp=tp))
    faulty = simulate_serving(serving(slow(rank % tp, scale), FREE_LINKS, tp=tp))
    assert faulty.end_s == pytest.approx(scale * healthy.end_s, rel=1e-6)


def test_replicas_do_not_wait_for_a_slow_one() -> None:
    """dp varies slower than tp: ranks 2 and 3 are the second replica."""
    healthy, faulty = (simulate_serving(serving(f, FREE_LINKS, tp=2, dp=4)) for f in (None, slow(3, 1.5)))
    for i in range(4):
        expected = busy(healthy, i, 0) * (1.5 if i == 1 else 1.0)
        assert busy(faulty, i, 0) == pytest.approx(expected, rel=1e-6)
        assert i == 1 or faulty.replicas[i].iterations == healthy.replicas[i].iterations


def test_a_slow_stage_is_slow_alone_and_the_pipeline_as_slow_as_it() -> None:
    healthy, faulty = (simulate_serving(serving(f, FREE_LINKS, pp=4)) for f in (None, slow(2, 3.0)))
    for stage in range(4):
        ratio = busy(faulty, 0, stage) / busy(healthy, 0, stage)
        assert ratio == pytest.approx(3.0 if stage == 2 else 1.0, rel=0.02)
    assert healthy.end_s < faulty.end_s < 3 * healthy.end_s


def test_slow_links_slow_the_groups_that_use_them() -> None:
    """Node 1 is the second replica's."""
    links = {"links": [{"between": ["node1", "node1"], "bandwidth_scale": 0.1}]}
    healthy, faulty = (simulate_serving(serving(f, tp=8, dp=2)) for f in (None, links))
    assert busy(faulty, 0, 0) == busy(healthy, 0, 0)
    assert busy(faulty, 1, 0) > 1.05 * busy(healthy, 1, 0)


@pytest.mark.parametrize(
    "faults",
    [
        {},
        slow(1, 1.0),
        {"jitter": {"sigma": 0.0}},
        {"failures": {}},
        {"links": [{"between": ["node0", "node0"], "bandwidth_scale": 1.0}]},
    ],
)
def test_faults_that_are_off_change_no_bit(faults: dict[str, Any]) -> None:
    found = [simulate_serving(serving(f, tp=2, pp=2, dp=2)) for f in (None, faults)]
    assert found[0].replicas[0].iterations == found[1].replicas[0].iterations
    results = [s.result for s in found]
    for r in results:
        r["engine"].pop("wall_s")
        r["scenario"].pop("faults")
    assert results[0] == results[1]


def test_jitter_is_said_to_be_left_out() -> None:
    warnings = simulate_serving(serving({"jitter": {"sigma": 0.1}}, tp=2)).result["warnings"]
    assert any(w.startswith("faults.jitter") for w in warnings)
