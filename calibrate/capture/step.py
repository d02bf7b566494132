"""`Step`: a training step to capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Step:
    """A training step: forward and backward of one micro-batch, clipping and the optimizer's step.

    `loss` runs the forward of one micro-batch and returns the scalar loss. `autocast`: the dtype in which it runs
    under `torch.autocast`, "" without. `clip_grad_norm` None: gradients are not clipped. `seq_len` and
    `micro_batch_size` say what `loss` computes on. `facts` are further words and numbers for the file.
    `compiled`: model and loss run as `torch.compile` would run them.
    """

    model: torch.nn.Module
    loss: Callable[[], torch.Tensor]
    optimizer: torch.optim.Optimizer
    seq_len: int
    micro_batch_size: int
    autocast: str = ""
    clip_grad_norm: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    compiled: bool = False
