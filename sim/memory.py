"""Bytes on each rank over the step: parameters, gradients, optimizer states, saved activations, buffers.

States per parameter (Rajbhandari et al. 2020, section 3.1): stored parameter, gradient in `grad_dtype`, and for AdamW
two fp32 moments, with an fp32 master copy where parameters are kept in 16 bits: 2+2+12 with 16-bit gradients, 2+4+12
with fp32 ones, 4+4+8 in fp32. ZeRO-1 shards the optimizer, ZeRO-2 also the gradients, ZeRO-3 also the parameters. Of
fp32 parameters that are cast on use, FSDP frees a layer's 16-bit copies after it; elsewhere (torch.autocast) each
layer's backward needs its own, and all but the embedding's are there.

A forward's saved bytes count from its start, a backward's until its end; after a split backward's input half, what the
weight half needs is left: the inputs of linear layers and the gradients of their outputs. Buffers are transient: what
the running operator or recomputation holds, and what ZeRO gathers. Gradients live in persistent buffers (Megatron's).
Workspaces of cuBLAS are buffers, always there. Left out: NCCL's buffers, the CUDA context, DDP's bucket copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.actions import Kind
from sim.dtypes import dtype_bytes
from sim.graph.build import Acted
from sim.graph.data_parallel import compute_bytes
from sim.graph.stages import Stage
from sim.graph.taskgraph import ragged
from sim.metrics import short
from sim.models.head import tied_params
from sim.plan import Plan
from sim.program import Block, Compute, Phase
from topology.spec import GpuSpec

Bytes = NDArray[np.float64]
Ints = NDArray[np.int64]
GROUPED_STREAMS = 4  # of Transformer Engine's grouped matmuls, each with a workspace
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True, slots=True)
class States:
    """What a rank holds for the whole step, and what gathering and reducing needs for the moment. Bytes."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float


@dataclass(frozen=True, slots=True, eq=False)
class MemoryCurve:
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


def states(plan: Plan, stages: Sequence[Stage]) -> States:
    """Parameters, gradients and optimizer states of a rank that holds these stages, by dtype and ZeRO stage."""
    t = plan.scenario.training
    assert t is not None
    dp = stages[0].dp
    blocks = [b for s in stages for b in s.blocks]
    copied = _tied_copy(plan, stages)
    dense = sum(b.params for b in blocks) + (copied if t.lora is None else 0)
    frozen = float(sum(b.frozen_params for b in blocks) + (copied if t.lora is not None else 0))
    experts = sum(b.expert_params for b in blocks)
    sharded = dense / dp.shard + experts / dp.expert_shard
    whole = float(dense + experts)
    kept = dtype_bytes(t.param_dtype)
    optimizer = (8.0 if t.optimizer == "adamw" else 0.0) + (4.0 if kept < 4 else 0.0)
    held = (sharded + frozen / dp.shard if dp.zero == 3 else whole + frozen) * kept
    gradients_sharded = dp.zero >= 2 and dp.each_micro_batch
    shared, gathered = max(dp.shard, dp.expert_shard) > 1, 0.0
    if dp.zero == 3 and shared:
        sizes = sorted((b.held_params + b.expert_params for b in blocks), reverse=True)
        gathered = sum(sizes[:2] if dp.reshard else sizes) * dp.parameter_bytes
    elif kept > compute_bytes(t.precision):
        casts = [b.held_params + b.expert_params for b in blocks if dp.zero == 3 or b.name != "embedding"]
        tied = tied_params(plan.scenario) if any(b.name == "head" for b in blocks) else 0
        gathered = (max(casts, default=0) if dp.zero == 3 else sum(casts) + tied) * dp.parameter_bytes
    quantized = sorted((b.quantized_bytes for b in blocks), reverse=True)
    gathered += sum(quantized[:2] if dp.zero == 3 and dp.reshard else quantized)  # of what is gathered, where it is
    gathered += max((b.workspace_bytes for b in blocks), default=0.0) + _workspaces(plan, experts > 0)
    return States(
        held,
        (sharded if gradients_sharded else whole) * dtype_bytes(t.grad_dtype),
        (sharded if dp.zero >= 1 else whole) * optimizer,
        gathered,
    )


class Workspace(NamedTuple):
    """Bytes of one cuBLAS workspace: torch's for a thread and stream, Transformer Engine's for a stream."""

    torch: float
    transformer_engine: float


def matmul_workspace(gpu: GpuSpec) -> Workspace:
    """Both take them from torch's allocator with the first matmul and keep them.

    torch: ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`; Transformer Engine: module/base.py,
    `get_cublas_workspace_size_bytes`. Both are larger from Hopper on, the first GPUs with 8-bit floating point.
    """
    if gpu.name == "cpu":
        return Workspace(0.0, 0.0)
    large = 32.0 * 2**20
    return Workspace(large, large) if "fp8" in gpu.peak_flops_per_s else Workspace(8_519_680.0, 4.0 * 2**20)


def _workspaces(plan: Plan, experts: bool) -> float:
    """torch's for the threads of forward and backward; Megatron's layers use Transformer Engine's besides, and four
    more on the streams of its grouped matmuls."""
    size, t = matmul_workspace(plan.scenario.cluster.gpu), plan.scenario.training
    own = GROUPED_STREAMS * experts + 1 if t is not None and t.elementwise == "megatron" else 0
    return 2 * size.torch + own * size.transformer_engine


def _tied_copy(plan: Plan, stages: Sequence[Stage]) -> int:
    """The embedding matrix that the last stage holds a copy of, where it is tied to a first stage elsewhere."""
    model = plan.scenario.model
    names = [b.name for s in stages for b in s.blocks]
    if not model.tied_embeddings or "head" not in names or "embedding" in names:
        return 0
    return tied_params(plan.scenario)


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """Bytes of several classes of ranks over the step, class after class: the i-th holds `held[i]` throughout, and row
    by row, from `first[i]` on, activations and buffers; `time_s` is when a row's begin to hold."""

    held: Sequence[States]
    first: Ints
    time_s: Bytes
    activations: Bytes
    buffers: Bytes

    def curve(self, i: int, rank: int) -> MemoryCurve:
        """The memory of one class, whose lowest rank is `rank`."""
        rows = slice(self.first[i], self.first[i + 1] if i + 1 < len(self.first) else None)
        ones, held = np.ones(len(self.time_s[rows])), self.held[i]
        return MemoryCurve(
            rank, self.time_s[rows], ones * held.parameters, ones * held.gradients, ones * held.optimizer,
            self.activations[rows], self.buffers[rows],
        )  # fmt: skip

    def at_most(self) -> list[dict[str, float]]:
        """Each class's maximum of every category, and the `peak` of their sum."""
        lasting = np.array([(x.parameters, x.gradients, x.optimizer) for x in self.held]).T
        rows = np.diff(np.append(self.first, len(self.time_s)))
        total = np.repeat(lasting[0] + lasting[1] + lasting[2], rows) + self.activations + self.buffers
        varying = [np.maximum.reduceat(column, self.first) for column in (self.activations, self.buffers, total)]
        names = (*CATEGORIES, "peak")
        return [dict(zip(names, row, strict=True)) for row in np.stack([*lasting, *varying]).T.tolist()]


def levels(
    stages: Sequence[dict[int, Stage]],
    done: Sequence[Acted],
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
    action, row = ragged(counts, pick)
    share, claimed, buffered = table[:, row]
    first, last = np.concatenate([x.first for x in done]), np.concatenate([x.last for x in done])
    start, end = start_s[first][action], end_s[last][action]
    index = np.repeat(np.arange(len(done)), [len(x.first) for x in done])[action]
    nothing = np.zeros(len(done))  # at the beginning
    time = np.append(nothing, np.where(share < 1.0, start + share * (end - start), end))
    index = np.append(np.arange(len(done)), index)
    changes = np.append([nothing, nothing], [claimed, buffered], axis=1)
    order = np.lexsort((changes.sum(axis=0) > 0, time, short(index)))  # what is freed at an instant comes first
    time, index, bytes_now = time[order], index[order], changes[:, order]
    for a, b in pairwise(np.searchsorted(index, np.arange(len(done) + 1)).tolist()):
        np.cumsum(bytes_now[:, a:b], axis=1, out=bytes_now[:, a:b])
    last = np.flatnonzero(np.append((time[1:] != time[:-1]) | (index[1:] != index[:-1]), True))
    index = index[last]
    activations, buffers = bytes_now[:, last].clip(min=0.0)
    buffers += np.array([x.gathered for x in held])[index]
    return Levels(held, np.searchsorted(index, np.arange(len(done))), time[last], activations, buffers)


def _changes_of(
    stages: Sequence[dict[int, Stage]], works: Sequence[Ints], fine: bool
) -> tuple[Bytes, Ints, Ints]:
    """What actions claim and free, [3, rows]; how many rows each sort of action has, and the sort of every action.
    `works`: what the actions compute, class by class (see `lists.work_number`)."""
    numbers: dict[Stage, int] = {}  # equal stages are one object
    picks = []
    for mine, work in zip(stages, works, strict=True):
        number = np.zeros(max(mine) + 1, dtype=np.int64)
        number[list(mine)] = [numbers.setdefault(stage, len(numbers)) for stage in mine.values()]
        picks.append(number[work // len(Kind)] * len(Kind) + work % len(Kind))
    pick = np.concatenate(picks)
    sorts = [(stage, kind) for stage in numbers for kind in Kind]
    used = np.bincount(pick, minlength=len(sorts)).tolist()
    tables = [_table(*sort, fine) if use else np.zeros((0, 3)) for sort, use in zip(sorts, used, strict=True)]
    return np.concatenate(tables).T, np.array([len(t) for t in tables]), pick


def peak_bytes(stages: dict[int, Stage], work: Ints, step: Ints, held: States) -> float:
    """The peak of `levels`, which takes no simulation: a rank's steps follow each other, whenever they run, and each
    needs the most when all of its actions have begun. `work`, `step`: as in `lists.RankList`."""
    table, counts, pick = _changes_of([stages], [work], False)
    begin = (np.cumsum(counts) - counts)[pick]
    order = np.argsort(np.append(2 * step, 2 * step + 1), kind="stable")
    changes = table[1:, np.append(begin, begin + 1)[order]]
    activations, buffers = np.cumsum(changes, axis=1)[:, order < len(step)].clip(min=0.0)
    lasting = held.parameters + held.gradients + held.optimizer
    return float((lasting + activations + (buffers + held.gathered)).max(initial=lasting + held.gathered))


@lru_cache(maxsize=256)
def _table(stage: Stage, kind: Kind, fine: bool) -> Bytes:
    """`_changes` as rows; equal stages are one object."""
    return np.array(_changes(stage, kind, fine and not stage.offload)).reshape(-1, 3)


Change = tuple[float, float, float]  # fraction of the action that has passed, bytes of activations, bytes of buffers


def _changes(stage: Stage, kind: Kind, fine: bool) -> list[Change]:
    """What an action of a stage claims and frees, and when; as two changes, or as two for each block.

    A backward frees each block's activations before the next block's, so its peak is found block by block.
    """
    blocks = stage.blocks if kind is Kind.F else stage.blocks[::-1]
    saved = [sum(s.bytes for s in b.saved) for b in blocks]
    if stage.offload:
        return _offloaded_changes(stage, kind)
    if kind is Kind.F:
        steps = [(size, b.forward_peak_bytes, 0.0) for b, size in zip(blocks, saved, strict=True)]
    else:
        freed_bytes = [_freed_bytes(b, kind) for b in blocks]
        steps = [(0.0, peak, freed) for peak, freed in zip(_backward_peaks(stage, kind), freed_bytes, strict=True)]
    if fine and blocks:
        return _block_by_block(stage, kind, steps)
    claimed, freed = sum(x[0] for x in steps), sum(x[2] for x in steps)
    peak, now = 0.0, 0.0
    for claim, transient, free in steps:
        now += claim
        peak = max(peak, now + transient - claimed)
        now -= free
    return [(0.0, claimed, peak), (1.0, -freed, -peak)]


def _freed_bytes(block: Block, kind: Kind) -> float:
    """Saved bytes that a block's backward, whole or a half of it, frees."""
    late = 0.0 if kind is Kind.B else late_bytes(block)
    return late if kind is Kind.W else sum(s.bytes for s in block.saved) - late


def _backward_peaks(stage: Stage, kind: Kind) -> list[float]:
    """Transient bytes of each block's backward, last block first, beyond what is saved.

    With ZeRO-2 and -3 a block's gradients, once it has them all, are copied into the buffer that is reduced, and freed;
    the buffer stays until the next block's is needed (torch's FSDP2: `post_backward` in `_fsdp_param_group.py`).
    """
    dp, out, sent = stage.dp, [], 0.0
    reduces = dp.zero >= 2 and dp.each_micro_batch and max(dp.shard, dp.expert_shard) > 1 and kind is not Kind.I
    for b in stage.blocks[::-1]:
        inner = 0.0 if kind is Kind.W else b.backward_peak_bytes
        elements = (b.params + b.expert_params) if reduces else 0
        at_end = elements * (dp.parameter_bytes + dp.gradient_bytes) - _freed_bytes(b, kind)
        out.append(max(inner + sent, at_end, 0.0))
        sent = elements * dp.gradient_bytes
    return out


def stranded_bytes(stages: Iterable[Stage], segment_bytes: float) -> float:
    """By how much a freed segment that the loss cannot use raises what torch's allocator reserves at the most.

    Nothing where another block's backward allocates so much more than the head's that it has room for the segment.
    """
    for stage in stages:
        if stage.blocks and stage.blocks[-1].name == "head":
            at_most = _changes(stage, Kind.B, False)[0][2]
            return max(0.0, _backward_peaks(stage, Kind.B)[0] + segment_bytes - at_most)
    return 0.0


def on_device(saved: Sequence[float]) -> list[float]:
    """Bytes of offloaded activations on the device while each block of a stage runs, forward or backward.

    Its own and those of the block before it: in the forward these are on their way to the host, which the block after
    waits for; in the backward they are being fetched for when it is their turn.

    >>> on_device([1.0, 10.0, 100.0])
    [1.0, 11.0, 110.0]
    """
    return [mine + before for mine, before in zip(saved, (0.0, *saved), strict=False)]


def _offloaded_changes(stage: Stage, kind: Kind) -> list[Change]:
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
    moments, stays = [(left, 0.0)], 0.0
    present = on_device([sum(s.bytes for s in b.saved) for b in blocks])
    for here, peak, later in zip(present[::-1], peaks[::-1], late[::-1], strict=True):
        moments.append((stays + here, peak))
        stays += later
    kept, peak = max(moments, key=sum)
    return [(0.0, kept, peak), (1.0, left - kept, -peak)]


def late_bytes(block: Block) -> float:
    """What a split backward keeps for its weight half."""
    needed = sum(s.bytes for s in block.saved if s.weight_grad)
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


def _block_by_block(stage: Stage, kind: Kind, steps: list[Change]) -> list[Change]:
    """The changes of an action where they happen, blocks taking the share of its time that their seconds are."""
    seconds = stage.block_seconds(kind)
    total = sum(seconds) or 1.0
    out: list[Change] = []
    passed = 0.0
    for (claim, transient, freed), mine in zip(steps, seconds, strict=True):
        out.append((passed / total, claim, transient))
        passed += mine
        out.append((min(1.0, passed / total), -freed, -transient))
    return out


def over_steps(curve: MemoryCurve, step_time_s: float, optimizer_start_s: float, steps: int) -> MemoryCurve:
    """The curve of the first `steps` steps: optimizer states appear at the end of the first (torch makes them late)."""
    shift = np.concatenate([curve.time_s + i * step_time_s for i in range(steps)])
    cut = np.sort(np.append(shift, optimizer_start_s))
    at = (np.searchsorted(shift, cut, side="right") - 1).clip(min=0)

    def tiled(values: Bytes) -> Bytes:
        return np.asarray(np.tile(values, steps)[at], dtype=np.float64)

    optimizer = np.where(cut < optimizer_start_s, 0.0, tiled(curve.optimizer))
    return MemoryCurve(
        curve.rank,
        cut,
        tiled(curve.parameters),
        tiled(curve.gradients),
        optimizer,
        tiled(curve.activations),
        tiled(curve.buffers),
    )
