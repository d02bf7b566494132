"""How often the kernels of a norm's backward read and write: each tensor once, or those of the weight's gradient twice.

A norm's backward has two sums: over the width of each row, for the input's gradient, and over all rows, for the
weight's. torch's own norm computes them in two kernels. Since torch 2.10 Inductor makes one kernel of both, if rows are
many and not too wide, until torch 2.14 at least twice as many as they are wide (torch/_inductor/scheduler.py:
`MixOrderReduction.can_fuse`; the fact `joins_norm_sums`). It also makes two kernels where one
would read more than ten tensors, as that of a layer norm before three matmuls; this rule is not simulated.

A compiler also reads the gradients of several matmuls that share a norm's result inside these kernels: it launches none
for their sum.
"""

from __future__ import annotations

from sim.models.dims import Dims

INPUT_GRADIENT_ACCESSES = 3  # input and output gradient read, input gradient written
LEAST_ELEMENTS, LEAST_ROWS, LARGEST_WIDTH = 5 * 2**20, 4096, 16_384


def without_weight(d: Dims) -> bool:
    """Tell whether a frozen weight saves a kernel: that of its gradient, which is one of its own."""
    return d.lora is not None and d.framework.norm_backward_accesses > INPUT_GRADIENT_ACCESSES


def backward_accesses(d: Dims, rows: int, width: int) -> int:
    """Return the reads and writes for each element of a norm of `rows` by `width` elements in its backward."""
    if without_weight(d) or _in_one_kernel(d, rows, width):
        return INPUT_GRADIENT_ACCESSES
    return d.framework.norm_backward_accesses


def gradient_reads(d: Dims, rows: int, width: int) -> int:
    """Return how many of these accesses read the gradient of the norm's result."""
    return backward_accesses(d, rows, width) // 2


def _in_one_kernel(d: Dims, rows: int, width: int) -> bool:
    rows_for_width = d.framework.joins_norm_sums
    if rows_for_width is None or width > LARGEST_WIDTH:
        return False
    return rows * width >= LEAST_ELEMENTS and rows >= max(LEAST_ROWS, rows_for_width * width)
