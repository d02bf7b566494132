"""Folding keeps what is equal together and nothing else: simulated rank by rank, the same times to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario, parse_scenario
from sim.ranks.equal_ranks import group_numbers, members
from sim.ranks.plan import make_plan
from sim.simulation import Simulation, simulate
from tests.sim.cases import case, scenario_with

MOE = {"moe": {"experts": 8, "top_k": 2, "ffn": 256}, "mlp": "swiglu", "bias": False}
SMALL = {"layers": 4, "hidden": 512, "heads": 12, "kv_heads": 12, "head_dim": 64, "ffn": 768, "vocab": 1536}


def spans_of_ranks(simulation: Simulation) -> dict[int, list[tuple[str, str, int, int, float, float]]]:
    """Every rank's spans in order of start, whichever class stands for it."""
    graph, times = simulation.built.graph, simulation.times
    kinds, streams = tuple(graph.span_kinds), tuple(graph.streams)
    stages, micro_batches = graph.stages.tolist(), graph.micro_batches.tolist()
    rows: dict[int, list[tuple[str, str, int, int, float, float]]] = {i: [] for i in range(len(graph.classes))}
    for task, c, stream, kind in graph.slot_table().tolist():
        stage, micro_batch = stages[task], micro_batches[task]
        span = (streams[stream], kinds[kind], stage, micro_batch, times.start_s[task], times.end_s[task])
        rows[c].append(span)
    return {rank: sorted(rows[i]) for i, c in enumerate(graph.classes) for rank in c.ranks}


def assert_equal(scenario: Scenario) -> Simulation:
    folded, apart = (simulate(scenario, expand=True, fold=f) for f in (True, False))
    assert len(apart.plan.classes) == scenario.parallelism.ranks
    assert folded.step_time_s == apart.step_time_s
    assert spans_of_ranks(folded) == spans_of_ranks(apart)
    for key in ("bubble_ratio", "exposed_comm_s", "compute_s", "peak_memory_bytes"):
        assert folded.result[key] == pytest.approx(apart.result[key], rel=1e-12), key
    assert folded.result["step_time_interval_s"] == pytest.approx(apart.result["step_time_interval_s"], rel=1e-9)
    assert simulate(scenario).step_time_s == pytest.approx(folded.step_time_s, rel=1e-9)
    return folded


@st.composite
def faulty(draw: st.DrawFn) -> Scenario:
    """Any small layout, aligned with its nodes or not, with a few slow ranks and links."""
    sizes = {d: draw(st.sampled_from([1, 1, 2, 3, 4])) for d in ("tp", "cp", "dp", "pp")}
    ranks = sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"]
    assume(2 <= ranks <= 24)
    plane = ranks // sizes["pp"]
    moe = draw(st.booleans())
    ep = draw(st.sampled_from([e for e in (1, 2, 4, 8) if plane % e == 0])) if moe else 1
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "zb_h1", "interleaved_1f1b", "zb_v", "dualpipe_v", "dualpipe"]))
    shard = draw(st.sampled_from([s for s in (1, 2, 3, 4, 8) if (sizes["cp"] * sizes["dp"]) % s == 0]))
    modules = draw(st.integers(0, 1))
    apart = modules > 0 and sizes["pp"] > 2 and "_v" not in schedule and schedule != "dualpipe" and draw(st.booleans())
    stages = sizes["pp"] * (2 if schedule == "interleaved_1f1b" else 1)
    parallelism: dict[str, Any] = {
        **sizes,
        "mtp_stage": stages - 2 if apart else None,
        "ep": ep,
        "schedule": schedule,
        "zero": draw(st.integers(0, 3)),
        "shard_size": shard,
        "sp": sizes["tp"] > 1 and draw(st.booleans()),
        "dp_sync": draw(st.sampled_from(["bucketed", "after_backward"])),
        "cp_split": draw(st.sampled_from(["zigzag", "contiguous"])),
        "cp_method": draw(st.sampled_from(["ring", "all_gather"])),
        "rank_order": "-".join(draw(st.permutations(["tp", "cp", "dp", "pp"]))),
        "bucket_bytes": draw(st.sampled_from([10**5, 10**9])),
    }
    nodes = -(-ranks // 4)
    node = st.integers(0, nodes - 1).map(lambda n: f"node{n}")
    faults = {
        "stragglers": draw(
            st.lists(
                st.fixed_dictionaries(
                    {"rank": st.integers(0, ranks - 1), "compute_scale": st.sampled_from([1.0, 1.3, 2.0])}
                ),
                max_size=2,
            )
        ),
        "links": draw(
            st.lists(
                st.fixed_dictionaries(
                    {"between": st.tuples(node, node).map(list), "bandwidth_scale": st.sampled_from([0.3, 0.5])}
                ),
                max_size=2,
            )
        ),
    }
    try:
        return scenario_with(
            {"seq_len": 24 * 24, "global_batch_size": sizes["dp"] * sizes["pp"] * 2},
            parallelism,
            model={**SMALL, **(MOE if moe else {}), "tied_embeddings": draw(st.booleans()), "mtp_layers": modules},
            cluster={
                "preset": "dgx-h100",
                "gpus_per_node": 4,
                "nvlink_domain": 4,
                "inter_node": {"nodes_per_leaf": 2, "oversubscription": draw(st.sampled_from([1.0, 2.0]))},
            },
            faults=faults,
            calibration=draw(st.sampled_from(["roofline", "h100-sxm"])),
        )
    except InputError:
        assume(False)
        raise


@pytest.mark.slow
@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(faulty())
def test_folded_and_rank_by_rank_are_equal_to_the_last_bit(scenario: Scenario) -> None:
    try:
        assert_equal(scenario)
    except InputError:  # a schedule that does not suit
        assume(False)


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(faulty())
def test_groups_in_numbers_are_the_plans_groups(scenario: Scenario) -> None:
    plan = make_plan(scenario)
    plane = np.array(plan.mesh.along(["tp", "cp", "dp"], 0))
    for name, number in group_numbers(scenario, plan.mesh, plane, plan.group_sizes).items():
        table = plane[members(number)]
        for rank, group in zip(plane.tolist(), number.tolist(), strict=True):
            assert table[group].tolist() == plan.group(name, rank), name


@pytest.mark.parametrize("cp_method", ["ring", "all_gather"])
def test_ranks_of_one_group_with_other_links_are_told_apart(cp_method: str) -> None:
    """Four GPUs a node: ranks 4 and 5 share worse links inside theirs than rank 3, with which they exchange blocks."""
    faults = {"links": [{"between": ["node1", "node1"], "bandwidth_scale": 0.3}]}
    parallelism = {"dp": 2, "cp": 3, "cp_method": cp_method, "bucket_bytes": 10**5}
    folded = assert_equal(
        scenario_with(
            {"seq_len": 24 * 24, "global_batch_size": 4},
            parallelism,
            model=SMALL,
            cluster={"preset": "dgx-h100", "gpus_per_node": 4},
            faults=faults,
            calibration="roofline",
        )
    )
    assert [list(c.ranks) for c in folded.plan.classes] == [[0, 1, 2], [3], [4, 5]]


def lane_sizes(parallelism: dict[str, Any], faults: dict[str, Any], **training: Any) -> list[int]:
    """Ranks that the classes of the first stage stand for, by descending number."""
    s = case(parallelism, {"global_batch_size": 64, **training})
    plan = make_plan(parse_scenario({**s.model_dump(mode="json"), "faults": faults}))
    return sorted((len(c.ranks) for c in plan.classes[: plan.pipelines]), reverse=True)


def test_a_straggler_unfolds_what_waits_for_it_and_no_more() -> None:
    """Itself, its tensor-parallel peers, its data-parallel peers, and those of its peers: four sorts of columns."""
    slow = {"stragglers": [{"rank": 21, "compute_scale": 1.3}]}
    assert lane_sizes({"dp": 8}, {"stragglers": [{"rank": 5}]}) == [7, 1]
    assert lane_sizes({"tp": 8}, {"stragglers": [{"rank": 5}]}) == [7, 1]
    assert lane_sizes({"tp": 4, "dp": 8, "pp": 2}, slow) == [21, 7, 3, 1]
    assert lane_sizes({"tp": 4, "dp": 8, "pp": 2}, {"stragglers": [{"rank": r} for r in range(64)]}) == [32]


def test_a_slow_link_tells_apart_the_groups_that_use_it() -> None:
    links = {"links": [{"between": ["node0", "node0"], "bandwidth_scale": 0.5}]}
    assert lane_sizes({"tp": 8, "dp": 4}, links) == [24, 8]
    assert lane_sizes({"tp": 8, "dp": 4}, {"links": [{"between": ["node0", "node1"], "bandwidth_scale": 0.5}]}) == [32]
    assert lane_sizes({"tp": 8, "dp": 4}, {}) == [32]


def test_groups_that_lie_unlike_in_their_nodes_are_told_apart() -> None:
    """Of groups of three on nodes of eight every third one crosses into the next node."""
    model = {"heads": 12, "head_dim": 64, "hidden": 768, "ffn": 768}
    plan = make_plan(case({"tp": 3, "dp": 8}, {"global_batch_size": 8}, model))
    crossing = [c.ranks for c in plan.classes if any(len({r // 8 for r in plan.group("tp", k)}) > 1 for k in c.ranks)]
    assert sorted(r for ranks in crossing for r in ranks) == [6, 7, 8, 15, 16, 17]


def test_messages_of_one_price_above_the_leaves_and_below_are_told_apart() -> None:
    """NVLink slower than what is left above the leaves: those that a rail's other GPU relays cost the same anywhere."""
    cluster = {
        "preset": "dgx-h100",
        "gpus_per_node": 2,
        "nvlink_domain": 2,
        "intra_node": {"bandwidth_bytes_per_s": 5e9},
        "inter_node": {
            "nics_per_node": 2,
            "nic_bandwidth_bytes_per_s": 50e9,
            "oversubscription": 3.0,
            "nodes_per_leaf": 2,
        },
    }
    parallelism = {"dp": 3, "pp": 4, "zero": 2, "schedule": "zb_v", "bucket_bytes": 10**6}
    folded = assert_equal(case(parallelism, {"global_batch_size": 24}, {"layers": 4, "ffn": 1024}, cluster))
    assert "spine" in folded.ran.links
