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

So the activation in 16 bits and the gradients of both sides of it in 16 bits are never in memory.

In NVFP4, since Transformer Engine 2.17 of July 2026 (ops/fused/grouped_mlp.py: `use_nvfp4`), the same two kernels
compute the activation and its backward, and write 16 bits: the activation's result, which is quantized behind in one
pass as the kernel has found its largest values, and both halves' gradients, which are quantized as any gradient.

In both formats a kernel serves all experts. It is priced as a matmul of its size, and the time of what it moves besides
is added. Rows are filled up by the dispatcher or the router (HybridEP, `moe_router_padding_for_quantization`), or by
kernels of their own (`Framework.fused_experts_tile`).
"""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.program import NeededBy, Saved
from sim.models.dims import Dims
from sim.models.moe.grouped import Fused, grouped
from sim.models.operators import Operator
from sim.variants.recipes import NOTHING


def fused_mlp(d: Dims, experts: int, rows: float, inner: int, ffn: int) -> tuple[Operator, Operator]:
    """Return both projections of `experts` over `rows` copies of tokens in all: `[rows, hidden] x [hidden, inner]`, and
    `[rows, ffn] x [ffn, hidden]` after the activation."""
    first, second = _quantizing(d, rows, inner, ffn) if _quantizes(d) else _writing_16_bits(d, rows, inner, ffn)
    result = Saved("experts_up output", rows * inner * d.act_bytes, NeededBy.INPUT_GRAD)
    up = grouped(d, "experts_up", experts, rows, inner, d.hidden, fused=first)
    down = grouped(d, "experts_down", experts, rows, d.hidden, ffn, fused=second)
    return replace(up, saved=(*up.saved, result), module="expert_fc1"), down


def _quantizes(d: Dims) -> bool:
    return d.recipe is None or d.recipe.after_activation == NOTHING


def _quantizing(d: Dims, rows: float, inner: int, ffn: int) -> tuple[Fused, Fused]:
    """What both projections' kernels move besides, where they quantize what they make."""
    sixteen, quantized = d.act_bytes, d.quantized_copies * d.linear_bytes
    read = rows * (inner * (sixteen + quantized) - ffn * sixteen)  # and no 16-bit gradient of the activation
    written = Fused(forward_bytes=rows * ffn * quantized, made_gradient=True)
    return written, Fused(dgrad_bytes=read, made_input=True)


def _writing_16_bits(d: Dims, rows: float, inner: int, ffn: int) -> tuple[Fused, Fused]:
    """What both projections' kernels move besides, where they write what they make in 16 bits."""
    sixteen, orders = d.act_bytes, d.quantized_copies
    step = None if d.recipe is None else d.recipe.after_activation
    first = Fused(forward_bytes=rows * ffn * sixteen, kept_orders=orders)
    read = rows * (2 * inner - ffn) * sixteen  # and writes both halves' gradients, no gradient of the activation
    return first, Fused(dgrad_bytes=read, input_pass=step, kept_orders=orders)
