"""Asynchronous tensor parallelism: each matmul runs in chunks of tokens, and a chunk's communication runs beside the
next chunk's matmul.

A column layer gathers its input chunk by chunk, a row layer sums its output chunk by chunk, and their backwards do the
same (Transformer Engine's userbuffers; Wang et al. 2023, "Overlap Communication with Dependent Computation via
Decomposition"). Order and sizes of communications are those of the simulator's `sim.models.linear` with `tp_overlap:
full`.

Under sequence parallelism a chunk has a share of every rank's own tokens, [ranks, own tokens, …][:, part]. So each rank
gathers and keeps consecutive tokens of its own.

Documentation: docs/tensor_parallel.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrate.bundled_model.linear import as_rows, bias_gradient, weight_gradient
from calibrate.parallel.comm import Group, Pending
from calibrate.parallel.tensor_split import TensorSplit
from sim.models.linear import CHUNKS


def parts(rows: int) -> list[slice]:
    """Split rows into `CHUNKS` consecutive parts, as even as possible.

    >>> parts(10)
    [slice(0, 2, None), slice(2, 5, None), slice(5, 7, None), slice(7, 10, None)]
    """
    ends = [rows * c // CHUNKS for c in range(CHUNKS + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """Reshape [ranks · tokens, …] → [ranks, tokens, …]."""
    return x.reshape(ranks, -1, x.shape[-1])


def _gathered_chunks(x: Tensor, group: Group) -> Iterator[tuple[slice, Tensor]]:
    """Yield all ranks' tokens chunk by chunk: the slice of a rank's own tokens, and the chunk [ranks · rows, h].

    All gathers start at once, so that later chunks arrive while the caller works on earlier ones.
    """
    each = parts(len(x))
    coming = [group.start_all_gather(x[part]) for part in each]
    for part, gathered in zip(each, coming, strict=True):
        yield part, gathered.wait()


def _start_sums(x: Tensor, product: Callable[[Tensor], Tensor], cut: TensorSplit) -> list[Pending]:
    """Compute `product` of each chunk of `x` and start its sum over the ranks, which runs beside the next product."""
    if not cut.sequence:
        rows = as_rows(x)
        return [cut.group.start_all_reduce(product(rows[part])) for part in parts(len(rows))]
    by_rank = _by_rank(x, cut.group.size)
    return [cut.group.start_reduce_scatter(product(as_rows(by_rank[:, part]))) for part in parts(by_rank.shape[1])]


def _summed(chunks: Sequence[Pending], shape: Sequence[int]) -> Tensor:
    """Wait for the chunks' sums and concatenate them."""
    return torch.cat([chunk.wait() for chunk in chunks]).view(*shape)


class ChunkedColumn(torch.autograd.Function):
    """`y = x Wᵀ + b` for this rank's outputs; x is gathered in chunks, its gradient is summed in chunks."""

    @staticmethod
    def forward(ctx, x, weight, bias, layer):  # type: ignore[no-untyped-def]
        cut = layer.cut
        ctx.save_for_backward(x)
        ctx.layer = layer
        if not cut.sequence:
            return F.linear(x, weight, bias)
        out = x.new_empty(cut.group.size, len(x), len(weight))
        for part, gathered in _gathered_chunks(x, cut.group):
            out[:, part] = _by_rank(F.linear(gathered, weight, bias), cut.group.size)
        return out.view(cut.batch, -1, len(weight))

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,), layer = ctx.saved_tensors, ctx.layer
        cut, weight = layer.cut, layer.weight
        gathered = cut.start_gather(x)
        sums = _start_sums(grad, lambda rows: rows @ weight, cut)
        grad_weight, grad_bias = weight_gradient(gathered(), grad), bias_gradient(grad, layer.bias)
        return _summed(sums, x.shape), grad_weight, grad_bias, None


class ChunkedRow(torch.autograd.Function):
    """`y = x Wᵀ` for this rank's inputs, summed over the ranks in chunks; y's gradient is gathered in chunks."""

    @staticmethod
    def forward(ctx, x, weight, bias, layer):  # type: ignore[no-untyped-def]
        cut = layer.cut
        ctx.save_for_backward(x)
        ctx.layer = layer
        sums = _start_sums(x, lambda rows: F.linear(rows, weight), cut)
        tokens = (len(as_rows(x)) // cut.group.size,) if cut.sequence else x.shape[:-1]
        y = _summed(sums, (*tokens, len(weight)))
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,), layer = ctx.saved_tensors, ctx.layer
        cut, weight, grad_bias = layer.cut, layer.weight, bias_gradient(grad, layer.bias)
        if not cut.sequence:
            return grad @ weight, weight_gradient(x, grad), grad_bias, None
        ranks = cut.group.size
        whole = grad.new_empty(ranks, *grad.shape)
        grad_x = grad.new_empty(ranks, len(grad), x.shape[-1])
        for part, rows in _gathered_chunks(grad, cut.group):
            grad_x[:, part] = _by_rank(rows @ weight, ranks)
            whole[:, part] = _by_rank(rows, ranks)
        return grad_x.view(x.shape), weight_gradient(x, whole), grad_bias, None
