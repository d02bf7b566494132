"""Sums of many numbers each, such as a bias's gradient over the rows of a matrix, as torch runs them on a GPU.

Where results are few and rows many, thread blocks share the numbers of a result. Each adds up its part, and the last
block that ends adds up the parts, one after another (ATen/native/cuda/Reduce.cuh: setReduceConfig, global_reduce).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sim.core.program import SumShape

WIDEST = 4  # neighbours that a thread loads at once: columns, or numbers of a long row
VECTOR_ROW = 128  # from which a thread loads neighbours of a row at once
BLOCK_THREADS, WARP_THREADS, THREADS = 512, 32, 2048  # at most of a block; of a warp; of a multiprocessor
# Threads of a multiprocessor that run at once. torch asks for registers for a quarter of `THREADS` at least
# (Reduce.cuh: reduce_kernel's launch bounds). Half of them fits the times on an H100: sums of more blocks wait once
# more (`prices.unvectorized.SUM_WAVE_S`).
RUNNING_THREADS = 1024
LEAST_ROWS, MOST_ROWS = 16, 256  # of a thread, where blocks share a column's rows


class SharedSum(NamedTuple):
    """How torch shares a sum: the parts of a result and their blocks' waves; how many parts the last block adds at
    once; a thread's numbers, and how many of them it loads at once."""

    parts: int
    numbers: int
    threads: int = 1
    waves: float = 1.0
    at_once: int = 4

    @property
    def turns(self) -> int:
        """Turns in which the threads of the last block add a part each; 0 if one block has all numbers of a result."""
        return math.ceil(self.parts / self.threads) if self.parts > 1 else 0

    @property
    def loads(self) -> int:
        """Loads of a thread that wait for each other."""
        return math.ceil(self.numbers / self.at_once)


def shared_sum(shape: SumShape, multiprocessors: int) -> SharedSum:
    """Return how a GPU shares a sum.

    There are no more parts than blocks that fill the GPU, so more rows make the parts longer, and not their number. Of
    few columns a block has many threads, which take fewer turns.

    >>> [shared_sum(SumShape(rows, 128), 132).turns for rows in (512, 2048, 16384, 200704)]
    [0, 8, 64, 528]
    >>> [shared_sum(SumShape(16384, columns), 132).turns for columns in (4, 512, 2048, 32768)]
    [0, 64, 33, 4]
    >>> shared_sum(SumShape(512, 768), 132).loads  # six blocks, whose threads add up 128 rows each
    32
    >>> shared_sum(SumShape(200704, 128, neighbours=True, joined=False), 132)  # of images' channels
    SharedSum(parts=5, numbers=79, threads=512, waves=2.4242424242424243, at_once=4)
    """
    rows, columns, widest = shape.rows, shape.columns, WIDEST if shape.stride == 1 else 1
    if shape.neighbours:
        width = 1
        dims = rows / (widest if shape.joined and rows >= VECTOR_ROW else 1), columns
    else:
        width = math.gcd(widest, int(columns))
        dims = columns / width, rows
    threads = BLOCK_THREADS // width
    first, second = (min(threads, 1 << (max(1, int(n)).bit_length() - 1)) for n in dims)
    block_width = min(first, WARP_THREADS)
    block_height = min(second, threads // block_width)
    block_width = min(first, threads // block_height)
    of_lane, results = (math.ceil(rows / block_width), 1) if shape.neighbours else (math.ceil(rows), block_width)
    if of_lane < min(block_height * LEAST_ROWS, MOST_ROWS):
        return SharedSum(1, of_lane, at_once=shape.at_once)  # each thread, or each warp, has results of its own
    blocks = math.ceil(columns / (results * width))
    of_thread = math.ceil(of_lane / block_height)
    at_once = multiprocessors * (THREADS // (block_width * block_height))
    parts = 1
    if of_thread >= MOST_ROWS and blocks <= at_once:
        fill, least, most = math.ceil(at_once / blocks), *(math.ceil(of_thread / n) for n in (MOST_ROWS, LEAST_ROWS))
        parts = max(min(fill, most), least)
    adding = block_height * (block_width if shape.neighbours else 1)
    running = multiprocessors * max(1, RUNNING_THREADS // (block_width * block_height))
    waves = max(1.0, blocks * parts / running)
    return SharedSum(parts, math.ceil(of_thread / parts), adding, waves, shape.at_once)
