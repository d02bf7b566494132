"""Clocks of torch's top-k over the last dimension, whose instructions outlast its bytes.

A thread block takes a row, a warp for each 32 numbers, and finds the k-th largest by two bits of a number after another
(TensorTopK.cu, sbtopk::gatherTopK). A second kernel sorts what was chosen (Sort.cu, bitonicSortKVInPlace). On an H100
at 1.98 GHz the first takes 27 to 33 us for 8,192 rows of 64 fp32 numbers and 29 us for 16,384 rows of 8; the second
takes 6, 9 and 14 us for 2,048, 8,192 and 16,384 rows (scenarios/measured/gpu_programs).
"""

from __future__ import annotations

import math

WARP_CLOCKS, NARROW_WARP_CLOCKS = 430.0, 215.0  # fp32; 16 bits have half the digits
SORTED_ROW_CLOCKS = 175.0
WARP = 32
# From how many numbers of a row on several blocks choose its largest, by the most rows (TensorTopK.cu:
# should_use_multiblock).
SEVERAL_BLOCKS = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
SEVERAL_BLOCKS_OTHERWISE = 400
LONGEST_ROW = 1024  # up to which a block has a thread for each number; longer rows were not measured


def top_k_clocks(rows: float, row: int, chosen: int, narrow: bool) -> float:
    """Return the clocks of one multiprocessor that all share; `chosen` of each row's `row` numbers. 0: none are known.

    >>> round(top_k_clocks(8192, 64, 8, narrow=False) / 132 / 1.98e3, 1)  # microseconds on an H100; measured: 36 to 42
    32.4
    """
    if row > LONGEST_ROW:
        return 0.0
    warp = NARROW_WARP_CLOCKS if narrow else WARP_CLOCKS
    return rows * (math.ceil(row / WARP) * warp + (SORTED_ROW_CLOCKS if chosen > 1 else 0.0))


def several_blocks_choose(rows: int, row: int) -> bool:
    """Tell whether several thread blocks choose a row's largest numbers.

    Rows of up to `LONGEST_ROW` are left out: the clocks of one block were measured with them.

    >>> several_blocks_choose(4, 32000), several_blocks_choose(4, 10000), several_blocks_choose(8192, 512)
    (True, False, False)
    """
    least = next((least for most, least in SEVERAL_BLOCKS if rows <= most), SEVERAL_BLOCKS_OTHERWISE)
    return row > LONGEST_ROW and row >= least


def several_block_kernels(passes: int) -> int:
    """Return the further kernels where several blocks choose: a start, three for each byte of a number (counts, their
    sums, what lies within), counts of the last, two sums by key of two kernels each, and a sort of what was chosen
    (TensorTopK.cu: mbtopk::launch)."""
    return 1 + 3 * passes + 1 + 2 * 2 + 1
