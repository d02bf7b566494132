"""Where the stages of a schedule live, and its Schedule made of per-rank lists."""

from __future__ import annotations

from collections.abc import Iterable

from sim.actions import Entry, Schedule


def looped(name: str, p: int, m: int, ranks: Iterable[Iterable[Entry]], v: int = 1) -> Schedule:
    """One chain of v·p stages dealt to p ranks in turn: stage s on rank s mod p."""
    stages = tuple(range(p * v))
    return Schedule(name, m, tuple(s % p for s in stages), stages, (stages,), tuple(map(tuple, ranks)))


def v_shaped(name: str, p: int, m: int, ranks: Iterable[Iterable[Entry]]) -> Schedule:
    """One chain of 2p stages down the ranks and back: rank r has stages r and 2p−1−r."""
    stages = tuple(range(2 * p))
    rank_of_stage = tuple(min(s, 2 * p - 1 - s) for s in stages)
    return Schedule(name, m, rank_of_stage, stages, (stages,), tuple(map(tuple, ranks)))
