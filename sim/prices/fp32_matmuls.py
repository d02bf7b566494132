"""Matmuls in fp32 on a GPU, without tensor cores: whole tiles, and a start and an end that do not fill the GPU.

Products with adapters of rank 16 take as long as with 64 columns on an H200 (llama1b_lora_checkpoint in
scenarios/measured/gpu_programs_h200). 20 linear layers of 128 to 4,096 rows take 8 to 20 us longer than at the speed of
large ones (`linear fp32` in scenarios/measured/gpu_kernels/h200.json); with 10 us they are predicted within 10 %. A
multiprocessor's first and last tiles take no longer than their products: 32 matrices of 64 rows and 128 columns take 5
to 8 us (qwen3_next_4l in scenarios/measured/gpu_programs_h200).

Where few products make a result, the results bound a matmul: those of 16 products take 0.43 clocks of a multiprocessor
each on an H100, 8,192 rows of 4,096 columns (qwen3_8b_8l_lora in scenarios/measured/gpu_programs).

Gradients of such adapters add up many products for each result, which thread blocks share. They reach 0.50 to 0.56 of
the peak with tiles of 32 on an H100 (qwen3_8b_8l_lora, 16 by 1,024 to 12,288 results of 8,192 products).

cuBLAS multiplies a matrix by one row or column in kernels of its own, which have no tiles (`gemvx::kernel` and
`gemvNSP_kernel` in profilers' lists). Its smallest tiles are 32 x 32 (`sgemm_32x32_sliced1x4`).
"""

from __future__ import annotations

import math

from sim.core.program import Compute, Role

TILE, SMALL_TILE, REACHED = 64, 32, 0.8  # rows and columns of a tile, of the smallest, and its part of the peak
START_S = 1e-5  # at most
THIN_REACHED = 0.53  # of a weight's gradient of up to `SMALL_TILE` rows or columns
RESULT_CLOCKS = 0.434


def fp32_seconds(op: Compute, seconds: float, peak_flops_per_s: float, sm_count: int, clocks_per_s: float) -> float:
    """Return the seconds of a matmul that would take `seconds` at the speed of large ones; `clocks_per_s`: of all
    multiprocessors together."""
    batch, m, n, k = op.shape
    if 1 in (m, n):
        return seconds
    thin = op.role is Role.WEIGHT_GRADIENT and min(m, n) <= SMALL_TILE < max(m, n)
    tile = SMALL_TILE if thin or max(m, n) <= SMALL_TILE else TILE
    whole_m, whole_n = (math.ceil(size / tile) * tile for size in (m, n))
    reached = THIN_REACHED if thin else REACHED
    least_s = 2.0 * batch * whole_m * whole_n * k / (reached * peak_flops_per_s)
    results_s = batch * m * n * RESULT_CLOCKS / clocks_per_s
    start_s = min(START_S, 2.0 * tile * tile * k * sm_count / peak_flops_per_s)
    return max(seconds, least_s, results_s) + (1 if op.looped else op.kernels) * start_s
