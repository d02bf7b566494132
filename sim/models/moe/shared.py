"""Experts that every token passes, beside those that a router chooses."""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.program import Compute, Program, Saved
from sim.models.dims import Dims
from sim.models.operators import F, I, Operator, W, accumulate, gemm, memory_op
from sim.models.recompute_modules import inside


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
    add = accumulate(d, "shared_expert_sum", d.rows * d.hidden, phase=F)
    gradients = accumulate(d, "shared_grad_sum", d.rows * d.hidden)
    gate = (_shared_gate(d),) if gated else ()
    together = Operator("shared_expert_sum", (add,), (gradients,))
    return (*inside("shared_experts", (replace(out[0], saved=()), *out[1:])), *gate, together)


def _shared_gate(d: Dims) -> Operator:
    """`[rows, h] x [h, 1]`, its sigmoid, and the product with what the shared expert gives, which is kept for it."""
    m, h, e = d.rows, d.hidden, d.act_bytes
    n = m * h
    backward = (
        memory_op("shared_gate_product_backward", I, "elementwise", n, 3 * n * e, d.act, 2),
        gemm("shared_gate_dgrad", I, m, h, 1, d.act),
        gemm("shared_gate_wgrad", W, 1, h, m, d.act, out_bytes=2 * d.grad_bytes * h),
        accumulate(d, "shared_gate_grad_sum", n),
    )
    forward = (
        gemm("shared_gate", F, m, 1, h, d.act),
        memory_op("shared_gate_product", F, "elementwise", n, 2 * n * e, d.act, 2),
    )
    saved = (Saved("shared expert's result", n * e),)
    return Operator("shared_gate", forward, backward, saved, params=h, weights=((1, h),), backward_bytes=2 * n * e)
