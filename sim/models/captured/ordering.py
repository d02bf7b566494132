"""Kernels of torch that order the numbers of a row, choose its largest, or add them up one after another.

A row lies along the dimension that the operator goes along, mostly the last (`CapturedOperator.dims_behind`). Sources
are in aten/src/ATen/native/cuda of torch 2.14.
"""

from __future__ import annotations

import math

from sim.inputs.program_file import CapturedOperator
from sim.models.captured.indices import PLACE_BYTES, SORT_STARTS, passes
from sim.models.torch_kernels.latencies import CACHED_CLOCKS, FETCHED_BYTES, LOAD_CLOCKS
from sim.models.torch_kernels.layer_norm_clocks import MULTIPROCESSORS, Clocks
from sim.models.torch_kernels.top_k import LONGEST_ROW, several_block_kernels, several_blocks_choose, top_k_clocks

SMALL_SORT = 4096  # the longest row that one thread block sorts (Sort.h: should_use_small_sort)
# Fewer rows than this are sorted as one array, by value and then by row; a row of so many numbers is sorted by itself
# (SortStable.cu: launch_stable_sort_kernel).
SEGMENTS, LONG_ROW = 128, 1_000_000
SEGMENT_BITS = 6  # of a key that a pass of cub's DeviceSegmentedRadixSort handles; it reads the keys before
CUMULATIVE_CLOCKS = 1.5  # an element of a cumulative sum
# ScanUtils.cuh, tensor_kernel_scan_innermost_dim: a block of 512 threads adds up 1,024 numbers of its rows in one turn,
# after the turn before. 256 blocks of 256 turns take 410 us on an H200 (8,192 x 8,192 fp32,
# scenarios/measured/gpu_kernels/h200.json).
TURN_CLOCKS, SCAN_THREADS_LOG2, LEAST_THREADS_LOG2 = 3150.0, 9, 4
# tensor_kernel_scan_outer_dim: a thread adds up a column, one row after another, and no load passes the store before
# it. An issue of torch (122170) shows 322 ns a row of 32 numbers on a GPU that it does not name; the latencies of an
# H100's memory give 243 ns on an H200.
BLOCK_THREADS, THREADS = 512, 2048  # of a block of such columns; of a multiprocessor


def row_of(op: CapturedOperator) -> int:
    """Return the elements that are ordered together."""
    shape = op.inputs[0].shape
    return shape[-1 - op.dims_behind] if len(shape) > op.dims_behind else 1


def rows_of(op: CapturedOperator) -> int:
    """Return the number of rows that are ordered one by one."""
    return op.inputs[0].elements // max(1, row_of(op))


def sorted_bytes(op: CapturedOperator) -> float:
    """Return a sort's bytes (Sort.cpp, SortStable.cu).

    Short rows: a copy, places, and one sort in place. Else passes over values and places: of few rows with the row
    beside the place, one more by row, and both results; of many rows each pass reads the values before.
    """
    values, places = op.outputs[0].bytes, op.outputs[-1].bytes
    if row_of(op) <= SMALL_SORT:
        return sum(x.bytes for x in op.inputs) + values + places + 2.0 * (values + places)
    by_value = places + 2.0 * (values + places) * passes(op.inputs[0])
    if _as_one_array(op):
        by_row = PLACE_BYTES * op.inputs[0].elements * (1.0 + 2.0 * _row_passes(op))
        return by_value + values + by_row + 2.0 * (values + places)
    return by_value if _by_itself(op) else places + (3.0 * values + 2.0 * places) * _segment_passes(op)


def sort_kernels(op: CapturedOperator) -> int:
    """Return the further kernels of a sort, whose starts take time."""
    if row_of(op) <= SMALL_SORT:
        return 3
    if _as_one_array(op):
        return 2 * SORT_STARTS + passes(op.inputs[0]) + _row_passes(op) + 1
    return SORT_STARTS + passes(op.inputs[0]) if _by_itself(op) else _segment_passes(op)


def sort_passes(op: CapturedOperator) -> int:
    """Return how many of these are passes over all rows at once."""
    if row_of(op) <= SMALL_SORT or not (_as_one_array(op) or _by_itself(op)):
        return 0
    return passes(op.inputs[0]) + (_row_passes(op) if _as_one_array(op) else 0)


def _by_itself(op: CapturedOperator) -> bool:
    return rows_of(op) <= 1 or row_of(op) >= LONG_ROW


def _as_one_array(op: CapturedOperator) -> bool:
    return not _by_itself(op) and rows_of(op) < SEGMENTS


def _row_passes(op: CapturedOperator) -> int:
    return math.ceil(max(1.0, math.log2(rows_of(op))) / 8)


def _segment_passes(op: CapturedOperator) -> int:
    return math.ceil(8 * passes(op.inputs[0]) / SEGMENT_BITS)


def top_k_bytes(op: CapturedOperator) -> float:
    """Return a top-k's bytes: a row read for each byte of a number, and once to gather what is chosen.

    One block keeps a row in its cache.
    """
    chosen = 3.0 * sum(x.bytes for x in op.outputs)
    reads = passes(op.inputs[0]) + 1 if several_blocks_choose(rows_of(op), row_of(op)) else 1
    return reads * op.inputs[0].bytes + chosen


def top_k_kernels(op: CapturedOperator) -> int:
    """Return the further kernels of a top-k: one block's sort of what it chose, or those of several blocks."""
    return several_block_kernels(passes(op.inputs[0])) if several_blocks_choose(rows_of(op), row_of(op)) else 1


def chosen_clocks(op: CapturedOperator, narrow: bool) -> Clocks:
    """Return the clocks of a top-k whose rows one block each chooses from; few blocks do not fill the GPU."""
    rows, row = rows_of(op), row_of(op)
    if several_blocks_choose(rows, row):
        return Clocks()
    chosen = op.outputs[0].shape[-1] if op.outputs[0].shape else 1
    if row <= LONGEST_ROW:
        return Clocks(top_k_clocks(rows, row, chosen, narrow))
    # A longer row's warps take turns.
    whole = top_k_clocks(1, LONGEST_ROW, chosen, narrow) * row / LONGEST_ROW
    return Clocks(0.0, whole) if rows < MULTIPROCESSORS else Clocks(rows * whole)


def selected_clocks(op: CapturedOperator, narrow: bool) -> Clocks:
    """Return the clocks of a k-th value or a median of each row.

    It is found as a top-k's last number is, by two bits of a number after another (Sorting.cu: gatherKthValue,
    gatherMedian; SortingRadixSelect.cuh: radixSelect).
    """
    rows, row = rows_of(op), row_of(op)
    whole = top_k_clocks(1, LONGEST_ROW, 1, narrow) * row / LONGEST_ROW
    return Clocks(0.0, whole) if rows < MULTIPROCESSORS else Clocks(rows * whole)


def scan_clocks(op: CapturedOperator) -> Clocks:
    """Return the clocks of a sum, product or largest number so far.

    Few rows leave most blocks without work, and each turn of a block waits for the one before. One row alone is spread
    over all blocks (ScanUtils.cuh: scan_dim).

    >>> from sim.inputs.program_file import Tensor
    >>> few = Tensor("fp32", (4, 32000), ())
    >>> round(scan_clocks(CapturedOperator("aten.cumsum", "forward", "", (few,), (few,), 1, False)).alone / 1.98e3)
    51
    """
    rows, row = rows_of(op), row_of(op)
    if rows <= 1:
        return Clocks()
    if op.dims_behind:
        return _along_columns(op)
    shared = op.inputs[0].elements * CUMULATIVE_CLOCKS
    columns, lines = (math.ceil(math.log2(n)) for n in (max(1, row), rows))
    threads = min(max((SCAN_THREADS_LOG2 + columns - lines) // 2, LEAST_THREADS_LOG2), SCAN_THREADS_LOG2)
    alone = math.ceil(row / (2 << threads)) * TURN_CLOCKS
    return Clocks(shared) if shared >= alone * MULTIPROCESSORS else Clocks(0.0, alone)


def _along_columns(op: CapturedOperator) -> Clocks:
    """Return the clocks of threads that add up a column each, by turns of all multiprocessors.

    >>> from sim.inputs.program_file import Tensor
    >>> places = Tensor("int64", (8192, 64), ())  # of tokens among an expert's
    >>> op = CapturedOperator("aten.cumsum", "forward", "", (places,), (places,), 1, False, dims_behind=1)
    >>> round(_along_columns(op).alone / 1.98e6, 1)  # milliseconds on an H200
    2.0
    """
    x, row = op.inputs[0], row_of(op)
    columns = math.prod(x.shape[-op.dims_behind :])
    blocks = rows_of(op) // max(1, columns) * math.ceil(columns / BLOCK_THREADS)
    turns = math.ceil(blocks * min(columns, BLOCK_THREADS) / (MULTIPROCESSORS * THREADS))
    fetched = columns * x.bytes / max(1, x.elements) / FETCHED_BYTES
    each = LOAD_CLOCKS if fetched >= 1.0 else CACHED_CLOCKS + fetched * (LOAD_CLOCKS - CACHED_CLOCKS)
    return Clocks(0.0, turns * row * each)
