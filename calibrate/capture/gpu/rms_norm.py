"""`torch.nn.functional.rms_norm` as one kernel, which only a GPU has; a CPU runs it operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

FUSED = getattr(torch.ops.aten, "_fused_rms_norm", None)  # from torch 2.9 on


class _RmsNorm(torch.autograd.Function):
    """Runs the fused kernel below autograd, which would divide it on a CPU, and its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            y, rstd = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)
        ctx.shape = shape
        ctx.save_for_backward(x, rstd, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, rstd, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        of_x, of_weight = torch.ops.aten._fused_rms_norm_backward(grad, x, ctx.shape, rstd, weight, wanted)
        return of_x, None, of_weight, None


def rms_norm(
    func: Callable[..., Any],
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """Run the fused kernel, or `func` where torch has none for these dtypes (ATen/native/layer_norm.cpp)."""
    if FUSED is None or (weight is not None and weight.dtype != input.dtype):
        return func(input, normalized_shape, weight, eps)
    return _RmsNorm.apply(input, list(normalized_shape), weight, eps)
