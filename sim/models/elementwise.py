"""Norms, rope, activations, dropout and residual sums: bound by memory, counted access by access.

`training.framework` decides which of them share a kernel:

- eager: every torch operator is a kernel. LayerNorm is one already; RMSNorm as written in PyTorch code
  (cast to fp32, square, mean, rsqrt, scale, cast back, weight) is eight;
- megatron: norm, rope, bias-GELU, SwiGLU and bias-dropout-add are one kernel each;
- compiled: as megatron, and a chain without a matmul in it is one kernel (the residual sum and the norm after
  it); what a pointwise chain can rebuild from kept tensors is not kept (norm and activation outputs).

Accesses are per element, times the activations' bytes; a dropout mask is one byte.
"""

from __future__ import annotations

from typing import NamedTuple

from sim.core.dtypes import FP32_BYTES
from sim.core.program import NeededBy, Program, Saved, TensorRole
from sim.models.dims import Dims
from sim.models.operators import F, I, Operator, accumulate, memory_op

MASK_BYTES = 1.0
GATED = ("swiglu", "geglu")  # two projections of the input, of which one passes SiLU or GELU and gates the other


class Traffic(NamedTuple):
    """Bytes per element and kernels, forward and backward."""

    forward_bytes: float
    forward_kernels: int
    backward_bytes: float
    backward_kernels: int


def rms_norm_eager(e: float) -> Traffic:
    """RMSNorm in separate torch kernels, `e` bytes an activation.

    Forward: x.float() (e+4), pow (8), mean (4), rsqrt and epsilon (rows only), multiply (8), to dtype (4+e),
    weight (2e). Backward: the weight's two products and sum (2e, 3e, e), to fp32 (e+4), product with rsqrt
    and its row sum (8, 12, 4), pow (8, 12), sum of the two paths (12), to dtype (4+e). Without upcasts in
    fp32.
    """
    if e == FP32_BYTES:
        return Traffic(8 + 4 + 8 + 8, 6, 8 + 12 + 4 + 8 + 12 + 4 + 8 + 12 + 12, 11)
    return Traffic((e + 4) + 8 + 4 + 8 + (4 + e) + 2 * e, 8, 6 * e + (e + 4) + 8 + 12 + 4 + 8 + 12 + 12 + (4 + e), 14)


def norm_traffic(d: Dims, kind: str, after_sum: bool) -> Traffic:
    """`after_sum`: the norm right after a residual sum, whose kernel a compiler extends by the norm."""
    e = d.act_bytes
    if kind == "rmsnorm" and not d.framework.fuses_rmsnorm:
        return rms_norm_eager(e)
    # of 5 accesses dx takes 3, the weight's gradient reads x and dy once more; or partial sums of it come with dx
    backward = d.framework.norm_backward_accesses * e
    return Traffic(e, 0, backward, 2) if after_sum and d.framework.fuses_chains else Traffic(2 * e, 1, backward, 2)


def norm(d: Dims, name: str, kind: str, rows: int, width: int, bias: bool, after_sum: bool = False) -> Operator:
    """LayerNorm or RMSNorm over `width` of `rows` tokens.

    Its input is kept: 4sbh for a layer's two (Korthikanti 2022, section 4.1); row statistics (8 bytes a row,
    4 for RMSNorm) are left out there and here. Eager RMSNorm as a chain of torch operators would also keep
    what the chain makes (an fp32 copy, the normalized value): the reference implementation does not, and
    neither does torch's fused CUDA operator.
    """
    elements = rows * width
    fused = d.framework.fuses_rmsnorm or kind != "rmsnorm"
    t = norm_traffic(d, kind, after_sum)
    again = NeededBy.BOTH if d.framework.rebuilds_pointwise else NeededBy.INPUT_GRAD  # the next input is made of it
    return Operator(
        name,
        (memory_op(name, F, "norm", elements, t.forward_bytes * elements, d.act, t.forward_kernels),),
        (
            memory_op(
                f"{name}_backward",
                I,
                "norm",
                elements,
                t.backward_bytes * elements,
                d.act,
                t.backward_kernels,
            ),
        ),
        (Saved("norm", f"{name} input", elements * d.act_bytes, again, TensorRole.INPUT),),
        params=width * (2 if kind == "layernorm" and bias else 1),
        tensors=(width,) * (2 if kind == "layernorm" and bias else 1),
        backward_bytes=2 * elements * (d.act_bytes if fused else FP32_BYTES),
    )


def rope(d: Dims, elements: float, name: str = "rope", kernels: int = 2) -> Operator:
    """Rotary embedding of query and key, `kernels` tensors in all.

    Eager (x·cos + rotate_half(x)·sin): multiply 2, negate 1, concatenate 2, multiply 2, add 3 accesses in
    five kernels; fused 2 in one. cos and sin are constants: nothing is kept.
    """
    fused = d.framework.fuses_rope
    moved, launches = elements * d.act_bytes * (2 if fused else 10), kernels * (1 if fused else 5)
    items = [
        memory_op(n, p, "elementwise", elements, moved, d.act, launches)
        for n, p in ((name, F), (f"{name}_backward", I))
    ]
    return Operator(name, (items[0],), (items[1],), backward_bytes=2 * elements * d.act_bytes)


def copied(name: str, d: Dims, elements: float) -> Operator:
    """Tensors brought into another order, and their gradients back: read and written."""
    moved = 2 * d.act_bytes * elements
    items = [memory_op(n, p, "copy", elements, moved, d.act) for n, p in ((name, F), (f"{name}_backward", I))]
    return Operator(name, (items[0],), (items[1],))


def activation_traffic(d: Dims, mlp: str) -> Traffic:
    """Per element of the MLP's inner width. GELU; SwiGLU (silu, multiply); squared ReLU (relu, square)."""
    e, fused = d.act_bytes, d.framework.fuses_activation
    rebuilt = int(d.framework.rebuilds_pointwise)  # backward writes the output again, for the weight gradient
    if mlp == "gelu" or (mlp == "relu2" and fused):
        return Traffic(2 * e, 1, (3 + rebuilt) * e, 1)
    if mlp == "relu2":
        return Traffic(4 * e, 2, 8 * e, 3)
    if not fused:
        return Traffic(5 * e, 2, 9 * e, 3)
    return Traffic(3 * e, 1, (5 + rebuilt) * e, 1)


def activation_saved(d: Dims, mlp: str, elements: float, part: str) -> tuple[Saved, ...]:
    """GELU and squared ReLU keep their input (the latter its rectified input); SwiGLU and GeGLU gate and up, eager
    silu(gate) or gelu(gate) too.
    """
    size = elements * d.act_bytes
    needed = NeededBy.BOTH if d.framework.rebuilds_pointwise else NeededBy.INPUT_GRAD  # the output is made of them
    if mlp == "gelu":
        return (Saved(part, "gelu input", size, needed, TensorRole.INPUT),)
    passed = "silu(gate)" if mlp == "swiglu" else "gelu(gate)"
    gated = ("gate", "up") if d.framework.fuses_activation else ("gate", passed, "up")
    tensors = gated if mlp in GATED else ("relu output",)
    return tuple(Saved(part, name, size, needed) for name in tensors)


def activation(d: Dims, mlp: str, elements: float, part: str = "mlp") -> Operator:
    t = activation_traffic(d, mlp)
    inputs = 2 if mlp in GATED else 1
    return Operator(
        mlp,
        (memory_op(mlp, F, "elementwise", elements, t.forward_bytes * elements, d.act, t.forward_kernels, mlp),),
        (
            memory_op(
                f"{mlp}_backward",
                I,
                "elementwise",
                elements,
                t.backward_bytes * elements,
                d.act,
                t.backward_kernels,
                f"{mlp}_backward",
            ),
        ),
        activation_saved(d, mlp, elements, part),
        backward_bytes=(1 + inputs) * elements * d.act_bytes,
    )


def residual(d: Dims, name: str, part: str, bias_after: bool) -> Operator:
    """Bias (where the matmul could not add it), dropout and the sum with the residual stream."""
    elements, e = d.rows * d.hidden, d.act_bytes
    mask = MASK_BYTES if d.dropout else 0.0
    moved, kernels = 3 * e + mask, 1
    if not d.framework.fuses_residual:
        moved, kernels = (
            moved + (2 * e if d.dropout else 0) + (2 * e if bias_after else 0),
            1 + bool(d.dropout) + bias_after,
        )
    backward: Program = ()
    if d.dropout:
        backward = (
            memory_op(f"{name}_dropout_backward", I, "elementwise", elements, (2 * e + mask) * elements, d.act),
        )
    return Operator(
        name,
        (memory_op(name, F, "elementwise", elements, moved * elements, d.act, kernels),),
        backward,
        (Saved(part, f"{name} dropout mask", mask * elements),),
        forward_bytes=elements * e,
        backward_bytes=(2 if d.dropout else 1) * elements * e,
    )


def branch_sum(d: Dims) -> Operator:
    """Backward alone: the residual branch's gradient is added to that of the norm's input (fused by a
    compiler).
    """
    elements = d.rows * d.hidden
    add = accumulate(d, "residual_grad_sum", elements, 1.0 if d.framework.fuses_chains else 3.0)
    return Operator("residual_grad_sum", (), (add,), backward_bytes=2 * elements * d.act_bytes)
