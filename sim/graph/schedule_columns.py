"""Turn the action lists of a schedule into columns, over all ranks of the pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.core.actions import Action, Entry, Kind, Overlap, Schedule, Step
from sim.core.columns import Ints, ints
from sim.graph.messages import DIRECTION, NEITHER

NUMBER = {kind: i for i, kind in enumerate(Kind)}
DIRECTION_OF_KIND = ints([DIRECTION[kind] for kind in Kind])
Bools = NDArray[np.bool_]


class RankList(NamedTuple):
    """Hold the list of one rank: its steps, and each action's work and step (from 0), in order.

    `work`: kind and stage as one number, stage · kinds + the kind's `NUMBER`.
    """

    steps: list[Step]
    work: Ints
    step: Ints

    @property
    def actions(self) -> list[Action]:
        """Return all actions."""
        return list(chain.from_iterable(self.steps))


class ScheduleColumns:
    """Hold the steps of all ranks of the pipeline: rank r has `steps[begin[r] : begin[r + 1]]`.

    Columns over steps' actions, [steps, 1 or 2]; if a step has only one of two, the second column repeats it: `stage`,
    `kind` (by `NUMBER`), `micro_batch`, `direction` (of its messages, NEITHER for a repetition), and `ends`, 1 for the
    first forward of a stage and for the last action that makes gradients of its weights; with `rows` for the
    last of every row of such actions, before the rank goes on with another stage's.
    `early`: 1 up to the end of the stage's first backward; 0 everywhere without `early`.
    """

    def __init__(self, schedule: Schedule, pair: bool, rows: bool = False, early: bool = False) -> None:
        lists = [steps_of(entries, pair) for entries in schedule.ranks]
        self.steps: list[Step] = list(chain.from_iterable(lists))
        self.begin: list[int] = [0, *np.cumsum([len(x) for x in lists]).tolist()]
        self._ranks: dict[int, RankList] = {}
        # Few schedules overlap pairs, as DualPipe does. All others get one column, which is faster.
        self._pairs = np.zeros(len(self.steps), dtype=bool)
        if pair:
            self._pairs[:] = [len(step) > 1 for step in self.steps]
        # Index -1 of a step with one action is that action, so the second column repeats it.
        columns = [_columns(map(itemgetter(i), self.steps)) for i in ((0, -1) if self._pairs.any() else (0,))]
        self.stage, self.kind, self.micro_batch = (np.column_stack([c[i] for c in columns]) for i in range(3))
        # An array indexed by kind replaces one dict look-up for each step.
        self.direction = DIRECTION_OF_KIND[self.kind]
        self.ends = _ends(self.stage, self.kind, len(schedule.rank_of_stage), rows)
        self.early = _early(self.stage, self.kind, len(schedule.rank_of_stage)) if early else np.zeros_like(self.ends)
        if len(columns) == 2:
            # A repetition must not send its message again. `_ends` may have marked the repetition, so both columns get
            # the mark.
            self.direction[~self._pairs, 1] = NEITHER
            self.ends[~self._pairs] = self.ends[~self._pairs].max(axis=1, keepdims=True)

    @cached_property
    def first_and_last(self) -> set[Action]:
        """Return, for every stage, its first forward and the action that completes its gradients, or each row's."""
        return self._marked(self.ends)

    @cached_property
    def until_first_backward(self) -> set[Action]:
        """Return the actions that `early` marks."""
        return self._marked(self.early)

    def _marked(self, column: Ints) -> set[Action]:
        return {self.steps[i][min(side, len(self.steps[i]) - 1)] for i, side in np.argwhere(column).tolist()}

    def of_rank(self, rank: int) -> RankList:
        """Return the list of one rank."""
        if rank not in self._ranks:
            mine = slice(*self.begin[rank : rank + 2])
            work = self.stage[mine] * len(NUMBER) + self.kind[mine]
            actions = np.ones(work.shape, dtype=bool)
            if work.shape[1] > 1:
                # Repetitions are left out. `nonzero` then gives the step of each action.
                actions[:, 1] = self._pairs[mine]
            self._ranks[rank] = RankList(self.steps[mine], work[actions], np.nonzero(actions)[0])
        return self._ranks[rank]

    def equal_steps(self, program_of_stage: Ints, remote: Bools, deferred: int = 0) -> tuple[Ints, list[list[int]]]:
        """Number the steps so that steps of a rank with equal numbers run the same; return the numbers, and for each
        rank the index in `steps` of the first step of each number. `remote`: whether an action's input comes from
        another rank; `deferred`: how many first micro-batches of a stage may run otherwise than the others."""
        # The facts that decide a step's program are digits of one number, because NumPy compares integers in bulk: its
        # stage's programs, its kind, whether it is an end of its stage, whether its input comes from another rank,
        # whether its micro-batch is one of the first, and whether it is early.
        digits = ((program_of_stage[self.stage] * len(NUMBER) + self.kind) * 2 + self.ends) * 2 + remote
        number, _ = _numbered((digits * 2 + (self.micro_batch < deferred)) * 2 + self.early)
        if number.shape[1] == 2:
            # 0 means no second action, so that a single action differs from a pair of equal ones.
            second = np.where(self._pairs, number[:, 1] + 1, 0)
            number, _ = _numbered(number[:, :1] + (number.max() + 1) * second[:, None])
        ranks = len(self.begin) - 1
        rank = np.repeat(np.arange(ranks), np.diff(self.begin))
        examples = [list[int]() for _ in range(ranks)]
        # The rank is the highest digit, so numbers of a rank are consecutive, and ranks share no numbers.
        number, first = _numbered(rank * (number.max() + 1) + number[:, 0])
        for i in first.tolist():
            examples[rank[i]].append(i)
        return number, examples


def steps_of(entries: tuple[Entry, ...], pair: bool) -> list[Step]:
    """Turn a list's entries into steps: overlapped pairs (if `pair`), else one action after the other."""
    # Most schedules have no pairs. `zip` of one list makes the steps without a loop in Python.
    if Overlap not in set(map(type, entries)):
        return list(zip(entries))  # type: ignore[arg-type]
    out: list[Step] = []
    for e in entries:
        if not isinstance(e, Overlap):
            out.append((e,))
        elif pair:
            out.append((e.forward, e.backward))
        else:
            out += [(e.forward,), (e.backward,)]
    return out


def _columns(actions: Iterable[Action]) -> tuple[Ints, Ints, Ints]:
    """Return columns of stage, kind (by `NUMBER`) and micro-batch."""
    stage, kind, micro_batch = zip(*actions, strict=True)
    return ints(stage), ints([*map(NUMBER.__getitem__, kind)]), ints(micro_batch)


def _ends(stage: Ints, kind: Ints, stages: int, of_rows: bool) -> Ints:
    """Return 1 for the first forward of each stage and for the last action that makes its weights' gradients, or each
    row's."""
    stage, kind, ends = stage.ravel(), kind.ravel(), np.zeros(stage.shape, dtype=np.int64)
    # Reversed, so that the first forward is written last.
    forward = np.flatnonzero(kind == NUMBER[Kind.F])[::-1]
    # I makes no gradients of weights: with a split backward the last W completes them.
    backward = np.flatnonzero((kind == NUMBER[Kind.B]) | (kind == NUMBER[Kind.W]))
    for rows in (forward, backward):
        found = np.full(stages, -1)
        found[stage[rows]] = rows  # of several rows of a stage the last one stays
        ends.flat[found[found >= 0]] = 1
    if of_rows:  # no stage is on two ranks, so where a rank's list ends, the stage changes too
        ends.flat[backward[:-1][np.diff(stage[backward]) != 0]] = 1
    return ends


def _early(stage: Ints, kind: Ints, stages: int) -> Ints:
    """Return 1 for each stage's actions up to its first backward; of a split backward, up to the first I."""
    step = np.arange(len(stage))[:, None]
    last = np.full(stages, len(stage))  # of a stage without a backward all are early
    backward, column = np.nonzero((kind == NUMBER[Kind.B]) | (kind == NUMBER[Kind.I]))
    last[stage[backward, column][::-1]] = backward[::-1]  # of several the first one stays
    return (step <= last[stage]).astype(np.int64)


def _numbered(keys: Ints) -> tuple[Ints, Ints]:
    """Return keys as consecutive numbers in their order, and the flat index in `keys` where each first occurs."""
    flat = keys.ravel()
    found = np.full(int(flat.max(initial=0)) + 1, -1)
    # Written back to front, so that the first position of each key stays. Unlike `unique` this needs no sort.
    found[flat[::-1]] = np.arange(len(flat))[::-1]
    used = np.flatnonzero(found >= 0)
    number = np.empty(len(found), dtype=np.int64)
    number[used] = np.arange(len(used))
    return number[keys], found[used]
