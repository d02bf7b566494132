"""Kernels of latent attention: rope of the parts with it, and queries and keys put together, in Megatron-Core and as
Transformers' own modules run them. Each of the latter was read in transformers/models, at 5.24, and counted in a
captured program (`tests/sim/models/test_latent_kernels_of_transformers.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, Phase, Program
from sim.models.dims import Dims
from sim.models.elementwise import rope
from sim.models.operators import F, I, Operator, memory_op


class RopeKernels(NamedTuple):
    """Hold one direction of rope over one tensor: for each number that it rotates the accesses of the activations'
    dtype, fp32 bytes, and how many numbers its kernels handle one at a time; and the kernels."""

    accesses: float
    fp32_bytes: float
    single: float
    kernels: int


# deepseek_v3/modeling_deepseek_v3.py: apply_rotary_pos_emb_interleave. Forward: four products of half of the numbers
# (1 each), their difference and sum (1.5 each), both joined (2). Backward: four products (1 each), a negation (1), two
# sums (1.5 each); either half is put into zeros (zeros, half a read and every second number written: 2.5 each), and
# these are added up (3).
_SLICES = (RopeKernels(9, 0, 3, 7), RopeKernels(16, 0, 3.5, 12))
# deepseek_v2/modeling_deepseek_v2.py and llama4/modeling_llama4.py: apply_rotary_emb. A cast, a product of complex
# numbers of 8 bytes, a cast back;
# backward also the conjugate of the angles, which all heads share.
_COMPLEX = (RopeKernels(2, 16, 1.5, 3), RopeKernels(2, 16, 1.5, 4))
# minicpm3/modeling_minicpm3.py: apply_rotary_pos_emb, as `sim.models.elementwise.rope`; the copy to tokens' order is
# counted where queries' gradients are joined.
_HALVES = (RopeKernels(10, 0, 4.5, 5), RopeKernels(15, 0, 4.5, 9))
ROPES = {"slices": _SLICES, "complex": _COMPLEX, "halves": _HALVES}


def latent_rope(d: Dims, elements: float) -> Operator:
    """Rotary embedding of latent attention's two tensors, in whose heads pairs lie side by side (DeepSeek).

    In separate operators, accesses forward: pairs put apart 2, x·cos 2, -x 1, rotated half 2, times sin 2, sum 3, with
    the rest of the head, which is empty, 2: 14 in seven kernels a tensor. Backward: both products 4, the half back 3,
    sum 3, pairs back 4, their sum 3, the empty rest 1 and its sum 3: 21 in fourteen. Counted by running such a function
    (`tests/sim/models/test_latent_kernels.py`). One number at a time go those that join pairs or halves, with every
    second number or half of a head, the products with cosines that all heads share, and the negated half.
    """
    if d.framework.fuses_latent_rope:
        return rope(d, elements)
    return Operator(
        "rope",
        _latent_rope(d, F, elements, LATENT_ROPE),
        _latent_rope(d, I, elements, LATENT_ROPE_BACKWARD),
        backward_bytes=2 * elements * d.act_bytes,
    )


class LatentRope(NamedTuple):
    """Hold one direction of latent attention's rope in separate operators: accesses for a number, kernels for both
    tensors; of these the accesses of kernels that join strided parts, those of other kernels that handle one number at
    a time, how many numbers these handle, and their kernels."""

    accesses: float
    kernels: int
    joins: float
    singles: float
    handled: float
    single_kernels: int


# Pairs and halves joined (2 each); two products (2 each), the negated half (1).
LATENT_ROPE = LatentRope(14, 14, 4, 5, 2.5, 6)
# The half's gradients joined (2); two products (2 each), a negation (1), pairs put into zeros (1 each).
LATENT_ROPE_BACKWARD = LatentRope(21, 28, 2, 7, 3.5, 10)


def _latent_rope(d: Dims, phase: Phase, elements: float, t: LatentRope) -> Program:
    """The kernels of one direction; a compiler's chains stream, and are one operator."""
    name, size = "rope" if phase is F else "rope_backward", elements * d.act_bytes
    whole = memory_op(name, phase, "elementwise", elements, t.accesses * size, d.act, t.kernels)
    if d.framework.fuses_chains:
        return (whole,)
    joins = memory_op(f"{name}_joins", phase, "copy", elements, t.joins * size, d.act, round(t.joins), "cat")
    singles = memory_op(f"{name}_singles", phase, "elementwise", elements, t.singles * size, d.act, t.single_kernels)
    left = t.kernels - joins.kernels - singles.kernels
    return (
        replace(joins, single_elements=t.joins / 2 * elements),
        replace(singles, single_elements=t.handled * elements),
        replace(whole, bytes=(t.accesses - t.joins - t.singles) * size, kernels=left),
    )


def rope_of_latents(d: Dims, elements: float) -> Operator:
    """Rope of two tensors of `elements` in all: every head's query and the shared key."""
    if not (d.framework.runs_model_code and d.framework.rotates_latents_in_slices):
        return latent_rope(d, elements)
    return rope_of_pairs(d, elements)


def rope_of_pairs(d: Dims, elements: float) -> Operator:
    """Rope of two tensors of `elements` in all, as the model's code pairs numbers (`ModelCode.rope_pairs`)."""
    ahead, back = (
        replace(
            memory_op(name, phase, "elementwise", elements, _moved(d, k) * elements, d.act, 2 * k.kernels),
            single_elements=k.single * elements,
        )
        for name, phase, k in zip(("rope", "rope_backward"), (F, I), ROPES[d.code.rope_pairs], strict=True)
    )
    return Operator("rope", (ahead,), (back,), backward_bytes=2 * elements * d.act_bytes)


def _moved(d: Dims, kernels: RopeKernels) -> float:
    fp32_bytes = kernels.fp32_bytes if d.act_bytes < FP32_BYTES else kernels.fp32_bytes / 2  # no casts
    accesses = kernels.accesses if d.act_bytes < FP32_BYTES or not kernels.fp32_bytes else 0.0
    return accesses * d.act_bytes + fp32_bytes


def put_into_keys(d: Dims, heads: float, plain: int, rope: int, value: int, shared: float) -> tuple[Compute, Compute]:
    """Queries joined of their parts, and keys put into an empty tensor; their gradients, those of both projections'
    outputs brought to tokens' order.

    `heads`: of all tokens; `plain`, `rope`, `value`: widths of a head's parts; `shared`: numbers of all tokens' rope
    keys and latents, which are one tensor.

    deepseek_v3/modeling_deepseek_v3.py: DeepseekV3Attention.expand_kv, by which `new_empty` is filled with two slices.
    torch's node of such a slice (torch/csrc/autograd/functions/tensor.cpp: CopySlices::apply) copies the whole gradient
    and the slice's, and puts zeros in its place; so each of both slices does. Then the rope key's gradient is summed
    over heads; those of keys without rope and of values are joined and copied, those of queries, too, and those of the
    latent and the shared key joined.
    """
    query, e = plain + rope, d.act_bytes
    forward = heads * (2 * query + 2 * plain + rope)
    copies = 2 * (2 * query) + 2 * rope + rope + 2 * rope + 2 * plain  # of slices, with the zeros
    joined = 4 * (plain + value) + 4 * query
    backward = heads * (copies + rope + joined) + 2 * shared
    ahead = memory_op("assemble_qk", F, "copy", heads * 2 * query, forward * e, d.act, 3)
    back = memory_op("assemble_qk_backward", I, "copy", heads * (query + plain + value), backward * e, d.act, 12)
    return (
        replace(ahead, single_elements=float(heads * 2 * query)),
        replace(back, single_elements=float(heads * (2 * query + rope + 3 * plain + 2 * value))),
    )
