"""Checks what somebody else's function returned: a step, and the loss that it computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from calibrate.capture.step import Step
from sim.core.dtypes import normalise_dtype
from sim.core.errors import InputError
from sim.core.json_values import is_count, is_positive

AUTOCAST = ("", "bf16", "fp16")
ACCUMULATION = "the scenario's global_batch_size says how many micro-batches a step accumulates"


class StepRefused(InputError):
    """Raised where the work of a step's function cannot be captured; the message lacks the step's name."""


def checked_step(step: Any, where: str) -> Step:
    """Return the step of a function `where`, with its dtype in the file's spelling.

    Raises:
        InputError: if it is no step, or a field has a value that no capture can use.
    """
    if not isinstance(step, Step):
        raise InputError(f"{where}: returned {type(step).__name__}; must return a calibrate.capture.Step")
    found: Step = replace(step, autocast=normalise_dtype(step.autocast or ""))
    for name, fits, allowed in (
        ("model", isinstance(found.model, torch.nn.Module), "a torch.nn.Module"),
        ("loss", callable(found.loss), "a function without arguments"),
        ("optimizer", isinstance(found.optimizer, torch.optim.Optimizer | None), "a torch.optim.Optimizer or None"),
        ("seq_len", is_count(found.seq_len), "a whole number of tokens, at least 1"),
        ("micro_batch_size", is_count(found.micro_batch_size), "a whole number of sequences, at least 1"),
        ("autocast", found.autocast in AUTOCAST, 'bf16, fp16 or ""'),
        (
            "clip_grad_norm",
            found.clip_grad_norm is None or is_positive(found.clip_grad_norm),
            "a number above 0 or None",
        ),
    ):
        if not fits:
            raise InputError(f"{where}: Step.{name}: found {_shown(getattr(found, name))}; must be {allowed}")
    if isinstance(found.optimizer, torch.optim.LBFGS):
        raise InputError(f"{where}: Step.optimizer: found LBFGS; it runs the forward itself, as often as it needs")
    return found


def checked_loss(value: Any) -> torch.Tensor:
    """Return a step's loss.

    Raises:
        StepRefused: if no backward can start at it.
    """
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise StepRefused(f"Step.loss: returned {_shown(value)}; must return the loss, a tensor with one element")
    if not value.requires_grad:
        raise StepRefused(
            "Step.loss: returned a tensor that depends on no parameter that wants a gradient; must return the loss "
            "before detach or item (without an optimizer, a step is a forward alone)"
        )
    return value


def without_gradients(step: Step) -> None:
    """Check that a forward made no gradients.

    Raises:
        StepRefused: if it did, which would count as the step's forward.
    """
    if any(p.grad is not None for p in step.model.parameters()):
        raise StepRefused(
            f"Step.loss: runs a backward itself; must return the loss, whose backward is captured; {ACCUMULATION}"
        )


def _shown(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"a tensor {list(x.shape)}"
    return repr(x)[:60] if x is None or isinstance(x, int | float | str) else f"a {type(x).__name__}"
