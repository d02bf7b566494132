"""Sums over the rows of a matrix, such as a bias's gradient, as torch runs them on a GPU.

Thread blocks share the rows of a column. Each adds up its part, and the last block that ends adds up the parts, one
after another (ATen/native/cuda/Reduce.cuh: setReduceConfig, global_reduce).
"""

from __future__ import annotations

import math

from sim.models.torch_kernels.layer_norm_clocks import MULTIPROCESSORS

WIDEST = 4  # neighbouring columns of a thread, if the columns are a multiple of as many
BLOCK_THREADS, WARP_THREADS, THREADS = 512, 32, 2048  # at most of a block; of a warp; of a multiprocessor
LEAST_ROWS, MOST_ROWS = 16, 256  # of a thread, where blocks share a column's rows
# Rows of the parts of one turn in the shapes whose rows were timed: 4 threads of 4 parts, each of 4 threads' rows.
TURN_ROWS = 4 * 4 * LEAST_ROWS


def summed_rows(rows: float, columns: float) -> float:
    """Return the rows that wait for the last block: so many for each turn in which its threads add a part each.

    There are no more parts than blocks that fill the GPU, so more rows make the parts longer, and not their number. Of
    few columns a block has many threads, which take fewer turns.

    >>> [summed_rows(rows, 128) for rows in (2048, 16384, 200704)]
    [2048.0, 16384.0, 135168.0]
    >>> [summed_rows(16384, columns) for columns in (4, 512, 2048, 32768)]
    [256.0, 16384.0, 8448.0, 1024.0]
    """
    width = math.gcd(WIDEST, int(columns))
    threads = BLOCK_THREADS // width
    across, along = (min(threads, 1 << (max(1, int(n)).bit_length() - 1)) for n in (columns / width, rows))
    block_width = min(across, WARP_THREADS)
    block_rows = min(along, threads // block_width)
    block_width = min(across, threads // block_rows)
    blocks = math.ceil(columns / (block_width * width))
    of_a_thread = math.ceil(rows / block_rows)
    at_once = MULTIPROCESSORS * (THREADS // (block_width * block_rows))
    parts = 1
    if of_a_thread >= MOST_ROWS and blocks <= at_once:
        fill, least, most = math.ceil(at_once / blocks), *(math.ceil(of_a_thread / n) for n in (MOST_ROWS, LEAST_ROWS))
        parts = max(min(fill, most), least)
    return float(TURN_ROWS * math.ceil(parts / block_rows))
