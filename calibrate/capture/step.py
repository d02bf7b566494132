"""A training step, or a forward alone, to capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Step:
    """A training step: forward and backward of one micro-batch, clipping and the optimizer's step.

    `loss` runs the forward of one micro-batch and returns the scalar loss. It runs twice; the second run is recorded.
    Without an optimizer (None) the step is a forward alone, as inference runs it: `loss` runs under `torch.no_grad`,
    and may return anything. `model.eval()` is yours to call.
    `autocast`: dtype of `torch.autocast`; "": none. `clip_grad_norm`: the largest norm; None: no clipping. `seq_len`
    (tokens) and `micro_batch_size` (sequences) say what `loss` computes on. `facts`: further entries for the file.
    `compiled`: capture model and loss as `torch.compile` runs them.
    """

    model: torch.nn.Module
    loss: Callable[[], Any]
    optimizer: torch.optim.Optimizer | None
    seq_len: int
    micro_batch_size: int
    autocast: str = ""
    clip_grad_norm: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    compiled: bool = False
