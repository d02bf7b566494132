"""Where the stages of a schedule live, and the writing of per-rank lists."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from itertools import repeat

from sim.core.actions import Action, Entry, Kind, Overlap, Schedule

_ACTION = partial(tuple.__new__, Action)  # `Action._make` without Python's part of it
_COUNTED = {Kind.F: Kind.F, Kind.B: Kind.I, Kind.I: Kind.I, Kind.W: Kind.W}  # B counts as I


def looped(
    name: str, p: int, m: int, ranks: Iterable[Iterable[Entry]], v: int = 1, joint: tuple[range, ...] = ()
) -> Schedule:
    """One chain of v·p stages dealt to p ranks in turn: stage s on rank s mod p. `joint`: see `Schedule`."""
    stages = tuple(range(p * v))
    return Schedule(name, m, tuple(s % p for s in stages), stages, (stages,), tuple(map(tuple, ranks)), joint)


def v_shaped(name: str, p: int, m: int, ranks: Iterable[Iterable[Entry]]) -> Schedule:
    """One chain of 2p stages down the ranks and back: rank r has stages r and 2p−1−r."""
    stages = tuple(range(2 * p))
    rank_of_stage = tuple(min(s, 2 * p - 1 - s) for s in stages)
    return Schedule(name, m, rank_of_stage, stages, (stages,), tuple(map(tuple, ranks)))


def actions(stages: Iterable[int], kind: Kind, micro_batches: Iterable[int]) -> list[Action]:
    """Pair `stages` and `micro_batches`, two columns of equal length, into actions of one kind.

    Many at once take a fifth of the time that they take one by one.
    """
    return list(map(_ACTION, zip(stages, repeat(kind), micro_batches)))


class ListWriter:
    """Writes one rank's list; a stage takes its micro-batches in order, so only stage and kind are named.

    `first` is a stage's first micro-batch, 0 where it is not told.
    """

    def __init__(self, first: dict[int, int] | None = None) -> None:
        self.entries: list[Entry] = []
        self._first = first or {}
        self._taken: dict[tuple[int, Kind], int] = {}
        self._owed: deque[Action] = deque()

    def _next(self, stage: int, kind: Kind) -> Action:
        counted = (stage, _COUNTED[kind])
        micro_batch = self._taken.get(counted, self._first.get(stage, 0))
        self._taken[counted] = micro_batch + 1
        return Action(stage, kind, micro_batch)

    def repeat(self, times: int, *steps: tuple[int, Kind]) -> None:
        """`times` times the steps, each the stage's next micro-batch for that kind (B counts as I)."""
        for _ in range(times):
            for stage, kind in steps:
                action = self._next(stage, kind)
                self.entries.append(action)
                if kind == "I":
                    self._owed.append(Action(stage, Kind.W, action.micro_batch))

    def overlap(self, forward: int, backward: int) -> None:
        """The next forward of one stage and the next full backward of another, at once."""
        self.entries.append(Overlap(self._next(forward, Kind.F), self._next(backward, Kind.B)))

    def weights(self, times: int) -> None:
        """The oldest weight gradients that split backwards of any stage still owe."""
        for _ in range(times):
            self.entries.append(self._owed.popleft())
