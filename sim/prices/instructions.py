"""Seconds of a memory-bound kernel whose instructions were counted in its machine code.

A multiprocessor starts four warps' instructions a clock, 128 threads' (NVIDIA, Volta to Blackwell: four schedulers).
Bandwidth grew faster than this: a B200 moves 29 bytes in a multiprocessor's clock, an H100 14, so that on a B200 the
instructions of SwiGLU's backward take twice as long as its bytes.

Where both take about as long they hide each other badly. On an H100 at 1.98 GHz the backward of Megatron-Core's SwiGLU
(scenarios/measured/gpu_megatron: 117 million elements in 524 us) would take 350 us for its 10 bytes an element at the
data sheet's bandwidth, and 359 us for its 102 instructions; the root of the sum of squares is 502 us. The forward, with
6 bytes and 24 instructions, took 226 us; 210 and 84 us give 226 us.
"""

from __future__ import annotations

from math import hypot

STARTED_PER_CLOCK = 128  # threads' instructions of one multiprocessor


def with_instructions(seconds: float, instructions: float, clocks_per_s: float) -> float:
    """Return the seconds of a kernel whose bytes take `seconds` and whose threads take `instructions` together.

    `clocks_per_s`: of all multiprocessors; 0: unknown, and instructions take no time.
    """
    if not clocks_per_s:
        return seconds
    return hypot(seconds, instructions / (STARTED_PER_CLOCK * clocks_per_s))
