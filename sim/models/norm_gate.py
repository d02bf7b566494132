"""A gate of low rank behind a norm (A.X K2): y·sigmoid(B·silu(A·y)) of what the norm gives.

`AXK2GatedRMSNorm` in transformers/models/axk2/modeling_axk2.py. Both matrices are whole on every rank. Bytes for each
number of y, besides the matrices: in one kernel both read and the product written (3e), backward two gradients (5e). In
separate operators the gate to fp32 (e + 4), sigmoid (8), product (e + 8), cast back (4 + e); backward cast (e + 4),
both products (8, 12), the gradient of y to its dtype (4 + e), sigmoid (12), cast (4 + e), sum of y's gradients (3e).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Program, Saved
from sim.models.dims import Dims
from sim.models.linear import linear
from sim.models.operators import F, I, Linear, Operator, gemm, memory_op

if TYPE_CHECKING:
    from sim.models.serving.operators import ServingDims


class NormGate(Struct, frozen=True):
    """A gate of low rank on a norm's result: two matrices, `[hidden, rank]` and `[rank, hidden]`."""

    hidden: int
    rank: int

    @property
    def elements(self) -> int:
        """Weights of both, which a token is multiplied by."""
        return 2 * self.hidden * self.rank

    def train(self, d: Dims, name: str) -> tuple[Operator, ...]:
        """Both matrices, the activation between them, and the product."""
        low, e = d.rows * self.rank, d.act_bytes
        down = Linear(f"{name}_gate_down", d.rows, self.hidden, (self.rank,))
        up = Linear(f"{name}_gate_up", d.rows, self.rank, (self.hidden,))
        middle = Operator(
            f"{name}_gate_silu",
            (memory_op(f"{name}_gate_silu", F, "elementwise", low, 2 * e * low, d.act),),
            (memory_op(f"{name}_gate_silu_backward", I, "elementwise", low, 3 * e * low, d.act),),
            (Saved(f"{name} gate of low rank", e * low),),
        )
        return linear(d, down), middle, linear(d, up), self._product(d, name)

    def _product(self, d: Dims, name: str) -> Operator:
        e, n, fused = d.act_bytes, float(d.rows * self.hidden), d.framework.fuses_activation
        (ahead, kernels), (back, back_kernels) = (3 * e, 1), (5 * e, 1)
        if not fused:
            (ahead, kernels), (back, back_kernels) = (3 * e + 24, 4), (6 * e + 44, 7)
        gate, size = ("gate", e) if fused else ("sigmoid of the gate", FP32_BYTES)
        return Operator(
            f"{name}_gate",
            (memory_op(f"{name}_gate", F, "elementwise", n, ahead * n, d.act, kernels),),
            (memory_op(f"{name}_gate_backward", I, "elementwise", n, back * n, d.act, back_kernels),),
            (Saved(f"{name} {gate}", n * size),),
            backward_bytes=3 * n * e,
        )

    def serve(self, d: ServingDims, name: str, tokens: int) -> Program:
        """Both matrices, and the product in one kernel."""
        n = tokens * self.hidden
        return (
            gemm(f"{name}_gate_down", F, tokens, self.rank, self.hidden, d.act),
            gemm(f"{name}_gate_up", F, tokens, self.hidden, self.rank, d.act),
            memory_op(f"{name}_gate", F, "elementwise", n, 3 * n * d.act_bytes, d.act),
        )
