"""Which of a stage's saved activations go to host memory, and until when they are on the device (docs/offload.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sim.core.program import Block, BlockKind
from sim.inputs.training_config import ActivationOffload


class HostCopy(NamedTuple):
    """Saved bytes of the stage's block number `block`, copied to host memory behind its forward. They are on the device
    until the forward of block `until` ends, and from the start of that block's backward on."""

    block: int
    bytes: float
    until: int


def host_copies(blocks: Sequence[Block], offload: ActivationOffload | bool) -> tuple[HostCopy, ...]:
    """The copies of one micro-batch's activations, first block first; none without offload."""
    if offload is False:
        return ()
    last = len(blocks) - 1
    if offload is True or offload.modules:
        chosen = [_bytes_of(b, () if offload is True else offload.modules) for b in blocks]
        if offload is not True and any(b.kind is BlockKind.HEAD for b in blocks):
            chosen[_last_layer(blocks)] = 0.0  # its backward comes at once
        copies = enumerate(chosen)
        return tuple(HostCopy(i, size, min(i + 1, last)) for i, size in copies if size or offload is True)
    layers = [i for i, b in enumerate(blocks) if b.kind is BlockKind.LAYER]
    away = min(offload.layers or 0, len(layers) - 1)
    ends = layers[len(layers) - away - 1 :]
    return tuple(HostCopy(i, _bytes_of(blocks[i], ()), end) for i, end in zip(layers[:away], ends, strict=False))


def _bytes_of(block: Block, modules: Sequence[str]) -> float:
    """Bytes that a block saves, or those of these modules."""
    return sum(s.bytes for s in block.saved if not modules or s.module in modules)


def _last_layer(blocks: Sequence[Block]) -> int:
    return max((i for i, b in enumerate(blocks) if b.kind in (BlockKind.LAYER, BlockKind.MTP)), default=0)


def on_device(saved: Sequence[float], copies: Sequence[HostCopy]) -> list[float]:
    """Saved bytes of one micro-batch on the device while each block of a stage runs, forward or backward: all of it
    and of the blocks before it, but for what is in host memory.

    >>> every = [HostCopy(0, 1.0, 1), HostCopy(1, 10.0, 2), HostCopy(2, 100.0, 2)]
    >>> on_device([1.0, 10.0, 100.0], every)
    [1.0, 11.0, 110.0]
    >>> on_device([1.0, 10.0, 100.0], [HostCopy(0, 1.0, 1)])
    [1.0, 11.0, 110.0]
    >>> on_device([3.0, 10.0, 100.0], [HostCopy(0, 1.0, 1)])
    [3.0, 13.0, 112.0]
    """
    copied, stays = {c.block: c for c in copies}, 0.0
    there: list[HostCopy] = []
    out = []
    for i, size in enumerate(saved):
        there = [c for c in there if c.until >= i]
        if (mine := copied.get(i)) is not None:
            there.append(mine)
        stays += size - (0.0 if mine is None else mine.bytes)
        out.append(stays + sum(c.bytes for c in there))
    return out


def kept_on_device(saved: Sequence[float], copies: Sequence[HostCopy]) -> float:
    """Saved bytes that stay on the device between a forward and its backward."""
    return sum(saved) - sum(c.bytes for c in copies)
