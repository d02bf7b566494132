"""Zero bubble, handcrafted, in up to twice 1F1B's memory: more forwards fill the wait for the first backward.

Bubble (p−1)(F + I − 2W) between a rank's first and last action, so none with F = I = W, for m ≥ 2p−1. The
ranks' work is skewed (a parallelogram): over the common makespan each is idle (p−1)·F, which the paper hides
in the next step by validating the optimizer step afterwards. In flight: min(m, 2(p−rank)−1) until I;
min(m, 2p−1) on every rank until W.
Source: Qi et al. 2024 (arXiv 2401.10241, section 2.2). Left out: the bypassed optimizer synchronization
(section 4).
"""

from __future__ import annotations

from sim.core.actions import Schedule
from sim.schedules.form import ScheduleForm
from sim.schedules.list_writer import looped
from sim.schedules.zb_h1 import split_backward


def zb_h2(p: int, m: int) -> Schedule:
    """Rank r starts with 2(p−r)−1 forwards; W of a micro-batch 2r input gradients after its own."""
    return looped("zb_h2", p, m, (split_backward(r, m, 2 * (p - r) - 1, 2 * r) for r in range(p)))


FORM = ScheduleForm("zb_h2", zb_h2)
