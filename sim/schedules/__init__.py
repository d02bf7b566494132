"""Pipeline schedules by name: `build("1f1b", p=4, m=8)`. One file each; sources and formulas stand there."""

from __future__ import annotations

from sim.actions import Schedule
from sim.schedules.gpipe import gpipe
from sim.schedules.naive import naive
from sim.schedules.one_f_one_b import one_f_one_b

_BUILDERS = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b}
NAMES = tuple(_BUILDERS)


def build(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """The schedule `name` for p pipeline ranks and m micro-batches.

    Raises:
        ValueError: if the name is unknown or p, m or v do not suit the schedule.
    """
    if name not in _BUILDERS:
        raise ValueError(f"schedule {name!r}: expected one of {', '.join(NAMES)}")
    if p < 1 or m < 1:
        raise ValueError(f"schedule {name}: needs at least one rank and one micro-batch, not p={p}, m={m}")
    return _BUILDERS[name](p, m)
