"""ZeRO-3's units of parameters: what is gathered and freed together, and which of it stays for the backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from sim.core.program import Block, BlockKind, Comm, Phase
from sim.programs.data_parallel import DataParallel
from sim.variants.frameworks.zero import ZeroEngine

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


def stays_all_step(engine: ZeroEngine, block: Block) -> bool:
    """Tell whether a block is gathered once a step and kept to its end (`ZeroEngine.ends_stay`)."""
    return engine.ends_stay and block.kind in ENDS


def forward_gathers(
    blocks: Sequence[Block], dp: DataParallel, first: bool = True, early: bool = False
) -> list[list[Comm]]:
    """The messages that gather each block for its forward; those of a root with the stage's first block. `first`: the
    step's first forward here, which alone gathers what stays; `early`: no backward has ended here."""
    gathers = [
        _gather(b, dp, Phase.FORWARD, f"w{i}", first, early) if first or not stays_all_step(dp.engine, b) else []
        for i, b in enumerate(blocks)
    ]
    return _with_root(blocks, dp, gathers, "w0")


def _gather(
    block: Block, dp: DataParallel, phase: Phase, handle: str, first: bool = False, early: bool = False
) -> list[Comm]:
    """A block's messages (`DataParallel.gather_block`), behind the copy of its shard from host memory."""
    return dp.from_host((block,), dp.gather_block(block, phase, handle, first, early), phase, handle)


def forward_order(blocks: Sequence[Block], dp: DataParallel) -> list[list[int]]:
    """The places of the blocks whose messages are sent as each block's forward begins: with the first its own and those
    ahead of it, with each other one the last of those ahead."""
    return _sent(len(blocks), 0, max(1, units_ahead(blocks, dp)), False)


def backward_order(order: Sequence[Block], dp: DataParallel) -> list[list[int]]:
    """`forward_order` for the backward, which runs the last block first.

    A gather that nothing prefetches queues behind the reduction before it (`_unshard` in the layer's own hook of
    torch/distributed/fsdp/_runtime_utils.py: `_pre_backward_hook`). Where ends stay, no hook of theirs sends anything:
    the first unit's own does, in the model's order, so that its own message is the last.
    """
    engine, begins = dp.engine, 0
    if engine.ends_stay:
        begins = next((i for i, b in enumerate(order) if not stays_all_step(engine, b)), 0)
    return _sent(len(order), begins, units_ahead(order, dp), engine.ends_stay)


def _sent(count: int, begins: int, ahead: int, turned: bool) -> list[list[int]]:
    run = list(range(count))[begins : begins + ahead + 1]
    first = run[::-1] if turned else run
    return [first if i == begins else [i + ahead] if begins < i < count - ahead else [] for i in range(count)]


def units_ahead(blocks: Sequence[Block], dp: DataParallel) -> int:
    """Count the units that are gathered ahead of the one that computes: one, or by `ZeroEngine.ahead_elements` as many
    of the stage's largest as reach that number."""
    if not dp.engine.ahead_elements:
        return int(dp.prefetches)
    largest = max((_elements(b, dp) for b in blocks if not stays_all_step(dp.engine, b)), default=0.0)
    return max(1, math.ceil(dp.engine.ahead_elements / largest)) if largest else 1


def _elements(block: Block, dp: DataParallel) -> float:
    return dp.gathered_params(block) + dp.gathered_experts(block)


def _with_root(blocks: Sequence[Block], dp: DataParallel, gathers: list[list[Comm]], handle: str) -> list[list[Comm]]:
    """The messages, with all of FSDP's root unit joined in one at its first block, if the root begins with it."""
    root = [i for i, b in enumerate(blocks) if in_root(dp.engine, b)]
    if len(root) < 2 or root[0] > 0:
        return gathers
    ends, phase = [blocks[i] for i in root], Phase.FORWARD if handle == "w0" else Phase.INPUT_GRAD
    dense, experts = sum(map(dp.gathered_params, ends)), sum(b.expert_params for b in ends)
    joined = dp.from_host(ends, dp.gather("root", dense, experts, phase, handle), phase, handle)
    return [joined if i == 0 else [] if i in root else each for i, each in enumerate(gathers)]


def backward_gathers(order: Sequence[Block], dp: DataParallel, early: bool = False) -> list[list[Comm]]:
    """The messages that gather each block, last block first, again for its backward; none for what stays. A root may be
    gathered as the backward begins (`ZeroEngine.root_again`). `early`: the step's first backward here."""
    live, again = _live_blocks(order, dp), gathered_again(order[::-1], dp)[::-1]
    gathers = [
        _gather(b, dp, Phase.INPUT_GRAD, f"v{i}", early=early) if again[i] and i >= live else []
        for i, b in enumerate(order)
    ]
    return _with_root(order, dp, gathers, "v0") if dp.engine.root_again else gathers


def gathered_again(blocks: Sequence[Block], dp: DataParallel) -> list[bool]:
    """Tell of each block of a stage whether its backward gathers it, as far as `kept_last`, `ends_together` and a tied
    matrix, which the output's backward has gathered, say."""
    engine = dp.engine
    first_kept = len(blocks) - kept_units(blocks, engine)
    kept = [in_root(engine, b) or stays_all_step(engine, b) for b in blocks]
    kept = [k or (dp.tied > 0 and b.kind is BlockKind.EMBEDDING) for k, b in zip(kept, blocks, strict=True)]
    return [i < first_kept and not kept[i] for i in range(len(blocks))]


def _live_blocks(order: Sequence[Block], dp: DataParallel) -> int:
    """Count the blocks in backward order that the forward left gathered (`ZeroEngine.live_elements`)."""
    held = accumulate(dp.gathered_params(b) + b.expert_params for b in order)
    return sum(elements <= dp.engine.live_elements for elements in held)


def gathered_after_loss(blocks: Sequence[Block], dp: DataParallel) -> float:
    """The elements, of `gathered_elements`, that are not there yet while the loss runs its backward: all but the last
    unit's. This unit prefetches the layer before it once its logits have a gradient (torch's FSDP2: `pre_backward` in
    _fsdp_param_group.py, a hook of the unit's outputs). 0 where other units, or a root around the loss, are gathered.
    """
    engine = dp.engine
    own_unit = engine.kept_last and not engine.ends_together and not dp.tied and dp.reshard
    if dp.zero != 3 or not own_unit or not blocks or blocks[-1].kind is not BlockKind.HEAD:
        return 0.0
    return gathered_elements(blocks, dp) - _elements(blocks[-1], dp)


def gathered_elements(blocks: Sequence[Block], dp: DataParallel) -> float:
    """The most elements of whole parameters that are there at once: two units', all where they stay, or as many as may
    be there. Where a framework's units are known they are neighbours, beside the root or what stays.

    `live_elements` limits what is gathered ahead and kept; what a module is about to use, its tensor or all experts of
    a layer, comes on top (deepspeed/runtime/zero/partitioned_param_coordinator.py: `_fetch_sub_module_impl`). Mostly
    that is the output layer, before which the forward has filled the limit."""
    engine, sizes = dp.engine, [_elements(b, dp) for b in blocks]
    if not dp.reshard:
        return sum(sizes)
    if engine.ends_stay:
        root = sum(n for n, b in zip(sizes, blocks, strict=True) if stays_all_step(engine, b))
        cycled = [n for n, b in zip(sizes, blocks, strict=True) if not stays_all_step(engine, b)]
        there = 1 + units_ahead(blocks, dp)
        return root + max((sum(cycled[i : i + there]) for i in range(len(cycled))), default=0.0)
    if dp.tied:  # beside it two neighbours; what else the ends hold is small
        cycled = [n for n, b in zip(sizes, blocks, strict=True) if b.kind not in ENDS]
        return dp.tied + max((a + b for a, b in pairwise((0.0, *cycled))), default=0.0)
    if engine.ends_together or engine.kept_last:
        root = sum(n for n, b in zip(sizes, blocks, strict=True) if in_root(engine, b))
        cycled = [n for n, b in zip(sizes, blocks, strict=True) if not in_root(engine, b)]
        return root + max((a + b for a, b in pairwise((0.0, *cycled))), default=0.0)
    if not engine.live_elements:
        return sum(sorted(sizes, reverse=True)[:2])
    largest = max((max(n, b.expert_params) for b in blocks for n in b.tensors), default=0)
    return min(sum(sizes), engine.live_elements + largest)
