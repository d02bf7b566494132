"""The action lists of a schedule as columns, over all ranks of the pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import itemgetter

import numpy as np

from sim.actions import Action, Entry, Kind, Overlap, Schedule, Step
from sim.graph.taskgraph import Ints, ints

NUMBER = {kind: i for i, kind in enumerate(Kind)}


class Lists:
    """What all ranks of the pipeline run: rank r has `steps[begin[r] : begin[r + 1]]`.

    `micro_batch` and `ends` [steps, 1 or 2] are those of a step's actions, twice those of the only one: whether it is
    the first forward of its stage or the last that makes gradients of its weights. Steps of equal `alike` [steps]
    differ in their micro-batches alone; the first of each number is at `examples[number]`.
    """

    def __init__(self, schedule: Schedule, pair: bool) -> None:
        lists = [steps_of(entries, pair) for entries in schedule.ranks]
        self.steps: list[Step] = list(chain.from_iterable(lists))
        self.begin: list[int] = [0, *np.cumsum([len(x) for x in lists]).tolist()]
        pairs = np.array([len(step) > 1 for step in self.steps]) if pair else np.zeros(len(self.steps), dtype=bool)
        columns = [_columns(map(itemgetter(i), self.steps)) for i in ((0, -1) if pairs.any() else (0,))]
        stage, kind, self.micro_batch = (np.column_stack([c[i] for c in columns]) for i in range(3))
        self.ends = _ends(stage, kind, len(schedule.rank_of_stage))
        if len(columns) == 2:
            self.ends[~pairs] = self.ends[~pairs].max(axis=1, keepdims=True)
        number, _ = _numbered((stage * len(NUMBER) + kind) * 2 + self.ends)
        if len(columns) == 2:
            number[:, 0] += (number.max() + 1) * np.where(pairs, number[:, 1] + 1, 0)
        self.alike, self.examples = _numbered(number[:, 0])

    def first_and_last(self) -> set[Action]:
        """Of every stage, the forward that runs first and what ends its gradients."""
        return {self.steps[i][min(side, len(self.steps[i]) - 1)] for i, side in np.argwhere(self.ends).tolist()}


def steps_of(entries: tuple[Entry, ...], pair: bool) -> list[Step]:
    """Entries as what runs together: pairs where they overlap (`pair`), else one action after the other."""
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
    forward = np.flatnonzero(kind == NUMBER[Kind.F])[::-1]
    backward = np.flatnonzero((kind == NUMBER[Kind.B]) | (kind == NUMBER[Kind.W]))
    for rows in (forward, backward):
        found = np.full(stages, -1)
        found[stage[rows]] = rows  # of several, the last one stays
        ends.flat[found[found >= 0]] = 1
    return ends


def _numbered(keys: Ints) -> tuple[Ints, Ints]:
    """Keys as numbers without gaps, in their order; and where in `keys`, flat, each first stands."""
    flat = keys.ravel()
    found = np.full(int(flat.max(initial=0)) + 1, -1)
    found[flat[::-1]] = np.arange(len(flat))[::-1]
    used = np.flatnonzero(found >= 0)
    number = np.empty(len(found), dtype=np.int64)
    number[used] = np.arange(len(used))
    return number[keys], found[used]
