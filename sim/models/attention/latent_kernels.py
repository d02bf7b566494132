"""Kernels of latent attention: rope of the parts with it, and queries and keys put together, in Megatron-Core and as
Transformers' own modules run them. Each of the latter was read in transformers/models, at 5.24, and counted in a
captured program (`tests/sim/models/test_latent_kernels_of_transformers.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute
from sim.models.dims import Dims
from sim.models.operators import F, I, Operator, memory_op
from sim.models.rope import rope


class RopeKernels(NamedTuple):
    """Hold one direction of rope over one tensor: for each number that it rotates the accesses of the activations'
    dtype, fp32 bytes, and how many numbers its kernels handle one at a time; the kernels of each tensor, and those
    that serve both."""

    accesses: float
    fp32_bytes: float
    single: float
    kernels: int
    shared: int = 0


# deepseek_v3/modeling_deepseek_v3.py: apply_rotary_pos_emb_interleave. Forward: four products of half of the numbers
# (1 each), their difference and sum (1.5 each), both joined (2). Backward: four products (1 each), a negation (1), two
# sums (1.5 each); either half is put into zeros (zeros, half a read and every second number written: 2.5 each), and
# these are added up (3).
_SLICES = (RopeKernels(9, 0, 3, 7), RopeKernels(16, 0, 3.5, 12))
# deepseek_v2/modeling_deepseek_v2.py and llama4/modeling_llama4.py: apply_rotary_emb. A cast, a product of complex
# numbers of 8 bytes, a cast back;
# backward also the conjugate of the angles, which all heads share.
_COMPLEX = (RopeKernels(2, 16, 1.5, 3), RopeKernels(2, 16, 1.5, 4))
# torchtitan: models/llama3/model.py, apply_rotary_emb. Inductor generates no kernels of complex numbers
# (torch/_inductor/lowering.py: `unsupported_input_tensor`), so that the product is torch's; both casts are compiled.
# Both tensors share the conjugate of the angles. Recorded with torch 2.6 and 2.14 on a CPU.
_COMPLEX_BETWEEN_CASTS = (RopeKernels(2, 16, 0.5, 3), RopeKernels(2, 16, 0.5, 3, shared=1))
# minicpm3/modeling_minicpm3.py: apply_rotary_pos_emb, as `sim.models.rope.rope`; the copy to tokens' order is
# counted where queries' gradients are joined.
_HALVES = (RopeKernels(10, 0, 4.5, 5), RopeKernels(15, 0, 4.5, 9))
# megatron/core/models/common/embeddings/rope_utils.py: _apply_rotary_pos_emb_bshd. Forward: pairs put apart (2), x·cos
# (2), -x (1), both halves joined (2), times sin (2), sum (3), the rest of the head, which is empty, joined (2).
# Backward: both products (4), the half back (3), their sum (3), pairs back (4), their sum (3), the empty rest (1) and
# its sum (3). One at a time go numbers that kernels join or put into zeros, those times cosines of all heads, and
# the negated half. Counted by running such a function (`tests/sim/models/test_latent_kernels.py`).
_PAIRS_APART = (RopeKernels(14, 0, 4.5, 7), RopeKernels(21, 0, 4.5, 14))
ROPES = {"slices": _SLICES, "complex": _COMPLEX, "halves": _HALVES}


def latent_rope(d: Dims, elements: float) -> Operator:
    """Rotary embedding of latent attention's two tensors, in whose heads pairs lie side by side (DeepSeek)."""
    if d.framework.multiplies_complex_rope:
        return rope_of_pairs(d, elements)
    return rope(d, elements) if d.framework.fuses_latent_rope else _in_kernels(d, elements, _PAIRS_APART)


def rope_of_latents(d: Dims, elements: float) -> Operator:
    """Rope of two tensors of `elements` in all: every head's query and the shared key."""
    if not (d.framework.runs_model_code and d.framework.rotates_latents_in_slices):
        return latent_rope(d, elements)
    return rope_of_pairs(d, elements)


def rope_of_pairs(d: Dims, elements: float) -> Operator:
    """Rope of two tensors of `elements` in all, as the model's code pairs numbers (`ModelCode.rope_pairs`), or as the
    framework's does (`Framework.multiplies_complex_rope`)."""
    of_framework = d.framework.multiplies_complex_rope
    return _in_kernels(d, elements, _COMPLEX_BETWEEN_CASTS if of_framework else ROPES[d.code.rope_pairs])


def _in_kernels(d: Dims, elements: float, directions: tuple[RopeKernels, RopeKernels]) -> Operator:
    """Rope of two tensors of `elements` in all by separate kernels, forward and backward."""
    ahead, back = (
        replace(
            memory_op(name, phase, "elementwise", elements, _moved(d, k) * elements, d.act, 2 * k.kernels + k.shared),
            single_elements=k.single * elements,
        )
        for name, phase, k in zip(("rope", "rope_backward"), (F, I), directions, strict=True)
    )
    in_fp32 = bool(directions[0].fp32_bytes)  # what the product reads and writes
    held = 2 * elements * (FP32_BYTES if in_fp32 else d.act_bytes)
    return Operator("rope", (ahead,), (back,), forward_bytes=in_fp32 * held, backward_bytes=held)


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
