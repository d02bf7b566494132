"""Pipeline schedules by name: `build("1f1b", p=4, m=8)`. One file each; sources and formulas stand there."""

from __future__ import annotations

from sim.actions import Schedule
from sim.schedules.dualpipe import dualpipe
from sim.schedules.dualpipe_v import dualpipe_v
from sim.schedules.gpipe import gpipe
from sim.schedules.interleaved_1f1b import interleaved_1f1b
from sim.schedules.naive import naive
from sim.schedules.one_f_one_b import one_f_one_b
from sim.schedules.unit_time import UnitTimes
from sim.schedules.zb_h1 import zb_h1
from sim.schedules.zb_h2 import zb_h2
from sim.schedules.zb_search import zb_search
from sim.schedules.zb_v import zb_v

__all__ = ["NAMES", "UnitTimes", "build"]

_BUILDERS = {  # those of p and m alone, each with its stages per rank
    "naive": (naive, 1),
    "gpipe": (gpipe, 1),
    "1f1b": (one_f_one_b, 1),
    "zb_h1": (zb_h1, 1),
    "zb_h2": (zb_h2, 1),
    "zb_v": (zb_v, 2),
    "dualpipe": (dualpipe, 2),
    "dualpipe_v": (dualpipe_v, 2),
}
NAMES = (*_BUILDERS, "interleaved_1f1b", "zb_search")


def build(
    name: str, p: int, m: int, v: int | None = None, times: UnitTimes | None = None, memory: float = 1.0
) -> Schedule:
    """The schedule `name` for p pipeline ranks and m micro-batches, unchecked (`sim.actions.validate`
    checks).

    `v` is the number of stages per rank, None what the schedule needs (interleaved_1f1b: 2 or more, 2 if
    None); `times` and `memory` (in multiples of 1F1B's activations) steer zb_search alone, by default F =
    I = W = 1.

    Raises:
        ValueError: if the name is unknown or p, m or v do not suit the schedule; says what does.
    """
    if name not in NAMES:
        raise ValueError(f"schedule {name!r}: expected one of {', '.join(NAMES)}")
    if p < 1 or m < 1:
        raise ValueError(f"schedule {name}: p={p}, m={m}: needs one or more ranks and micro-batches")
    if name == "interleaved_1f1b":
        return interleaved_1f1b(p, m, 2 if v is None else v)
    builder, stages = _BUILDERS.get(name, (None, 1))
    if v not in (None, stages):
        raise ValueError(f"schedule {name}: v={v}: it has {stages} stage{'s' * (stages > 1)} per rank")
    return builder(p, m) if builder else zb_search(p, m, times, memory)
