"""LSTM, GRU and RNN: one captured operator, many matmuls.

A layer multiplies all steps' inputs at once by its first matrix, [gates · hidden, inputs]. Each state waits for the one
before, so the second matrix, [gates · hidden, hidden], and an LSTM's projection are multiplied step by step. Then one
kernel computes gates and state (https://developer.nvidia.com/blog/optimizing-recurrent-neural-networks-cudnn-5). A
backward gives gradients of inputs in the same way. Those of weights are sums over all steps, one matmul each.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sim.core.program import Compute, Phase, Role
from sim.inputs.program_file import BYTES, CUDNN_RECURRENT, CapturedOperator, Tensor

ONE_LAYER = ("aten.mkldnn_rnn_layer", "aten.mkldnn_rnn_layer_backward")
RECURRENT = (*CUDNN_RECURRENT, *ONE_LAYER)


class _Layers(NamedTuple):
    """`whole`: matrices that all steps share in one matmul; `stepwise`: the others. `cells`: kernels of a step."""

    steps: int
    batch: int
    whole: list[Tensor]
    stepwise: list[Tensor]
    cells: int


def recurrent_computes(op: CapturedOperator) -> tuple[Compute, ...]:
    """Return the kernels of an operator of `RECURRENT`.

    >>> def t(*shape): return Tensor("fp32", shape, ())
    >>> given = t(5, 2, 3), t(1, 2, 4), t(1, 2, 4), t(16, 3), t(16, 4), t(16), t(16)
    >>> op = CapturedOperator("calibrate.rnn", "forward", "", given, (t(5, 2, 4),), 1, False)
    >>> [c.shape for c in recurrent_computes(op) if c.kind == "gemm"]
    [(1, 10, 16, 3), (1, 2, 16, 4), (1, 2, 16, 4), (1, 2, 16, 4), (1, 2, 16, 4), (1, 2, 16, 4)]
    """
    found = _layers(op)
    backward = op.phase == "backward"
    phase, role = (Phase.INPUT_GRAD, Role.INPUT_GRADIENT) if backward else (Phase.FORWARD, Role.OUTPUT)
    tokens = found.steps * found.batch
    made = [_cell(op, found, phase)]
    made += [_matmul(op, tokens, w, phase, role) for w in found.whole]
    each = [_matmul(op, found.batch, w, phase, role, kernels=0) for w in found.stepwise]  # the cell's loop issues them
    made += each * found.steps
    if backward:
        made += [
            _matmul(op, tokens, w, Phase.WEIGHT_GRAD, Role.WEIGHT_GRADIENT) for w in (*found.whole, *found.stepwise)
        ]
    return tuple(made)


def multiplied(op: CapturedOperator, x: Tensor) -> str:
    """Return the dtype of a product's inputs, one of which is `x`; complex ones are pairs of floats."""
    if x.dtype.startswith("complex"):
        return {"complex64": "fp32", "complex128": "fp64"}.get(x.dtype, x.dtype)
    return "tf32" if op.tf32 and x.dtype == "fp32" else x.dtype


def _layers(op: CapturedOperator) -> _Layers:
    """Read sizes off an operator's tensors; sequences of unlike lengths count as equally long ones."""
    x = op.inputs[0]
    if op.name in ONE_LAYER:
        first, second, batch = *op.inputs[1:3], op.inputs[5].shape[-2]
        return _Layers(max(1, x.elements // (x.shape[-1] * batch)), batch, [first], [second], 1)
    last_state = max(i for i, t in enumerate(op.inputs) if len(t.shape) == 3)
    layers, batch, _ = op.inputs[last_state].shape
    matrices = [t for t in op.inputs[last_state + 1 :] if len(t.shape) == 2]
    each = len(matrices) // layers
    whole = matrices[::each]
    stepwise = [w for i, w in enumerate(matrices) if i % each]
    return _Layers(math.ceil(x.elements / (x.shape[-1] * batch)), batch, whole, stepwise, layers)


def _matmul(op: CapturedOperator, rows: int, weight: Tensor, phase: Phase, role: Role, kernels: int = 1) -> Compute:
    out, inner = weight.shape
    shape = {
        Role.OUTPUT: (1, rows, out, inner),
        Role.INPUT_GRADIENT: (1, rows, inner, out),
        Role.WEIGHT_GRADIENT: (1, out, inner, rows),
    }[role]
    _, m, n, k = shape
    moved = float((m * k + k * n + m * n) * BYTES.get(weight.dtype, 4))
    return Compute(op.name, "gemm", shape, multiplied(op, weight), 2.0 * m * n * k, moved, phase, kernels, role=role)


def _cell(op: CapturedOperator, found: _Layers, phase: Phase) -> Compute:
    """Read the gates that the matmuls wrote, and read and write all but the weights."""
    weights = {id(w) for w in (*found.whole, *found.stepwise)}
    size = BYTES.get(found.whole[0].dtype, 4)
    gates = found.steps * found.batch * sum(w.shape[0] for w in found.whole)
    outputs = [t for t in op.outputs if len(t.shape) != 2 or op.phase != "backward"]
    moved = float(gates * size + sum(t.bytes for t in (*op.inputs, *outputs) if id(t) not in weights))
    kernels = found.steps * found.cells
    dtype = found.whole[0].dtype
    return Compute(op.name, "elementwise", (gates,), dtype, float(gates), moved, phase, kernels, looped=True)
