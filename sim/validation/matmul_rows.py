"""Rows of fused kernels with matmuls in them, operator by operator: for GPUs whose profile has no points of them.

Gated MLPs, and the output matrix with its loss: at once, as plain torch has it (logits cast to fp32), or
in chunks of tokens, as Liger has it (`sim.models.output.chunked_loss`: both gradients are made in the forward).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from sim.core.dtypes import FP32_BYTES, dtype_bytes
from sim.core.program import Compute, Role
from sim.models.operators import F, I, W, gemm, memory_op
from sim.models.output.chunked_loss import chunk_rows
from sim.validation.sizes import Sizes

EAGER = ("huggingface", "torch", "megatron-unfused")  # as separate torch kernels
CHUNKED_LOSS = ("liger",)  # logits and loss, some rows at a time
Items = list[Compute]


def matmul_items(op: str, sizes: Sizes, dtype: str, which: str, provider: str) -> Items:
    """Return the matmuls of a pass (forward, backward, full) of one of `MATMUL_ROWS`."""
    items = MATMUL_ROWS[op](sizes, dtype, provider)
    return [i for i in items if which == "full" or (i.phase is F) == (which == "forward")]


def _linear(name: str, rows: int, n: int, k: int, dtype: str) -> Items:
    """`[rows, k] x [k, n]`, and both gradients."""
    return [
        gemm(name, F, rows, n, k, dtype),
        gemm(f"{name}_dgrad", I, rows, k, n, dtype),
        gemm(f"{name}_wgrad", W, n, k, rows, dtype),
    ]


def _gated(elements: float, dtype: str, provider: str) -> Items:
    """silu or gelu of the gate, times up: 3 accesses and 5 backward in one kernel, 5 and 9 in torch's two and three."""
    e, eager = dtype_bytes(dtype), provider in EAGER
    there, back = (5, 9) if eager else (3, 5)
    return [
        memory_op("gate", F, "elementwise", elements, there * e * elements, dtype, 2 if eager else 1),
        memory_op("gate_backward", I, "elementwise", elements, back * e * elements, dtype, 3 if eager else 1),
    ]


def _gated_mlp(sizes: Sizes, dtype: str, provider: str) -> Items:
    rows, hidden, ffn = (round(x) for x in (sizes.tokens, sizes("width"), sizes("ffn")))
    up = [item for name in ("gate_proj", "up_proj") for item in _linear(name, rows, ffn, hidden, dtype)]
    both = memory_op("dgrad_sum", I, "elementwise", rows * hidden, 3 * dtype_bytes(dtype) * rows * hidden, dtype)
    return [*up, both, *_gated(rows * ffn, dtype, provider), *_linear("down_proj", rows, hidden, ffn, dtype)]


def _output_and_loss(sizes: Sizes, dtype: str, provider: str) -> Items:
    rows, hidden, vocab = (round(x) for x in (sizes.tokens, sizes("width"), sizes("vocab")))
    e, logits = dtype_bytes(dtype), float(rows * vocab)
    if provider in CHUNKED_LOSS:
        return _chunked(rows, hidden, vocab, dtype)
    casts = 0.0 if e == FP32_BYTES else e + FP32_BYTES
    there, back = casts + 2 * FP32_BYTES, casts + 3 * FP32_BYTES
    return [
        *_linear("output", rows, vocab, hidden, dtype),
        memory_op("loss", F, "cross_entropy", logits, there * logits, dtype, 2),
        memory_op("loss_backward", I, "cross_entropy", logits, back * logits, dtype, 2),
    ]


def _chunked(rows: int, hidden: int, vocab: int, dtype: str) -> Items:
    e, size, chunk = dtype_bytes(dtype), vocab * hidden, min(rows, chunk_rows(rows, vocab, hidden))
    count, logits = math.ceil(rows / chunk), chunk * vocab
    one = [
        gemm("output", F, chunk, vocab, hidden, dtype),
        memory_op("loss", F, "cross_entropy", logits, 3 * e * logits, dtype),
        gemm("output_dgrad", F, chunk, hidden, vocab, dtype, role=Role.INPUT_GRADIENT),
        gemm("output_wgrad", F, vocab, hidden, chunk, dtype, role=Role.WEIGHT_GRADIENT),
        memory_op("output_wgrad_sum", F, "elementwise", size, 3 * e * size, dtype),
    ]
    scale = [
        memory_op(f"{name}_scale", I, "elementwise", n, 2 * e * n, dtype)
        for name, n in (("dgrad", rows * hidden), ("wgrad", size))
    ]
    return one * count + scale


MATMUL_ROWS: Mapping[str, Callable[[Sizes, str, str], Items]] = {
    "geglu": _gated_mlp,
    "swiglu": _gated_mlp,
    "fused_linear_cross_entropy": _output_and_loss,
}
