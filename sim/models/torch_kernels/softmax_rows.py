"""Which of torch's softmax kernels computes rows of a length.

torch keeps a short row in registers, so each element is read and written once: up to 2,048 elements forward, up to
1,024 if 16 bits become fp32, and backward (ATen/native/cuda/SoftMax.cu: host_softmax, host_softmax_backward; until
torch 2.7 1,024 in all cases, pytorch pull request 144679). Longer rows are read again for their largest value and for
their sum, from a cache if they fit. Rows of a vocabulary do not: on an H100 those of 30,000 to 260,000 numbers take the
same share of the bandwidth, and another one than rows of 4,096. Of long rows that do not start at multiples of 16
bytes the forward reads one element after the other (cunn_SoftMaxForwardReg).
"""

from __future__ import annotations

from sim.core.program import (
    TORCH_SOFTMAX,
    TORCH_SOFTMAX_BACKWARD,
    TORCH_SOFTMAX_LONG,
    TORCH_SOFTMAX_LONG_BACKWARD,
    TORCH_SOFTMAX_SHORT_BACKWARD,
    TORCH_SOFTMAX_UNALIGNED,
)

VECTOR_BYTES = 16  # that a thread reads at once
IN_REGISTERS = 2048
IN_REGISTERS_OTHERWISE = 1024  # backward, or with a conversion
LONG = 16384  # between the lengths that were measured, 4,096 and 30,000


def torch_softmax(row: int, size: float, converts: bool = False) -> str:
    """Return the forward's kernel for rows of `row` elements of `size` bytes; "": a streaming one.

    `converts`: its result is of another dtype.

    >>> torch_softmax(2048, 2), torch_softmax(2048, 2, converts=True), torch_softmax(128256, 4)
    ('', 'torch', 'torch_long')
    """
    if row <= (IN_REGISTERS_OTHERWISE if converts else IN_REGISTERS):
        return ""
    if row > LONG:
        return TORCH_SOFTMAX_LONG
    return TORCH_SOFTMAX_UNALIGNED if row * size % VECTOR_BYTES else TORCH_SOFTMAX


def torch_softmax_backward(row: int) -> str:
    """Return the two kernels of the backward for rows of `row` elements.

    The first multiplies the result and its gradient (softmax_backward_cuda_out), and so moves as much as the second.
    """
    if row <= IN_REGISTERS_OTHERWISE:
        return TORCH_SOFTMAX_SHORT_BACKWARD
    return TORCH_SOFTMAX_BACKWARD if row <= LONG else TORCH_SOFTMAX_LONG_BACKWARD


def torch_log_softmax_backward(row: int) -> str:
    """Return the one kernel of a log-softmax's backward; "": a streaming one."""
    return "" if row <= IN_REGISTERS_OTHERWISE else TORCH_SOFTMAX_LONG_BACKWARD
