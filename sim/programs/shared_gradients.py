"""Sums over tp of the gradients of what all its ranks hold whole (`Block.shared`)."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from sim.core.program import Block, Comm, ModelPart, Phase, Program
from sim.models.operators import memory_op
from sim.programs.data_parallel import DataParallel


def sum_shared(block: Block, dp: DataParallel) -> list[Comm]:
    """All-reduces over tp of the gradients of what its ranks hold whole, a tensor each (`ZeroEngine.sums_shared`)."""
    if not dp.engine.sums_shared or dp.zero != 3 or dp.shard * dp.replica == 1:
        return []
    name, phase, b = f"{block.name} shared gradients", Phase.WEIGHT_GRAD, dp.parameter_bytes
    return [Comm(name, "all_reduce", "tp", n * b, phase) for n in block.shared]


def sum_shared_once(blocks: Sequence[Block], dp: DataParallel, element_bytes: float) -> Program:
    """One all-reduce over tp of the gradients of all that its ranks hold whole (`ZeroEngine.sums_shared_once`), which
    are joined before it (2 accesses) and copied back behind it, tensor by tensor (2). FSDP has shards of them.
    `element_bytes`: of a gradient as it is kept."""
    tensors = [n for b in blocks for n in b.shared]
    elements = sum(tensors) / (dp.shard if dp.zero >= 2 else 1)
    if not dp.engine.sums_shared_once or not tensors:
        return ()
    size, phase = elements * element_bytes, Phase.OPTIMIZER
    joined = memory_op("join shared gradients", phase, "copy", elements, 2 * size, "fp32")
    back = memory_op("copy shared gradients", phase, "copy", elements, 2 * size, "fp32", len(tensors))
    # A bare loop of copies costs the host about what a loop in C++ does, not what a module does.
    parts = [replace(made, part=ModelPart.OPTIMIZER, plain_host=True, looped=True) for made in (joined, back)]
    return (parts[0], Comm("shared gradients", "all_reduce", "tp", size, phase), parts[1])
