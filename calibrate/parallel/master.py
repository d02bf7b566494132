"""AdamW over 16-bit parameters by way of fp32 copies of them, as mixed-precision training does.

Micikevicius et al. 2018 (arXiv 1710.03740, sec. 3.1). Apex and Transformer Engine do it in one pass over memory; in
plain torch the gradients are widened first and the parameters written back after, in passes of their own.

Documentation: docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 26  # parameters whose gradients are fp32 at once


class MasterAdamW:
    """Offers of torch's optimizers what the real runs use: `step` and `state` by the 16-bit parameter."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], lr: float) -> None:
        self.chunks = [_Chunk(low, lr) for low in _chunks(parameters)]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Of each 16-bit parameter: the moments, and the fp32 copy."""
        return {
            p: {**c.adamw.state.get(m, {}), "master": m}
            for c in self.chunks
            for p, m in zip(c.low, c.master, strict=True)
        }

    def step(self, scale: float = 1.0) -> None:
        """An update by the gradients times `scale` (of loss scaling: a division that fp16 would lose them to)."""
        for chunk in self.chunks:
            chunk.step(scale)


def _chunks(parameters: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters in a row, of at most `CHUNK` elements where one alone is not more."""
    out: list[list[torch.nn.Parameter]] = []
    size = 0
    for p in parameters:
        if size + p.numel() > CHUNK or not out:
            out.append([])
            size = 0
        out[-1].append(p)
        size += p.numel()
    return out


class _Chunk:
    """Parameters that are updated together."""

    def __init__(self, low: list[torch.nn.Parameter], lr: float) -> None:
        self.low: list[Tensor] = [*low]
        self.master = [p.detach().float() for p in low]
        self.adamw = torch.optim.AdamW(self.master, lr=lr, fused=True)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        for p, m in zip(self.low, self.master, strict=True):
            m.grad = None if p.grad is None else p.grad.float()
            if m.grad is not None and scale != 1.0:
                m.grad.mul_(scale)
        self.adamw.step()
        torch._foreach_copy_(self.low, self.master)
        for m in self.master:
            m.grad = None
