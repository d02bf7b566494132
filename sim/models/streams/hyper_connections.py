"""Hyper-connections: a residual stream of several streams (mHC, arXiv 2512.24880, as DeepSeek V4 has them).

With n streams X of a token, attention and MLP each compute weights from all of them: H = W·norm(X), (2 + n)·n numbers
in fp32. Of these n make the branch's input, a sum of the streams; n say how much of the branch's result each stream
gets; n² mix the streams, after they are made doubly stochastic (Sinkhorn and Knopp 1967, 20 passes over rows and
columns). So X' = Bᵀ·X + p·branch(Σ a·X). After the last layer a sum of the streams with such weights is the head's
input (`DeepseekV4HyperConnection` and `DeepseekV4HyperHead` in
transformers/models/deepseek_v4/modeling_deepseek_v4.py). Independent ones (Hunyuan 4) have no weights that mix, and
divide W·X by the root mean square (`HYV4HyperConnection` in transformers/models/hy_v4/modeling_hy_v4.py). Gated ones
(Qwen 4) are `sim.models.streams.gated_streams`.

Bytes for each of the n·hidden numbers of a token, besides the product with W. Fused (mHC, section 4.3.1; Megatron-Core:
core/fusions/fused_mhc_kernels.py: proj_rms, sinkhorn, h_aggregate, h_post_bda): the branch's input reads the streams
(e + e/n), the new streams are written (2e + e/n). In separate operators: to fp32 (e + 4), square (8), mean (4), product
(8, mixed ones alone), weighted sum (e + 4, 4 + 4/n), cast (4/n + e/n). Result to each stream (e/n + e), mixed streams
(2e), sum (3e); independent ones in fp32: casts of result and streams (e/n + 4/n, e + 4), product (4/n + 4), sum (12),
cast (4 + e). The Sinkhorn passes are three small kernels for each half of a pass there. Backward: twice the forward's,
but for the weights of streams that are mixed (`_mixed_backward`).
"""

from __future__ import annotations

from msgspec import Struct

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, NeededBy, Saved, TensorRole
from sim.models.dims import Dims
from sim.models.operators import F, I, Operator, W, gemm, memory_op
from sim.models.streams.gated_streams import gated_spread, gated_sum

SINKHORN_PASSES = 20


class _Sum(Struct, frozen=True):
    """A sum of the streams: `weights` of a token and learned `scales`. In separate operators: `small_kernels` over
    numbers of a token, of which `kept` are kept; `normalizes`: the streams are normed before their product with W."""

    weights: int
    scales: int
    small_kernels: int
    kept: int
    normalizes: bool


def _branch(d: Dims) -> _Sum:
    """Weights of a branch: of its input and of its result's shares, and of each pair of streams if these are mixed."""
    s = d.streams
    if s.mixes:
        return _Sum(s.weights, s.scales, 14 + 3 * (2 * SINKHORN_PASSES - 1), _kept_numbers(s.number, s.weights), True)
    # epsilon, root, product with it, and scale, bias, sigmoid, epsilon of both kinds, magnitude; kept: the product with
    # W and its quotient, the root, three sigmoids, what multiplies
    return _Sum(s.weights, s.scales, 12, 8 * s.number + 1, False)


def _head(d: Dims) -> _Sum:
    n = d.streams.number
    return _Sum(n, 1, 4 if d.streams.mixes else 6, 2 * n if d.streams.mixes else 4 * n + 1, d.streams.mixes)


def collapsed(d: Dims, name: str) -> tuple[Operator, ...]:
    """The weights of the branch `name` and its input, a sum of the streams; empty with one stream."""
    if d.streams.number == 1:
        return ()
    return gated_sum(d, name, True) if d.streams.gated else _sum(d, name, _branch(d))


def last_sum(d: Dims) -> tuple[Operator, ...]:
    """The head's input, a sum of the streams; empty with one stream."""
    if d.streams.number == 1:
        return ()
    return gated_sum(d, "head", False) if d.streams.gated else _sum(d, "head", _head(d))


def _sum(d: Dims, name: str, own: _Sum) -> tuple[Operator, ...]:
    e, rows, width, n, numbers = d.act_bytes, d.rows, d.streams.width, d.streams.number, own.weights
    elements = float(rows * width)
    fused = d.framework.fuses_hyper_connections
    passes = 8 if own.normalizes else 6  # in fp32
    moved = e * (1 + 1 / n) if fused else 2 * e + passes * FP32_BYTES + (2 * FP32_BYTES + e) / n
    kernels = 2 if fused else 7 + own.normalizes + own.small_kernels
    label, dtype = f"{name}_streams", d.act if fused else "fp32"
    product = gemm(f"{label}_weights", F, rows, numbers, width, dtype)
    forward = (memory_op(label, F, "elementwise", elements, moved * elements, d.act, kernels), product)
    backward = (
        _mixed_backward(d, label, elements)
        if own.normalizes and own.weights > n and not fused
        else memory_op(f"{label}_backward", I, "elementwise", elements, 2 * moved * elements, d.act, kernels),
        gemm(f"{label}_weights_dgrad", I, rows, width, numbers, dtype),
        gemm(f"{label}_weights_wgrad", W, numbers, width, rows, dtype),
    )
    kept = [Saved(f"{name} streams", elements * e, NeededBy.BOTH, TensorRole.INPUT)]
    if not fused:
        copies = own.normalizes + (e < FP32_BYTES)  # normalized, and before
        kept.append(Saved(f"{name} streams in fp32", copies * elements * FP32_BYTES, role=TensorRole.INPUT))
        statistics = rows * own.kept * FP32_BYTES
        kept.append(Saved(f"{name} streams' weights", statistics, role=TensorRole.STATISTICS))
    return (
        Operator(
            label,
            forward,
            backward,
            tuple(kept),
            params=numbers * width + numbers + own.scales,
            weights=((numbers, width),),
            forward_bytes=elements * (e if fused else 2 * FP32_BYTES),
            backward_bytes=2 * elements * (e if fused else FP32_BYTES),
        ),
    )


def _mixed_backward(d: Dims, label: str, elements: float) -> Compute:
    """Return what separate operators do for the gradients of a branch's weights and of the streams.

    Bytes of each number of the streams: casts (e + 4 each, two of the streams, one of the branch), sums of gradients
    (3e each, two), products with weights and streams (12), row sums (4), the norm (68). Each half of a Sinkhorn pass
    divides by its sums: seven kernels of 15 accesses of the token's matrix. Counted in a captured program.
    """
    e, n = d.act_bytes, d.streams.number
    halves = 2 * SINKHORN_PASSES - 1
    casts = (2 + 1 / n) * (e + FP32_BYTES) if e < FP32_BYTES else 0.0
    small = halves * 15 * FP32_BYTES * n**2 * d.rows
    moved = (casts + 6 * e + 84) * elements + small
    return memory_op(f"{label}_backward", I, "elementwise", elements, moved, d.act, 38 + 7 * halves)


def _kept_numbers(streams: int, weights: int) -> int:
    """Numbers of a token that separate operators keep of one branch's weights: the weights, three of their sigmoids,
    the softmax, and of each half of a Sinkhorn pass the matrix and what divides it."""
    halves, square = 2 * SINKHORN_PASSES - 1, streams**2
    return weights + 3 * streams + square + halves * (square + streams)


def spread(d: Dims, name: str) -> Operator:
    """The branch's result added to each stream, and the streams mixed where they are; the result is kept for its
    weights' gradient."""
    if d.streams.gated:
        return gated_spread(d, name)
    e, branch, n = d.act_bytes, float(d.rows * d.hidden), d.streams.number
    elements = branch * n
    fused = d.framework.fuses_hyper_connections
    apart = 6 * e + e / n if d.streams.mixes else 2 * e + 6 * FP32_BYTES + (e + 2 * FP32_BYTES) / n
    moved, kernels = (2 * e + e / n, 1) if fused else (apart, 5)
    kept = branch * (e if fused or d.streams.mixes else FP32_BYTES)
    return Operator(
        f"{name}_residual",
        (memory_op(f"{name}_residual", F, "elementwise", elements, moved * elements, d.act, kernels),),
        (memory_op(f"{name}_residual_backward", I, "elementwise", elements, 2 * moved * elements, d.act, 2 * kernels),),
        (Saved(f"{name} result", kept),),
        forward_bytes=elements * e,
        backward_bytes=2 * elements * e,
    )


def copied_to_streams(d: Dims) -> tuple[Operator, ...]:
    """The embedding's result copied to every stream; empty with one."""
    if d.streams.number == 1:
        return ()
    n = float(d.rows * d.hidden)
    moved = (1 + d.streams.number) * n * d.act_bytes
    forward = memory_op("embedding_streams", F, "copy", n * d.streams.number, moved, d.act)
    backward = memory_op("embedding_streams_backward", W, "elementwise", n * d.streams.number, moved, d.act)
    return (Operator("embedding_streams", (forward,), (backward,), backward_bytes=moved),)
