"""The action lists of a schedule as columns, over all ranks of the pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.core.actions import Action, Entry, Kind, Overlap, Schedule, Step
from sim.graph.messages import DIRECTION, NEITHER
from sim.graph.taskgraph import Ints, ints

NUMBER = {kind: i for i, kind in enumerate(Kind)}
DIRECTION_OF_KIND = ints([DIRECTION[kind] for kind in Kind])
Bools = NDArray[np.bool_]


class RankList(NamedTuple):
    """The list of one rank: the work number of each action in order, and its step, counted from 0."""

    steps: list[Step]
    work: Ints
    step: Ints

    @property
    def actions(self) -> list[Action]:
        """All of them."""
        return list(chain.from_iterable(self.steps))


def work_number(stage: int, kind: Kind) -> int:
    """Kind and stage of an action as one number."""
    return stage * len(NUMBER) + NUMBER[kind]


class ScheduleColumns:
    """What all ranks of the pipeline run: rank r has `steps[begin[r] : begin[r + 1]]`.

    Of a step's actions, [steps, 1 or 2] (of a step with only one of two, the second column repeats it): `stage`, `kind`
    (by `NUMBER`), `micro_batch`, `direction` (of its messages, NEITHER where it is a repetition), and `ends`, whether
    it is the first forward of its stage or the last that makes gradients of its weights.
    """

    def __init__(self, schedule: Schedule, pair: bool) -> None:
        lists = [steps_of(entries, pair) for entries in schedule.ranks]
        self.steps: list[Step] = list(chain.from_iterable(lists))
        self.begin: list[int] = [0, *np.cumsum([len(x) for x in lists]).tolist()]
        self._ranks: dict[int, RankList] = {}
        # Few schedules overlap pairs, as DualPipe does. All others get one column, and half of the work falls away.
        self._pairs = np.zeros(len(self.steps), dtype=bool)
        if pair:
            self._pairs[:] = [len(step) > 1 for step in self.steps]
        # The last of one action is that action itself, so a step without a second repeats its first.
        columns = [_columns(map(itemgetter(i), self.steps)) for i in ((0, -1) if self._pairs.any() else (0,))]
        self.stage, self.kind, self.micro_batch = (np.column_stack([c[i] for c in columns]) for i in range(3))
        # A lookup by number does for all steps what a dict would do one by one.
        self.direction = DIRECTION_OF_KIND[self.kind]
        self.ends = _ends(self.stage, self.kind, len(schedule.rank_of_stage))
        if len(columns) == 2:
            # A repetition must not send its message twice. It may be the one that `_ends` found, so both columns take
            # the mark.
            self.direction[~self._pairs, 1] = NEITHER
            self.ends[~self._pairs] = self.ends[~self._pairs].max(axis=1, keepdims=True)

    @cached_property
    def first_and_last(self) -> set[Action]:
        """For every stage, its first forward and the action that completes its gradients."""
        return {self.steps[i][min(side, len(self.steps[i]) - 1)] for i, side in np.argwhere(self.ends).tolist()}

    def of_rank(self, rank: int) -> RankList:
        """The list of one rank."""
        if rank not in self._ranks:
            mine = slice(*self.begin[rank : rank + 2])
            work = self.stage[mine] * len(NUMBER) + self.kind[mine]
            actions = np.ones(work.shape, dtype=bool)
            if work.shape[1] > 1:
                # The repetitions are no actions and drop out here. `nonzero` then gives the step of each that is left.
                actions[:, 1] = self._pairs[mine]
            self._ranks[rank] = RankList(self.steps[mine], work[actions], np.nonzero(actions)[0])
        return self._ranks[rank]

    def equal_steps(self, program_of_stage: Ints, remote: Bools) -> tuple[Ints, list[list[int]]]:
        """Numbers steps such that those of a rank with one number run the same, and says for each rank where in `steps`
        the first of each of its numbers is. `remote`: of actions, whether their input comes from another rank."""
        # What decides about a step's program, as digits of one number: its stage's programs, its kind, whether it is an
        # end of its stage, and whether its input comes from afar. Integers are compared in bulk, tuples are not.
        number, _ = _numbered(((program_of_stage[self.stage] * len(NUMBER) + self.kind) * 2 + self.ends) * 2 + remote)
        if number.shape[1] == 2:
            # 0 stands for no second action, so a pair of twice the same differs from one alone.
            second = np.where(self._pairs, number[:, 1] + 1, 0)
            number, _ = _numbered(number[:, :1] + (number.max() + 1) * second[:, None])
        ranks = len(self.begin) - 1
        rank = np.repeat(np.arange(ranks), np.diff(self.begin))
        examples = [list[int]() for _ in range(ranks)]
        # The rank is the highest digit. Equal steps of two ranks get two numbers, and those of a rank follow each
        # other.
        number, first = _numbered(rank * (number.max() + 1) + number[:, 0])
        for i in first.tolist():
            examples[rank[i]].append(i)
        return number, examples


def steps_of(entries: tuple[Entry, ...], pair: bool) -> list[Step]:
    """Entries as what runs together: pairs where they overlap (`pair`), else one action after the other."""
    # Most schedules have no pairs. `zip` of one list then makes all the steps without a loop in Python.
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
    """Stage, kind by `NUMBER`, and micro-batch."""
    stage, kind, micro_batch = zip(*actions, strict=True)
    return ints(stage), ints([*map(NUMBER.__getitem__, kind)]), ints(micro_batch)


def _ends(stage: Ints, kind: Ints, stages: int) -> Ints:
    """1 for the first forward of each stage, and for the last that makes gradients of its weights."""
    stage, kind, ends = stage.ravel(), kind.ravel(), np.zeros(stage.shape, dtype=np.int64)
    # Reversed, so that the first forward is written last and stays.
    forward = np.flatnonzero(kind == NUMBER[Kind.F])[::-1]
    # I makes no gradients of weights, so where a backward is split the last W ends them.
    backward = np.flatnonzero((kind == NUMBER[Kind.B]) | (kind == NUMBER[Kind.W]))
    for rows in (forward, backward):
        found = np.full(stages, -1)
        found[stage[rows]] = rows  # of several, the last one stays
        ends.flat[found[found >= 0]] = 1
    return ends


def _numbered(keys: Ints) -> tuple[Ints, Ints]:
    """Keys as consecutive numbers in their order, and the flat index in `keys` where each first occurs."""
    flat = keys.ravel()
    found = np.full(int(flat.max(initial=0)) + 1, -1)
    # Written back to front, so that the first place of each key stays. Counting like this needs no sort, unlike
    # `unique`.
    found[flat[::-1]] = np.arange(len(flat))[::-1]
    used = np.flatnonzero(found >= 0)
    number = np.empty(len(found), dtype=np.int64)
    number[used] = np.arange(len(used))
    return number[keys], found[used]
