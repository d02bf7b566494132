"""Hyper-connections: a residual stream of several streams (mHC, arXiv 2512.24880, as DeepSeek V4 has them).

With n streams X of a token, attention and MLP each compute weights from all of them: H = W·norm(X), (2 + n)·n numbers
in fp32. Of these n make the branch's input, a sum of the streams; n say how much of the branch's result each stream
gets; n² mix the streams, after they are made doubly stochastic (Sinkhorn and Knopp 1967, 20 passes over rows and
columns). So X' = Bᵀ·X + p·branch(Σ a·X). After the last layer a sum of the streams with such weights is the head's
input (`DeepseekV4HyperConnection` and `DeepseekV4HyperHead` in
transformers/models/deepseek_v4/modeling_deepseek_v4.py).

Bytes for each of the n·hidden numbers of a token, besides the product with W. Fused (mHC, section 4.3.1; Megatron-Core:
core/fusions/fused_mhc_kernels.py: proj_rms, sinkhorn, h_aggregate, h_post_bda): the branch's input reads the streams
(e + e/n), the new streams are written (2e + e/n). In separate operators: to fp32 (e + 4), square (8), mean (4), product
(8), weighted sum (e + 4, 4 + 4/n), cast (4/n + e/n); result to each stream (e/n + e), mixed streams (2e), sum (3e). The
Sinkhorn passes are three small kernels for each half of a pass there. Backward: twice the forward's.
"""

from __future__ import annotations

from msgspec import Struct

from sim.core.dtypes import FP32_BYTES
from sim.core.program import NeededBy, Saved, TensorRole
from sim.models.dims import Dims
from sim.models.operators import F, I, Operator, W, gemm, memory_op

SINKHORN_PASSES = 20
_SMALL_KERNELS = 14 + 3 * (2 * SINKHORN_PASSES - 1)  # in separate operators, over the weights of each token


class Streams(Struct, frozen=True):
    """How many streams of `hidden` numbers the residual stream is.

    >>> Streams(1, 4096).branch_parameters, Streams(4, 4096).branch_parameters, Streams(4, 4096).head_parameters
    (0, 393243, 65541)
    """

    number: int = 1
    hidden: int = 0

    @property
    def weights(self) -> int:
        """Weights that one branch computes for a token."""
        return (2 + self.number) * self.number

    @property
    def branch_elements(self) -> int:
        """Parameters of one branch that a token is multiplied by: W."""
        return 0 if self.number == 1 else self.weights * self.number * self.hidden

    @property
    def branch_parameters(self) -> int:
        """Parameters of one branch: W, a bias of each weight, and three scales."""
        return 0 if self.number == 1 else self.branch_elements + self.weights + 3

    @property
    def head_parameters(self) -> int:
        """Parameters of the sum after the last layer."""
        return 0 if self.number == 1 else self.number * (self.number * self.hidden + 1) + 1


def collapsed(d: Dims, name: str) -> tuple[Operator, ...]:
    """The weights of the branch `name` and its input, a sum of the streams; empty with one stream."""
    return (
        () if d.streams == 1 else _sum(d, name, Streams(d.streams).weights, _SMALL_KERNELS, _kept_numbers(d.streams), 3)
    )


def last_sum(d: Dims) -> tuple[Operator, ...]:
    """The head's input, a sum of the streams; empty with one stream."""
    return () if d.streams == 1 else _sum(d, "head", d.streams, 4, 2 * d.streams, 1)


def _sum(d: Dims, name: str, numbers: int, small_kernels: int, kept_numbers: int, scales: int) -> tuple[Operator, ...]:
    """A sum of the streams by `numbers` weights of a token, of which separate operators keep `kept_numbers`."""
    e, rows, width = d.act_bytes, d.rows, d.streams * d.hidden
    elements = float(rows * width)
    fused = d.framework.fuses_hyper_connections
    moved = e * (1 + 1 / d.streams) if fused else 2 * e + 8 * FP32_BYTES + (2 * FP32_BYTES + e) / d.streams
    kernels = 2 if fused else 8 + small_kernels
    label, dtype = f"{name}_streams", d.act if fused else "fp32"
    product = gemm(f"{label}_weights", F, rows, numbers, width, dtype)
    forward = (memory_op(label, F, "elementwise", elements, moved * elements, d.act, kernels), product)
    backward = (
        memory_op(f"{label}_backward", I, "elementwise", elements, 2 * moved * elements, d.act, kernels),
        gemm(f"{label}_weights_dgrad", I, rows, width, numbers, dtype),
        gemm(f"{label}_weights_wgrad", W, numbers, width, rows, dtype),
    )
    kept = [Saved("norm", f"{name} streams", elements * e, NeededBy.BOTH, TensorRole.INPUT)]
    if not fused:
        statistics = rows * kept_numbers * FP32_BYTES
        copies = 1 + (e < FP32_BYTES)  # normalized, and before
        kept.append(Saved("norm", f"{name} streams in fp32", copies * elements * FP32_BYTES, role=TensorRole.INPUT))
        kept.append(Saved("norm", f"{name} streams' weights", statistics, role=TensorRole.STATISTICS))
    return (
        Operator(
            label,
            forward,
            backward,
            tuple(kept),
            params=numbers * width + numbers + scales,
            weights=((numbers, width),),
            forward_bytes=elements * (e if fused else 2 * FP32_BYTES),
            backward_bytes=2 * elements * (e if fused else FP32_BYTES),
        ),
    )


def _kept_numbers(streams: int) -> int:
    """Numbers of a token that separate operators keep of one branch's weights: the weights, three of their sigmoids,
    the softmax, and of each half of a Sinkhorn pass the matrix and what divides it."""
    halves, square = 2 * SINKHORN_PASSES - 1, streams**2
    return Streams(streams).weights + 3 * streams + square + halves * (square + streams)


def spread(d: Dims, name: str) -> Operator:
    """The branch's result added to each stream, and the streams mixed; the result is kept for its weights' gradient."""
    e, branch = d.act_bytes, float(d.rows * d.hidden)
    elements = branch * d.streams
    fused = d.framework.fuses_hyper_connections
    moved = (2 * e + e / d.streams) if fused else (6 * e + e / d.streams)
    kernels = 1 if fused else 5
    return Operator(
        f"{name}_residual",
        (memory_op(f"{name}_residual", F, "elementwise", elements, moved * elements, d.act, kernels),),
        (memory_op(f"{name}_residual_backward", I, "elementwise", elements, 2 * moved * elements, d.act, 2 * kernels),),
        (Saved(name, f"{name} result", branch * e),),
        forward_bytes=elements * e,
        backward_bytes=2 * elements * e,
    )


def copied_to_streams(d: Dims) -> tuple[Operator, ...]:
    """The embedding's result copied to every stream; empty with one."""
    if d.streams == 1:
        return ()
    n = float(d.rows * d.hidden)
    moved = (1 + d.streams) * n * d.act_bytes
    forward = memory_op("embedding_streams", F, "copy", n * d.streams, moved, d.act)
    backward = memory_op("embedding_streams_backward", W, "elementwise", n * d.streams, moved, d.act)
    return (Operator("embedding_streams", (forward,), (backward,), backward_bytes=moved),)
