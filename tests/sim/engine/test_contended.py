"""Communications of a step that share links: both engines, folded and not, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sim.core.errors import InputError
from sim.engine import run as engine
from sim.engine import shared_links as contended
from sim.engine.run import run_static
from sim.inputs.scenario import Scenario, load_scenario
from sim.simulation import Simulation, simulate
from tests.sim.cases import case
from tests.sim.ranks.test_faults_folding import spans_of_ranks

ROOT = Path(__file__).parents[3]


@st.composite
def crowded(draw: st.DrawFn) -> Scenario:
    """Small layouts on slow networks, most of whose ranks send gradients beside messages or other collectives."""
    sizes = {
        d: draw(st.sampled_from(s))
        for d, s in (("tp", [1, 2, 4]), ("cp", [1, 2]), ("dp", [1, 2, 3]), ("pp", [1, 2, 4]))
    }
    ranks = sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"]
    assume(2 <= ranks <= 16)
    over = draw(st.sampled_from([1.0, 3.0]))
    cluster = {
        "preset": "dgx-h100",
        "gpus_per_node": 2,
        "nvlink_domain": 2,
        "intra_node": {"bandwidth_bytes_per_s": draw(st.sampled_from([5e9, 450e9]))},
        "inter_node": {
            "nics_per_node": 2,
            "nic_bandwidth_bytes_per_s": draw(st.sampled_from([2e9, 50e9])),
            "oversubscription": over,
            "nodes_per_leaf": 2,
        },
    }
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "zb_h1", "interleaved_1f1b", "zb_v", "dualpipe"]))
    parallelism = {
        **sizes,
        "schedule": schedule,
        "zero": draw(st.integers(0, 3)),
        "bucket_bytes": 10**6,
        "sp": sizes["tp"] > 1 and draw(st.booleans()),
        "p2p_overlap": draw(st.sampled_from([None, True])),
        "rank_order": "-".join(draw(st.permutations(["tp", "cp", "dp", "pp"]))),
    }
    training = {
        "seq_len": 512,
        "global_batch_size": sizes["dp"] * sizes["pp"] * 2,
        "activation_offload": draw(st.booleans()),
    }
    try:
        return case(parallelism, training, {"layers": 4, "hidden": 512, "ffn": 1024}, cluster)
    except InputError:
        assume(False)
        raise


def run(scenario: Scenario, **how: Any) -> Simulation:
    try:
        return simulate(scenario, **how)
    except InputError:  # a schedule that does not suit
        assume(False)
        raise


@pytest.mark.slow
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(crowded())
def test_folded_and_rank_by_rank_are_equal_to_the_last_bit(scenario: Scenario) -> None:
    folded, apart = run(scenario, expand=True), run(scenario, expand=True, fold=False)
    assert folded.ran.alone_s == apart.ran.alone_s
    assert spans_of_ranks(folded) == spans_of_ranks(apart)


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(crowded(), st.booleans())
def test_simpys_clock_gives_the_same_to_the_last_bit(scenario: Scenario, expand: bool) -> None:
    a, b = run(scenario, expand=expand), run(scenario, expand=expand, engine="simpy")
    assert np.array_equal(a.times.start_s, b.times.start_s)
    assert np.array_equal(a.times.end_s, b.times.end_s)
    with patch.object(engine, "_events", None):
        assert run(scenario, expand=expand).times == a.times


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(crowded())
def test_actions_that_stand_as_one_task_hide_nothing(scenario: Scenario) -> None:
    """Placed task by task only where links are crowded, the step takes what it takes with every task placed."""
    a, b = run(scenario), run(scenario, expand=True)
    assert a.step_time_s == pytest.approx(b.step_time_s, rel=1e-9)
    assert a.ran.alone_s == pytest.approx(b.ran.alone_s, rel=1e-9)
    assert a.step_time_s >= a.ran.alone_s * (1 - 1e-12)


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(crowded())
def test_where_no_link_is_crowded_no_bit_changes(scenario: Scenario) -> None:
    sim = run(scenario, expand=True)
    if sim.ran.flows is None:
        assert np.array_equal(sim.times.end_s, run_static(sim.built.graph).end_s)
    else:
        rows = zip(sim.times.start_s, sim.times.end_s, sim.built.graph.seconds, strict=True)
        assert any(end - start > s * (1 + 1e-9) for start, end, s in rows)


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(crowded(), st.booleans())
def test_a_few_ranks_tell_as_much_about_links_as_all_of_them(scenario: Scenario, fold: bool) -> None:
    sim = run(scenario, expand=True, fold=fold)
    parts = contended._parts
    with patch.object(contended, "_parts", lambda flows, capacity, whole: parts(flows, capacity, True)):
        assert run(scenario, expand=True, fold=fold).ran.links == sim.ran.links


def test_gradients_and_messages_share_an_oversubscribed_spine() -> None:
    scenario = load_scenario(ROOT / "scenarios" / "contention_spine.yaml")
    result = simulate(scenario).result
    found = result["contention"]
    assert result["engine"]["links_shared"]
    assert result["engine"]["events"] > 0
    assert found["links"] == ["spine"]
    assert {"SEND_F", "REDUCE_SCATTER"} <= {row["kind"] for row in found["slowed"]}
    inter = scenario.cluster.inter_node.model_copy(update={"oversubscription": 1.0})
    cluster = scenario.cluster.model_copy(update={"inter_node": inter})
    full = simulate(scenario.unchecked_copy(update={"cluster": cluster})).result
    assert found["lost_s"] > 20 * full["contention"]["lost_s"]


def test_messages_of_both_directions_of_a_pipeline_share_what_each_rank_sends() -> None:
    """DualPipe sends forward and backward, to both neighbours: up to four messages of equal size leave a rank at once,
    and on slow links each then takes as many times as long."""
    links = {
        "preset": "dgx-h100",
        "gpus_per_node": 1,
        "nvlink_domain": 1,
        "inter_node": {"nics_per_node": 1, "nic_bandwidth_bytes_per_s": 1e7, "latency_s": 0.0},
    }
    scenario = case({"pp": 4, "schedule": "dualpipe"}, {"global_batch_size": 8, "gradient_clipping": False}, {}, links)
    sim = simulate(scenario)
    graph, start, end = sim.built.graph, sim.times.start_s, sim.times.end_s
    sends = {t for t, _, _, k in graph.slot_table().tolist() if tuple(graph.span_kinds)[k].startswith("SEND")}
    factors = [(end[t] - start[t]) / graph.seconds[t] for t in sends]
    assert 1.9 < max(factors) < 4.0
    assert min(factors) >= 1 - 1e-9
    assert sum(f > 1.01 for f in factors) > len(factors) / 4


def test_the_timeline_says_what_a_slowed_communication_takes_alone() -> None:
    sim = simulate(load_scenario(ROOT / "scenarios" / "contention_spine.yaml"))
    slowed = [s for s in sim.timeline.spans() if "if alone on its links" in s.detail.note]
    assert {s.kind for s in slowed} >= {"SEND_F", "RECV_F", "REDUCE_SCATTER"}
    for span in slowed[:100]:
        alone_s = float(span.detail.note.partition(" ms if alone")[0].rpartition(" ")[2]) / 1e3
        assert span.end_s - span.start_s > alone_s * 0.995
