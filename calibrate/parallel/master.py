"""AdamW for 16-bit parameters with fp32 master copies, as in mixed-precision training.

Micikevicius et al. 2018 (arXiv 1710.03740, sec. 3.1). Apex and Transformer Engine need one pass over memory. Plain
torch needs two more: one casts the gradients to fp32, another writes the parameters back.

Documentation: docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 26  # parameters whose gradients are in fp32 at the same time


class MasterAdamW:
    """AdamW with the parts of torch's interface that real runs use: `step`, and `state` by 16-bit parameter."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], lr: float) -> None:
        self.chunks = [_Chunk(low, lr) for low in _chunks(parameters)]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The moments and the fp32 copy of each 16-bit parameter."""
        return {
            p: {**c.adamw.state.get(m, {}), "master": m}
            for c in self.chunks
            for p, m in zip(c.low, c.master, strict=True)
        }

    def step(self, scale: float = 1.0) -> None:
        """Update by the gradients times `scale`, which undoes loss scaling; dividing in fp16 would lose gradients."""
        for chunk in self.chunks:
            chunk.step(scale)


def _chunks(parameters: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Split parameters into consecutive chunks of at most `CHUNK` elements, unless one parameter is larger."""
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
    """Parameters that are updated at once."""

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
