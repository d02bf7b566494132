"""Tensors of which a rank holds a part: how often a loop over parameters runs at the end of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from sim.core.program import Block
from sim.models.optimizers.loops import Loops
from sim.programs.data_parallel import DataParallel


def loops_at_the_end(blocks: Sequence[Block], dp: DataParallel) -> Loops:
    """Return over how many tensors the slowest rank loops, and what it clips."""
    whole = sum(b.params + b.expert_params for b in blocks) if dp.zero in dp.engine.clips_whole_at else None
    return Loops(held_tensors(blocks, dp), dp.zero in dp.engine.clips_tensors_at, whole)


def held_tensors(blocks: Iterable[Block], dp: DataParallel) -> int:
    """Count the tensors of which a rank updates a part, on the rank that has most of them.

    A unit whose shards are vectors (`ZeroEngine.flat_at`) is cut into equal parts, which few of its tensors reach; of
    one that is cut by rows each rank has a part of every tensor (torch/distributed/fsdp/_flat_param.py:
    `_get_shard_metadata`, whose tensors without a part have no gradient). Blocks are taken for units.
    """
    alike = Counter(tuple(b.tensors) or ((b.params,) if b.params else ()) for b in blocks)
    if dp.zero not in dp.engine.flat_at or dp.shard < 2:
        return max(1, sum(len(tensors) * count for tensors, count in alike.items()))
    if dp.engine.one_tensor_a_unit:
        return max(1, sum(count for tensors, count in alike.items() if tensors))
    by_rank = [0] * dp.shard
    for tensors, count in alike.items():
        for rank, held in enumerate(_parts(tensors, dp.shard)):
            by_rank[rank] += held * count
    return max(1, *by_rank)


def _parts(tensors: tuple[int, ...], ranks: int) -> list[int]:
    """Count for each rank the tensors that reach its part of them all.

    >>> _parts((2, 2, 12), 4)
    [2, 1, 1, 1]
    """
    size, at, held = -(-sum(tensors) // ranks), 0, [0] * ranks
    for n in tensors:
        for rank in range(at // size, -(-(at + n) // size)):
            held[rank] += 1
        at += n
    return held
