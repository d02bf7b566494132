"""Breadth-first over v stages per rank, dealt to the ranks in turn: all micro-batches go through a stage before the
rank's next stage takes the first.

Bubble ratio (p−1)/(v·m) for m ≥ p. In flight, in stages of 1/v of a rank's layers: v·m on every rank, as many as with
gpipe; where ZeRO-3 shards parameters, a stage is gathered once for all forwards and once for all backwards in a row.
Backwards run in the opposite order of micro-batches.

Source: Lamy-Poirier 2022, arXiv 2211.05953; torch's `ScheduleLoopedBFS` (torch/distributed/pipelining/schedules.py).
"""

from __future__ import annotations

from sim.core.actions import Kind, Schedule
from sim.schedules.form import ScheduleForm
from sim.schedules.list_writer import actions, looped


def looped_bfs(p: int, m: int, v: int) -> Schedule:
    """Each rank's forwards stage by stage, then its backwards from its last stage to its first."""

    def of_rank(rank: int) -> list[tuple[int, int]]:
        return [(stage, i) for stage in range(rank, v * p, p) for i in range(m)]

    lists = []
    for rank in range(p):
        taken = of_rank(rank)
        stages, micro_batches = [s for s, _ in taken], [i for _, i in taken]
        backwards = actions(stages[::-1], Kind.B, micro_batches[::-1])
        lists.append([*actions(stages, Kind.F, micro_batches), *backwards])
    return looped("looped_bfs", p, m, lists, v)


FORM = ScheduleForm("looped_bfs", looped_bfs, least_stages=2)
