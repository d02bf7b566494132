"""Collectives as messages: alone their closed forms, with others on the same links not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.errors import InputError
from sim.graph.collective_steps import Pattern, exchange, parents, ring, tree
from sim.graph.taskgraph import CollectiveStep
from sim.inputs.scenario import Scenario, load_scenario, parse_scenario
from sim.simulation import Simulation, simulate
from sim.views.timeline_page import timeline_page

PATTERNS = {"gather": lambda n: ring(n, 1), "all-reduce": lambda n: ring(n, 2), "tree": tree, "exchange": exchange}


def chain_of(pattern: Pattern) -> int:
    """The most messages that follow each other."""
    length: list[int] = []
    for hop in pattern.hops:
        assert all(i < len(length) for i in hop.after)
        length.append(1 + max((length[i] for i in hop.after), default=0))
    return max(length)


@pytest.mark.parametrize("name", PATTERNS)
@given(st.integers(2, 33))
@settings(max_examples=20, deadline=None)
def test_the_longest_chain_is_what_is_said(name: str, n: int) -> None:
    pattern = PATTERNS[name](n)
    assert chain_of(pattern) == pattern.chain


@pytest.mark.parametrize("name", ["gather", "all-reduce", "tree"])
@given(st.integers(2, 33))
@settings(max_examples=20, deadline=None)
def test_what_every_member_gives_reaches_all(name: str, n: int) -> None:
    """What a message carries its sender had when the messages that it waits for had come."""
    pattern = PATTERNS[name](n)
    carried: list[set[int]] = []
    has = [{i} for i in range(n)]
    for hop in pattern.hops:
        own = {hop.sender}.union(*(carried[i] for i in hop.after if pattern.hops[i].receiver == hop.sender))
        carried.append(own)
        has[hop.receiver] |= own
    assert has == [set(range(n))] * n


@given(st.integers(2, 33))
@settings(max_examples=10, deadline=None)
def test_an_exchange_sends_once_from_each_to_each(n: int) -> None:
    pairs = Counter((hop.sender, hop.receiver) for hop in exchange(n).hops)
    assert set(pairs) == {(a, b) for a in range(n) for b in range(n) if a != b}
    assert set(pairs.values()) == {1}


RINGS = {"preset": "dgx-h100", "intra_node": {"nvls_efficiency": 0.0}}  # as with NCCL_NVLS_ENABLE=0


def scenario(parallelism: dict[str, Any], collectives: str = "messages", **more: Any) -> Scenario:
    whole = {
        "model": {"preset": "llama3.2-1b", "layers": 4},
        "cluster": "dgx-a100",
        "training": {"seq_len": 2048, "global_batch_size": 32},
        "parallelism": parallelism,
        "engine": {"collectives": collectives},
    }
    return parse_scenario({**whole, **more}, "test")


def messages(step: Simulation) -> set[str]:
    """The algorithms of which messages were made."""
    graph = step.built.graph
    kinds = [graph.task_kinds[i].work for i in np.unique(graph.task_kind).tolist()]
    return {str(w.sender[1].choice) for w in kinds if isinstance(w, CollectiveStep)}


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ring": ({"dp": 16, "dp_sync": "after_backward"}, {"cluster": RINGS}),
    "tp": ({"tp": 8, "sp": True}, {}),
    "zero 3": ({"dp": 8, "zero": 3}, {"calibration": "roofline"}),
    "pipeline": ({"tp": 2, "pp": 2, "dp": 2, "dp_sync": "after_backward"}, {}),
    "cp": ({"cp": 4}, {}),
    "experts": ({"dp": 8, "ep": 8}, {"model": {"preset": "mixtral-8x7b", "layers": 2}}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_alone_they_take_their_closed_forms(name: str) -> None:
    layout, more = LAYOUTS[name]
    closed, steps = (simulate(scenario(layout, mode, **more)) for mode in ("closed_form", "messages"))
    assert messages(steps)
    assert steps.ran.alone_s == pytest.approx(closed.ran.alone_s, rel=1e-9)
    assert steps.step_time_s == pytest.approx(closed.step_time_s, rel=0.01)
    a, b = closed.outcome.mean_rank, steps.outcome.mean_rank
    assert b.compute_s == pytest.approx(a.compute_s, rel=1e-9)
    assert b.exposed_comm_s == pytest.approx(a.exposed_comm_s, rel=0.01)


@pytest.mark.parametrize("layout", [{"dp": 16}, {"tp": 4, "dp": 4}, {"cp": 4, "dp": 4}])
def test_who_waits_for_a_slow_rank_is_the_same_as_with_closed_forms(layout: dict[str, Any]) -> None:
    faults = {"stragglers": [{"rank": 1, "compute_scale": 1.5}]}
    layout = {**layout, "dp_sync": "after_backward"}
    closed, steps = (
        simulate(scenario(layout, mode, faults=faults, cluster=RINGS), fold=False)
        for mode in ("closed_form", "messages")
    )
    assert messages(steps)
    expected, found = ({(w.ranks, w.awaited): w.seconds for w in s.outcome.waiting} for s in (closed, steps))
    assert found
    assert found == pytest.approx(expected, rel=1e-6)


@given(st.integers(3, 300))
def test_no_member_is_a_leaf_of_both_trees(n: int) -> None:
    leaves = [set(range(n)) - set(parent) for parent in parents(n)]
    assert not leaves[0] & leaves[1]
    assert all(parent.count(None) == 1 for parent in parents(n))


def test_trees_go_up_and_down() -> None:
    """Over nodes of one GPU each a small all-reduce takes a tree."""
    cluster = {"preset": "dgx-a100", "nodes": 8}
    layout = {"tp": 1, "dp": 64, "dp_sync": "per_parameter"}
    closed, steps = (
        simulate(scenario(layout, mode, cluster=cluster, training={"seq_len": 512, "global_batch_size": 64}))
        for mode in ("closed_form", "messages")
    )
    assert any(name.startswith("tree") for name in messages(steps))
    assert steps.ran.alone_s == pytest.approx(closed.ran.alone_s, rel=1e-9)


def test_both_engines_give_the_same_to_the_last_bit() -> None:
    s = scenario({"tp": 2, "dp": 4, "zero": 1})
    a, b = simulate(s, engine="simpy"), simulate(s, engine="static")
    assert (a.times.path, b.times.path) == ("simpy", "static")
    assert np.array_equal(a.times.start_s, b.times.start_s)
    assert np.array_equal(a.times.end_s, b.times.end_s)


def test_a_late_member_holds_up_who_needs_it_and_nobody_else() -> None:
    """Before the straggler begins, messages between others are over; the last piece comes a whole pass after it."""
    faults = {"stragglers": [{"rank": 5, "compute_scale": 1.5}]}
    layout, training = {"dp": 16, "dp_sync": "after_backward"}, {"seq_len": 4096, "global_batch_size": 16}
    one = scenario(layout, "closed_form", cluster=RINGS, training=training, faults=faults)
    many = scenario(layout, "messages", cluster=RINGS, training=training, faults=faults)
    whole, step = simulate(one), simulate(many)
    spans = [x for x in step.timeline.spans() if x.kind == "ALL_REDUCE" and "message" in x.detail.name]
    late_s = max(x.start_s for x in whole.timeline.spans() if x.kind == "ALL_REDUCE")
    early = [x for x in spans if x.end_s < late_s / 1.1]
    assert early
    assert not {"rank 4 to 5", "rank 5 to 6"}.intersection(x.detail.name.rpartition(", ")[2] for x in early)
    assert step.step_time_s == pytest.approx(whole.step_time_s, rel=0.01)


def test_a_link_that_another_uses_holds_up_the_messages_on_it() -> None:
    s = scenario({"dp": 16, "dp_sync": "after_backward"}, cluster=RINGS)

    def traffic(env: Any, cluster: Any) -> Any:
        while True:
            yield cluster.transfer(1e9, source=0, target=8)

    step = simulate(s, processes=[traffic])
    alone_s = simulate(s).step_time_s
    spans = [x for x in step.timeline.spans() if x.kind == "ALL_REDUCE" and "message" in x.detail.name]
    lasts = {rank: [x.end_s - x.start_s for x in spans if x.rank == rank] for rank in (0, 3)}
    assert max(lasts[0]) > 1.5 * max(lasts[3])
    assert step.step_time_s > 1.1 * alone_s


def test_the_page_shows_every_message() -> None:
    step = simulate(load_scenario("scenarios/collectives_messages.yaml"), expand=True)
    spans = [x for x in step.timeline.spans() if "message" in x.detail.name]
    assert len(spans) == 2 * 15 * 16 + sum("message" in x.detail.name and x.detail.bytes < 100 for x in spans)
    page = timeline_page(step.outcome, step.timeline, step.memory_over(1), step.critical_rows)
    assert "message 480 of 480, rank 15 to 0" in page


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"512 ranks are too many.*closed_form"):
        simulate(scenario({"dp": 512}, training={"seq_len": 2048, "global_batch_size": 512}))
    with pytest.raises(InputError, match=r"engine\.collectives.*requests are served"):
        parse_scenario(
            {
                **load_scenario("scenarios/serve_llama8b.yaml").model_dump(mode="json"),
                "training": None,
                "engine": {"collectives": "messages"},
            }
        )
    with pytest.raises(InputError, match=r"engine\.collectives"):
        scenario({}, "chunks")
    monkeypatch.setattr("sim.graph.collective_steps.MAX_MESSAGES", 1000)
    with pytest.raises(InputError, match="messages in a step are too many"):
        simulate(scenario({"tp": 8}))
