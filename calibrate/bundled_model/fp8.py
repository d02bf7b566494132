"""Linear layers in fp8: inputs and weights in E4M3, gradients of outputs in E5M2, one scale for each tensor.

This is Transformer Engine's hybrid format with current scaling and powers of two as scales (`Float8CurrentScaling`,
`force_pow_2_scales`). A tensor is scaled up to the format's largest value and rounded (Micikevicius et al. 2022, arXiv
2209.05433). The rounded input is kept for the backward, with one byte for each element.

A CPU has no 8-bit matmuls. The rounded values are multiplied in the activations' dtype instead, which holds them
exactly. So the results equal those of an 8-bit matmul up to the order of its sums; the times do not. The weight is
rounded again for each use, where a GPU keeps an 8-bit copy.

Documentation: docs/number_formats.md.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrate.bundled_model.linear import Linear, bias_gradient, weight_gradient

INPUT, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round `x` to an 8-bit dtype; also return the power of two by which it was multiplied.

    >>> eight_bits, scale = quantized(torch.tensor([1.0, 104.0]), INPUT)
    >>> eight_bits.float().tolist(), float(scale)
    ([4.0, 416.0], 4.0)
    """
    most = x.detach().abs().amax().float()
    room = torch.where(most > 0, torch.finfo(dtype).max / most, torch.ones_like(most))
    scale = torch.ldexp(torch.ones_like(most), torch.frexp(room).exponent - 1)
    return (x * scale.to(x.dtype)).to(dtype), scale


def restored(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert an 8-bit tensor to another dtype and divide it by its scale."""
    return x.to(dtype) / scale.to(dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round `x` to 8 bits and convert it back."""
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
    """y = x Wᵀ + b with x and W rounded to 8 bits."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Linear8.apply(x, self.weight, self.bias, self)
        return out
