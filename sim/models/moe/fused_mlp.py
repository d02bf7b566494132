"""Experts whose matmuls also compute the activation and quantize its result (`training.fused_experts`).

Transformer Engine fuses a grouped linear, the weighted activation and the second grouped linear on Blackwell with MXFP8
(ops/fused/forward_grouped_mlp.py, backward_grouped_mlp.py; pull requests 2622 and 2769, merged in 2026), if Megatron
sets `use_transformer_engine_op_fuser` and the environment `NVTE_CUTEDSL_FUSED_GROUPED_MLP=1`. With cuDNN's grouped
kernels:

- the first projection computes the activation, multiplies it by the copies' router weights, and quantizes it by rows
  and by columns. It also writes its own 16-bit result, which the backward needs;
- the second projection reads what was quantized;
- its input's gradient computes the backward of the activation from that 16-bit result, and quantizes it by rows and by
  columns; both gradients of the first projection read what was quantized.

So the activation in 16 bits and the gradients of both sides of it in 16 bits are never in memory. A kernel serves all
experts. It is priced as a matmul of its size, and the time of what it moves besides is added. Rows are filled up by
the dispatcher or the router (HybridEP, `moe_router_padding_for_quantization`), or by kernels of their own
(`Framework.fused_experts_tile`).
"""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.program import NeededBy, Saved
from sim.models.dims import Dims
from sim.models.moe.grouped import Fused, grouped
from sim.models.operators import Operator


def fused_mlp(d: Dims, experts: int, rows: float, inner: int, ffn: int) -> tuple[Operator, Operator]:
    """Return both projections of `experts` over `rows` copies of tokens in all: `[rows, hidden] x [hidden, inner]`, and
    `[rows, ffn] x [ffn, hidden]` after the activation."""
    sixteen, quantized = d.act_bytes, d.quantized_copies * d.linear_bytes
    result = Saved("experts_up output", rows * inner * sixteen, NeededBy.INPUT_GRAD)
    written = Fused(forward_bytes=rows * ffn * quantized, made_gradient=True)
    up = grouped(d, "experts_up", experts, rows, inner, d.hidden, fused=written)
    read = rows * (inner * (sixteen + quantized) - ffn * sixteen)  # and no 16-bit gradient of the activation
    down = grouped(d, "experts_down", experts, rows, d.hidden, ffn, fused=Fused(dgrad_bytes=read, made_input=True))
    return replace(up, saved=(*up.saved, result), module="expert_fc1"), down
