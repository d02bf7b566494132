"""Bytes on each rank over the step: parameters, gradients, optimizer states, saved activations, buffers.

States per parameter (Rajbhandari et al. 2020, section 3.1): stored parameter, gradient in `grad_dtype`, and for AdamW
two fp32 moments, with an fp32 master copy where parameters are kept in 16 bits: 2+2+12 with 16-bit gradients, 2+4+12
with fp32 ones, 4+4+8 in fp32. ZeRO-1 shards the optimizer, ZeRO-2 also the gradients, ZeRO-3 also the parameters.

A forward's saved bytes count from its start, a backward's until its end; after a split backward's input half only what
the weight half needs is left. Buffers are transient: what the running operator or recomputation holds, and what ZeRO
gathers. Gradients live in persistent buffers (Megatron's). Left out: NCCL's buffers, the CUDA context, output gradients
that a split backward keeps for its weight half, DDP's bucket copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.actions import Kind
from sim.build import Done
from sim.data_parallel import compute_bytes
from sim.dtypes import dtype_bytes
from sim.engine import Times
from sim.models.head import tied_params
from sim.plan import Plan
from sim.stages import Stage

Bytes = NDArray[np.float64]
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
    dense = sum(b.params for b in blocks) + _tied_copy(plan, stages)
    experts = sum(b.expert_params for b in blocks)
    sharded = dense / dp.shard + experts / dp.expert_shard
    whole = float(dense + experts)
    kept = dtype_bytes(t.param_dtype)
    optimizer = (8.0 if t.optimizer == "adamw" else 0.0) + (4.0 if kept < 4 else 0.0)
    gradients_sharded = dp.zero >= 2 and dp.each_micro_batch
    largest = max((b.params + b.expert_params for b in blocks), default=0)
    gathered = 0.0
    if dp.zero == 3:
        sizes = sorted((b.params + b.expert_params for b in blocks), reverse=True)
        held = sizes[:2] if dp.reshard else sizes
        gathered = sum(held) * dp.parameter_bytes
    elif kept > compute_bytes(t.precision):
        gathered = largest * dp.parameter_bytes
    if gradients_sharded and dp.shard > 1:
        gathered += largest * dp.gradient_bytes
    gathered += max((b.workspace_bytes for b in blocks), default=0.0)
    return States(
        (sharded if dp.zero == 3 else whole) * kept,
        (sharded if gradients_sharded else whole) * dtype_bytes(t.grad_dtype),
        (sharded if dp.zero >= 1 else whole) * optimizer,
        gathered,
    )


def _tied_copy(plan: Plan, stages: Sequence[Stage]) -> int:
    """The embedding matrix that the last stage holds a copy of, where it is tied to a first stage elsewhere."""
    model = plan.scenario.model
    names = [b.name for s in stages for b in s.blocks]
    if not model.tied_embeddings or "head" not in names or "embedding" in names:
        return 0
    return tied_params(plan.scenario)


@dataclass(frozen=True, slots=True)
class _StageBytes:
    """Of one micro-batch: kept from forward to backward, kept for the weight gradient, and the most that running a
    forward or a backward adds on top of what is kept."""

    saved: float
    for_weights: float
    forward_peak: float
    backward_peak: float
    weights_peak: float


def _stage_bytes(stage: Stage) -> _StageBytes:
    """A backward frees each block's activations before the next block's, so its peak is found block by block."""
    blocks = stage.blocks
    saved = [sum(s.bytes for s in b.saved) for b in blocks]
    kept = sum(saved)
    if stage.offload:  # two blocks at a time are on the device
        kept = sum(sorted(saved)[-2:])
        return _StageBytes(
            kept,
            0.0,
            max((b.forward_peak_bytes for b in blocks), default=0.0),
            max((b.backward_peak_bytes for b in blocks), default=0.0),
            0.0,
        )
    forward = backward = -kept
    before = 0.0
    for b, size in zip(blocks, saved, strict=True):
        before += size
        forward = max(forward, before - kept + b.forward_peak_bytes)
        backward = max(backward, before - kept + b.backward_peak_bytes)
    for_weights = sum(s.bytes for b in blocks for s in b.saved if s.weight_grad)
    return _StageBytes(kept, for_weights, max(0.0, forward), max(0.0, backward), 0.0)


def memory_curve(rank: int, stages: dict[int, Stage], done: Sequence[Done], times: Times, held: States) -> MemoryCurve:
    """The memory of one class of ranks over the step; `done` are its actions."""
    sizes: dict[int, _StageBytes] = {}
    of_stage = {}
    for i, stage in stages.items():
        of_stage[i] = sizes.setdefault(id(stage), _stage_bytes(stage))
    changes = {(i, kind): _changes(of_stage[i], kind, stages[i].offload) for i in stages for kind in Kind}
    table = np.array([changes[d.action.stage, d.action.kind] for d in done]).reshape(-1, 4)
    start = np.array(times.start_s)[[d.first for d in done]]
    end = np.array(times.end_s)[[d.last for d in done]]
    # releases of an instant come before its claims: sorted by time, then claims last
    time = np.concatenate([[0.0], end, start])
    activations = np.concatenate([[0.0], table[:, 1], table[:, 0]])
    buffers = np.concatenate([[0.0], -table[:, 3], table[:, 2]])
    order = np.argsort(time, kind="stable")
    time, activations, buffers = time[order], np.cumsum(activations[order]), np.cumsum(buffers[order])
    last = np.append(time[1:] != time[:-1], True)
    time, activations, buffers = time[last], activations[last].clip(min=0.0), buffers[last].clip(min=0.0)
    ones = np.ones(len(time))
    return MemoryCurve(
        rank,
        time,
        ones * held.parameters,
        ones * held.gradients,
        ones * held.optimizer,
        activations,
        buffers + held.gathered,
    )


def _changes(b: _StageBytes, kind: Kind, offload: bool) -> tuple[float, float, float, float]:
    """An action's change of activations when it starts and when it ends, its buffers from start to end (both signs)."""
    if kind is Kind.F:
        return b.saved, -b.saved if offload else 0.0, b.forward_peak, b.forward_peak
    fetched = b.saved if offload and kind is not Kind.W else 0.0
    freed = {Kind.B: b.saved, Kind.I: b.saved - b.for_weights, Kind.W: b.for_weights}[kind]
    peak = b.weights_peak if kind is Kind.W else b.backward_peak
    return fetched, -freed, peak, peak


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
