"""Residual sums, copies and biases: bound by memory, counted access by access.

`training.framework` decides which of these operators, of norms (`sim.models.norm`) and of rope (`sim.models.rope`)
share a kernel:

- eager, transformers: every torch operator is a kernel. LayerNorm is one already; RMSNorm as written in PyTorch code
  (cast to fp32, square, mean, rsqrt, scale, cast back, weight) is eight;
- megatron: norm, rope, bias-GELU, SwiGLU and bias-dropout-add are one kernel each;
- compiled: as megatron, and a chain without a matmul in it is one kernel (the residual sum and the norm after
  it); what a pointwise chain can rebuild from kept tensors is not kept (norm and activation outputs).

Accesses are per element, times the activations' bytes; a dropout mask is one byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Phase, Program, Saved
from sim.models.dims import Dims
from sim.models.operators import F, I, Operator, accumulate, memory_op
from sim.models.precision.casts import branch_gradient_casts, mixed

if TYPE_CHECKING:
    pass

MASK_BYTES = 1.0


class Traffic(Struct, frozen=True):
    """Bytes per element and kernels, forward and backward. `…_launches`: further launches, which take the host's time
    alone: the bytes and the device's time of such kernels are counted with the others, or are negligible."""

    forward_bytes: float
    forward_kernels: int
    backward_bytes: float
    backward_kernels: int
    forward_launches: int = 0
    backward_launches: int = 0


def launches_alone(name: str, phase: Phase, kernels: int) -> Program:
    """Kernels of which only the launch counts, each a call from Python."""
    return (memory_op(name, phase, "elementwise", kernels, FP32_BYTES * kernels, "fp32", kernels),) if kernels else ()


def bias_apart(d: Dims, name: str, elements: int) -> Operator:
    """The sum of a projection's output of `elements` and its bias, as a kernel of its own."""
    return Operator(name, (memory_op(name, F, "elementwise", elements, 2 * elements * d.act_bytes, d.act),))


def copied(name: str, d: Dims, elements: float, kernels: tuple[int, int] = (1, 1)) -> Operator:
    """Tensors copied into another order, and their gradients copied back; `kernels`: of the forward and the backward.

    Each copy reads and writes all `elements` once.
    """
    moved = 2 * d.act_bytes * elements
    ahead, back = kernels
    forward, backward = (
        memory_op(n, phase, "copy", elements, moved, d.act, kernels, strided=d.framework.reads_strided)
        for n, phase, kernels in ((name, F, ahead), (f"{name}_backward", I, back))
    )
    return Operator(name, (forward,), (backward,))


def residual(d: Dims, name: str, bias_after: bool) -> Operator:
    """Bias (where the matmul could not add it), dropout and the sum with the residual stream.

    Under autocast the stream has fp32 and the branch 16 bits, to which the stream's gradient is cast on its way back.
    `scales_branches`: a kernel multiplies the branch, and one its gradient; or so the stream, too.
    """
    elements, e, wide = d.rows * d.hidden, d.act_bytes, d.of_stream.act_bytes
    mask = MASK_BYTES if d.dropout else 0.0
    moved, kernels = 2 * wide + e + mask, 1
    if not d.framework.fuses_residual:
        beside = bool(d.dropout) + bias_after
        moved, kernels = moved + 2 * e * beside, 1 + beside
    undrop = memory_op(f"{name}_dropout_backward", I, "elementwise", elements, (2 * e + mask) * elements, d.act)
    of_both = d.code.scales_branches == "both"
    scaled, times = 2 * (e + of_both * wide) * elements, 1 + of_both
    scale, unscale = (
        memory_op(f"{name}_{what}", phase, "elementwise", elements, scaled, d.act, times)
        for what, phase in (("scale", F), ("scale_backward", I))
    )
    backward: Program = (
        *branch_gradient_casts(d, name, elements),
        *((undrop,) if d.dropout else ()),
        *((unscale,) if d.code.scales_branches else ()),
    )
    added = memory_op(name, F, "elementwise", elements, moved * elements, d.act, kernels)
    added = replace(added, random_numbers=float(elements)) if d.dropout else added
    summed = mixed(added, 3) if wide > e and not d.framework.fuses_chains else added
    return Operator(
        name,
        (scale, summed) if d.code.scales_branches else (summed,),
        backward,
        (Saved(f"{name} dropout mask", mask * elements),),
        forward_bytes=elements * wide,
        backward_bytes=(2 if d.dropout else 1) * elements * e,
    )


def branch_sum(d: Dims) -> Operator:
    """The sum at a residual branch, which only the backward has: the gradient of the stream plus that of the norm's
    input. A compiler fuses it into the kernel before it."""
    elements = d.rows * d.hidden
    add = accumulate(d.of_stream, "residual_grad_sum", elements, 1.0 if d.framework.fuses_chains else 3.0)
    return Operator("residual_grad_sum", (), (add,), backward_bytes=2 * elements * d.of_stream.act_bytes)
