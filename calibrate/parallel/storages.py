"""Distinct storages of tensors, by which memory is counted."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from calibrate.bundled_model.model import Layer


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return distinct storages: identity → bytes. Addresses would not do, as ZeRO-3 frees and reallocates storages."""
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


def resident(blocks: Iterable[nn.Module]) -> dict[int, int]:
    """Return the storages that are always allocated: parameters, gradients, and constants shared by layers."""
    found: list[Tensor] = []
    for block in blocks:
        for p in block.parameters():
            found += [p] if p.grad is None else [p, p.grad]
        if isinstance(block, Layer):
            found += [block.constants.mask, block.constants.cos, block.constants.sin]
    return storages(found)
