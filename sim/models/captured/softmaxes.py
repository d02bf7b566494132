"""Captured softmaxes: the kernel that computes one, its bytes and its clocks, by the dimension that it goes along.

A file of an older capture does not say the dimension; then it is the last.
"""

from __future__ import annotations

import math

from sim.inputs.program_file import CapturedOperator
from sim.models.captured.bytes import read_bytes, written_bytes
from sim.models.captured.ordering import row_of, rows_of
from sim.models.torch_kernels.layer_norm_clocks import Clocks
from sim.models.torch_kernels.softmax_columns import ALL_WARPS, WARPS_OF_40_REGISTERS, Columns
from sim.models.torch_kernels.softmax_rows import torch_log_softmax_backward, torch_softmax, torch_softmax_backward

_BACKWARDS = {
    "aten._softmax_backward_data": torch_softmax_backward,
    "aten._log_softmax_backward_data": torch_log_softmax_backward,
}
SOFTMAXES = ("aten._softmax", "aten._log_softmax", *_BACKWARDS)
COLUMN_ROW = 1  # a length whose kernels stream


def columns_of(op: CapturedOperator) -> Columns | None:
    """Return the columns of a softmax behind whose dimension others lie; None of one over rows."""
    read = op.inputs[0]
    behind = math.prod(read.shape[-op.dims_behind :]) if op.dims_behind else 1
    if behind <= 1:
        return None
    warps = WARPS_OF_40_REGISTERS if op.name == "aten._softmax" else ALL_WARPS
    return Columns(rows_of(op) // behind, row_of(op), behind, read.bytes / max(1, read.elements), warps)


def softmax_kernel(op: CapturedOperator) -> str:
    """Return the kernel by the length of a row, as profiles name it."""
    row = COLUMN_ROW if columns_of(op) else row_of(op)
    if op.name in _BACKWARDS:
        return _BACKWARDS[op.name](row)
    read, made = op.inputs[0], op.outputs[0]
    return torch_softmax(row, read.bytes / max(1, read.elements), read.dtype != made.dtype)


def softmax_bytes(op: CapturedOperator) -> float:
    """Return the bytes: all tensors once; columns that no cache keeps are read again, forward twice, backward once."""
    columns, read = columns_of(op), op.inputs[0]
    once = read_bytes(op) + written_bytes(op)
    if columns is None or columns.fit_in_cache:
        return once
    return once + read.bytes * (1.0 if op.name in _BACKWARDS else 2.0)


def softmax_clocks(op: CapturedOperator) -> Clocks:
    """Return the clocks of columns, whose numbers wait for each other; none of rows."""
    columns = columns_of(op)
    return Clocks() if columns is None else Clocks(0.0, columns.clocks(op.name in _BACKWARDS))
