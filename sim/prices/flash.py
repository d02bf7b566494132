"""Fused attention by its published speed: what training kernels reach, by head size, length and occupancy.

    work = flops x (1 + 128 / kv_len, if causal) x (1 + ramp / kv_len) / (peak x e)
    tail = flops of `tile_rows` queries over all keys / (peak x e / SMs)
    seconds = launch + max((work^x + tail^x)^(1/x), bytes / bandwidth)

Short sequences of many heads are bound by memory, at the bandwidth that streaming kernels reach.
The diagonal's tiles of 128 are computed whole; a row of tiles pays a prologue and an epilogue, worth `ramp` keys. A
thread block walks its queries' whole row of keys alone, so the longest row, of `tile_rows` queries, is a floor. How far
the rest hides behind it is x: 1 adds them, infinity takes the longer. With a tile of 128 and 1.2 the times of serving
kernels of 1 to 96 heads on A100 and H100 (NVIDIA AIConfigurator's database, 8,300 prefills from 512 tokens on) are met
with median errors of 2 to 4 %, 95 % within 11 to 18; published charts, with as many tiles in each row, cannot tell. e
is the efficiency of a head size, interpolated between 64, 128 and 256 over log2. Backward has a share of the forward's
e. Coefficients are those of an implementation (`flash2_efficiency_128`, ...); `attention_...` are those of the one that
training uses, `megatron_...` of the one that Transformer Engine picks, where that is another: cuDNN's on Hopper,
FlashAttention-2 on Ampere (`get_attention_backend` in its dot_product_attention/utils.py: "FusedAttention preference on
Hopper+ for performance reasons"); `compiled_...` on Ampere FlashAttention-2, which torch has had since 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

from sim.dtypes import dtype_bytes
from sim.program import Compute
from topology.spec import GpuSpec

TILE = 128.0
OVERLAP = 1.2
SIZES = (64, 128, 256)
BY_STYLE = ("megatron", "compiled")  # these have a kernel of their own where the profile says so, else the usual one
LAUNCH_S = 4e-6
UNCERTAINTY = 0.08  # held-out rows of the published charts


def flash_seconds(
    op: Compute, gpu: GpuSpec, peak_flops_per_s: float, coefficient: Callable[[str, float], float]
) -> float | None:
    """Seconds of an attention_forward or attention_backward; None if the profile has no such coefficients."""
    name = op.name.partition(":")[2] or op.name
    prefix = name if coefficient(f"{name}_efficiency_128", 0.0) else "attention"
    efficiency = _at_size(prefix, math.sqrt(op.shape[5] * op.shape[6]), coefficient)
    if efficiency <= 0:
        return None
    _, _, _, q_len, kv_len, d, dv, causal = op.shape
    rows, passes = coefficient(f"{prefix}_tile_rows", TILE), 1.0
    if op.kind == "attention_backward":
        efficiency *= coefficient(f"{prefix}_backward_share", 1.0)
        rows, passes = coefficient(f"{prefix}_backward_tile_rows", rows), 2.5
    flops_per_s = peak_flops_per_s * efficiency
    ramp = 1.0 + coefficient(f"{prefix}_ramp_tokens", 0.0) / kv_len
    work_s = op.flops * (1.0 + TILE / kv_len * bool(causal)) * ramp / flops_per_s
    tail_s = passes * 2.0 * min(rows, q_len) * kv_len * (d + dv) / (flops_per_s / gpu.sm_count)
    x = coefficient(f"{prefix}_overlap", OVERLAP)
    moved_s = op.bytes / (gpu.memory_bandwidth_bytes_per_s * coefficient("memory_efficiency", 1.0))
    kernel_s = max(float((work_s**x + tail_s**x) ** (1.0 / x)), moved_s)
    return LAUNCH_S + kernel_s + _group_sums_s(op, gpu, prefix, coefficient)


def _group_sums_s(op: Compute, gpu: GpuSpec, prefix: str, coefficient: Callable[[str, float], float]) -> float:
    """Summing dK and dV over the query heads that share a key head, where the kernel leaves one for each query head.

    FlashAttention-2 does (csrc/flash_attn/flash_api.cpp, `mha_bwd`: `dk_expanded`, `at::sum_out`); with
    `..._group_sums` 0 the kernel does it inside.
    """
    batch, heads, kv_heads, _, kv_len, d, dv, _ = op.shape
    if op.kind != "attention_backward" or heads == kv_heads or not coefficient(f"{prefix}_group_sums", 0.0):
        return 0.0
    moved = dtype_bytes(op.dtype) * batch * kv_len * (d + dv) * (heads + kv_heads)
    return moved / (gpu.memory_bandwidth_bytes_per_s * coefficient("memory_efficiency", 1.0))


def _at_size(prefix: str, head_dim: float, coefficient: Callable[[str, float], float]) -> float:
    known = [(math.log2(d), math.log(e)) for d in SIZES if (e := coefficient(f"{prefix}_efficiency_{d}", 0.0)) > 0]
    if not known:
        return 0.0
    x = min(max(math.log2(head_dim), known[0][0]), known[-1][0])
    for (x0, y0), (x1, y1) in pairwise(known):
        if x <= x1:
            return math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
    return math.exp(known[-1][1])
