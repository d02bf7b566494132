"""One forward, one backward (1F1B with a flush).

Bubble ratio (p−1)/m, as GPipe's. In flight: min(m, p − rank). Source: PipeDream-flush (Narayanan et al. 2021,
arXiv 2006.09503) as in Megatron-LM (Narayanan et al. 2021, arXiv 2104.04473, fig. 4 top).
"""

from __future__ import annotations

from sim.core.actions import Action, Kind, Schedule
from sim.schedules.form import ScheduleForm
from sim.schedules.list_writer import looped


def one_f_one_b(p: int, m: int) -> Schedule:
    """Rank r warms up with min(m, p−1−r) forwards, then alternates, then drains."""
    return looped("1f1b", p, m, (_rank(p, m, r) for r in range(p)))


def _rank(p: int, m: int, r: int) -> list[Action]:
    warm_up = min(m, p - 1 - r)
    entries = [Action(r, Kind.F, i) for i in range(warm_up)]
    for i in range(m - warm_up):
        entries += (Action(r, Kind.F, warm_up + i), Action(r, Kind.B, i))
    return entries + [Action(r, Kind.B, i) for i in range(m - warm_up, m)]


FORM = ScheduleForm("1f1b", one_f_one_b, blocking_sends=True)
