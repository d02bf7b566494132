"""Bytes that an action of a stage claims and frees, and when.

A forward's saved bytes count from its start, a backward's until its end; after a split backward's input half, what the
weight half needs is left: the inputs of linear layers and the gradients of their outputs. Buffers are transient: what
the running operator or recomputation holds, and what ZeRO gathers. Gradients live in persistent buffers (Megatron's),
or come with a step's first backward (captured programs, which set them to None).
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from sim.core.actions import Kind
from sim.core.dtypes import dtype_bytes
from sim.core.program import Block, Compute, Phase
from sim.programs.gathered_units import gathered_after_loss, in_root
from sim.programs.host_copies import kept_on_device, on_device
from sim.programs.stages import Stage

# The fraction of an action that has passed; bytes of activations, of buffers and of gradients that come and go.
Change = tuple[float, float, float, float]
LEAST_SHARE = 1e-3  # of an action for each of its blocks, so that bytes which are there for an instant are in its curve


class BlockStep(Struct, frozen=True):
    """Hold the bytes that a block claims as it begins, holds while it runs, keeps until the action ends, and frees; the
    gradients that it brings; the copies of weights that a forward's leaves, or (below 0) a backward's frees."""

    claimed: float
    transient: float
    until_end: float
    freed: float
    gradients: float
    copies: float = 0.0


def brings_gradients(stage: Stage) -> bool:
    """True if gradients are allocated in a step's first backward."""
    return stage.dp.fleeting_gradient_bytes > 0 or any(b.own is not None for b in stage.blocks)


def changes_of(stage: Stage, kind: Kind, first: bool, fine: bool) -> list[Change]:
    """Return what an action of a stage claims and frees, and when; as two changes, or as two for each block.

    A backward frees each block's activations before the next block's, so its peak is found block by block. `first`: the
    step's first of its kind, which brings gradients where they come and go.
    """
    blocks = stage.blocks if kind is Kind.F else stage.blocks[::-1]
    brought = _brought(stage, kind) if first else [0.0] * len(blocks)
    if stage.offload:
        begin, end = _offloaded_changes(stage, kind)
        most, left = _all_copies(stage, kind)
        return [(*begin[:2], begin[2] + most, 0.0), (*end[:2], end[2] - most + left, sum(brought))]
    if kind is Kind.F:
        steps = [
            BlockStep(sum(s.bytes for s in b.saved), b.forward_peak_bytes, held_to_end(b), 0.0, 0.0) for b in blocks
        ]
        steps = [_with_copies(stage, kind, b, x) for b, x in zip(blocks, steps, strict=True)]
        others = [b for blocks in stage.read_only() for b in blocks]  # which keep nothing
        steps += [BlockStep(0.0, b.forward_peak_bytes, 0.0, 0.0, 0.0) for b in others]
    else:
        late = _late_gradients(stage, kind)
        steps = [
            BlockStep(0.0, _with_gradients(stage, kind, b, peak, new), held, _freed_bytes(b, kind), new)
            for b, peak, new, held in zip(blocks, backward_peaks(stage, kind, first), brought, late[:-1], strict=True)
        ]
        steps = [_with_copies(stage, kind, b, x) for b, x in zip(blocks, steps, strict=True)]
        steps += [BlockStep(0.0, 0.0, late[-1], 0.0, 0.0)] * (late[-1] > 0)
    if fine and blocks:
        return _block_by_block(stage, kind, steps)
    # As two changes: everything is claimed at the start, and the buffers are as large as makes the peak the same.
    claimed, freed = sum(x.claimed for x in steps), sum(x.freed for x in steps)
    peak, now = 0.0, 0.0
    for x in steps:
        now += x.claimed + x.until_end + max(0.0, x.copies)
        peak = max(peak, now + x.transient - claimed)
        now += x.gradients - x.freed + min(0.0, x.copies)
    return [(0.0, claimed, peak, 0.0), (1.0, -freed, sum(x.copies for x in steps) - peak, sum(brought))]


def _with_copies(stage: Stage, kind: Kind, block: Block, step: BlockStep) -> BlockStep:
    """The step with the copies of weights that autocast makes (`CastCopies`); a weight half needs none."""
    casts = stage.dp.casts
    if casts is None or block.own is not None or kind is Kind.W:
        return step
    own = casts.of(block, stage.blocks)
    if not casts.runs_again(block):
        return replace(step, copies=own if kind is Kind.F else -own)
    if kind is Kind.F and casts.cached:
        return replace(step, until_end=step.until_end + own)
    return replace(step, transient=step.transient + own)


def _all_copies(stage: Stage, kind: Kind) -> tuple[float, float]:
    """Return the bytes of copies that an action needs beside those there before it, and the change that it leaves."""
    nothing = BlockStep(0.0, 0.0, 0.0, 0.0, 0.0)
    steps = [_with_copies(stage, kind, b, nothing) for b in stage.blocks]
    left = sum(x.copies for x in steps)
    return max(0.0, left) + sum(x.until_end for x in steps) + max((x.transient for x in steps), default=0.0), left


def _with_gradients(stage: Stage, kind: Kind, block: Block, peak: float, brought: float) -> float:
    """The most that a block's backward holds of transient bytes, `peak`, and of the gradients that it brings: all, or
    in a whole backward whose operators are told apart those that are there by then. A loss has ended before the
    output matrix gets its gradient. Shards are there once the block's gradients are reduced, whose copies hold more
    (`backward_peaks`)."""
    if block.own is not None or (brought and reduces_at_once(stage) and not stage.dp.host.parameters):
        return peak
    params, moments = block.params + block.expert_params, _moments(stage, kind, block)
    if kind is not Kind.B or reduces_at_once(stage) or not moments or not params:
        return peak + brought
    return max(0.0, *(held + brought * there / params for held, there in moments))


def _moments(stage: Stage, kind: Kind, block: Block) -> tuple[tuple[float, int], ...]:
    """`Block.backward_moments`, less what ZeRO-3 gathers only when the loss has ended (`gathered_after_loss`)."""
    moments = block.backward_moments
    if kind is not Kind.B or not moments or block is not stage.blocks[-1]:
        return moments
    missing = gathered_after_loss(stage.blocks, stage.dp) * stage.dp.parameter_bytes
    return tuple((held - (0.0 if there else missing), there) for held, there in moments) if missing else moments


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
    return dp.zero >= 2 and dp.keeps_shards and (max(dp.shard, dp.expert_shard) > 1 or dp.host.parameters)


def _freed_bytes(block: Block, kind: Kind) -> float:
    """Saved bytes that a block's backward, whole or a half of it, frees."""
    # The input half frees all that the weight half does not need; that goes with the weight half.
    late = 0.0 if kind is Kind.B else late_bytes(block)
    return late if kind is Kind.W else sum(s.bytes for s in block.saved) - late


def backward_peaks(stage: Stage, kind: Kind, first: bool = False) -> list[float]:
    """Transient bytes of each block's backward, last block first, beyond what is saved.

    With ZeRO-2 and -3 a block's gradients, once it has them all, are copied into the buffer that is reduced, and freed;
    the buffer stays until the next block's is needed (torch's FSDP2: `post_backward` in `_fsdp_param_group.py`). Whole
    gradients of a row of micro-batches are among the states. Those of a root (`in_root`) wait for the backward's end.
    Megatron's FSDP brings gradients into their buckets one by one (`_queued_peaks`).
    """
    if stage.dp.engine.queued_elements and reduces_at_once(stage):
        return _queued_peaks(stage, kind)
    dp, out, sent, waiting = stage.dp, [], 0.0, 0
    own_bytes = 0.0 if dp.each_row else dp.parameter_bytes
    reduces = reduces_at_once(stage) and kind is not Kind.I
    for b in stage.blocks[::-1]:
        # A weight half multiplies what is kept already; its matmuls' outputs are gradients, counted elsewhere.
        inner = 0.0 if kind is (Kind.W if _has_input_half(b) else Kind.I) else b.backward_peak_bytes
        if (moments := _moments(stage, kind, b)) is not b.backward_moments:
            inner = max(held for held, _ in moments)
        if first and b.own is not None and kind is Kind.B and not reduces:
            inner = b.own.first_backward_peak
        # As the copy is made, the gradients and the buffer are both there, and the block's activations no longer are.
        elements = (b.params + b.expert_params) if reduces else 0
        held = waiting * own_bytes
        if elements and dp.zero == 3 and in_root(dp.engine, b):
            waiting += elements
            elements = waiting if b is stage.blocks[0] else 0
            held_at_end = 0.0
        else:
            held_at_end = held
        at_end = held_at_end + elements * (own_bytes + dp.gradient_bytes) - _freed_bytes(b, kind)
        out.append(max(inner + sent + held, at_end, 0.0))
        sent = elements * dp.gradient_bytes
    return out


def _queued_peaks(stage: Stage, kind: Kind) -> list[float]:
    """`backward_peaks` for buckets that are allocated with a block's first gradient and freed once
    `ZeroEngine.queued_elements` gradients wait for reduction after it; the backward's end reduces the rest."""
    dp, out, queue = stage.dp, list[float](), list[int]()
    for b in stage.blocks[::-1]:
        inner = 0.0 if kind is (Kind.W if _has_input_half(b) else Kind.I) else b.backward_peak_bytes
        own = b.params + b.expert_params if kind is not Kind.I else 0
        out.append(inner + (sum(queue) + own) * dp.gradient_bytes)
        while sum(queue) > dp.engine.queued_elements:
            queue.pop(0)
        queue.append(own)
    return out


def _has_input_half(block: Block) -> bool:
    """False for an embedding, whose backward makes the gradient of its weights alone."""
    return any(i.phase is Phase.INPUT_GRAD for i in block.backward if isinstance(i, Compute))


def _offloaded_changes(stage: Stage, kind: Kind) -> list[tuple[float, float, float]]:
    """The two changes of an action of which some activations are in host memory before or after it.

    What a split backward's weight half needs is not fetched again, so it stays on the device between both halves.
    """
    blocks, saved = stage.blocks, [sum(s.bytes for s in b.saved) for b in stage.blocks]
    late = [late_bytes(b) if kind in (Kind.I, Kind.W) else 0.0 for b in blocks]
    left = sum(late)
    if kind is Kind.W:
        peak = max(backward_peaks(stage, kind), default=0.0)
        return [(0.0, 0.0, peak), (1.0, -left, -peak)]
    between = kept_on_device(saved, stage.offload)
    before, after = (0.0, between) if kind is Kind.F else (between, left)
    peaks = [b.forward_peak_bytes for b in blocks] if kind is Kind.F else backward_peaks(stage, kind)[::-1]
    # Backwards go from the last block to the first; forwards need the same, read from the end.
    others = [b for blocks in stage.read_only() for b in blocks] if kind is Kind.F else []
    beside = max((b.forward_peak_bytes for b in others), default=0.0)
    moments, stays = [(max(before, after), beside)], 0.0
    present = on_device(saved, stage.offload)
    for here, peak, later in zip(present[::-1], peaks[::-1], late[::-1], strict=True):
        moments.append((stays + here, peak))
        stays += later
    kept, peak = max(moments, key=sum)
    return [(0.0, kept - before, peak), (1.0, after - kept, -peak)]


def late_bytes(block: Block) -> float:
    """Bytes that a split backward keeps for its weight half."""
    needed = sum(s.bytes for s in block.saved if s.late)
    return needed + block.rebuilt_bytes + output_gradients_bytes(block)


def output_gradients_bytes(block: Block) -> float:
    """Return what a split backward keeps for its weight half besides saved inputs: the gradients of linear layers'
    outputs.

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
    least_s = LEAST_SHARE * sum(seconds)
    seconds = [max(mine, least_s) for mine in seconds]
    total = sum(seconds) or 1.0  # a price of 0 s, as tests have it, has no shares
    out: list[Change] = []
    passed = held = 0.0
    for x, mine in zip(steps, seconds, strict=True):
        held += x.until_end
        out.append((passed / total, x.claimed, x.until_end + x.transient + max(0.0, x.copies), 0.0))
        passed += mine
        out.append((min(1.0, passed / total), -x.freed, min(0.0, x.copies) - x.transient, x.gradients))
    return [*out, (1.0, 0.0, -held, 0.0)] if held else out
