"""Linear layers of the bundled model, whose weight gradients may be computed later than their input gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WeightJob = tuple[Tensor, Tensor, nn.Parameter, nn.Parameter | None, Callable[[Tensor], Tensor] | None]


@dataclass(slots=True)
class WeightGrads:
    """Takes the weight-gradient half of linear layers' backwards, as the zero-bubble paper's code does.

    While `deferred` is a list, jobs are queued there for the schedule's W action; otherwise they run at once.
    `listeners` are called with each parameter to whose gradient a job has added.
    """

    deferred: list[WeightJob] | None = None
    listeners: list[Callable[[nn.Parameter], None]] = field(default_factory=list)

    def add(
        self,
        x: Tensor,
        grad: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        gather: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take the weight-gradient half of one linear layer's backward: its input and its output's gradient.

        `gather` makes the whole input from the part that this rank kept (sequence parallelism).
        """
        if self.deferred is None:
            self.run([(x, grad, weight, bias, gather)])
        else:
            self.deferred.append((x, grad, weight, bias, gather))

    @torch.no_grad()
    def run(self, jobs: list[WeightJob]) -> None:
        """Add the weight gradients of `jobs` to the parameters' `.grad`, and clear the list."""
        while jobs:
            x, grad, weight, bias, gather = jobs.pop(0)
            rows = as_rows(grad)
            inputs = as_rows(x if gather is None else gather(x))
            if weight.grad is None:
                weight.grad = rows.t() @ inputs
            else:
                weight.grad.addmm_(rows.t(), inputs)
            if bias is not None:
                bias.grad = rows.sum(0) if bias.grad is None else bias.grad.add_(rows.sum(0))
            for listen in self.listeners:
                for p in (weight, bias) if bias is not None else (weight,):
                    listen(p)


def gradient(p: Tensor) -> Tensor:
    """Return the gradient of a parameter that has one."""
    assert p.grad is not None
    return p.grad


def as_rows(x: Tensor) -> Tensor:
    """Reshape [..., n] → [rows, n]."""
    return x.reshape(-1, x.shape[-1])


def weight_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """Compute the gradient of a linear layer's weight [n_out, n_in] from its input and its output's gradient."""
    return as_rows(grad).t() @ as_rows(x)


def bias_gradient(grad: Tensor, bias: Tensor | None) -> Tensor | None:
    """Compute the gradient of a linear layer's bias; None if it has none."""
    return None if bias is None else as_rows(grad).sum(0)


class _SplitLinear(torch.autograd.Function):
    """A linear layer whose backward computes the input gradient and leaves the weight gradient to `WeightGrads`."""

    @staticmethod
    def forward(ctx, x, weight, bias, store):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.store = weight, bias, store  # the parameters themselves, as their `.grad` is needed
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        ctx.store.add(x, grad, ctx.weight, ctx.bias)
        return grad @ ctx.weight, None, None, None


class Linear(nn.Module):
    """y = x Wᵀ + b. With a `store`, the weight gradient can be deferred."""

    def __init__(self, n_in: int, n_out: int, bias: bool, store: WeightGrads | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n_out)) if bias else None
        self.store = store

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: nn.Parameter | None) -> Tensor:
        """Compute x Wᵀ, and add the bias if there is one."""
        if self.store is None:
            return F.linear(x, self.weight, bias)
        out: Tensor = _SplitLinear.apply(x, self.weight, bias, self.store)
        return out

    def deferred_parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients `WeightGrads` adds, not autograd."""
        return list(self.parameters(recurse=False))
