"""Bytes on each rank over the step: parameters, gradients, optimizer states, saved activations, buffers.

What is held throughout is in `states.py`. A forward's saved bytes count from its start, a backward's until its end;
after a split backward's input half, what the weight half needs is left: the inputs of linear layers and the gradients
of their outputs. Buffers are transient: what the running operator or recomputation holds, and what ZeRO gathers.
Gradients live in persistent buffers (Megatron's), or come with a step's first backward (captured programs, which set
them to None).
Workspaces of cuBLAS are buffers, always there. Left out: NCCL's buffers, the CUDA context, DDP's bucket copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from sim.core.actions import Kind
from sim.core.dtypes import dtype_bytes
from sim.core.program import Block, BlockKind, Compute, Phase
from sim.graph.build import ActionTasks
from sim.graph.taskgraph import ragged
from sim.programs.stages import Stage
from sim.results.metrics import short
from sim.results.states import States

Bytes = NDArray[np.float64]
Ints = NDArray[np.int64]


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
    time_s: Bytes
    parameters: Bytes
    gradients: Bytes
    optimizer: Bytes
    activations: Bytes
    buffers: Bytes

    @property
    def total(self) -> Bytes:
        """All categories together."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


class Levels(Struct, frozen=True, eq=False):
    """Bytes of several classes of ranks over the step. Class i holds `held[i]` for the whole step. From row `first[i]`
    on its rows have activations, buffers, and gradients that are freed between steps; `time_s` is the time from which
    a row's bytes hold.
    """

    held: Sequence[States]
    first: Ints
    time_s: Bytes
    activations: Bytes
    buffers: Bytes
    gradients: Bytes

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
    start_s: Bytes,
    end_s: Bytes,
    held: Sequence[States],
    fine: bool = False,
) -> Levels:
    """The memory of classes of ranks over the step; `done` are their actions, `start_s` and `end_s` of all tasks.

    What an action claims and frees is placed at its start and end, or (`fine`) block by block within it; the peak is
    the same.
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
    # What is freed at an instant comes first: the allocator gives the next action the last one's memory.
    order = np.lexsort((changes.sum(axis=0) > 0, time, short(index)))
    time, index, bytes_now = time[order], index[order], changes[:, order]
    # Each class starts from nothing, whatever the class before it ended with.
    for a, b in pairwise(np.searchsorted(index, np.arange(len(done) + 1)).tolist()):
        np.cumsum(bytes_now[:, a:b], axis=1, out=bytes_now[:, a:b])
    # Of the changes of one instant only the outcome holds for any time.
    last = np.flatnonzero(np.append((time[1:] != time[:-1]) | (index[1:] != index[:-1]), True))
    index = index[last]
    # Rounded sums may end a little below 0.
    activations, buffers, *gradients = bytes_now[:, last].clip(min=0.0)
    buffers += np.array([x.gathered for x in held])[index]
    begins, come = np.searchsorted(index, np.arange(len(done))), gradients[0] if gradients else np.zeros(len(last))
    return Levels(held, begins, time[last], activations, buffers, come)


# Either is a stage's first to make gradients of weights; a split backward's input half makes none.
GRADIENT_MAKERS = [i for i, kind in enumerate(Kind) if kind in (Kind.B, Kind.W)]


def _changes_of(stages: Sequence[dict[int, Stage]], works: Sequence[Ints], fine: bool) -> tuple[Bytes, Ints, Ints]:
    """What actions claim and free, [4, rows]; how many rows each sort of action has, and the sort of every action.
    `works`: what the actions compute, class by class (see `schedule_columns.RankList`)."""
    numbers: dict[Stage, int] = {}  # equal stages are one object
    picks = []
    for mine, work in zip(stages, works, strict=True):
        number = np.zeros(max(mine) + 1, dtype=np.int64)
        number[list(mine)] = [numbers.setdefault(stage, len(numbers)) for stage in mine.values()]
        # The first backward of each stage alone brings gradients, so it is a sort of its own.
        first = np.zeros(len(work), dtype=np.int64)
        if any(brings_gradients(stage) for stage in mine.values()):
            making = np.flatnonzero(np.isin(work % len(Kind), GRADIENT_MAKERS))
            first[making[np.unique(work[making] // len(Kind), return_index=True)[1]]] = 1
        picks.append((number[work // len(Kind)] * len(Kind) + work % len(Kind)) * 2 + first)
    pick = np.concatenate(picks)
    sorts = [(stage, kind, first) for stage in numbers for kind in Kind for first in (False, True)]
    # Thousands of actions are of a few sorts, and the changes of a sort are worked out once.
    used = np.bincount(pick, minlength=len(sorts)).tolist()
    tables = [_table(*sort, fine) if use else np.zeros((0, 4)) for sort, use in zip(sorts, used, strict=True)]
    return np.concatenate(tables).T, np.array([len(t) for t in tables]), pick


def peak_bytes(stages: dict[int, Stage], work: Ints, step: Ints, held: States) -> float:
    """The peak of `levels`, which takes no simulation: a rank's steps follow each other, whenever they run, and each
    needs the most when all of its actions have begun. `work`, `step`: as in `schedule_columns.RankList`."""
    table, counts, pick = _changes_of([stages], [work], False)
    begin = (np.cumsum(counts) - counts)[pick]
    # Even numbers are the begins of a step's actions, odd ones their ends: two actions that overlap begin together.
    order = np.argsort(np.append(2 * step, 2 * step + 1), kind="stable")
    changes = table[1:, np.append(begin, begin + 1)[order]]
    total = np.cumsum(changes, axis=1)
    activations, buffers, gradients = total[:, order < len(step)].clip(min=0.0)
    lasting = held.parameters + held.gradients + held.optimizer
    at_end = lasting + float(total[2, -1] if total.size else 0.0) + held.gathered + held.at_end
    return float((lasting + activations + (buffers + held.gathered) + gradients).max(initial=at_end))


@lru_cache(maxsize=256)
def _table(stage: Stage, kind: Kind, first: bool, fine: bool) -> Bytes:
    """`_changes` as rows; equal stages are one object."""
    return np.array(_changes(stage, kind, first, fine and not stage.offload)).reshape(-1, 4)


# The fraction of an action that has passed; bytes of activations, of buffers and of gradients that come and go.
Change = tuple[float, float, float, float]


class BlockStep(Struct, frozen=True):
    """What a block claims as it begins, holds while it runs, keeps until the action ends, and frees as it ends; the
    gradients that it brings."""

    claimed: float
    transient: float
    until_end: float
    freed: float
    gradients: float


def brings_gradients(stage: Stage) -> bool:
    """True if gradients are allocated in a step's first backward."""
    return stage.dp.fleeting_gradient_bytes > 0 or any(b.own is not None for b in stage.blocks)


def _changes(stage: Stage, kind: Kind, first: bool, fine: bool) -> list[Change]:
    """What an action of a stage claims and frees, and when; as two changes, or as two for each block.

    A backward frees each block's activations before the next block's, so its peak is found block by block. `first`: the
    step's first of its kind, which brings gradients where they come and go.
    """
    blocks = stage.blocks if kind is Kind.F else stage.blocks[::-1]
    brought = _brought(stage, kind) if first else [0.0] * len(blocks)
    if stage.offload:
        begin, end = _offloaded_changes(stage, kind)
        return [(*begin, 0.0), (*end, sum(brought))]
    if kind is Kind.F:
        steps = [
            BlockStep(sum(s.bytes for s in b.saved), b.forward_peak_bytes, held_to_end(b), 0.0, 0.0) for b in blocks
        ]
    else:
        late = _late_gradients(stage, kind)
        steps = [
            BlockStep(0.0, peak + (new if b.own is None else 0.0), held, _freed_bytes(b, kind), new)
            for b, peak, new, held in zip(blocks, _backward_peaks(stage, kind, first), brought, late[:-1], strict=True)
        ]
        steps += [BlockStep(0.0, 0.0, late[-1], 0.0, 0.0)] * (late[-1] > 0)
    if fine and blocks:
        return _block_by_block(stage, kind, steps)
    # As two changes: everything is claimed at the start, and the buffers are as large as makes the peak the same.
    claimed, freed = sum(x.claimed for x in steps), sum(x.freed for x in steps)
    peak, now = 0.0, 0.0
    for x in steps:
        now += x.claimed + x.until_end
        peak = max(peak, now + x.transient - claimed)
        now += x.gradients - x.freed
    return [(0.0, claimed, peak, 0.0), (1.0, -freed, -peak, sum(brought))]


def held_to_end(block: Block) -> float:
    """Bytes that a forward holds until it ends, without saving them."""
    return 0.0 if block.own is None else block.own.until_forward_end


def _brought(stage: Stage, kind: Kind) -> list[float]:
    """Bytes of the gradients that a step's first backward leaves, last block first: of shards where each micro-batch's
    are reduced."""
    if kind not in (Kind.B, Kind.W):
        return [0.0] * len(stage.blocks)
    dp = stage.dp
    cut, expert_cut = (dp.shard, dp.expert_shard) if reduces_at_once(stage) else (1, 1)
    each = dp.fleeting_gradient_bytes
    return [
        (b.params / cut + b.expert_params / expert_cut) * each if b.own is None else b.own.gradients / cut
        for b in stage.blocks[::-1]
    ]


def _late_gradients(stage: Stage, kind: Kind) -> list[float]:
    """Bytes of gradients that a backward holds until it ends, last block first: each block's own come when it has
    ended, so that they are there from the next one on, and the first block's after all."""
    each = stage.dp.late_gradient_bytes if kind in (Kind.B, Kind.W) else 0.0
    return [0.0, *((b.params + b.expert_params) * each for b in stage.blocks[::-1])]


def reduces_at_once(stage: Stage) -> bool:
    """True if the gradients of each micro-batch, or row of them, are reduced and sharded."""
    dp = stage.dp
    return dp.zero >= 2 and dp.keeps_shards and max(dp.shard, dp.expert_shard) > 1


def _freed_bytes(block: Block, kind: Kind) -> float:
    """Saved bytes that a block's backward, whole or a half of it, frees."""
    # The input half frees all that the weight half does not need; that goes with the weight half.
    late = 0.0 if kind is Kind.B else late_bytes(block)
    return late if kind is Kind.W else sum(s.bytes for s in block.saved) - late


def _backward_peaks(stage: Stage, kind: Kind, first: bool = False) -> list[float]:
    """Transient bytes of each block's backward, last block first, beyond what is saved.

    With ZeRO-2 and -3 a block's gradients, once it has them all, are copied into the buffer that is reduced, and freed;
    the buffer stays until the next block's is needed (torch's FSDP2: `post_backward` in `_fsdp_param_group.py`). Whole
    gradients of a row of micro-batches are among the states.
    """
    dp, out, sent = stage.dp, [], 0.0
    own_bytes = 0.0 if dp.each_row else dp.parameter_bytes
    reduces = reduces_at_once(stage) and kind is not Kind.I
    for b in stage.blocks[::-1]:
        # A weight half multiplies what is kept already; its matmuls' outputs are gradients, counted elsewhere.
        inner = 0.0 if kind is Kind.W else b.backward_peak_bytes
        if first and b.own is not None and kind is Kind.B and not reduces:
            inner = b.own.first_backward_peak
        # As the copy is made, the gradients and the buffer are both there, and the block's activations no longer are.
        elements = (b.params + b.expert_params) if reduces else 0
        at_end = elements * (own_bytes + dp.gradient_bytes) - _freed_bytes(b, kind)
        out.append(max(inner + sent, at_end, 0.0))
        sent = elements * dp.gradient_bytes
    return out


def stranded_bytes(stages: Iterable[Stage], segment_bytes: float) -> float:
    """By how much a freed segment that the loss cannot use raises what torch's allocator reserves at the most.

    Nothing where another block's backward allocates so much more than the head's that it has room for the segment.
    """
    for stage in stages:
        if stage.blocks and stage.blocks[-1].kind is BlockKind.HEAD:
            # The head's backward runs first and leaves the segment behind; a larger peak of a later block fills it.
            # A loss that works in place in its backward needs the most at the end of its forward.
            forward = stage.blocks[-1].forward_peak_bytes
            at_most = max(forward, _changes(stage, Kind.B, False, False)[0][2])
            return max(0.0, max(forward, _backward_peaks(stage, Kind.B)[0]) + segment_bytes - at_most)
    return 0.0


def on_device(saved: Sequence[float]) -> list[float]:
    """Bytes of offloaded activations on the device while each block of a stage runs, forward or backward.

    Its own and those of the block before it: in the forward these are on their way to the host, which the block after
    waits for; in the backward they are being fetched for when it is their turn.

    >>> on_device([1.0, 10.0, 100.0])
    [1.0, 11.0, 110.0]
    """
    return [mine + before for mine, before in zip(saved, (0.0, *saved), strict=False)]


def _offloaded_changes(stage: Stage, kind: Kind) -> list[tuple[float, float, float]]:
    """The two changes of an action whose activations are in host memory before and after it.

    What a split backward's weight half needs is not fetched again, so it stays on the device between both halves.
    """
    blocks = stage.blocks
    late = [late_bytes(b) if kind in (Kind.I, Kind.W) else 0.0 for b in blocks]
    left = sum(late)
    if kind is Kind.W:
        peak = max(_backward_peaks(stage, kind), default=0.0)
        return [(0.0, 0.0, peak), (1.0, -left, -peak)]
    peaks = [b.forward_peak_bytes for b in blocks] if kind is Kind.F else _backward_peaks(stage, kind)[::-1]
    # Backwards go from the last block to the first; forwards need the same, read from the end.
    moments, stays = [(left, 0.0)], 0.0
    present = on_device([sum(s.bytes for s in b.saved) for b in blocks])
    for here, peak, later in zip(present[::-1], peaks[::-1], late[::-1], strict=True):
        moments.append((stays + here, peak))
        stays += later
    kept, peak = max(moments, key=sum)
    return [(0.0, kept, peak), (1.0, left - kept, -peak)]


def late_bytes(block: Block) -> float:
    """Bytes that a split backward keeps for its weight half."""
    needed = sum(s.bytes for s in block.saved if s.late)
    return needed + block.rebuilt_bytes + output_gradients_bytes(block)


def output_gradients_bytes(block: Block) -> float:
    """What a split backward keeps for its weight half besides saved inputs: the gradients of linear layers' outputs.

    A weight gradient's matmul is `[outputs, rows] x [rows, inputs]`, shape (batch, outputs, inputs, rows).
    """
    total = 0.0
    for i in block.backward:
        if isinstance(i, Compute) and i.phase is Phase.WEIGHT_GRAD and i.kind in ("gemm", "grouped_gemm"):
            total += i.shape[0] * i.shape[1] * i.shape[3] * dtype_bytes(i.dtype)
    return total


def _block_by_block(stage: Stage, kind: Kind, steps: list[BlockStep]) -> list[Change]:
    """The changes of an action where they happen, blocks taking the share of its time that their seconds are."""
    seconds = stage.block_seconds(kind)
    seconds = [*seconds, *[0.0] * (len(steps) - len(seconds))]  # what comes when the last block has ended
    total = sum(seconds) or 1.0  # a price of 0 s, as tests have it, has no shares
    out: list[Change] = []
    passed = held = 0.0
    for x, mine in zip(steps, seconds, strict=True):
        held += x.until_end
        out.append((passed / total, x.claimed, x.until_end + x.transient, 0.0))
        passed += mine
        out.append((min(1.0, passed / total), -x.freed, -x.transient, x.gradients))
    return [*out, (1.0, 0.0, -held, 0.0)] if held else out


def thinned(total: Bytes, points: int) -> Ints:
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
