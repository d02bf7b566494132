"""Compute the roofline, the least time of an operator on a device (Williams, Waterman, Patterson 2009).

seconds = max(flops / peak, bytes / bandwidth). Nothing is fitted here. A profile has the efficiency of real kernels,
roofline seconds / measured seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from sim.core.attention_pairs import least
from sim.core.dtypes import dtype_bytes, peak_flops_per_s
from sim.core.errors import InputError
from sim.core.operator_kinds import ATTENTION, ATTENTION_DECODE, MATMULS, MEMORY_BOUND, MOE_LAYER, N, shape_flops

if TYPE_CHECKING:
    from topology.spec import GpuSpec

ACTIVATION_BYTES = 2.0  # bytes of an activation of served layers, for any dtype of weights


class Device(Struct, frozen=True):
    """Hold a device's dense peaks by dtype and its memory bandwidth."""

    name: str
    peak_flops_per_s: Mapping[str, float]
    bandwidth_bytes_per_s: float
    sm_count: int = 0  # 0: unknown, so waves of tiles are not considered

    @staticmethod
    def of(gpu: GpuSpec) -> Device:
        """Return the device that a GPU's data sheet describes."""
        return Device(gpu.name, gpu.peak_flops_per_s, gpu.memory_bandwidth_bytes_per_s, gpu.sm_count)

    def peak(self, dtype: str) -> float:
        """Return the dense peak of matmuls in FLOP/s (`sim.core.dtypes.peak_flops_per_s`).

        Raises:
            InputError: if the device has no peak for `dtype`.
        """
        peak = peak_flops_per_s(self.peak_flops_per_s, dtype)
        if peak is None:
            raise InputError(
                f"cluster.gpu.peak_flops_per_s: {self.name} has no rate for {dtype}; "
                f"it has {', '.join(sorted(self.peak_flops_per_s))}"
            )
        return peak

    def seconds(self, kind: str, flops: float, bytes_: float, dtype: str) -> float:
        """Return max(flops/peak, bytes/bandwidth) in seconds; memory-bound kinds have only the second term."""
        moved = bytes_ / self.bandwidth_bytes_per_s
        # Without FLOPs no peak is needed: a copy of int8 data runs on GPUs that cannot multiply int8.
        return moved if kind in MEMORY_BOUND or not flops else max(flops / self.peak(dtype), moved)

    def shape_seconds(self, kind: str, shape: tuple[int, ...], dtype: str, weight_bytes: float | None = None) -> float:
        """Return `seconds` of an operator by its shape; `weight_bytes` as for `shape_bytes`."""
        return self.seconds(kind, shape_flops(kind, shape), shape_bytes(kind, shape, dtype, weight_bytes), dtype)


def shape_bytes(kind: str, shape: Sequence[N], dtype: str, weight_bytes: float | None = None) -> N:
    """Return the bytes of operands and result, each moved once; memory-bound kinds have `shape` (bytes,).

    `weight_bytes`: of a weight of a matmul or of experts in a format of its own, where the result has 16 bits; of
    single tokens' attention, of a number of a latent cache, which is read once as key and value.
    """
    size = dtype_bytes(dtype)
    weight = size if weight_bytes is None else weight_bytes
    if kind in MATMULS:
        batch, m, n, k = shape
        result = size if weight_bytes is None else ACTIVATION_BYTES
        return batch * (size * m * k + weight * k * n + result * m * n)
    if kind in ATTENTION:
        batch, heads, kv_heads, q_len, kv_len, d, dv, _ = shape
        passes = 1 if kind == "attention_forward" else 2  # backward: q, k, v, o and the gradients of all four
        return passes * size * batch * (d + dv) * (heads * q_len + kv_heads * kv_len)
    if kind == ATTENTION_DECODE:
        batch, heads, kv_heads, kv_len, d = shape
        if weight_bytes is not None:
            return batch * d * (2.0 * ACTIVATION_BYTES * heads + weight_bytes * kv_len)
        # The largest term is the cache: a decode reads every key and value for one query.
        return 2.0 * size * batch * d * (heads + kv_heads * kv_len)
    if kind == MOE_LAYER:
        tokens, hidden, ffn, top_k, experts, expert_tp, ep = shape
        rows = tokens * top_k / ep  # evenly spread, as measured: no expert gets a second row before all have one
        # -least(-rows, -1) is max(rows, 1): a rank with less than one row still reads an expert.
        read = least(experts / ep, -least(-rows, rows * 0.0 - 1.0))
        inner = ffn / expert_tp
        return read * 3 * hidden * inner * weight + rows * (2 * hidden + 3 * inner) * ACTIVATION_BYTES
    return 1.0 * shape[0]
