"""The bandwidth of a GPU's scratch memories (SRAM).

A multiprocessor's serves 128 bytes a clock: 32 banks of 4 bytes (NVIDIA's V100, A100 and H100 whitepapers). Its clock
is taken from the data sheet's 16-bit peak.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topology.spec import GpuSpec

BYTES_PER_CLOCK = 128


def clock_hz(gpu: GpuSpec) -> float:
    """Clock at which all tensor cores give the data sheet's peak in 16 bits."""
    peak = gpu.peak_flops_per_s.get("fp16", gpu.peak_flops_per_s.get("bf16", 0.0))
    return peak / (gpu.sm_count * gpu.sm_flops_per_clock)


def sram_bytes_per_s(gpu: GpuSpec) -> float:
    """Bandwidth of all multiprocessors' scratch memories together; 0 where the chip's figures are not known."""
    known = gpu.sm_sram_bytes and gpu.sm_flops_per_clock
    return BYTES_PER_CLOCK * gpu.sm_count * clock_hz(gpu) if known else 0.0
