"""Gathers of the parameters that ZeRO-1 and -2 have updated shard by shard: beside the next forward, or before it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from sim.core.program import Block, Comm, Compute, ModelPart, Phase, Program, Wait
from sim.models.operators import memory_op
from sim.programs.around_messages import behind_input, cast, limit_bytes, waits
from sim.programs.data_parallel import DataParallel


def gather_units(blocks: Sequence[Block], dp: DataParallel) -> list[tuple[float, float, int]]:
    """Return what ZeRO-1 and -2 gather at once: the buckets that gradients fill in backward, the first block's first.

    Each: dense and expert elements of `DataParallel.gathered_bytes`, those that are gathered in 8 bits counted by their
    bytes, and the first block that has some of them.
    """
    limit, units = max(limit_bytes(dp), 1.0), list[tuple[float, float, int]]()
    for with_dense, with_experts in ((1, 1),) if dp.mixes_experts else ((0, 1), (1, 0)):
        dense = experts = 0.0
        filled = first = 0
        for i in reversed(range(len(blocks))):
            own, (share, expert_share) = blocks[i].tensors or (blocks[i].params,), _gathered_shares(blocks[i], dp)
            for a, b in (*((n * with_dense, 0) for n in reversed(own)), (0, blocks[i].expert_params * with_experts)):
                dense, experts, filled = dense + share * a, experts + expert_share * b, filled + a + b
                first = i if a + b else first
                if filled * dp.gradient_bytes >= limit:
                    units.append((dense, experts, i))
                    dense, experts, filled = 0.0, 0.0, 0
        if filled > 0:
            units.append((dense, experts, first))
    units.reverse()
    units.sort(key=lambda unit: unit[2])
    return units


def _gathered_shares(block: Block, dp: DataParallel) -> tuple[float, float]:
    return dp.eight_bit.shares(block, dp.gathered_bytes) if dp.eight_bit.kept else (1.0, 1.0)


def prologue(blocks: tuple[Block, ...], dp: DataParallel) -> Program:
    """ZeRO-1 and -2: the updated parameters of the step before, gathered under this step's forward."""
    if not _gathers_with_the_step(dp) or dp.gathered_late:
        return ()
    return tuple(
        c
        for k, (dense, experts, i) in enumerate(gather_units(blocks, dp))
        for c in dp.gather(blocks[i].name, dense, experts, Phase.FORWARD, f"p{k}")
    )


def prologue_waits(blocks: tuple[Block, ...], dp: DataParallel) -> list[list[Wait | Compute | Comm]]:
    """Return what each block's first forward waits for: the gathers of `prologue` that bring it something, or, where
    stages are `gathered_late`, gathers that start here; and their cast."""
    out: list[list[Wait | Compute | Comm]] = [[] for _ in blocks]
    if _gathers_with_the_step(dp):
        for k, (dense, experts, i) in enumerate(gather_units(blocks, dp)):
            gathered = dp.gather(blocks[i].name, dense, experts, Phase.FORWARD, "" if dp.gathered_late else f"p{k}")
            out[i] += behind_input(gathered) if dp.gathered_late else waits(gathered, Phase.FORWARD)
            out[i] += cast(gathered, dp, Phase.FORWARD)
    return out


def _gathers_with_the_step(dp: DataParallel) -> bool:
    """Tell whether the first forwards of a step gather what the step before has updated."""
    return dp.zero in (1, 2) and dp.gather_overlap and not dp.gathered_early


def early_gather(blocks: tuple[Block, ...], dp: DataParallel) -> tuple[list[Comm], Program]:
    """The gather of a rank's first stage, which starts when its own parameters are updated, and what ends the step: a
    wait, and the cast of gathered fp32 parameters. The step's end waits for it, where the next step's first forward of
    the stage does: the first pipeline rank's comes at once, that of the others later."""
    units = gather_units(blocks, dp)
    dense, experts = sum(unit[0] for unit in units), sum(unit[1] for unit in units)
    gathered = dp.gather("first stage", dense, experts, Phase.OPTIMIZER, "early")
    return gathered, (*waits(gathered, Phase.OPTIMIZER), *cast(gathered, dp, Phase.OPTIMIZER))


def gather_after_optimizer(blocks: tuple[Block, ...], dp: DataParallel) -> Program:
    """ZeRO-1 and -2 without overlap: the updated parameters are gathered before the next step starts."""
    if dp.zero not in (1, 2) or dp.gather_overlap:
        return ()
    shares = [_gathered_shares(b, dp) for b in blocks]
    dense = sum(b.params * share for b, (share, _) in zip(blocks, shares, strict=True))
    experts = sum(b.expert_params * share for b, (_, share) in zip(blocks, shares, strict=True))
    gathered = dp.gather("all", dense, experts, Phase.OPTIMIZER, "")
    copied = copies_by_tensor(blocks, dp) if gathered and dp.by_tensor else ()
    return (*copied[:1], *gathered, *copied[1:], *cast(gathered, dp, Phase.OPTIMIZER))


def copies_by_tensor(blocks: Sequence[Block], dp: DataParallel) -> Program:
    """Return the copies before and after a gather of which each tensor is a list of its ranks' parts.

    All parameters are joined rank by rank, whatever is gathered into them. torch copies what arrives from the buffer
    of its own collective (ProcessGroupNCCL, `allgather`), and then each part of each tensor is copied back.
    """
    elements = sum(b.params + b.expert_params for b in blocks)
    moved = 2 * elements * dp.gathered_bytes
    tensors = sum(len(b.tensors) or 1 for b in blocks)
    phase, dtype = Phase.OPTIMIZER, "bf16"
    joined = memory_op("join parameters", phase, "copy", elements, moved, dtype, dp.shard)
    put = memory_op("put parameters", phase, "copy", elements, moved, dtype, dp.shard)
    back = memory_op("copy parameters back", phase, "copy", elements, moved, dtype, tensors * dp.shard)
    made = (joined, put, replace(back, looped=True))
    return tuple([replace(op, part=ModelPart.PARAMETER_COPIES) for op in made])
