"""Kernels of casts between a residual stream in fp32 and matmuls in 16 bits (`sim.inputs.autocast`).

- Each matmul casts its own fp32 input, keeps the copy for its weight gradient, and casts the input's gradient back, so
  that query, key and value have three copies. A compiler (`fuses_chains`) puts these casts into the kernels around them
  and makes one copy.
- Each weight is cast once in a forward: autocast keeps the copies of leaves until its region ends
  (`cached_cast` in torch's aten/src/ATen/autocast_mode.cpp), and the region is a micro-batch's forward (Transformers'
  Trainer, torchtitan). A forward that is run again in the backward casts again.
- A weight's gradient is cast from the 16 bits of its matmul and then added to the sum (`sim.models.operators`).
- The stream's gradient is cast to 16 bits where it enters a branch.

Beside 16-bit weights (adapters of a model in 16 bits) the stream has 16 bits, or fp32 behind a norm of the embedding
(`Dims.wide_stream`: BLOOM). What is on the list of fp32 is given
copies all the same: torch's layer norm and powers, whose fp32 results the matmuls behind them cast back.

All were counted in captured programs (`tests/sim/models/test_autocast.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, Phase, Program
from sim.models.dims import Dims
from sim.models.operators import F, I, Linear, accumulate, memory_op
from sim.models.torch_kernels.norm_passes import gradient_reads


class More(NamedTuple):
    """Hold what a chain of kernels costs in fp32 beyond its cost in 16 bits: bytes moved for an element, and
    kernels."""

    bytes: float = 0.0
    kernels: int = 0


def mixed(op: Compute, operands: int) -> Compute:
    """The operator as torch's pointwise kernel for mixed dtypes, which is not vectorized.

    `operands`: how many tensors it reads and writes, the result included.
    """
    return replace(op, single_elements=float(op.shape[0]), casts=operands)


def cast(d: Dims, name: str, phase: Phase, elements: float, kernels: int = 1, widens: bool = False) -> Compute:
    """A copy of fp32 in 16 bits, whose kernel is vectorized, or (`widens`) the other way."""
    made = memory_op(name, phase, "cast", elements, (d.act_bytes + FP32_BYTES) * elements, d.act, kernels)
    return mixed(made, 2) if widens else made


def casts_apart(d: Dims) -> bool:
    """Tell whether activations are cast by kernels of their own."""
    return d.autocast and not d.framework.fuses_chains


def lists_hold(d: Dims) -> bool:
    """Tell whether autocast's lists hold, over fp32 or 16-bit weights."""
    return d.autocast or d.adapters == "autocast"


def lists_apart(d: Dims) -> bool:
    """Tell whether autocast's lists hold, and its casts are kernels of their own."""
    return lists_hold(d) and not d.framework.fuses_chains


def widens_norms(d: Dims) -> bool:
    """Tell whether norms of a stream in 16 bits are given copies in fp32."""
    return lists_apart(d) and not d.stream_in_fp32 and d.torch_norms


def norms_give_wide(d: Dims) -> bool:
    """Tell whether norms give fp32 on, which the matmuls behind them cast."""
    return (d.stream_in_fp32 and not d.framework.fuses_chains) or widens_norms(d)


def in_fp32(d: Dims) -> Dims:
    """The sizes of what is computed in fp32."""
    return replace(d, act="fp32", act_bytes=FP32_BYTES, normed_bytes=FP32_BYTES)


def reads_wide(d: Dims, spec: Linear) -> bool:
    """Tell whether the layer's matmuls are given fp32: what a norm has made, or what it says."""
    return spec.mode == "column" and norms_give_wide(d) if spec.wide is None else spec.wide and lists_apart(d)


def kept_copies(d: Dims, spec: Linear) -> int:
    """Return the number of copies of its input that a layer keeps for the backward: each matmul its own cast of an fp32
    input, else one."""
    return len(spec.outs) if reads_wide(d, spec) else 1


def operand_casts(d: Dims, spec: Linear) -> Program:
    """The casts before a layer's matmuls: of their inputs and of their weights and biases."""
    inputs = [
        cast(d, f"{spec.out_name(i)}_cast", F, spec.rows * spec.k) for i in range(len(spec.outs)) if reads_wide(d, spec)
    ]
    if not d.autocast:
        return tuple(inputs)
    each, elements = 1 + spec.bias, (spec.k + spec.bias) * spec.n
    weights = cast(d, f"{spec.name}_weight_cast", F, elements, each * len(spec.outs))
    return (*inputs, weights)


def input_gradient_casts(d: Dims, spec: Linear, i: int, rows: int) -> Program:
    """Return the kernels behind the i-th matmul of a layer's input gradient: the cast to fp32 and the sum with the
    gradients of the matmuls before it."""
    elements = rows * spec.k
    if not reads_wide(d, spec):
        return (branch_gradients_summed(d, f"{spec.name}_dgrad_sum", rows, spec.k, i),) if i else ()
    widened = cast(d, f"{spec.out_name(i)}_dgrad_cast", I, elements, widens=True)
    added = (accumulate(in_fp32(d), f"{spec.name}_dgrad_sum", elements),) if i else ()
    return (widened, *added)


def branch_gradients_summed(d: Dims, name: str, rows: int, width: int, i: int) -> Compute:
    """Return the sum of a gradient `[rows, width]` with those of the `i` matmuls before it that share their input.

    A compiler reads them all where it computes the backward of the norm before the matmuls, or, if the ranks' gradients
    are added first, in one kernel.
    """
    if not d.framework.fuses_chains:
        return accumulate(d, name, rows * width)
    accesses, kernels = (gradient_reads(d, rows, width), 0) if d.tp == 1 else (3, 1) if i == 1 else (1, 0)
    return memory_op(name, I, "elementwise", rows * width, accesses * d.act_bytes * rows * width, d.act, kernels)


def branch_gradient_casts(d: Dims, name: str, elements: float) -> Program:
    """The stream's gradient in 16 bits for a branch that gave 16; a compiler writes it beside the sum that it is."""
    if d.act_bytes == d.of_stream.act_bytes:
        return ()
    if d.framework.fuses_chains:
        return (memory_op(f"{name}_grad_cast", I, "elementwise", elements, d.act_bytes * elements, d.act, 0),)
    return (cast(d, f"{name}_grad_cast", I, elements),)


def rope_gives_fp32(d: Dims) -> bool:
    """Tell whether rope multiplies by fp32 cosines, so that queries and keys come out of it in fp32."""
    return casts_apart(d) and d.framework.rope_in_fp32 and d.code.rope_dtype == "own"


def wider_rope(d: Dims) -> tuple[More, More]:
    """Return what separate kernels of rope cost in fp32 beyond their cost in 16 bits, forward and backward.

    Where fp32 cosines and sines multiply it, forward: two products are written in fp32 (2 more each), read and added in
    it (6 more), and their sum is cast (4 and 2). Backward: the gradient is cast to fp32 (6), both products read and
    write it (4 more each) and are cast (6 each). Scores that are multiplied in fp32 need neither the sum's cast nor the
    gradient's. Where it is cast before, all accesses of `sim.models.rope.rope`
    are of fp32, forward 10 and backward 15 of 17 (the copy between orders is not), with a cast before and one after.
    Where both parts are cast after one of them was rotated, forward both products and their sum (7) and backward both
    products (4) are of fp32, with three casts.
    """
    e = d.act_bytes
    more = FP32_BYTES - e
    if d.code.rope_dtype == "fp32 products":
        casts = 3 * (FP32_BYTES + e)
        return More(7 * more + casts, 3), More(4 * more + casts, 3)
    if d.code.rope_dtype == "fp32":
        casts = 2 * (FP32_BYTES + e)
        return More(10 * more + casts, 2), More(15 * more + casts, 2)
    if not (rope_gives_fp32(d) or d.code.rope_dtype == "promoted"):
        return More(), More()
    cast_for_scores = not (rope_gives_fp32(d) and d.code.scores_without_autocast and not d.fused_attention)
    own = cast_for_scores * (FP32_BYTES + e)
    return More(5 * more + own, cast_for_scores), More(own + 2 * (FP32_BYTES + e) + 2 * 2 * more, 2 + cast_for_scores)
