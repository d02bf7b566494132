"""The memories of a GPU below its device memory, and what tiled attention moves between the two.

A multiprocessor has 256 KiB of registers and a scratch memory (SRAM) that serves 128 bytes a clock: 32 banks of 4 bytes
(NVIDIA's V100, A100 and H100 whitepapers). Its clock is taken from the data sheet's 16-bit peak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topology.spec import GpuSpec

REGISTER_BYTES = 256 << 10
BYTES_PER_CLOCK = 128


@dataclass(frozen=True, slots=True)
class OnChip:
    """`sram_bytes`: of one multiprocessor, the most that kernels can have; `flops_per_clock`: dense, 16 bits."""

    multiprocessors: int
    sram_bytes: int
    flops_per_clock: int

    def clock_hz(self, gpu: GpuSpec) -> float:
        """At which all matrix units give the data sheet's peak."""
        peak = gpu.peak_flops_per_s.get("fp16", gpu.peak_flops_per_s.get("bf16", 0.0))
        return peak / (self.multiprocessors * self.flops_per_clock)

    def sram_bytes_per_s(self, gpu: GpuSpec) -> float:
        """Of all multiprocessors together."""
        return BYTES_PER_CLOCK * self.multiprocessors * self.clock_hz(gpu)

    @property
    def register_bytes(self) -> int:
        """Of all multiprocessors together."""
        return REGISTER_BYTES * self.multiprocessors


ON_CHIP = {
    "v100": OnChip(80, 96 << 10, 1024),
    "a100-sxm": OnChip(108, 164 << 10, 2048),
    "a100-pcie": OnChip(108, 164 << 10, 2048),
    "h100-sxm": OnChip(132, 228 << 10, 4096),
    "h200-sxm": OnChip(132, 228 << 10, 4096),
}


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
