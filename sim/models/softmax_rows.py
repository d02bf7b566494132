"""Which of torch's softmax kernels computes rows of a length.

torch keeps a row of up to 1,024 elements in registers (ATen/native/cuda/SoftMax.cu: host_softmax;
PersistentSoftmax.cuh: dispatch_softmax_forward), so each element is read and written once. Longer rows are read again
for their largest value and for their sum, from a cache if they fit. Rows of a vocabulary do not: on an H100 those of
30,000 to 260,000 numbers take the same share of the bandwidth, and another one than rows of 4,096.
"""

from __future__ import annotations

from sim.core.program import (
    TORCH_SOFTMAX,
    TORCH_SOFTMAX_BACKWARD,
    TORCH_SOFTMAX_LONG,
    TORCH_SOFTMAX_LONG_BACKWARD,
)

IN_REGISTERS = 1024
LONG = 16384  # between the lengths that were measured, 4,096 and 30,000


def torch_softmax(row: int, backward: bool = False) -> str:
    """Return the kernel for rows of `row` elements; "": a streaming one.

    >>> torch_softmax(1024), torch_softmax(4096), torch_softmax(128256, backward=True)
    ('', 'torch', 'torch_long_backward')
    """
    if row <= IN_REGISTERS:
        return ""
    if row <= LONG:
        return TORCH_SOFTMAX_BACKWARD if backward else TORCH_SOFTMAX
    return TORCH_SOFTMAX_LONG_BACKWARD if backward else TORCH_SOFTMAX_LONG
