"""8-bit weights in the served model: integers with a scale for each output, converted back in every product.

This is weight-only absmax quantization (`calibrate.quantization.int8_weight_only`), which `inference.quantization:
int8_weight_only` simulates. It applies to the linear layers of transformer layers, not to embedding, output layer,
router and norms.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calibrate.bundled_model.linear import Linear
from calibrate.bundled_model.model import Layer, Router


class Int8Linear(nn.Module):
    """y = x (W₈ s)ᵀ + b"""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127.0
        self.scale = nn.Buffer(scale)
        self.weight = nn.Buffer((weight / scale).round().clamp(-127, 127).to(torch.int8))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def quantize(blocks: list[nn.Module]) -> None:
    """Replace every linear layer of the transformer layers among `blocks`."""
    for layer in (b for b in blocks if isinstance(b, Layer)):
        for owner in list(layer.modules()):
            for name, child in list(owner.named_children()):
                if isinstance(child, Linear) and not isinstance(owner, Router):
                    setattr(owner, name, Int8Linear(child))


def weight_bytes(blocks: list[nn.Module]) -> int:
    """Return the bytes of all parameters and buffers of `blocks`."""
    return sum(x.nbytes for b in blocks for x in (*b.parameters(), *b.buffers()))
