"""Distinct storages of tensors: what memory is counted by."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from calibrate.model import Layer


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Distinct storages: identity → bytes (an address would not do: ZeRO-3's are freed and come back elsewhere)."""
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


def resident(blocks: Iterable[nn.Module]) -> dict[int, int]:
    """Storages that are there anyway: parameters, gradients, and constants shared by layers."""
    found: list[Tensor] = []
    for block in blocks:
        for p in block.parameters():
            found += [p] if p.grad is None else [p, p.grad]
        if isinstance(block, Layer):
            found += [block.constants.mask, block.constants.cos, block.constants.sin]
    return storages(found)
