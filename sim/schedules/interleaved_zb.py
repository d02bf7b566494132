"""Interleaved 1F1B with the backward split, whose weight gradients fill what input gradients leave idle.

A rank takes its stages as with interleaved_1f1b, in groups of p micro-batches. It begins with (v−1)·p + p−1−rank
forwards, then runs F, I and W in turn, W `rank` input gradients behind.
Source: ZB1P of Qi et al. 2024 (arXiv 2401.10241) over several stages, as torch's `ScheduleInterleavedZeroBubble` has it
(torch/distributed/pipelining/schedules.py).
"""

from __future__ import annotations

from sim.core.actions import Action, Kind, Schedule
from sim.schedules.form import ScheduleForm
from sim.schedules.list_writer import looped


def interleaved_zb(p: int, m: int, v: int) -> Schedule:
    """Groups of p micro-batches go through a rank's first stage, then through its second, ..."""
    return looped("interleaved_zb", p, m, (_list(p, m, v, rank) for rank in range(p)), v)


def _list(p: int, m: int, v: int, rank: int) -> list[Action]:
    stages = range(rank, v * p, p)
    groups = [range(first, first + p) for first in range(0, m, p)]
    forwards = [(stage, i) for group in groups for stage in stages for i in group]
    backwards = [(stage, i) for group in groups for stage in stages[::-1] for i in group]
    lead = min(m * v, (v - 1) * p + p - 1 - rank)
    entries = [Action(stage, Kind.F, i) for stage, i in forwards[:lead]]
    for n, (stage, i) in enumerate(backwards):
        if lead + n < len(forwards):
            ahead, j = forwards[lead + n]
            entries.append(Action(ahead, Kind.F, j))
        entries.append(Action(stage, Kind.I, i))
        if n >= rank:
            owed, j = backwards[n - rank]
            entries.append(Action(owed, Kind.W, j))
    return entries + [Action(stage, Kind.W, i) for stage, i in backwards[max(0, m * v - rank) :]]


FORM = ScheduleForm(
    "interleaved_zb",
    interleaved_zb,
    least_stages=2,
    micro_batches_multiple=lambda p: p,
    fewest_micro_batches=lambda p: p,
)
