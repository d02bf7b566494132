"""Tensor parallelism within experts: each rank of a group holds a part of the inner width of every expert.

The ranks of a group have different tokens. An all-gather gives every rank all of them. Each rank computes its part of
the result for all tokens, and a reduce-scatter sums the parts on the tokens' own ranks. The backward does the same in
reverse (Megatron-Core's `MoEAlltoAllTokenDispatcher`, core/transformer/moe/token_dispatcher.py). There is no
communication inside an expert.

Documentation: docs/expert_parallel.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from calibrate.bundled_model.linear import Linear
from calibrate.bundled_model.model import Expert
from calibrate.parallel.comm import Group
from calibrate.parallel.tensor import OwnColumns, OwnRows


class _Rows(torch.autograd.Function):
    """Rows gathered from all ranks, or summed over them and scattered; the backward does the opposite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, gathers: bool) -> Tensor:
        ctx.group, ctx.gathers = group, gathers
        return group.all_gather(x) if gathers else group.reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        group = ctx.group
        return (group.reduce_scatter(grad) if ctx.gathers else group.all_gather(grad)), None, None


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """Gather the rows of all ranks: [rows, h] → [ranks · rows, h]."""
    out: Tensor = _Rows.apply(x, group, True)
    return out


def scatter_sum(x: Tensor, group: Group) -> Tensor:
    """Sum all ranks' results and return this rank's rows: [ranks · rows, h] → [rows, h]."""
    out: Tensor = _Rows.apply(x, group, False)
    return out


class _Shared(torch.autograd.Function):
    """A bias ÷ the number of ranks that add it. Each rank sees every row's gradient, so the gradient is not divided."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, ranks: int) -> Tensor:
        return bias / ranks

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class DownPart(OwnColumns):
    """The inputs `columns` of an expert's second matrix, with the whole bias. [tokens, own inputs] → [tokens, h]

    The result is one term of a sum over `ranks` ranks.
    """

    def __init__(self, whole: Linear, columns: slice, ranks: int) -> None:
        super().__init__(whole, columns)
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x, None)
        return y if self.bias is None else y + _Shared.apply(self.bias, self.ranks)


def cut_expert(expert: nn.Module, group: Group) -> None:
    """Replace an expert's matrices by this rank's parts; a gate is split like the outputs that it multiplies."""
    assert isinstance(expert, Expert)
    inner = expert.down.weight.shape[1]
    each = inner // group.size
    columns = slice(group.index * each, (group.index + 1) * each)
    own = torch.arange(inner)[columns]
    expert.up = OwnRows(expert.up, torch.cat((own, own + inner)) if expert.mlp == "swiglu" else own)
    expert.down = DownPart(expert.down, columns, group.size)


def biases_counted_before(experts: Iterable[nn.Module], group: Group) -> list[nn.Parameter]:
    """Return the second matrices' biases, except on the group's first rank, which counts them in the norm."""
    if group.index == 0:
        return []
    downs = (x for e in experts for x in e.modules() if isinstance(x, DownPart))
    return [x.bias for x in downs if x.bias is not None]
