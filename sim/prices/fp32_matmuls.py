"""Matmuls in fp32 on a GPU, without tensor cores: whole tiles, and a start and an end that do not fill the GPU.

Products with adapters of rank 16 take as long as with 64 columns on an H200 (llama1b_lora_checkpoint in
scenarios/measured/gpu_programs_h200). 20 linear layers of 128 to 4,096 rows take 8 to 20 us longer than at the speed of
large ones (`linear fp32` in scenarios/measured/gpu_kernels/h200.json); with 10 us they are predicted within 10 %.

cuBLAS multiplies a matrix by one row or column in kernels of its own, which have no tiles (`gemvx::kernel` and
`gemvNSP_kernel` in profilers' lists). Its smallest tiles are 32 x 32 (`sgemm_32x32_sliced1x4`).
"""

from __future__ import annotations

import math

from sim.core.program import Compute

TILE, SMALL_TILE, REACHED = 64, 32, 0.8  # rows and columns of a tile, of the smallest, and its part of the peak
START_S = 1e-5


def fp32_seconds(op: Compute, seconds: float, peak_flops_per_s: float) -> float:
    """Return the seconds of a matmul that would take `seconds` at the speed of large ones."""
    batch, m, n, k = op.shape
    if 1 in (m, n):
        return seconds
    tile = SMALL_TILE if max(m, n) <= SMALL_TILE else TILE
    whole_m, whole_n = (math.ceil(size / tile) * tile for size in (m, n))
    least_s = 2.0 * batch * whole_m * whole_n * k / (REACHED * peak_flops_per_s)
    return max(seconds, least_s) + (1 if op.looped else op.kernels) * START_S
