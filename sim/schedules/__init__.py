"""Pipeline schedules by name: `build("1f1b", p=4, m=8)`. One file each; sources and formulas stand there.

A new schedule is a file with a `FORM` and a line in `FORMS`: scenarios, rules, search, pages and real runs read these.
"""

from __future__ import annotations

from sim.core.actions import Schedule
from sim.schedules import (
    dualpipe,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    interleaved_zb,
    looped_bfs,
    naive,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_search,
    zb_v,
)
from sim.schedules.form import ScheduleForm
from sim.schedules.unit_time import UnitTimes

__all__ = ["FORMS", "ONE_RANK", "ScheduleForm", "UnitTimes", "build"]

FORMS: dict[str, ScheduleForm] = {
    module.FORM.name: module.FORM
    for module in (
        naive,
        gpipe,
        one_f_one_b,
        zb_h1,
        zb_h2,
        zb_v,
        dualpipe,
        dualpipe_v,
        interleaved_1f1b,
        looped_bfs,
        interleaved_zb,
        zb_search,
    )
}
ONE_RANK = one_f_one_b.ONE_RANK


def build(
    name: str, p: int, m: int, v: int | None = None, times: UnitTimes | None = None, memory: float = 1.0
) -> Schedule:
    """The schedule `name` for p pipeline ranks and m micro-batches, unchecked (`sim.core.actions.validate`
    checks).

    `v` is the number of stages per rank, None what the schedule needs (interleaved_1f1b: 2 or more, 2 if
    None); `times` and `memory` (in multiples of 1F1B's activations) steer zb_search alone, by default F =
    I = W = 1.

    Raises:
        ValueError: if the name is unknown or p, m or v do not suit the schedule; says what does.
    """
    if name not in FORMS:
        raise ValueError(f"schedule {name!r}: expected one of {', '.join(FORMS)}")
    return FORMS[name].build(p, m, v, times, memory)
