"""Seconds of kernels that draw random numbers, as dropout does: a counter-based generator's instructions.

CUDA's dropouts draw from Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): ten rounds of
integer multiplications for four numbers. They hide behind a kernel's memory traffic only in part. Measured on an H100
(scenarios/cuda/h100_dropout.json, 2^28 elements): `bernoulli_`, which writes 2 or 4 bytes a number, takes 0.364 clocks
of one multiprocessor for each; `native_dropout` takes 0.09 to 0.12 clocks more for each than its bytes do.
"""

from __future__ import annotations

DRAWN = "random"  # a profile's points of kernels that draw
DRAW_CLOCKS = 0.36  # of one multiprocessor, for a number
EXPOSED_CLOCKS = 0.10  # that memory traffic does not hide


def with_draws(seconds: float, draws: float, clocks_per_s: float) -> float:
    """Return the seconds of a memory-bound kernel that also draws `draws` numbers.

    `clocks_per_s`: of all multiprocessors; 0: unknown, and draws take no time.
    """
    if not clocks_per_s:
        return seconds
    return max(seconds + draws * EXPOSED_CLOCKS / clocks_per_s, draws * DRAW_CLOCKS / clocks_per_s)
