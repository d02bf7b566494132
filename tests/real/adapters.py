"""Low-rank adapters on the blocks of `calibrate.bundled_model.model`.

Hu et al. 2021, LoRA, arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calibrate.bundled_model.linear import Linear
from calibrate.bundled_model.model import Layer
from sim.inputs.training_config import Lora

# The layer's attribute for each name of the simulator.
NAMES = {"qkv": "qkv", "attention_out": "proj", "mlp_up": "up", "mlp_down": "down"}
ALPHA = 2.0  # alpha ÷ rank, by which the adapter's output is multiplied


class Adapted(nn.Module):
    """W x + alpha / rank · B A x; B starts at zero, so an untrained adapter changes nothing."""

    def __init__(self, base: Linear, rank: int) -> None:
        super().__init__()
        n, k = base.weight.shape
        self.base = base
        self.a = nn.Parameter(base.weight.new_empty(rank, k))
        self.b = nn.Parameter(base.weight.new_zeros(n, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + F.linear(F.linear(x, self.a), self.b) * ALPHA
        return out


def add_adapters(blocks: Sequence[nn.Module], lora: Lora) -> list[nn.Parameter]:
    """Freeze all parameters of `blocks` and add adapters to the targets; return the trained parameters."""
    for block in blocks:
        block.requires_grad_(False)
        for target in lora.targets if isinstance(block, Layer) else ():
            name = NAMES[target]
            setattr(block, name, Adapted(getattr(block, name), lora.rank))
    return [p for block in blocks for p in block.parameters() if p.requires_grad]


def merged(layer: Adapted) -> Tensor:
    """Return the one matrix that computes the same: W + alpha / rank · B A."""
    return torch.add(layer.base.weight, layer.b @ layer.a, alpha=ALPHA)
