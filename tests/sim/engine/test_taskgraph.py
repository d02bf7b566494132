"""What a task graph tells of its tasks."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from sim.core.actions import Action, Kind
from sim.core.columns import ints
from sim.core.timeline import Detail, RankClass
from sim.graph.taskgraph import GraphBuilder, named_actions
from sim.simulation import simulate
from tests.sim.cases import case


def test_a_task_for_a_whole_step_is_named_by_its_actions_and_others_by_their_sort() -> None:
    draft = GraphBuilder((RankClass(0, (0,), 0),))
    row = (draft.table.row(0, "compute", "F"),)
    whole = draft.table.new_kind(Detail("", source="measured"), row, named=named_actions)
    other = draft.table.new_kind(Detail("stage 0 to 1"), row)
    for sort in (whole, whole, other, other):
        draft.add(1.0, [], sort)
    steps = [(Action(0, Kind.F, 2),), (Action(0, Kind.F, 3), Action(5, Kind.I, 1))]
    graph = draft.graph()
    graph = replace(graph, columns=graph.columns._replace(steps=steps, step=ints([0, 1, 0, -1])))

    assert [d.name for d in graph.details()] == [
        "F of stage 0",
        "F of stage 0 and B of stage 5",
        "stage 0 to 1",
        "stage 0 to 1",
    ]
    assert {d.source for d in graph.details()[:2]} == {"measured"}
    assert (graph.stages.tolist(), graph.micro_batches.tolist()) == ([0, 0, 0, -1], [2, 3, 2, -1])
    assert "stage 0, micro-batch 3: F of stage 0 and B of stage 5 (rank 0 compute F)" in graph.describe(1)


@pytest.mark.parametrize(
    "parallelism",
    [
        {"dp": 4},
        {"dp": 4, "dp_sync": "after_backward"},
        {"dp": 2, "tp": 2, "sp": True},
        {"dp": 4, "zero": 3},
        {"pp": 4, "schedule": "zb_h1", "p2p_overlap": True},
        {"pp": 2, "dp": 2, "schedule": "interleaved_1f1b"},
    ],
    ids=str,
)
def test_tasks_stand_for_as_many_operators_however_they_are_folded(parallelism: dict[str, Any]) -> None:
    scenario = case(parallelism, {"global_batch_size": 32})
    whole_actions, one_by_one = (simulate(scenario, expand=expand).outcome.engine for expand in (False, True))
    assert whole_actions.stands_for == one_by_one.stands_for
    assert whole_actions.tasks <= one_by_one.tasks <= one_by_one.stands_for


def test_twice_the_replicas_are_the_same_tasks_and_stand_for_twice_the_operators() -> None:
    few, many = (simulate(case({"dp": dp}, {"global_batch_size": 4 * dp})).outcome.engine for dp in (2, 4))
    assert (many.tasks, many.simulated_ranks, many.stands_for) == (few.tasks, few.simulated_ranks, 2 * few.stands_for)
