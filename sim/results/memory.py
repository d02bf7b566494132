"""Bytes on each rank over the step: parameters, gradients, optimizer states, saved activations, buffers.

What is held throughout is in `states.py`, what actions claim and free in `memory_changes.py`.
Workspaces of cuBLAS are buffers, always there. Left out: NCCL's buffers, the CUDA context, DDP's bucket copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from sim.core.actions import Kind
from sim.core.columns import Floats, Ints, ragged, short
from sim.graph.build import ActionTasks
from sim.programs.stages import Stage
from sim.results.memory_changes import brings_gradients, changes_of
from sim.results.states import States


class AtMost(NamedTuple):
    """Bytes of a rank by category, each at its own maximum, and the peak of their sum."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    peak: float


class MemoryCurve(Struct, frozen=True, eq=False):
    """Bytes by category on one class of ranks; `time_s[i]` is when the i-th values begin to hold."""

    rank: int
    time_s: Floats
    parameters: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    buffers: Floats

    @property
    def total(self) -> Floats:
        """All categories together."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


class Levels(Struct, frozen=True, eq=False):
    """Bytes of several classes of ranks over the step. Class i holds `held[i]` for the whole step. From row `first[i]`
    on its rows have activations, buffers, and gradients that are freed between steps; `time_s` is the time from which
    a row's bytes hold.
    """

    held: Sequence[States]
    first: Ints
    time_s: Floats
    activations: Floats
    buffers: Floats
    gradients: Floats

    def curve(self, i: int, rank: int) -> MemoryCurve:
        """The memory of one class, whose lowest rank is `rank`."""
        rows = slice(self.first[i], self.first[i + 1] if i + 1 < len(self.first) else None)
        ones, held = np.ones(len(self.time_s[rows])), self.held[i]
        states = ones * held.parameters, held.gradients + self.gradients[rows], ones * held.optimizer
        return MemoryCurve(rank, self.time_s[rows], *states, self.activations[rows], self.buffers[rows])

    def at_most(self) -> list[AtMost]:
        """Each class's maximum of every category, and of their sum."""
        lasting = np.array([(x.parameters, x.gradients, x.optimizer) for x in self.held]).T
        rows = np.diff(np.append(self.first, len(self.time_s)))
        total = np.repeat(lasting[0] + lasting[1] + lasting[2], rows) + self.activations + self.buffers + self.gradients
        # The peak is that of the sum: categories have their maxima at other moments, so these do not add up to it.
        columns = (self.gradients, self.activations, self.buffers, total)
        come, *varying = [np.maximum.reduceat(column, self.first) for column in columns]
        return [AtMost(*row) for row in np.stack([lasting[0], lasting[1] + come, lasting[2], *varying]).T.tolist()]


def levels(
    stages: Sequence[dict[int, Stage]],
    done: Sequence[ActionTasks],
    start_s: Floats,
    end_s: Floats,
    held: Sequence[States],
    fine: bool = False,
) -> Levels:
    """The memory of classes of ranks over the step; `done` are their actions, `start_s` and `end_s` of all tasks.

    What an action claims and frees is placed at its start and end, or (`fine`) block by block within it; the peak is
    the same, unless two actions overlap (`overlap`).
    """
    table, counts, pick = _changes_of(stages, [x.listed.work for x in done], fine)
    # All classes are worked out at once, as columns: one row for each change of each action of each class.
    action, row = ragged(counts, pick)
    # In most layouts gradients stay for the whole step. They then have no column, which saves a quarter of the time.
    columns = 3 if table[3].any() else 2
    share, *moved = table[: 1 + columns, row]
    first, last = np.concatenate([x.first for x in done]), np.concatenate([x.last for x in done])
    start, end = start_s[first][action], end_s[last][action]
    index = np.repeat(np.arange(len(done)), [len(x.first) for x in done])[action]
    nothing = np.zeros(len(done))  # at the beginning, so that every class has a row from 0 s on
    # `start + 1.0 * (end - start)` may miss `end` by the last bit, and what is freed would outlive its action.
    time = np.append(nothing, np.where(share < 1.0, start + share * (end - start), end))
    index = np.append(np.arange(len(done)), index)
    changes = np.append([nothing] * columns, moved, axis=1)
    # Clipping and optimizer run behind a rank's last action.
    at_end = [i for i, x in enumerate(held) if x.at_end > 0 and len(done[i].last)]
    if at_end:
        time = np.append(time, [end_s[done[i].last].max() for i in at_end])
        index = np.append(index, at_end)
        none = [0.0] * len(at_end)
        changes = np.append(changes, [none, [held[i].at_end for i in at_end], none][:columns], axis=1)
    put_off = _put_off(stages, done, end_s)
    if len(put_off):
        time, index = np.append(time, put_off[:, 0]), np.append(index, put_off[:, 1].astype(np.int64))
        others = np.zeros((columns - 1, len(put_off)))
        changes = np.append(changes, np.vstack([put_off[:, 2], others]), axis=1)
    time, index, (activations, buffers, *gradients) = _summed(time, index, changes, len(done))
    buffers += np.array([x.gathered for x in held])[index]
    begins, come = np.searchsorted(index, np.arange(len(done))), gradients[0] if gradients else np.zeros(len(time))
    return Levels(held, begins, time, activations, buffers, come)


def _put_off(stages: Sequence[dict[int, Stage]], done: Sequence[ActionTasks], end_s: Floats) -> Floats:
    """Return what backwards keep for weight gradients that they put off (`Stage.deferral`), from their own end to that
    of the rank's last action: rows of time, class and bytes."""
    rows = list[tuple[float, float, float]]()
    for i, (mine, x) in enumerate(zip(stages, done, strict=True)):
        for number, stage in mine.items():
            if stage.deferral is None:
                continue
            times = [
                end_s[last]
                for action, last in zip(x.listed.actions, x.last, strict=True)
                if action.stage == number and stage.defers(action)
            ]
            rows += [(time, i, stage.deferral.bytes) for time in times]
            rows.append((end_s[x.last].max(), i, -stage.deferral.bytes * len(times)))
    return np.array(rows).reshape(-1, 3)


def _summed(time: Floats, index: Ints, changes: Floats, classes: int) -> tuple[Floats, Ints, Floats]:
    """Add up changes of memory (`[columns, rows]`, each at a time and of the class `index`) to what is held.

    Returns:
        A row for each class and instant: its time, its class, and the bytes held from then on.
    """
    # What is freed at an instant comes first: the allocator gives the next action the last one's memory.
    order = np.lexsort((changes.sum(axis=0) > 0, time, short(index)))
    time, index, bytes_now = time[order], index[order], changes[:, order]
    # Each class starts from nothing, whatever the class before it ended with.
    for a, b in pairwise(np.searchsorted(index, np.arange(classes + 1)).tolist()):
        np.cumsum(bytes_now[:, a:b], axis=1, out=bytes_now[:, a:b])
    # Of the changes of one instant only the outcome holds for any time.
    last = np.flatnonzero(np.append((time[1:] != time[:-1]) | (index[1:] != index[:-1]), True))
    # Rounded sums may end a little below 0.
    return time[last], index[last], bytes_now[:, last].clip(min=0.0)


# Either is a stage's first to make gradients of weights; a split backward's input half makes none.
GRADIENT_MAKERS = [i for i, kind in enumerate(Kind) if kind in (Kind.B, Kind.W)]


def _changes_of(stages: Sequence[dict[int, Stage]], works: Sequence[Ints], fine: bool) -> tuple[Floats, Ints, Ints]:
    """Return what actions claim and free, [4, rows]; how many rows each kind of action has, and the kind of every
    action. `works`: what the actions compute, class by class (see `schedule_columns.RankList`)."""
    numbers: dict[Stage, int] = {}  # equal stages are one object
    picks = []
    for mine, work in zip(stages, works, strict=True):
        number = np.zeros(max(mine) + 1, dtype=np.int64)
        number[list(mine)] = [numbers.setdefault(stage, len(numbers)) for stage in mine.values()]
        # The first backward of each stage alone brings gradients, so it is a kind of its own.
        first = np.zeros(len(work), dtype=np.int64)
        if any(brings_gradients(stage) for stage in mine.values()):
            making = np.flatnonzero(np.isin(work % len(Kind), GRADIENT_MAKERS))
            first[making[np.unique(work[making] // len(Kind), return_index=True)[1]]] = 1
        picks.append((number[work // len(Kind)] * len(Kind) + work % len(Kind)) * 2 + first)
    pick = np.concatenate(picks)
    kinds = [(stage, kind, first) for stage in numbers for kind in Kind for first in (False, True)]
    # Thousands of actions are of a few kinds, and the changes of a kind are worked out once.
    used = np.bincount(pick, minlength=len(kinds)).tolist()
    tables = [_table(*kind, fine) if use else np.zeros((0, 4)) for kind, use in zip(kinds, used, strict=True)]
    return np.concatenate(tables).T, np.array([len(t) for t in tables]), pick


def overlap(step: Ints) -> bool:
    """True if a rank runs two actions at once, which need the most at different moments: their blocks decide."""
    return bool((step[1:] == step[:-1]).any())


def peak_bytes(stages: dict[int, Stage], work: Ints, step: Ints, held: States, fine: bool = False) -> float:
    """The peak of `levels`, which takes no simulation: a rank's steps follow each other, whenever they run. `work`,
    `step`: as in `schedule_columns.RankList`."""
    table, counts, pick = _changes_of([stages], [work], fine)
    action, row = ragged(counts, pick)
    changes = table[1:, row]
    order = np.lexsort((changes.sum(axis=0) > 0, table[0, row], step[action]))  # what is freed comes first, as there
    total = np.cumsum(changes[:, order], axis=1)
    activations, buffers, gradients = total.clip(min=0.0)
    lasting = held.parameters + held.gradients + held.optimizer
    at_end = lasting + float(total[2, -1] if total.size else 0.0) + held.gathered + held.at_end
    return float((lasting + activations + (buffers + held.gathered) + gradients).max(initial=at_end))


@lru_cache(maxsize=256)
def _table(stage: Stage, kind: Kind, first: bool, fine: bool) -> Floats:
    """`changes_of` as rows; equal stages are one object."""
    return np.array(changes_of(stage, kind, first, fine and not stage.offload)).reshape(-1, 4)


def thinned(total: Floats, points: int) -> Ints:
    """Rows of a curve to draw: all, or of more than `points` the first and the highest of each run of neighbours."""
    rows = np.arange(len(total))
    if len(total) <= points:
        return rows
    runs = np.array_split(rows, points // 2)
    return np.unique([i for run in runs for i in (run[0], run[total[run].argmax()])])


def over_steps(curve: MemoryCurve, step_time_s: float, optimizer_start_s: float, steps: int) -> MemoryCurve:
    """The curve of the first `steps` steps: optimizer states appear at the end of the first (torch makes them late)."""
    # The optimizer's start becomes a row of its own, as its states appear between two others.
    shift = np.concatenate([curve.time_s + i * step_time_s for i in range(steps)])
    cut = np.sort(np.append(shift, optimizer_start_s))
    at = (np.searchsorted(shift, cut, side="right") - 1).clip(min=0)

    columns = {name: np.tile(getattr(curve, name), steps)[at] for name in AtMost._fields[:-1]}
    columns["optimizer"] = np.where(cut < optimizer_start_s, 0.0, columns["optimizer"])
    return replace(curve, time_s=cut, **columns)
