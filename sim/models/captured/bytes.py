"""Bytes that an operator's tensors have, also of operators over lists of tensors (optimizers, clipping).

torch has kernels for lists in aten/src/ATen/native/cuda/Foreach*.cu. In the file the lists follow one another, and a
tensor that is given twice (the gradient of `addcmul`) is there once.
"""

from __future__ import annotations

from sim.inputs.program_file import CapturedOperator

FOREACH = "aten._foreach"


def read_bytes(op: CapturedOperator) -> float:
    """Return the bytes of all inputs."""
    return float(sum(x.bytes for x in op.inputs))


def written_bytes(op: CapturedOperator) -> float:
    """Return the bytes of all outputs."""
    return float(sum(x.bytes for x in op.outputs))


def list_bytes(op: CapturedOperator) -> float:
    """Return the bytes of an operator in place: its lists are read, and those that it changes are written.

    A file of an older capture does not say which they are: then all count as written.
    """
    read = sum(x.bytes for x in op.inputs)
    return float(read + (sum(x.bytes for x in op.outputs) or read))
