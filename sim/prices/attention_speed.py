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
e.

Each implementation (`flash2`, ...) has an `AttentionSpeed` of its own; `attention` is the one that training uses. A
framework may pick another (`Framework.attention_kernel`): `megatron` is the one that Transformer Engine picks, cuDNN's
on Hopper, FlashAttention-2 on Ampere (`get_attention_backend` in its dot_product_attention/utils.py: "FusedAttention
preference on Hopper+ for performance reasons"); `compiled` on Ampere FlashAttention-2, which torch has had since 2.2.
"""

from __future__ import annotations

import math
from itertools import pairwise

from sim.core.dtypes import dtype_bytes
from sim.core.program import Compute
from sim.prices.coefficients import USUAL_KERNEL, AttentionSpeed, Coefficients
from topology.spec import GpuSpec

# Kernels that kinds of layers ask for by themselves: DeepSeek's sparse attention, and the scores of its indexer.
SPARSE, SCORES = "sparse_mla", "mqa_logits"
# Libraries take tiles of 64 to 176 keys. One size stands for all, as it matters for short sequences only.
TILE = 128.0
# A fused kernel stands for a row of launches, so it pays one launch, however short the sequences are.
LAUNCH_S = 4e-6
UNCERTAINTY = 0.08  # held-out rows of the published charts


def flash_seconds(op: Compute, gpu: GpuSpec, peak_flops_per_s: float, c: Coefficients) -> float | None:
    """Seconds of an attention_forward or attention_backward; None if the profile has no efficiency for it."""
    # A kernel that was not measured is nearer to the usual kernel than to the roofline.
    speed = c.attention.get(op.kernel) or c.attention.get(USUAL_KERNEL)
    # Latent attention has a v head size of its own. The flops grow with the sum of both, the shape of tiles with
    # either; the geometric mean stands for the one size that the published charts know.
    efficiency = 0.0 if speed is None else _at_size(speed, math.sqrt(op.shape[5] * op.shape[6]))
    if speed is None or efficiency <= 0:
        return None
    _, _, _, q_len, kv_len, d, dv, causal = op.shape
    # `passes` is in units of the two matmuls of a forward.
    rows, passes = speed.tile_rows, 1.0
    if op.kind == "attention_backward":
        efficiency *= speed.backward_share
        # Backward has five matmuls: it recomputes the scores before the four gradients (FlashAttention-2, section 3.1).
        rows, passes = rows if speed.backward_tile_rows is None else speed.backward_tile_rows, 2.5
    flops_per_s = peak_flops_per_s * efficiency
    ramp = 1.0 + speed.ramp_tokens / kv_len
    # Causal flops count half of the square. Each row of tiles also computes the masked half of its diagonal tile: TILE
    # / 2 keys more for a query that sees kv_len / 2 on average.
    work_s = op.flops * (1.0 + TILE / kv_len * bool(causal)) * ramp / flops_per_s
    # One multiprocessor does this alone, at its share of the GPU's speed. Too few heads to fill the GPU show up here.
    tail_s = passes * 2.0 * min(rows, q_len) * kv_len * (d + dv) / (flops_per_s / gpu.sm_count)
    # The longest row starts while others run, so neither the sum nor the maximum is right; a norm lies between.
    x = speed.overlap
    moved_s = op.bytes / (gpu.memory_bandwidth_bytes_per_s * c.streaming_efficiency)
    # A short sequence has few flops a byte. The kernel then waits for q, k, v and o and not for the tensor cores.
    kernel_s = max(float((work_s**x + tail_s**x) ** (1.0 / x)), moved_s)
    summed_s = _group_sums_s(op, gpu, c.streaming_efficiency) if speed.group_sums else 0.0
    return LAUNCH_S + kernel_s + summed_s


def _group_sums_s(op: Compute, gpu: GpuSpec, streaming_efficiency: float) -> float:
    """Summing dK and dV over the query heads that share a KV head, where the kernel leaves one for each query head.

    FlashAttention-2 does (csrc/flash_attn/flash_api.cpp, `mha_bwd`: `dk_expanded`, `at::sum_out`).
    """
    batch, heads, kv_heads, _, kv_len, d, dv, _ = op.shape
    if op.kind != "attention_backward" or heads == kv_heads:
        return 0.0
    # Reads one dK and one dV of each query head, and writes one of each KV head.
    moved = dtype_bytes(op.dtype) * batch * kv_len * (d + dv) * (heads + kv_heads)
    return moved / (gpu.memory_bandwidth_bytes_per_s * streaming_efficiency)


def _at_size(speed: AttentionSpeed, head_dim: float) -> float:
    """Efficiency at a head size, 0 where none is known: between known sizes log-log, beyond them the nearest's."""
    stated = ((64, speed.efficiency_64), (128, speed.efficiency_128), (256, speed.efficiency_256))
    known = [(math.log2(d), math.log(e)) for d, e in stated if e is not None]
    if not known:
        return 0.0
    # A slope over head sizes is not known beyond the charts. Going on with it would soon pass the peak.
    x = min(max(math.log2(head_dim), known[0][0]), known[-1][0])
    for (x0, y0), (x1, y1) in pairwise(known):
        if x <= x1:
            return math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
    return math.exp(known[-1][1])
