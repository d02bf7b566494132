"""Zero bubble, handcrafted, in the memory of 1F1B: weight gradients fill what input gradients leave idle.

Bubble (p−1)(F + I − W) on every rank, over the common makespan, for m ≥ p and W ≤ F, I: a third of 1F1B's
(p−1)(F + I + W) where F = I = W. In flight: min(m, p − rank) until I, as 1F1B; until W min(m, p) on every
rank, what 1F1B holds on rank 0.
Source: Qi et al. 2024 (arXiv 2401.10241, section 2.1), where B is our I.
"""

from __future__ import annotations

from sim.core.actions import Action, Kind, Schedule
from sim.schedules.form import ScheduleForm
from sim.schedules.list_writer import looped


def zb_h1(p: int, m: int) -> Schedule:
    """1F1B's order of F and I; W of a micro-batch `rank` input gradients after its own."""
    return looped("zb_h1", p, m, (split_backward(r, m, p - r, r) for r in range(p)))


def split_backward(stage: int, m: int, warm_up: int, lag: int) -> list[Action]:
    """`warm_up` forwards, then I, W, F in turn, W `lag` input gradients behind; at last the W's owed."""
    entries = [Action(stage, Kind.F, i) for i in range(min(m, warm_up))]
    for i in range(m):
        entries.append(Action(stage, Kind.I, i))
        if i >= lag:
            entries.append(Action(stage, Kind.W, i - lag))
        if warm_up + i < m:
            entries.append(Action(stage, Kind.F, warm_up + i))
    return entries + [Action(stage, Kind.W, i) for i in range(max(0, m - lag), m)]


FORM = ScheduleForm("zb_h1", zb_h1)
