"""Clocks of torch's layer norms (ATen/native/cuda/layer_norm_kernel.cu): one thread block normalizes a row.

For the gradients of weight and bias each block adds up all rows of 32 columns, one after another. From 65,537 rows on,
and where such blocks are fewer than half of the multiprocessors, several blocks share the rows.

The constants are of torch 2.11 on an H200 at 1.98 GHz, read off single operators by shape
(scenarios/measured/gpu_kernels/h200.json).
"""

from __future__ import annotations

from typing import NamedTuple

ROW_CLOCKS, ROW_BACKWARD_CLOCKS = 260.0, 180.0
SUMMED_ROW_CLOCKS = 7.2  # that one block adds to the gradients of 32 weights
SHARED_FROM_ROWS, COLUMNS, MULTIPROCESSORS = 65537, 32, 132
FORWARD_ELEMENT_CLOCKS, BACKWARD_ELEMENT_CLOCKS = (0.35, 0.5), (0.56, 0.8)  # 16 bits, fp32


class Clocks(NamedTuple):
    """Clocks of one multiprocessor that all share, and clocks of one thread block alone."""

    shared: float = 0.0
    alone: float = 0.0


def layer_norm_clocks(rows: float, width: float, backward: bool, narrow: bool) -> Clocks:
    """Clocks of a layer norm of `rows` rows of `width` elements each; `narrow`: the elements have 16 bits."""
    element = (BACKWARD_ELEMENT_CLOCKS if backward else FORWARD_ELEMENT_CLOCKS)[not narrow]
    shared = rows * ((ROW_BACKWARD_CLOCKS if backward else ROW_CLOCKS) + width * element)
    divided = rows >= SHARED_FROM_ROWS and width / COLUMNS < MULTIPROCESSORS / 2
    return Clocks(shared, rows * SUMMED_ROW_CLOCKS if backward and not divided else 0.0)
