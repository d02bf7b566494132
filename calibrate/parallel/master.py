"""AdamW over 16-bit parameters by way of fp32 copies of them, as mixed-precision training does.

Micikevicius et al. 2018 (arXiv 1710.03740, sec. 3.1). Apex and Transformer Engine do it in one pass over memory; in
plain torch the gradients are widened first and the parameters written back after, in passes of their own.

Beside it: docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 26  # parameters whose gradients are fp32 at once


class MasterAdamW:
    """Offers of torch's optimizers what the real runs use: `step` and `state` by the 16-bit parameter."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], lr: float) -> None:
        self.chunks: list[_Chunk] = []
        for p in parameters:
            if not self.chunks or self.chunks[-1].size + p.numel() > CHUNK:
                self.chunks.append(_Chunk([], [], lr))
            self.chunks[-1].low.append(p)
            self.chunks[-1].master.append(p.detach().float())

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Of each 16-bit parameter: the moments, and the fp32 copy."""
        return {
            p: {**c.adamw.state.get(m, {}), "master": m}
            for c in self.chunks
            for p, m in zip(c.low, c.master, strict=True)
        }

    def step(self) -> None:
        for chunk in self.chunks:
            chunk.step()


@dataclass(slots=True)
class _Chunk:
    low: list[torch.nn.Parameter]
    master: list[Tensor]
    lr: float
    made: torch.optim.AdamW | None = None

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.low)

    @property
    def adamw(self) -> torch.optim.AdamW:
        if self.made is None:
            self.made = torch.optim.AdamW(self.master, lr=self.lr, fused=True)
        return self.made

    @torch.no_grad()
    def step(self) -> None:
        for p, m in zip(self.low, self.master, strict=True):
            m.grad = None if p.grad is None else p.grad.float()
        self.adamw.step()
        torch._foreach_copy_(self.low, self.master)
        for m in self.master:
            m.grad = None
