"""torch's softmax along a dimension behind which others lie, as over the classes of each pixel of an image.

A thread goes through the numbers of one column, one after another; up to 64 columns share a block with several threads
for each (ATen/native/cuda/SoftMax.cu: cunn_SpatialSoftMaxForward, cunn_SpatialSoftMaxBackward, and the launch shape in
SpatialSoftMax_getBlockSize, SpatialSoftMax_getGridSize). In the machine code of torch 2.14 for Hopper
(cuobjdump -sass libtorch_cuda.so) no load is issued before the one of the number before has come: three a number
forward, for the largest, the sum and the result. Backward one thread loads four numbers at once for the sum, and then
one after another; several threads do both one after another. Its second loop reads the result for the first time.

A softmax takes 40 registers a thread forward, which leave room for 48 warps of a multiprocessor; a log-softmax and
gradients take 32, and all 64 warps run (cuobjdump -res-usage of the same library).

No such kernel was measured.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sim.models.torch_kernels.latencies import (
    CACHE_BYTES,
    CACHED_CLOCKS,
    FIRST_CACHE_BYTES,
    LOAD_CLOCKS,
    SECOND_CACHE_CLOCKS,
)
from sim.models.torch_kernels.layer_norm_clocks import MULTIPROCESSORS

BLOCK_THREADS, WARP_THREADS, BLOCKS = 1024, 32, 32  # at most of a block; of a warp; blocks of a multiprocessor
ALL_WARPS, WARPS_OF_40_REGISTERS = 64, 48  # that a multiprocessor runs at once
SHARED_COLUMNS, SHARED_NUMBERS = 64, 64  # up to so many columns, of at least so many numbers, have several threads
READ_AGAIN, BACKWARD_LOADS, SHARED_BACKWARD_LOADS = 2.0, 1.25, 2.0  # that wait, for each number


class Columns(NamedTuple):
    """A softmax of `numbers`, `inner` apart, for each of `outer` times `inner` columns.

    `element_bytes`: of a number that is read. `warps`: that a multiprocessor's registers leave room for.
    """

    outer: int
    numbers: int
    inner: int
    element_bytes: float = 4.0
    warps: int = ALL_WARPS

    @property
    def block(self) -> tuple[int, int]:
        """Threads of a column, and columns of a thread block.

        >>> Columns(8, 21, 512 * 512).block, Columns(32, 32000, 128).block, Columns(4, 4096, 16).block
        ((1, 1024), (1, 128), (64, 16))
        """
        columns = min(self.inner, BLOCK_THREADS)
        if columns > SHARED_COLUMNS or self.numbers < SHARED_NUMBERS:
            return 1, columns
        most = min(BLOCK_THREADS // columns, self.numbers)
        return 1 << (most.bit_length() - 1), columns

    @property
    def at_once(self) -> int:
        """Thread blocks that all multiprocessors run at once."""
        return MULTIPROCESSORS * min(BLOCKS, self.warps // math.ceil(math.prod(self.block) / WARP_THREADS))

    @property
    def grid(self) -> tuple[int, int]:
        """Thread blocks along the outer dimensions and along the inner ones: at least as many as run at once, and less
        than twice as many, where there are columns for them.

        >>> Columns(8, 21, 512 * 512).at_once, Columns(8, 21, 512 * 512).grid
        (264, (2, 256))
        """
        along = min(math.ceil(self.inner / self.block[1]), self.at_once)
        return min(math.ceil(self.at_once / along), self.outer), along

    def clocks(self, backward: bool) -> float:
        """Return the clocks of the blocks, each of which has its columns one after another.

        >>> round(Columns(32, 32000, 128).clocks(backward=False) / 1.98e6)  # milliseconds on an H200
        23
        """
        threads, columns = self.block
        outer, inner = self.grid
        turns = math.ceil(self.outer / outer) * math.ceil(self.inner / (columns * inner))
        turns *= math.ceil(outer * inner / self.at_once)
        if backward:
            waits = (BACKWARD_LOADS if threads == 1 else SHARED_BACKWARD_LOADS) * LOAD_CLOCKS
        else:
            waits = LOAD_CLOCKS + READ_AGAIN * self._clocks_again
        return turns * math.ceil(self.numbers / threads) * waits

    @property
    def _clocks_again(self) -> float:
        """Return the clocks of a load of a number that was read before: from the nearest cache that keeps it."""
        of_multiprocessor = self.at_once // MULTIPROCESSORS * self.block[1] * self.numbers * self.element_bytes
        if of_multiprocessor <= FIRST_CACHE_BYTES:
            return CACHED_CLOCKS
        return SECOND_CACHE_CLOCKS if self.fit_in_cache else LOAD_CLOCKS

    @property
    def fit_in_cache(self) -> bool:
        """Tell whether the columns that are computed at once are still in the cache when they are read again."""
        columns = min(math.prod(self.grid), self.at_once) * self.block[1]
        return min(columns, self.outer * self.inner) * self.numbers * self.element_bytes <= CACHE_BYTES
