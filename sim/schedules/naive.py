"""No pipelining: one micro-batch at a time goes down all stages and back.

Bubble ratio p−1: of p ranks one works. In flight: 1. Source: the naive model parallelism that GPipe (Huang et
al. 2019, arXiv 1811.06965, fig. 2b) starts from.
"""

from __future__ import annotations

from sim.core.actions import Action, Kind, Schedule
from sim.schedules.form import ScheduleForm
from sim.schedules.list_writer import looped


def naive(p: int, m: int) -> Schedule:
    """Every rank does forward and backward of a micro-batch before the next one's forward."""
    return looped(
        "naive", p, m, ([Action(r, kind, i) for i in range(m) for kind in (Kind.F, Kind.B)] for r in range(p))
    )


FORM = ScheduleForm("naive", naive, blocking_sends=True)
