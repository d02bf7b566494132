"""Dropout whose masks equal those of one device, however a tensor is split over ranks.

A rank with a part of a tensor draws the whole tensor's mask and keeps its own part. So all ranks together drop what one
device drops. Megatron-LM instead draws a mask of the part's shape from a seed of the rank
(core/tensor_parallel/random.py), which is cheaper but equals one device only on average.

The mask is kept for the backward with one byte for each element, as `torch.native_dropout` keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a tensor of shape `whole` that a rank has; `own` returns that part of such a tensor."""

    whole: tuple[int, ...]
    own: Callable[[Tensor], Tensor]


class _Masked(torch.autograd.Function):
    """x · mask / (1 − p); only the mask is kept for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = 1.0 / (1.0 - p)
        return (x * mask).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return (grad * mask).mul_(ctx.scale), None, None


def dropout(x: Tensor, p: float, share: Share | None = None) -> Tensor:
    """Zero elements of `x` with probability `p` and scale the others by 1 / (1 − p).

    `share` says which part of a whole tensor `x` is; None: all of it.
    """
    if p <= 0:
        return x
    if share is None:
        return torch.native_dropout(x, p, True)[0]
    mask = share.own(_mask(share.whole, p, x)).contiguous()
    out: Tensor = _Masked.apply(x, mask.view(x.shape), p)
    return out


def _mask(shape: tuple[int, ...], p: float, like: Tensor) -> Tensor:
    """Draw the mask that `torch.native_dropout` draws for this shape on the device of `like`."""
    if like.device.type == "cpu":
        return torch.empty(shape, dtype=torch.bool).bernoulli_(1.0 - p)
    return torch.native_dropout(like.new_ones(shape), p, True)[1]
