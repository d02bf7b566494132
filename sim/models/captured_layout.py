"""Which kernel torch takes for an operator bound by memory, by the layout of its tensors.

`calibrate.run` measures each of these; where a profile lacks one, the kind's own points serve.
"""

from __future__ import annotations

from sim.inputs.program_file import CapturedOperator, Tensor

FLOATS = ("fp64", "fp32", "bf16", "fp16", "fp8")
FUNCTIONS = {  # of one tensor; measured by themselves, as they compute more than they move where cores are slow
    "aten.tanh": "tanh",
    "aten.silu": "silu",
    "aten.silu_backward": "silu_backward",
    "aten.exp": "tanh",
    "aten.sigmoid": "tanh",
}
REDUCTIONS = ("aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.max", "aten.min", "aten.var", "aten.argmax")
SMALL = 16  # an operand this many times smaller than the result stays in a cache


def kernel_of(op: CapturedOperator) -> str:
    """The kernel of an elementwise operator; "" for one over contiguous tensors of one dtype and shape.

    >>> row, x = Tensor("fp32", (64,), ()), Tensor("fp32", (32, 64), ())
    >>> def add(*inputs): return CapturedOperator("aten.add", "forward", "", inputs, (x,), 1, False)
    >>> kernel_of(add(x, row)), kernel_of(add(x, x)), kernel_of(add(x)), kernel_of(add(x, x._replace(strides=(1, 32))))
    ('broadcast', '', 'unary', 'transposed')
    """
    if op.name in FUNCTIONS:
        return FUNCTIONS[op.name]
    if not op.inputs or not op.outputs:
        return ""
    out = op.outputs[0]
    if op.name in REDUCTIONS:
        return _reduction(op.inputs[0], out)
    whole = [x for x in op.inputs if x.elements * SMALL > out.elements]
    if any(_transposed(x) for x in (*whole, out)):
        return "transposed"
    if len({x.dtype for x in (*whole, out) if x.dtype in FLOATS}) > 1:
        return "mixed"
    if any(1 < x.elements < out.elements for x in op.inputs):
        return "broadcast"
    return "unary" if len(whole) == 1 else ""


def _reduction(x: Tensor, out: Tensor) -> str:
    """Over the last dimension, whose elements lie together, or over others."""
    if not x.shape or not out.shape:
        return "reduce_last"
    keeps = len(out.shape) == len(x.shape)
    last = out.shape[-1] == 1 if keeps else out.shape != x.shape[len(x.shape) - len(out.shape) :]
    return "reduce_last" if last else "reduce_first"


def _transposed(x: Tensor) -> bool:
    """Whether neighbours in the last dimension do not lie together."""
    return bool(x.strides) and len(x.shape) > 1 and x.shape[-1] > 1 and x.strides[-1] > 1


def is_transposing(op: CapturedOperator) -> bool:
    """Whether a copy brings neighbours together that did not lie so."""
    return any(_transposed(a) != _transposed(b) for a in op.inputs[-1:] for b in op.outputs[:1])
