"""Experts that every token passes, beside those that a router chooses."""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, NeededBy, Program, Saved, TensorRole
from sim.models.activation_memory.recompute_modules import inside
from sim.models.dims import Dims
from sim.models.operators import F, I, Operator, W, accumulate, gemm, memory_op
from sim.models.precision.casts import cast, casts_apart, in_fp32, lists_apart, mixed


def shared_parts(d: Dims, parts: tuple[Operator, ...], gated: bool = False) -> tuple[Operator, ...]:
    """Shared experts beside the routed ones, their gate and the sum of both. Their items and handles have names of
    their own; their input is the router's, which keeps it."""

    def items(program: Program) -> Program:
        return tuple(
            replace(i, handle=f"shared_{i.handle}" if i.handle else "")
            if not isinstance(i, Compute)
            else replace(i, name=f"shared_{i.name}")
            for i in program
        )

    out = [
        replace(
            p,
            name=f"shared_{p.name}",
            forward=items(p.forward),
            backward=items(p.backward),
            adapters_alone=items(p.adapters_alone),
        )
        for p in parts
    ]
    gate = (_shared_gate(d),) if gated else ()
    first = out[0] if casts_apart(d) else replace(out[0], saved=())
    return (*inside("shared_experts", (first, *out[1:])), *gate, _sum(d))


def _sum(d: Dims) -> Operator:
    """The sum of shared and routed experts' results; in the backward, the sum of the gradients of their input. Under
    autocast routed experts and both sums are in fp32, and shared experts' results in 16 bits."""
    elements = d.rows * d.hidden
    gradients = accumulate(d.of_stream, "shared_grad_sum", elements)
    if d.code.sums_shared_in_fp32 and not lists_apart(d) and d.act_bytes < FP32_BYTES:
        return _sum_in_fp32(d, elements, gradients)
    if not casts_apart(d):
        add = accumulate(d, "shared_expert_sum", elements, phase=F)
        halved = _halved(d, elements)
        return Operator("shared_expert_sum", (add, *halved[0]), (*halved[1], gradients))
    moved = (d.act_bytes + 2 * FP32_BYTES) * elements
    add = mixed(memory_op("shared_expert_sum", F, "elementwise", elements, moved, "fp32"), 3)
    return Operator("shared_expert_sum", (add,), (cast(d, "shared_grad_cast", I, elements), gradients))


def _halved(d: Dims, elements: float) -> tuple[Program, Program]:
    """The sum divided by two (Cohere2MoeSparseMoeBlock in Transformers), and its gradient; a compiler does both within
    the kernels beside."""
    if not d.code.averages_shared or d.framework.fuses_chains:
        return (), ()
    moved = 2 * d.act_bytes * elements
    forward = memory_op("shared_expert_mean", F, "elementwise", elements, moved, d.act)
    return (forward,), (memory_op("shared_expert_mean_backward", I, "elementwise", elements, moved, d.act),)


def _sum_in_fp32(d: Dims, elements: float, gradients: Compute) -> Operator:
    """The sum of two 16-bit results that are cast to fp32 for it, and cast back (HYV3MoE in Transformers): backward the
    gradient is cast to fp32, and for each of both results back. A compiler puts all casts into the sum."""
    if d.framework.fuses_chains:
        return Operator("shared_expert_sum", (accumulate(d, "shared_expert_sum", elements, phase=F),), (gradients,))
    forward = (
        cast(d, "shared_expert_sum_cast", F, 2 * elements, 2, widens=True),
        accumulate(in_fp32(d), "shared_expert_sum", elements, phase=F),
        cast(d, "shared_expert_sum_cast_back", F, elements),
    )
    backward = (
        cast(d, "shared_grad_cast", I, elements, widens=True),
        cast(d, "shared_grad_cast_back", I, 2 * elements, 2),
        gradients,
    )
    return Operator("shared_expert_sum", forward, backward)


def _shared_gate(d: Dims) -> Operator:
    """`[rows, h] x [h, 1]`, its sigmoid, and the product with what the shared expert gives, which is kept for it.

    Backward, by operators: the product's two factors (2, 3) and the row sums of one (1), the sigmoid's. Under autocast
    the gate casts its own copy of the input.
    """
    m, h, e = d.rows, d.hidden, d.act_bytes
    n = m * h
    accesses, kernels = (3, 2) if d.framework.fuses_chains else (6, 4)
    apart = casts_apart(d)
    backward = (
        memory_op("shared_gate_product_backward", I, "elementwise", n, accesses * n * e, d.act, kernels),
        gemm("shared_gate_dgrad", I, m, h, 1, d.act),
        *((cast(d, "shared_gate_grad_cast", I, n, widens=True),) if apart else ()),
        gemm("shared_gate_wgrad", W, 1, h, m, d.act, out_bytes=2 * d.grad_bytes * h),
        accumulate(d.of_stream, "shared_gate_grad_sum", n),
    )
    forward = (
        *((cast(d, "shared_gate_cast", F, n),) if apart else ()),
        gemm("shared_gate", F, m, 1, h, d.act),
        memory_op("shared_gate_product", F, "elementwise", n, 2 * n * e, d.act, 2),
    )
    saved = (
        Saved("shared expert's result", n * e),
        *((Saved("shared gate's input", n * e, NeededBy.WEIGHT_GRAD, TensorRole.INPUT),) if apart else ()),
    )
    whole = (h,) if d.sums_shared_once else ()
    made = Operator("shared_gate", forward, backward, saved, params=h, weights=((1, h),), shared=whole)
    return replace(made, backward_bytes=2 * n * e)
