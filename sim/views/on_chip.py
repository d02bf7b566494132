"""The memories of a GPU below its device memory, and what tiled attention moves between the two.

A multiprocessor has 256 KiB of registers and a scratch memory (SRAM) that serves 128 bytes a clock: 32 banks of 4 bytes
(NVIDIA's V100, A100 and H100 whitepapers). Its clock is taken from the data sheet's 16-bit peak.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topology.spec import GpuSpec

REGISTER_BYTES = 256 << 10
BYTES_PER_CLOCK = 128


def clock_hz(gpu: GpuSpec) -> float:
    """Clock at which all matrix units give the data sheet's peak in 16 bits."""
    peak = gpu.peak_flops_per_s.get("fp16", gpu.peak_flops_per_s.get("bf16", 0.0))
    return peak / (gpu.sm_count * gpu.sm_flops_per_clock)


def sram_bytes_per_s(gpu: GpuSpec) -> float:
    """Bandwidth of all multiprocessors' scratch memories together; 0 where the chip's figures are not known."""
    known = gpu.sm_sram_bytes and gpu.sm_flops_per_clock
    return BYTES_PER_CLOCK * gpu.sm_count * clock_hz(gpu) if known else 0.0


def register_bytes(gpu: GpuSpec) -> int:
    """Registers of all multiprocessors together."""
    return REGISTER_BYTES * gpu.sm_count


def unfused_accesses(seq: int, head_dim: int) -> int:
    """Elements of device memory that attention by its parts reads and writes, one head (Dao 2022, algorithm 0): query,
    key, value and output once, scores and probabilities each written and read.

    >>> unfused_accesses(1024, 64)
    4456448
    """
    return 4 * seq * head_dim + 4 * seq * seq


def tiled_accesses(seq: int, head_dim: int, sram_elements: int) -> int:
    """The same tiled (Dao 2022, algorithm 1; theorem 2: Θ(N²d²/M)): key and value blocks of M / 4d rows come once, and
    for each of them all queries and outputs come and outputs go, with two sums a row.

    >>> tiled_accesses(1024, 64, 24576) / unfused_accesses(1024, 64) < 0.6
    True
    """
    passes = math.ceil(seq / max(1, sram_elements // (4 * head_dim)))
    return 2 * seq * head_dim + passes * (3 * seq * head_dim + 4 * seq)
