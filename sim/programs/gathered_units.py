"""ZeRO-3's units of parameters: what is gathered and freed together, and which of it stays for the backward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from sim.core.program import Block, BlockKind, Comm, Phase
from sim.models.frameworks.parts import ZeroEngine
from sim.programs.data_parallel import DataParallel

ENDS = (BlockKind.EMBEDDING, BlockKind.NORM, BlockKind.HEAD)


def in_root(engine: ZeroEngine, block: Block) -> bool:
    """Tell whether a block belongs to the unit of what no other unit holds (`ZeroEngine.ends_together`)."""
    return engine.ends_together and block.kind in ENDS


def kept_units(blocks: Sequence[Block], engine: ZeroEngine) -> int:
    """Count the last blocks of a stage that stay gathered from the forward to the backward (`ZeroEngine.kept_last`).

    The last unit of the model is meant, so stages without its output keep none.
    """
    if not blocks or blocks[-1].kind is not BlockKind.HEAD:
        return 0
    return engine.kept_last + sum(in_root(engine, b) for b in blocks[-2:])


def forward_gathers(blocks: Sequence[Block], dp: DataParallel) -> list[list[Comm]]:
    """The messages that gather each block for its forward; those of a root with the stage's first block."""
    return _with_root(blocks, dp, [dp.gather_block(b, Phase.FORWARD, f"w{i}") for i, b in enumerate(blocks)], "w0")


def _with_root(blocks: Sequence[Block], dp: DataParallel, gathers: list[list[Comm]], handle: str) -> list[list[Comm]]:
    """These messages with those of a root as one, with the first block, if that is a part of it."""
    root = [i for i, b in enumerate(blocks) if in_root(dp.engine, b)]
    if len(root) < 2 or root[0] > 0:
        return gathers
    ends, phase = [blocks[i] for i in root], Phase.FORWARD if handle == "w0" else Phase.INPUT_GRAD
    dense, experts = sum(map(dp.gathered_params, ends)), sum(b.expert_params for b in ends)
    joined = dp.gather("root", dense, experts, phase, handle)
    return [joined if i == 0 else [] if i in root else each for i, each in enumerate(gathers)]


def backward_gathers(order: Sequence[Block], dp: DataParallel) -> list[list[Comm]]:
    """The messages that gather each block, last block first, again for its backward; none for what stays. A root may be
    gathered as the backward begins (`ZeroEngine.root_again`)."""
    live, again = _live_blocks(order, dp), gathered_again(order[::-1], dp.engine)[::-1]
    gathers = [
        dp.gather_block(b, Phase.INPUT_GRAD, f"v{i}") if again[i] and i >= live else [] for i, b in enumerate(order)
    ]
    return _with_root(order, dp, gathers, "v0") if dp.engine.root_again else gathers


def gathered_again(blocks: Sequence[Block], engine: ZeroEngine) -> list[bool]:
    """Tell of each block of a stage whether its backward gathers it, as far as `kept_last` and `ends_together` say."""
    first_kept = len(blocks) - kept_units(blocks, engine)
    return [i < first_kept and not in_root(engine, b) for i, b in enumerate(blocks)]


def _live_blocks(order: Sequence[Block], dp: DataParallel) -> int:
    """Count the blocks in backward order that the forward left gathered (`ZeroEngine.live_elements`)."""
    held = accumulate(dp.gathered_params(b) + b.expert_params for b in order)
    return sum(elements <= dp.engine.live_elements for elements in held)


def gathered_elements(blocks: Sequence[Block], dp: DataParallel) -> float:
    """The most elements of whole parameters that are there at once: two units', all where they stay, or as many as may
    be there. Where a framework's units are known they are neighbours, beside the root."""
    engine, sizes = dp.engine, [dp.gathered_params(b) + b.expert_params for b in blocks]
    if not dp.reshard:
        return sum(sizes)
    if engine.ends_together or engine.kept_last:
        root = sum(n for n, b in zip(sizes, blocks, strict=True) if in_root(engine, b))
        cycled = [n for n, b in zip(sizes, blocks, strict=True) if not in_root(engine, b)]
        return root + max((a + b for a, b in pairwise((0.0, *cycled))), default=0.0)
    return max(min(sum(sizes), engine.live_elements), sum(sorted(sizes, reverse=True)[:2]))
