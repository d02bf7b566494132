"""Kinds of operators, kernels that a layer's kind and sizes choose, and the FLOPs that follow from a shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sim.core.attention_pairs import attended_pairs

MATMULS = ("gemm", "grouped_gemm")
ATTENTION = ("attention_forward", "attention_backward")
# Kernels of one call of fused attention. FlashAttention's backward first sums output times its gradient by row,
# and last converts the queries' gradient, which blocks of keys add up in fp32 (flash_bwd_launch_template.h).
ATTENTION_LAUNCHES = {"attention_forward": 1, "attention_backward": 3}
MODEL_FLOPS_KINDS = (*MATMULS, *ATTENTION)  # of training: those whose FLOPs are counted as the model's
# A rank's routed experts as serving libraries run them, from the choice of experts to the weighted sum. Shape: (tokens,
# hidden, ffn, top_k, experts, expert_tp, ep) of a gated layer with experts over ep ranks, each split over expert_tp.
MOE_LAYER = "moe_layer"
ATTENTION_DECODE = "attention_decode"  # (batch, heads, kv_heads, kv_len, head_dim): one query a sequence
COUNTED = (*MATMULS, *ATTENTION, ATTENTION_DECODE, MOE_LAYER)  # kinds whose FLOPs follow from the shape
# Several kernels of these kinds read `bytes / kernels` each; an optimizer's or a copy's bytes are one sweep.
MEMORY_BOUND = ("norm", "elementwise", "softmax", "embedding", "cross_entropy", "optimizer", "permute", "cast", "copy")
HOST_UPDATE = "host_update"  # an operator of the host's CPUs, bound by their memory
# Kernels that only some layers have: DeepSeek's sparse attention, and the scores of its indexer.
SPARSE, SCORES = "sparse_mla", "mqa_logits"
EFFICIENT = "efficient"  # torch's, for wide heads and masks
# Of one multiprocessor, for an element of tensors in different orders (fitted: sim/prices/unvectorized.py).
PLACE_CLOCKS = 0.70
N = TypeVar("N", float, NDArray[np.float64])  # one shape, or a column of many shapes


def shape_flops(kind: str, shape: Sequence[N]) -> N:
    """Return the FLOPs of a matmul, attention or served experts of this shape; 0 for other kinds.

    Attention: QKᵀ and PV forward; the backward recomputes QKᵀ and computes dP, dV, dQ, dK (FlashAttention-2, 3.1).

    >>> shape_flops("gemm", (1, 2, 3, 4))
    48.0
    """
    if kind in MATMULS:
        batch, m, n, k = shape
        return 2.0 * batch * m * n * k
    if kind in ATTENTION:
        batch, heads, _, q_len, kv_len, d, dv, causal = shape
        pairs = 1.0 * batch * heads * attended_pairs(q_len, kv_len, causal)
        # Backward: QKᵀ, dQ and dK go over d, PV's gradients dP and dV over dv.
        return 2 * pairs * (d + dv if kind == "attention_forward" else 3 * d + 2 * dv)
    if kind == ATTENTION_DECODE:
        batch, heads, _, kv_len, d = shape
        return 4.0 * batch * heads * kv_len * d
    if kind == MOE_LAYER:
        tokens, hidden, ffn, top_k, _, expert_tp, ep = shape
        # Gate, up and down, two flops each. A rank has 1 / ep of the choices and 1 / expert_tp of each expert.
        return 6.0 * tokens * top_k / ep * hidden * ffn / expert_tp
    # A product, so that columns give a column of zeros.
    return 0.0 * shape[0]
