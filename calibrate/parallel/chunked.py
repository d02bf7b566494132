"""Asynchronous tensor parallelism: each matmul in chunks of tokens, whose messages run beside the next chunk's matmul.

A column layer's gather arrives chunk by chunk, a row layer's sum leaves chunk by chunk, and so their backwards
(Transformer Engine's userbuffers; Wang et al. 2023, "Overlap Communication with Dependent Computation via
Decomposition"). Only what a chunk sends waits for that chunk alone. Order and sizes are those of the simulator's
`sim.models.linear` with `tp_overlap: full`.

Under sequence parallelism a chunk has a share of every rank's own tokens, [ranks, own tokens, …][:, part], so that each
rank gathers and keeps consecutive tokens of its own.

Beside it: docs/tensor_parallel.md.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sim.models.linear import CHUNKS


def parts(rows: int) -> list[slice]:
    """`CHUNKS` runs of rows, as even as possible.

    >>> parts(10)
    [slice(0, 2, None), slice(2, 5, None), slice(5, 7, None), slice(7, 10, None)]
    """
    ends = [rows * c // CHUNKS for c in range(CHUNKS + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """[ranks, tokens of each, …]"""
    return x.reshape(ranks, -1, x.shape[-1])


def _weight_gradient(x: Tensor, grad: Tensor) -> Tensor:
    return _rows(grad).t() @ _rows(x)


def _bias_gradient(grad: Tensor, bias: Tensor | None) -> Tensor | None:
    return None if bias is None else _rows(grad).sum(0)


def _summed(chunks: list[Any], shape: torch.Size) -> Tensor:
    """Waits for the chunks' sums and puts them one behind the other."""
    return torch.cat([chunk.wait() for chunk in chunks]).view(shape)


class ChunkedColumn(torch.autograd.Function):
    """`y = x Wᵀ + b` of some outputs; x is gathered in chunks, its gradient summed in chunks."""

    @staticmethod
    def forward(ctx, x, weight, bias, layer):  # type: ignore[no-untyped-def]
        cut = layer.cut
        ctx.save_for_backward(x)
        ctx.layer = layer
        if not cut.sequence:
            return F.linear(x, weight, bias)
        each = parts(len(x))
        coming = [cut.group.start_all_gather(x[part]) for part in each]
        out = x.new_empty(cut.group.size, len(x), len(weight))
        for part, gathered in zip(each, coming, strict=True):
            out[:, part] = _by_rank(F.linear(gathered.wait(), weight, bias), cut.group.size)
        return out.view(cut.batch, -1, len(weight))

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,), layer = ctx.saved_tensors, ctx.layer
        cut, weight = layer.cut, layer.weight
        gathered = cut.start_gather(x)
        if cut.sequence:
            by_rank = _by_rank(grad, cut.group.size)
            pieces = [by_rank[:, part].reshape(-1, grad.shape[-1]) for part in parts(len(x))]
            sums = [cut.group.start_reduce_scatter(piece @ weight) for piece in pieces]
        else:
            sums = [cut.group.start_all_reduce(_rows(grad)[part] @ weight) for part in parts(len(_rows(grad)))]
        grad_weight, grad_bias = _weight_gradient(gathered(), grad), _bias_gradient(grad, layer.bias)
        return _summed(sums, x.shape), grad_weight, grad_bias, None


class ChunkedRow(torch.autograd.Function):
    """`y = x Wᵀ`, of some inputs, summed over the ranks in chunks; its gradient is gathered in chunks."""

    @staticmethod
    def forward(ctx, x, weight, bias, layer):  # type: ignore[no-untyped-def]
        cut = layer.cut
        ctx.save_for_backward(x)
        ctx.layer = layer
        if cut.sequence:
            by_rank = _by_rank(x, cut.group.size)
            pieces = [by_rank[:, part].reshape(-1, x.shape[-1]) for part in parts(by_rank.shape[1])]
            sums = [cut.group.start_reduce_scatter(F.linear(piece, weight)) for piece in pieces]
            y = _summed(sums, torch.Size((by_rank.shape[1], len(weight))))
        else:
            rows = _rows(x)
            sums = [cut.group.start_all_reduce(F.linear(rows[part], weight)) for part in parts(len(rows))]
            y = _summed(sums, torch.Size((*x.shape[:-1], len(weight))))
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,), layer = ctx.saved_tensors, ctx.layer
        cut, weight, grad_bias = layer.cut, layer.weight, _bias_gradient(grad, layer.bias)
        if not cut.sequence:
            return grad @ weight, _weight_gradient(x, grad), grad_bias, None
        ranks, each = cut.group.size, parts(len(grad))
        coming = [cut.group.start_all_gather(grad[part]) for part in each]
        whole = grad.new_empty(ranks, *grad.shape)
        grad_x = grad.new_empty(ranks, len(grad), x.shape[-1])
        for part, gathered in zip(each, coming, strict=True):
            rows = gathered.wait()
            grad_x[:, part] = _by_rank(rows @ weight, ranks)
            whole[:, part] = _by_rank(rows, ranks)
        return grad_x.view(x.shape), _weight_gradient(x, whole), grad_bias, None
