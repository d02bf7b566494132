"""1F1B over v stages per rank, dealt to the ranks in turn.

Bubble ratio (p−1)/(v·m). In flight, in stages of 1/v of a rank's layers: v·p + p − 1 − 2·rank for m > p, so
1 + (p−1)/(p·v) times the activations of 1F1B on rank 0. m must be a multiple of p.
Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2 and fig. 4 (bottom), and Megatron-LM's order.
"""

from __future__ import annotations

from itertools import chain

from sim.actions import Action, Kind, Schedule
from sim.schedules.layout import actions, looped


def interleaved_1f1b(p: int, m: int, v: int = 2) -> Schedule:
    """Micro-batches go in rounds of p: a round through a rank's first stage, then through its second, ...

    Raises:
        ValueError: if m is no multiple of p, or v is below 2.
    """
    if m % p:
        raise ValueError(f"schedule interleaved_1f1b: m={m} micro-batches must be a multiple of p={p}")
    if v < 2:
        raise ValueError(f"schedule interleaved_1f1b: v={v}: needs 2 or more stages per rank")
    micro_batches = [i for first in range(0, m, p) for _ in range(v) for i in range(first, first + p)]
    return looped("interleaved_1f1b", p, m, (_rank(p, m, v, r, micro_batches) for r in range(p)), v)


def _rank(p: int, m: int, v: int, r: int, micro_batches: list[int]) -> list[Action]:
    """The rank's forwards, and its backwards, which take its stages from last to first."""
    stages = [stage for stage in range(r, v * p, p) for _ in range(p)]  # of a round
    forwards = actions(stages * (m // p), Kind.F, micro_batches)
    backwards = actions(stages[::-1] * (m // p), Kind.B, micro_batches)
    warm_up = min(m * v, (v - 1) * p + 2 * (p - 1 - r))
    steady = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    return [*forwards[:warm_up], *steady, *backwards[m * v - warm_up :]]
