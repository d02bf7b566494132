"""The roofline: the least time an operator can take on a device (Williams, Waterman, Patterson 2009).

seconds = max(flops / peak, bytes / bandwidth). Nothing is fitted here; what real kernels lose against it is
measured and kept in a profile, as an efficiency = roofline seconds / measured seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sim.core.dtypes import dtype_bytes
from sim.core.errors import InputError

if TYPE_CHECKING:
    from topology.spec import GpuSpec

MATMULS = ("gemm", "grouped_gemm")
ATTENTION = ("attention_forward", "attention_backward")
# A rank's routed experts as serving libraries run them, from the choice of experts to the weighted sum: (tokens,
# hidden, ffn, top_k, experts, expert_tp, ep) of a gated layer, its experts spread over ep ranks, each over expert_tp.
MOE_LAYER = "moe_layer"
ATTENTION_DECODE = "attention_decode"  # (batch, heads, kv_heads, kv_len, head_dim): one query a sequence
COUNTED = (*MATMULS, *ATTENTION, ATTENTION_DECODE, MOE_LAYER)  # whose flops a shape tells
ACTIVATION_BYTES = 2.0  # of served layers, whatever their weights are kept in
# Several kernels of these read `bytes / kernels` each; an optimizer's or a copy's bytes are one sweep.
MEMORY_BOUND = (
    "norm",
    "elementwise",
    "softmax",
    "embedding",
    "cross_entropy",
    "optimizer",
    "permute",
    "cast",
    "copy",
)
N = TypeVar("N", float, NDArray[np.float64])  # of one shape or, column by column, of many
M = TypeVar("M", int, float, NDArray[np.float64])


class Device(Struct, frozen=True):
    """A device as the roofline sees it: dense peaks by dtype and the bandwidth of device memory."""

    name: str
    peak_flops_per_s: Mapping[str, float]
    bandwidth_bytes_per_s: float
    sm_count: int = 0  # 0: unknown, no quantization into waves

    @staticmethod
    def of(gpu: GpuSpec) -> Device:
        """The device that a GPU's data sheet describes."""
        return Device(gpu.name, gpu.peak_flops_per_s, gpu.memory_bandwidth_bytes_per_s, gpu.sm_count)

    def peak(self, dtype: str) -> float:
        """Dense matrix peak in flops/s.

        Microscaling formats run at the rate of their element type (mxfp8 as fp8, nvfp4 as fp4). fp32 is the
        true fp32 rate: tf32 is never assumed.

        Raises:
            InputError: if the device has no units for `dtype`.
        """
        # The format's own name first, so that a measured peak of mxfp8 is not hidden by the data sheet's fp8.
        for name in (dtype, {"mxfp8": "fp8", "nvfp4": "fp4"}.get(dtype, dtype)):
            if name in self.peak_flops_per_s:
                return self.peak_flops_per_s[name]
        raise InputError(
            f"cluster.gpu.peak_flops_per_s: {self.name} has no rate for {dtype}; "
            f"it has {', '.join(sorted(self.peak_flops_per_s))}"
        )

    def seconds(self, kind: str, flops: float, bytes_: float, dtype: str) -> float:
        """max(flops/peak, bytes/bandwidth); what is bound by memory computes on vector units, for free."""
        moved = bytes_ / self.bandwidth_bytes_per_s
        # Without flops the peak is not asked for: a copy of int8 data runs on GPUs that cannot multiply int8.
        return moved if kind in MEMORY_BOUND or not flops else max(flops / self.peak(dtype), moved)

    def shape_seconds(self, kind: str, shape: tuple[int, ...], dtype: str) -> float:
        """`seconds` of an operator known by its shape alone, as a profile's points are."""
        return self.seconds(kind, shape_flops(kind, shape), shape_bytes(kind, shape, dtype), dtype)


def shape_flops(kind: str, shape: Sequence[N]) -> N:
    """Floating-point operations of a matmul, attention or served experts of this shape; else 0.

    Attention: QKᵀ and PV forward; backward recomputes QKᵀ and has dP, dV, dQ, dK (FlashAttention-2, 3.1).

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
    # A product and no plain 0, so that columns give a column.
    return 0.0 * shape[0]


def attended_pairs(q_len: M, kv_len: M, causal: M | bool) -> M:
    """Query-key pairs of one head; a causal query sees the keys up to its own place, aligned at the end.

    >>> attended_pairs(4, 4, True), attended_pairs(1, 4, True), attended_pairs(4, 4, False), attended_pairs(4, 2, True)
    (10, 4, 16, 3)
    """
    # Arithmetic instead of branches on `causal`, since whole columns of points go through here as one array.
    pairs, shorter = q_len * kv_len, _least(q_len, kv_len)
    return pairs - causal * (pairs - shorter * kv_len + shorter * (shorter - 1) // 2)


def _least(a: M, b: M) -> M:
    return np.minimum(a, b) if isinstance(a, np.ndarray) else min(a, b)


def shape_bytes(kind: str, shape: Sequence[N], dtype: str) -> N:
    """Bytes of operands and result, each moved once; of what is bound by memory, `shape` is (bytes,)."""
    if kind in MATMULS:
        batch, m, n, k = shape
        return dtype_bytes(dtype) * batch * (m * k + k * n + m * n)
    if kind in ATTENTION:
        batch, heads, kv_heads, q_len, kv_len, d, dv, _ = shape
        passes = 1 if kind == "attention_forward" else 2  # backward: q, k, v, o and the gradients of all four
        return passes * dtype_bytes(dtype) * batch * (d + dv) * (heads * q_len + kv_heads * kv_len)
    if kind == ATTENTION_DECODE:
        batch, heads, kv_heads, kv_len, d = shape
        # The longest term is the cache itself: a decode reads every key and value for one query.
        return 2.0 * dtype_bytes(dtype) * batch * d * (heads + kv_heads * kv_len)
    if kind == MOE_LAYER:
        tokens, hidden, ffn, top_k, experts, expert_tp, ep = shape
        rows = tokens * top_k / ep  # spread evenly, as they were measured: no expert gets a second before all have one
        # -_least(-rows, -1) is the larger of rows and 1: a rank with less than one row still reads an expert.
        read = _least(experts / ep, -_least(-rows, rows * 0.0 - 1.0))
        inner = ffn / expert_tp
        return read * 3 * hidden * inner * dtype_bytes(dtype) + rows * (2 * hidden + 3 * inner) * ACTIVATION_BYTES
    return 1.0 * shape[0]
