"""Ranks, groups and parts: every group is a partition, neighbours are where the rank order puts them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.inputs.scenario import Scenario
from sim.ranks.plan import make_plan
from sim.simulation import simulate
from tests.processes import ROOT
from tests.sim.cases import case

MOE = {"moe": {"experts": 8, "top_k": 2, "ffn": 512}, "mlp": "swiglu", "bias": False}


@st.composite
def layouts(draw: st.DrawFn) -> Scenario:
    tp, cp, dp, pp = (draw(st.sampled_from([1, 2, 4])) for _ in range(4))
    plane = tp * cp * dp
    ep = draw(st.sampled_from([e for e in (1, 2, 4, 8) if plane % e == 0]))
    order = "-".join(draw(st.permutations(["tp", "cp", "dp", "pp"])))
    shard = draw(st.sampled_from([s for s in (1, 2, 4, 8, 16) if (cp * dp) % s == 0]))
    return case(
        {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": ep, "rank_order": order, "zero": 1, "shard_size": shard},
        {"global_batch_size": 32},
        MOE,
    )


@settings(deadline=None, max_examples=60)
@given(layouts())
def test_groups_partition_the_ranks(scenario: Scenario) -> None:
    plan = make_plan(scenario)
    n = scenario.parallelism.ranks
    for name in plan.group_sizes:
        groups = {tuple(plan.group(name, r)) for r in range(n)}
        sizes = {len(g) for g in groups}
        if name == "embedding" and scenario.parallelism.pp > 1:
            continue  # ranks of other stages than those with the matrix are in no such group
        assert sorted(r for g in groups for r in g) == list(range(n)), name
        assert sizes == {plan.group_size(name)}, name


@settings(deadline=None, max_examples=60)
@given(layouts())
def test_classes_cover_every_rank_once(scenario: Scenario) -> None:
    plan = make_plan(scenario)
    ranks = [r for c in plan.classes for r in c.ranks]
    assert sorted(ranks) == list(range(scenario.parallelism.ranks))
    for i, c in enumerate(plan.classes):
        assert c.rank == min(c.ranks)
        assert {plan.class_of(r) for r in c.ranks} == {i}
        assert {plan.pipeline_rank(r) for r in c.ranks} == {c.pipeline_rank}


def test_megatron_order() -> None:
    """tp neighbours are adjacent, then cp, dp, pp (Megatron-LM's default order)."""
    plan = make_plan(case({"tp": 2, "cp": 2, "dp": 2, "pp": 2}, {"global_batch_size": 8}))
    assert [plan.group(d, 0) for d in ("tp", "cp", "dp", "pp")] == [[0, 1], [0, 2], [0, 4], [0, 8]]
    assert plan.group("dp_cp", 1) == [1, 3, 5, 7]


def test_uneven_context_split_is_simulated_rank_by_rank() -> None:
    for split, classes in (("zigzag", 1), ("contiguous", 4), ("striped", 4)):
        plan = make_plan(case({"cp": 4, "cp_split": split, "dp": 2}))
        assert len(plan.classes) == classes
    assert make_plan(case({"cp": 4, "cp_split": "contiguous", "dp": 2})).classes[1].ranks == (1, 5)


def test_parts_hold_every_layer_in_order() -> None:
    plan = make_plan(case({"pp": 4, "schedule": "interleaved_1f1b", "layers_per_stage": [0, 1, 1, 2, 1, 1, 2, 0]}))
    assert [n for p in plan.parts for n in p.layers] == list(range(8))
    assert [p.embedding for p in plan.parts] == [True] + [False] * 7
    assert [p.head for p in plan.parts] == [False] * 7 + [True]


@pytest.mark.parametrize("schedule", ["zb_v", "dualpipe_v", "dualpipe", "1f1b"])
def test_a_rank_with_both_ends_of_the_model_has_one_embedding_matrix(schedule: str) -> None:
    """Nothing sums gradients with the last rank, which holds no copy: in a V, and where each end is held twice."""
    model = {"tied_embeddings": True, "mtp_layers": 1}
    found = simulate(case({"pp": 4, "schedule": schedule}, {"global_batch_size": 16}, model)).result["communication"]
    ranks = [row["rank"] for row in found if row["group"] == "embedding"]
    assert ranks == ([0, 3] if schedule == "1f1b" else [])


def test_the_glossary_names_every_group_of_ranks() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("## Groups of ranks")[2]
    named = set(re.findall(r"`([a-z_]+)`", "\n".join(row.split("|")[1] for row in page.splitlines() if "| " in row)))
    assert set(make_plan(case({"pp": 2})).group_sizes) == named - {"host"}
