"""Rotary positions, and the constants that all layers of a model share: the causal mask and the rotation tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sim.inputs.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Constants:
    """The additive causal mask [s, s] and the rotation tables [s, 1, width / 2] for vectors of size `width`."""

    mask: Tensor
    cos: Tensor
    sin: Tensor


def make_constants(m: ModelConfig, seq_len: int, device: str, dtype: torch.dtype) -> Constants:
    """Make the mask and the rotation tables (RoFormer, arXiv 2104.09864, base 10,000)."""
    width = m.head_dim if m.mla is None else m.mla.qk_rope_head_dim
    mask = torch.full((seq_len, seq_len), -math.inf, device=device, dtype=dtype).triu(1)
    rate = 10_000.0 ** (-torch.arange(0, width, 2, device=device, dtype=torch.float64) / width)
    angle = torch.outer(torch.arange(seq_len, device=device, dtype=torch.float64), rate)[:, None, :]
    return Constants(mask, angle.cos().to(dtype), angle.sin().to(dtype))


def rotate(x: Tensor, c: Constants) -> Tensor:
    """Rotate [b, s, heads, width]: the first half of each vector with the second."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * c.cos - b * c.sin, b * c.cos + a * c.sin), -1)
