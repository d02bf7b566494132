"""What a task graph tells of its tasks."""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.actions import Action, Kind
from sim.core.columns import ints
from sim.core.timeline import Detail, RankClass
from sim.graph.taskgraph import GraphBuilder, named_actions


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
