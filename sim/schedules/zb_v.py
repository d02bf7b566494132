"""Zero bubble in the memory of 1F1B: two stages per rank, down the ranks and back up (a V).

With F = I = W no rank is idle between its first and last action, for m ≥ 2p−1. Over the common makespan
each is idle (p−1)·F of a half-size stage: ratio (p−1)/(6m), a sixth of 1F1B's with the same layers.
In flight until W: at most 2p half-size stages on every rank, 1F1B's p on rank 0.
Source: ZB-V of Qi et al. 2024 (arXiv 2401.10241, section 6), called V-ZB in "Pipeline Parallelism with
Controllable Memory" (arXiv 2405.15362). Left out: the greedy variant for unequal F, I, W.
"""

from __future__ import annotations

from sim.core.actions import Entry, Kind, Schedule, parts
from sim.schedules.form import ScheduleForm
from sim.schedules.list_writer import ListWriter, v_shaped


def zb_v(p: int, m: int) -> Schedule:
    """The order for at least 2p−1 micro-batches; with fewer, that without those that are missing."""
    lists = (_rank(p, max(m, 2 * p - 1), r) for r in range(p))
    kept = ([e for e in entries if parts(e)[0].micro_batch < m] for entries in lists)
    return v_shaped("zb_v", p, m, kept)


def _rank(p: int, m: int, r: int) -> list[Entry]:
    down, up = r, 2 * p - 1 - r
    w = ListWriter()
    w.repeat(2 * (p - r) - 1, (down, Kind.F))
    w.repeat(r, (up, Kind.F), (down, Kind.F))
    w.repeat(p - r, (up, Kind.F), (up, Kind.I), (up, Kind.W))
    for i in range(m - p):
        if 2 * p - 1 - r + i < m:
            w.repeat(1, (down, Kind.F))
        w.repeat(1, (down, Kind.I), (down, Kind.W), (up, Kind.F), (up, Kind.I), (up, Kind.W))
    w.repeat(r, (down, Kind.I), (up, Kind.I))
    w.repeat(p - r, (down, Kind.I), (down, Kind.W))
    w.repeat(r, (up, Kind.W))
    w.repeat(r, (down, Kind.W))
    return w.entries


FORM = ScheduleForm("zb_v", zb_v)
