"""How pieces of programs become a graph: what never comes, what meets, what a step waits for."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from sim.core.actions import Action, Entry, Kind, Schedule
from sim.core.columns import ints
from sim.core.timeline import Detail
from sim.graph.shared_collectives import CollectivePart, merge_collectives
from sim.graph.taskgraph import Columns, Deadlock, KindTable, Launches, Waits
from sim.programs.compile import LocalTask
from sim.schedules import build
from sim.simulation import Simulation, simulate
from tests.sim.cases import case


def changed(schedule: Schedule, rank: int, entries: list[Entry]) -> Simulation:
    """A step whose schedule has another list on one rank."""
    ranks = list(schedule.ranks)
    ranks[rank] = tuple(entries)
    scenario = case({"pp": 2, "schedule": "1f1b", "p2p_overlap": True})
    return simulate(scenario, schedule=replace(schedule, ranks=tuple(ranks)))


def test_a_message_that_nobody_sends_is_named() -> None:
    schedule = build("1f1b", 2, case({"pp": 2}).micro_batches)
    without = [a for a in schedule.ranks[0] if a != Action(0, Kind.F, 1)]
    with pytest.raises(Deadlock, match="nobody sends message stage 0 to 1 of micro-batch 1"):
        changed(schedule, 0, without)


def test_ranks_that_wait_for_each_other_in_a_circle_are_named() -> None:
    schedule = build("1f1b", 2, case({"pp": 2}).micro_batches)
    assert [str(entry) for entry in schedule.ranks[1][:2]] == ["1F0", "1B0"]
    late = [a for a in schedule.ranks[0] if a != Action(0, Kind.F, 0)]
    with pytest.raises(Deadlock, match=r"tasks never start.*stage"):
        changed(schedule, 0, [*late[:3], Action(0, Kind.F, 0), *late[3:]])


def together(parts: list[int]) -> tuple[Columns, list[int], KindTable]:
    """Tasks 0 and 3 are classes 0 and 1's part in a collective, which tasks 1 and 4 wait for; `parts` as sorts."""
    meetings = [
        CollectivePart(c, (0, 1), LocalTask("tp", "all_reduce", seconds, (), (), Detail("sum", 8.0), "tp"))
        for c, seconds in ((0, 1.0), (1, 2.0))
    ]
    table = KindTable()
    sort = table.new_kind(Detail("work"), (table.row(0, "compute", "F"),))
    seconds = np.array([1.0, 5.0, 5.0, 2.0, 5.0])
    waits = Waits(ints([2, 0, 3]), ints([3, 1, 4]))
    sorts = ints([parts[0], sort, sort, parts[1], sort])
    columns = Columns(seconds, sorts, ints([-1] * 5), [], waits, Launches())
    found, now = merge_collectives(columns, meetings, table)
    return found, now.tolist(), table


def test_members_of_a_collective_share_one_task_as_long_as_the_slowest() -> None:
    found, now, table = together([-1, -2])
    assert now == [0, 1, 2, 0, 3]
    assert found.seconds.tolist() == [2.0, 5.0, 5.0, 5.0]
    assert sorted(zip(*(x.tolist() for x in found.waits), strict=True)) == [(0, 1), (0, 3), (2, 0)]
    assert [row[0] for row in table.task_kinds[found.task_kind[0]].rows] == [0, 1]


def test_a_collective_that_a_member_never_runs_is_named() -> None:
    with pytest.raises(Deadlock, match="collective 0 of group tp is run by 1 of its 2"):
        together([-1, -1])
