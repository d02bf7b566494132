"""Bytes of operators over lists of tensors, as optimizers and clipping run them.

torch has these kernels in aten/src/ATen/native/cuda/Foreach*.cu. In the file the lists follow one another, and a tensor
that is given twice (the gradient of `addcmul`) is there once.
"""

from __future__ import annotations

from sim.inputs.program_file import CapturedOperator

FOREACH = "aten._foreach"


def list_bytes(op: CapturedOperator) -> float:
    """Return the bytes of an operator in place: its lists are read, and those that it changes are written.

    A file of an older capture does not say which they are: then all count as written.
    """
    read = sum(x.bytes for x in op.inputs)
    return float(read + (sum(x.bytes for x in op.outputs) or read))
