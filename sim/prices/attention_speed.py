"""Price training's fused attention by its published speed: by head size, sequence length and occupancy.

    work = flops x tiles x (1 + 128 / kv_len, if causal) x (1 + ramp / kv_len) / (peak x e)
    tail = flops of `tile_rows` queries over all keys / (peak x e / SMs)
    seconds = launch + max((work^x + tail^x)^(1/x), bytes / bandwidth)

Short sequences of many heads are bound by memory, at the bandwidth that streaming kernels reach. Tiles are computed
whole: those of 64 in which queries and keys end (`tiles`: scores computed ÷ scores asked for), and those of 128 on the
diagonal. A row of tiles pays a prologue and an epilogue, worth `ramp` keys. One thread block computes
the whole row of keys of its queries, so the longest row, of `tile_rows` queries, is a floor. The exponent x (`overlap`)
says how much of the other work hides behind it: 1 adds the two, infinity takes the longer. With tiles of 128 and x =
1.2, serving kernels of 1 to 96 heads on A100 and H100 (NVIDIA AIConfigurator's database, 8,300 prefills from 512 tokens
on) are predicted with median errors of 2 to 4 %, and 95 % of them within 11 to 18 %. Published charts have equally many
tiles in each row, so they do not determine x. e is the efficiency of a head size, interpolated between 64, 128 and 256
over log2; the backward has `backward_share` of the forward's e.

Libraries have kernels for a few head sizes, and compute others as the next larger one (`head_step`). FlashAttention-2's
and -3's are multiples of 32 (csrc/flash_attn/src/static_switch.h: HEADDIM_SWITCH), FlashAttention-1's and those in
Triton 64 and 128 (flash_attn_triton.py: BLOCK_HEADDIM). cuDNN's backward takes no less time for heads of 96 than for
heads of 128 (GPT-NeoX-20B's layers on an H100, scenarios/measured/gpu_programs); its forward does.

Dropout costs instructions for every score that a kernel computes, and random numbers do not hide behind the matmuls:
cuDNN's forward takes twice as long with dropout. The clocks of one multiprocessor for a score follow from pairs of
calls on an H100 (scenarios/cuda/h100_dropout.json), and are equal at 1,024 to 8,192 tokens and at head sizes of 64 and
128. On other GPUs they are assumed to be the same.

cuDNN's kernels read a mask of numbers, [batch, 1, q_len, kv_len], beside the scores and compute all pairs. On an H200
this takes 1.8 times as long as all pairs without a mask, ten shapes (`attention window` beside `attention full` in
scenarios/measured/gpu_kernels/h200.json). FlashAttention-2 takes no mask.

Each implementation (`flash2`, ...) has its own `AttentionSpeed`; `attention` is training's default. A framework may
choose another (`Framework.attention_kernel`). `megatron` is Transformer Engine's choice: cuDNN's on Hopper,
FlashAttention-2 on Ampere (`get_attention_backend` in its dot_product_attention/utils.py: "FusedAttention preference on
Hopper+ for performance reasons"). `torch` is cuDNN's on Hopper and FlashAttention-2 on Ampere, which torch has had
since 2.2; neither multiplies fp32.

fp32 has the efficiencies of 16 bits and, on NVIDIA's chips with tf32, a third of its peak: torch's kernel multiplies by
three products (mem_eff_attention/gemm_kernel_utils.h: OpMultiplyAddFastF32). So 32 heads of 128 and 2,048 tokens reach
42 TFLOP/s forward and 36 backward on an H200, which measured 35 and 28 (scenarios/cuda/h200.json). In 16 bits the same
kernel (`efficient`) is slower than FlashAttention-2 by more than a factor of two, so that fp32 does not have its
efficiencies. On AMD's chips torch
runs AOTriton's kernels, which multiply fp32 as fp32 (Triton's AMD compiler.py: `default_dot_input_precision`, "ieee").

With 8 bits (Transformer Engine's fp8_dpa) the matmuls at full speed take half as long as in 16 bits. Everything else
takes as long as in 16 bits: exponentials, sums, and memory. So a kernel of efficiency 0.75 is 1.6 times as fast.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

from sim.core.dtypes import dtype_bytes
from sim.core.operator_kinds import EFFICIENT, SCORES, SPARSE
from sim.core.program import Compute
from sim.prices.coefficients import USUAL_KERNEL, AttentionSpeed, Coefficients
from sim.prices.roofline import Device
from sim.prices.unvectorized import sm_clocks_per_s
from topology.spec import GpuSpec

OF_SHAPES = frozenset({SPARSE, SCORES, EFFICIENT})  # which nobody names: a layer's kind and sizes choose them
MEASURED_IN_8_BITS = (SCORES,)  # DeepGEMM, fp8_mqa_logits
# A tile of these has the heads of a few tokens as its rows (DeepGEMM, fp8_mqa_logits: 128 / heads queries). A layer's
# shape has as many heads as its kernel computes (`LEAST_HEADS` of `sim.models.layers.sparse_latent`).
ROWS_ARE_HEADS = (SPARSE, SCORES)
# Libraries have tiles of 64 to 176 keys. One size represents all, because it matters only for short sequences.
TILE = 128.0
LAST_TILE = 64  # of the smallest tiles that libraries have
# The least time of the fused kernel, however short the sequences are. The value was chosen by judgement: the history
# records no measurement for it. The other coefficients of attention were fitted with it in place.
LAUNCH_S = 4e-6
TF32_PRODUCTS = 3
UNCERTAINTY = 0.08  # error on rows of the published charts that no fit used


class AttentionPeak(NamedTuple):
    """The peaks of a GPU in FLOP/s: `stated` of the dtype that efficiencies are stated for, `own` of the kernel's."""

    stated: float
    own: float

    def reached(self, efficiency: float) -> float:
        """FLOP/s of a kernel that reaches `efficiency` in the stated dtype. In its own dtype the matmuls at full speed
        take less time, and the kernel takes as much less."""
        return 1.0 / (1.0 / (self.stated * efficiency) - 1.0 / self.stated + 1.0 / self.own)


def attention_peak(device: Device, dtype: str, has_tf32: bool, kernel: str = "") -> AttentionPeak:
    """Return the peaks of the kernel's matmuls; in fp32 each is `TF32_PRODUCTS` in tf32 where the GPU has it.

    Efficiencies of `MEASURED_IN_8_BITS` are of the peak of 8 bits.

    Raises:
        InputError: if the device has no peak for `dtype`.
    """
    if dtype == "fp8" and kernel not in MEASURED_IN_8_BITS:
        return AttentionPeak(device.peak("bf16"), device.peak(dtype))
    products = TF32_PRODUCTS if dtype == "fp32" and has_tf32 else 1
    peak = device.peak("tf32" if products > 1 else dtype) / products
    return AttentionPeak(peak, peak)


def flash_seconds(op: Compute, gpu: GpuSpec, peak: AttentionPeak, c: Coefficients) -> float | None:
    """Return the seconds of an attention_forward or attention_backward; None if the profile has no efficiency."""
    # A kernel without its own speed is closer to the default kernel than to the roofline.
    own = None if op.kernel == EFFICIENT and op.dtype == "fp32" else c.attention.get(op.kernel)
    speed = own or c.attention.get(USUAL_KERNEL)
    if speed is None:
        return None
    _, _, _, q_len, kv_len, d, dv, causal = op.shape
    backward = op.kind == "attention_backward"
    step = _of_pass(speed.head_step, speed.backward_head_step, backward)
    wide_d, wide_dv = (math.ceil(n / step) * step for n in (d, dv))
    # Latent attention has two head sizes, d and dv. The published charts have one size; the geometric mean replaces it.
    efficiency = _at_size(speed, math.sqrt(wide_d * wide_dv))
    if efficiency <= 0:
        return None
    # Backward has five matmuls: it recomputes the scores before the four gradients (FlashAttention-2, section 3.1).
    of_keys, of_values = (3, 2) if backward else (1, 1)
    widths = of_keys * wide_d + of_values * wide_dv
    filled = widths / (of_keys * d + of_values * dv)
    rows = _of_pass(speed.tile_rows, speed.backward_tile_rows, backward)
    flops_per_s = peak.reached(efficiency * (speed.backward_share if backward else 1.0))
    ramp = 1.0 + speed.ramp_tokens / kv_len
    # Causal FLOPs count half of the square. Each row of tiles also computes the masked half of its diagonal tile: TILE
    # / 2 more keys for a query that sees kv_len / 2 keys on average.
    flops = filled * op.flops * (1.0 + TILE / kv_len * bool(causal))
    tiles = 1.0 if op.kernel in ROWS_ARE_HEADS else _whole_tiles(q_len, kv_len)
    work_s = flops * ramp * tiles / flops_per_s
    # One multiprocessor computes a row alone, at its share of the GPU's speed. This dominates with few heads.
    tail_s = 2.0 * min(rows, q_len) * kv_len * widths / (flops_per_s / gpu.sm_count)
    # The longest row runs in part beside others, so the time is between the sum and the maximum.
    x = speed.overlap
    moved_s = op.bytes / (gpu.memory_bandwidth_bytes_per_s * c.streaming_efficiency)
    # With short sequences the kernel waits for q, k, v and o and not for the tensor cores.
    masked = _of_pass(speed.masked_slowdown, speed.masked_backward_slowdown, backward) if op.masked else 1.0
    kernel_s = max(masked * float((work_s**x + tail_s**x) ** (1.0 / x)), moved_s)
    summed_s = _group_sums_s(op, gpu, c.streaming_efficiency) if speed.group_sums else 0.0
    return LAUNCH_S + kernel_s + summed_s + _dropout_seconds(op, gpu, speed)


def _of_pass(forward: float, backward: float | None, is_backward: bool) -> float:
    """Return a coefficient of the forward or of the backward, which has the forward's if it states none."""
    return backward if is_backward and backward is not None else forward


def _whole_tiles(q_len: int, kv_len: int) -> float:
    """Return the scores of whole tiles ÷ those of the sequences, which end within a tile.

    >>> _whole_tiles(4096, 4096), round(_whole_tiles(197, 197), 2)
    (1.0, 1.69)
    """
    return math.prod(math.ceil(n / LAST_TILE) * LAST_TILE / n for n in (q_len, kv_len))


def _dropout_seconds(op: Compute, gpu: GpuSpec, speed: AttentionSpeed) -> float:
    """Return the seconds that dropout adds, for all scores of the tiles that a kernel computes."""
    clocks_per_s = sm_clocks_per_s(gpu)
    if not op.drops or not clocks_per_s:
        return 0.0
    clocks = speed.dropout_backward_clocks if op.kind == "attention_backward" else speed.dropout_clocks
    batch, heads, _, q_len, kv_len, _, _, causal = op.shape
    return batch * heads * q_len * (0.5 * (kv_len + TILE) if causal else kv_len) * clocks / clocks_per_s


def _group_sums_s(op: Compute, gpu: GpuSpec, streaming_efficiency: float) -> float:
    """Return the seconds of summing dK and dV over query heads that share a KV head.

    FlashAttention-2's backward leaves one for each query head (csrc/flash_attn/flash_api.cpp, `mha_bwd`).
    """
    batch, heads, kv_heads, _, kv_len, d, dv, _ = op.shape
    if op.kind != "attention_backward" or heads == kv_heads:
        return 0.0
    # Reads one dK and one dV of each query head, and writes one of each KV head.
    moved = dtype_bytes(op.dtype) * batch * kv_len * (d + dv) * (heads + kv_heads)
    return moved / (gpu.memory_bandwidth_bytes_per_s * streaming_efficiency)


def _at_size(speed: AttentionSpeed, head_dim: float) -> float:
    """Return the efficiency at a head size: log-log between known sizes, the nearest one's beyond, 0 without any."""
    stated = ((64, speed.efficiency_64), (128, speed.efficiency_128), (256, speed.efficiency_256))
    known = [(math.log2(d), math.log(e)) for d, e in stated if e is not None]
    if not known:
        return 0.0
    # Extrapolating the slope would soon exceed the peak.
    x = min(max(math.log2(head_dim), known[0][0]), known[-1][0])
    for (x0, y0), (x1, y1) in pairwise(known):
        if x <= x1:
            return math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
    return math.exp(known[-1][1])
