"""Norms of the bundled model, which keep only their input for the backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sim.inputs.model_config import ModelConfig

EPSILON = 1e-5


class _RMSNorm(torch.autograd.Function):
    """x / rms(x) · weight, which keeps its input and one fp32 number for each row.

    torch's own RMSNorm keeps the normalized input too.
    """

    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight, scale = ctx.saved_tensors
        normal = x.to(scale.dtype) * scale
        grad_weight = (grad * normal).reshape(-1, x.shape[-1]).sum(0)
        g = (grad * weight).to(scale.dtype)
        grad_x = scale * (g - normal * (g * normal).mean(-1, keepdim=True))
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


def eager_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Compute RMSNorm by separate kernels, keeping only the input for the backward."""
    found: Tensor = _RMSNorm.apply(x, weight)
    return found


class Norm(nn.Module):
    """LayerNorm (with a bias if the model's linear layers have one) or RMSNorm over the hidden size."""

    def __init__(self, m: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(m.hidden))
        self.rms = m.norm == "rmsnorm"
        self.bias = nn.Parameter(torch.empty(m.hidden)) if m.bias and not self.rms else None

    def forward(self, x: Tensor) -> Tensor:
        if self.rms:
            return eager_rms_norm(x, self.weight)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, EPSILON)
