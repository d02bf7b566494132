"""The most that torch's caching allocator reserves, beyond the bytes that are allocated at the peak.

The allocator keeps freed segments. It gives one to a tensor that fits and is allocated on the same stream
(c10/cuda/CUDACachingAllocator.cpp: `get_free_block`). So it reserves more than is ever allocated at once where segments
are too small for what comes next, or belong to another stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heapreplace
from itertools import pairwise

from sim.core.actions import Kind
from sim.core.program import BlockKind
from sim.programs.stages import Stage
from sim.results.memory import AtMost, MemoryCurve
from sim.results.memory_changes import backward_peaks, brings_gradients, changes_of, reduces_at_once

SEGMENT_BYTES = 2 * 2**20  # large segments are rounded up to this


def reserved_bytes(
    stages: Sequence[Stage], most: AtMost, curve: Callable[[], MemoryCurve], logits_bytes: float
) -> float:
    """The most that torch's allocator reserves on a rank of these stages: allocated bytes in whole segments, and idle
    ones.

    `most`: the rank's allocated bytes; `curve`: the same over time, made only where it is needed; `logits_bytes`: of a
    freed segment that the loss cannot use.
    """
    rounding = SEGMENT_BYTES * sum((-size / SEGMENT_BYTES) % 1.0 for size in most[:-1])
    peak, idle = most.peak, _idle_gradients(stages, most.activations)
    if idle:  # the segments are there when their gradients are not
        held = curve()
        peak = float((held.total - idle * held.gradients).max()) + idle * float(held.gradients.max())
    return rounding + peak + _idle_logits(stages, logits_bytes) + _idle_gathered(stages)


def _idle_logits(stages: Iterable[Stage], segment_bytes: float) -> float:
    """The bytes by which a freed segment of logits, which the loss cannot use, raises the most that is reserved.

    Nothing where another block's backward allocates so much more than the head's that it has room for the segment.
    """
    for stage in stages:
        if stage.blocks and stage.blocks[-1].kind is BlockKind.HEAD:
            # The head's backward runs first and leaves the segment behind; a larger peak of a later block fills it.
            # A loss that works in place in its backward needs the most at the end of its forward.
            forward = stage.blocks[-1].forward_peak_bytes
            at_most = max(forward, changes_of(stage, Kind.B, False, False)[0][2])
            return max(0.0, max(forward, backward_peaks(stage, Kind.B)[0]) + segment_bytes - at_most)
    return 0.0


def _idle_gradients(stages: Sequence[Stage], activations: float) -> float:
    """The part, of 1, of gradients' memory that stays reserved between steps for no other use.

    Gradients that are freed after a step (`zero_grad`) leave their segments to the next step's activations, but only to
    tensors that fit in one. A segment holds one gradient, or a block's shards that are reduced together. Activations of
    `activations` bytes, which are as large as those that blocks save, go to the emptiest segment, the largest first.
    Shards that are reduced on a stream of their own leave nothing (`ZeroEngine.shards_apart`).
    """
    if any(reduces_at_once(s) and s.dp.engine.shards_apart and brings_gradients(s) for s in stages):
        return 1.0
    saved = [x.bytes for s in stages for b in s.blocks for x in b.saved]
    segments = [-size for s in stages for size in _freed_gradients(s)]
    total = -sum(segments)
    if not total:
        return 0.0
    heapify(segments)
    for size in sorted(saved * max(1, round(activations / max(1.0, sum(saved)))), reverse=True):
        if size <= -segments[0]:
            heapreplace(segments, segments[0] + size)
    return -sum(segments) / total


def _freed_gradients(stage: Stage) -> list[float]:
    """Bytes of each tensor of gradients that is freed between steps."""
    dp, each = stage.dp, stage.dp.fleeting_gradient_bytes
    if not each or any(b.own is not None for b in stage.blocks):
        return []
    if reduces_at_once(stage):
        return [each * (b.params / dp.shard + b.expert_params / dp.expert_shard) for b in stage.blocks]
    return [each * n for b in stage.blocks for n in b.tensors]


def _idle_gathered(stages: Sequence[Stage]) -> float:
    """Bytes of the buffers that ZeRO-3's parameters arrive in, as far as they are not allocated at the peak.

    They are of a stream of their own (`ZeroEngine.gathers_apart`). In the forward two blocks' are there, the one that
    arrives and the one before it (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: Note on overlapping
    all-gather copy-in and all-gather). In the backward, where the peak is, one is there, which `States.gathered` counts
    beside the block in use; where parameters stay gathered after the forward, none is.
    """
    dp = stages[0].dp
    if dp.zero != 3 or not dp.engine.gathers_apart or dp.shard * dp.expert_shard == 1:
        return 0.0
    arrived = [[dp.gathered_params(b) + b.expert_params for b in s.blocks] for s in stages]
    two = max((first + second for sizes in arrived for first, second in pairwise((0.0, *sizes))), default=0.0)
    counted = sorted((n for sizes in arrived for n in sizes), reverse=True)[1:2] if dp.reshard else []
    return max(0.0, two - sum(counted)) * dp.gathered_bytes
