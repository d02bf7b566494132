"""AdamW over 16-bit parameters by way of fp32 copies of them, as mixed-precision training does.

Micikevicius et al. 2018 (arXiv 1710.03740, sec. 3.1). Apex and Transformer Engine do it in one pass over memory; in
plain torch the gradients are widened first and the parameters written back after, in passes of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class MasterAdamW:
    """Offers of torch's optimizers what the real runs use: `step` and `state` by the 16-bit parameter."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], lr: float) -> None:
        self.low = list(parameters)
        self.master = [p.detach().float() for p in self.low]
        self.inner = torch.optim.AdamW(self.master, lr=lr, fused=True)

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Of each 16-bit parameter: the moments, and the fp32 copy."""
        return {p: {**self.inner.state.get(m, {}), "master": m} for p, m in zip(self.low, self.master, strict=True)}

    @torch.no_grad()
    def step(self) -> None:
        for p, m in zip(self.low, self.master, strict=True):
            m.grad = None if p.grad is None else p.grad.float()
        self.inner.step()
        torch._foreach_copy_(self.low, self.master)
        for m in self.master:
            m.grad = None
