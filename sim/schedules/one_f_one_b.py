"""One forward, one backward (1F1B with a flush).

Bubble ratio (p−1)/m, as GPipe's. In flight: min(m, p − rank). Source: PipeDream-flush (Narayanan et al. 2021,
arXiv 2006.09503) as in Megatron-LM (Narayanan et al. 2021, arXiv 2104.04473, fig. 4 top).

A model that is not cut (p = 1) can also run in pairs, as Megatron-LM does: the forward of micro-batch i + 1 at once
with the backward of i, so that each hides the other's expert exchanges. Two micro-batches are in flight then. Source:
`combined_1f1b_schedule_for_no_pipelining` (megatron/core/pipeline_parallel/combined_1f1b.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from sim.core.actions import Action, Entry, Kind, Overlap, Schedule
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


def one_rank_in_pairs(p: int, m: int) -> Schedule:
    """The first forward, m - 1 pairs of a forward and the backward before it, the last backward."""
    return looped("1f1b", p, m, (_pairs(r, m) for r in range(p)))


def _pairs(r: int, m: int) -> Iterator[Entry]:
    yield Action(r, Kind.F, 0)
    for i in range(1, m):
        yield Overlap(Action(r, Kind.F, i), Action(r, Kind.B, i - 1))
    yield Action(r, Kind.B, m - 1)


FORM = ScheduleForm("1f1b", one_f_one_b, blocking_sends=True)
# Of a model that is not cut: on one rank each forward is followed by its backward.
ONE_RANK = replace(FORM, in_pairs=one_rank_in_pairs)
