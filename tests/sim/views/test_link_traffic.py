"""The traffic that is drawn on links is the traffic that was simulated."""

from __future__ import annotations

import pytest

from sim.inputs.scenario import parse_scenario
from sim.simulation import simulate
from sim.views.link_traffic import step_traffic, topology_drawing
from tests.sim.cases import case


def test_every_group_sends_what_its_ranks_count() -> None:
    sim = simulate(case({"tp": 2, "dp": 4}, {"gradient_clipping": False}))
    sent = {(r["kind"], r["group"]): r["bytes"] for r in sim.result["communication"]}
    by_ranks = {t.ranks: t.size_bytes for t in step_traffic(sim)}
    assert {r for r in by_ranks if len(r) == 2} == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert {r for r in by_ranks if len(r) == 4} == {(0, 2, 4, 6), (1, 3, 5, 7)}
    assert by_ranks[0, 1] == pytest.approx(sent["all_reduce", "tp"])
    assert by_ranks[0, 2, 4, 6] == pytest.approx(sent["all_reduce", "dp_cp"])


def test_pipeline_messages_go_both_ways() -> None:
    sim = simulate(case({"pp": 4, "dp": 2}, {"gradient_clipping": False}))
    messages = [t for t in step_traffic(sim) if t.kind == "send_recv"]
    assert {t.ranks for t in messages} == {(r + x, r + x + 2) for r in (0, 1) for x in (0, 2, 4)}
    assert {t.times for t in messages} == {4}
    assert "</html>" in topology_drawing(sim)


def test_a_smaller_torus_in_place_of_a_large_one_is_drawn_without_loads() -> None:
    keys = {"global_batch_size": 256, "seq_len": 2048}
    cluster = {"gpu": "tpu-v5e", "nodes": 256}
    scenario = parse_scenario(
        {"model": "llama3.2-1b", "training": keys, "parallelism": {"dp": 256}, "cluster": cluster}
    )
    page = topology_drawing(simulate(scenario))
    assert "a torus of 144 nodes is drawn in its place, without loads" in page
