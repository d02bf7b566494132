"""Layers of models that tests compile."""

from __future__ import annotations

from typing import Any

import torch

WIDTH = 32


class Block(torch.nn.Module):
    """A norm, an MLP with a GELU in several operators, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        h = self.up(self.norm(x))
        return x + self.down(0.5 * h * (1.0 + torch.tanh(0.8 * (h + 0.04 * h**3))))


class Reads(Block):
    """Asks for a value, where Dynamo breaks the graph."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) if x.sum().item() > 0 else x


class Halves(Block):
    """Turns halves of its input, as rope does: the backward copies gradients into parts of a tensor."""

    def forward(self, x: Any) -> Any:
        half = WIDTH // 2
        return super().forward(x * 0.5 + torch.cat((-x[..., half:], x[..., :half]), dim=-1))
