"""Linear layers in 8 bits: inputs and weights in E4M3, gradients of outputs in E5M2, one scale for a tensor.

As Transformer Engine's hybrid format with current scaling and powers of two as scales (its `Float8CurrentScaling` and
`force_pow_2_scales`): a tensor is brought up to the format's largest value, rounded, and multiplied (Micikevicius et
al. 2022, arXiv 2209.05433). For backward the rounded input is kept, a byte an element.

A CPU has no 8-bit matmuls. What was rounded is multiplied in the activations' format instead, where it stands exactly,
as a product of two such numbers does in fp32: the numbers are an 8-bit matmul's up to the order of its sums, the time
is not. The weight is rounded anew for each use; what a GPU keeps of it in 8 bits is not held.

Beside it: docs/number_formats.md.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrate.linear import Linear, bias_gradient, weight_gradient

INPUT, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x` in 8 bits, and the power of two that it was multiplied by.

    >>> eight_bits, scale = quantized(torch.tensor([1.0, 100.0]), INPUT)
    >>> eight_bits.float().tolist(), float(scale)
    ([4.0, 416.0], 4.0)
    """
    most = x.detach().abs().amax().float()
    room = torch.where(most > 0, torch.finfo(dtype).max / most, torch.ones_like(most))
    scale = torch.ldexp(torch.ones_like(most), torch.frexp(room).exponent - 1)
    return (x * scale.to(x.dtype)).to(dtype), scale


def restored(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What stands in 8 bits, in another format."""
    return x.to(dtype) / scale.to(dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` as 8 bits hold it."""
    return restored(*quantized(x, dtype), x.dtype)


class _Linear8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Linear) -> Tensor:
        kept, scale = quantized(x, INPUT)
        ctx.save_for_backward(kept, scale)
        ctx.layer = layer
        return F.linear(restored(kept, scale, x.dtype), rounded(weight, INPUT), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept, scale), layer = ctx.saved_tensors, ctx.layer
        weight, bias = layer.weight, layer.bias
        eight = rounded(grad, GRADIENT)
        grad_x = eight @ rounded(weight, INPUT)
        grad_weight = weight_gradient(restored(kept, scale, grad.dtype), eight)
        return grad_x, grad_weight, bias_gradient(grad, bias), None


class Linear8(Linear):
    """y = x Wᵀ + b of what 8 bits hold of x and W."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Linear8.apply(x, self.weight, self.bias, self)
        return out
