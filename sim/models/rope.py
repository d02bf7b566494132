"""Rotary embeddings of queries and keys: bound by memory, counted access by access."""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, Program, Saved
from sim.models.dims import Dims
from sim.models.elementwise import copied
from sim.models.operators import F, I, Operator, memory_op
from sim.models.precision.casts import More, cast, mixed, wider_rope

ROPE_SINGLE = 4.5  # numbers that rope's kernels of one direction handle one at a time, for each number that it rotates


def cosines_repeated(d: Dims, made: Operator, width: int) -> Operator:
    """Rope whose cosines and sines, [1, seq, width], are copied from half of the width in each layer and kept
    (`ModelCode.repeats_cosines`): read once for each two that are written, in two kernels."""
    if d.framework.fuses_rope or d.framework.fuses_chains or not d.code.repeats_cosines:
        return made
    e = FP32_BYTES if d.code.rope_dtype == "fp32 products" else d.act_bytes
    written = 2 * d.seq * width
    copies = memory_op("cosine_copies", F, "copy", written, 1.5 * e * written, d.act, 2)
    saved = (*made.saved, Saved("cosines and sines", written * e))
    return replace(made, forward=(copies, *made.forward), saved=saved)


def rope(d: Dims, elements: float, copied_back: bool = True) -> Operator:
    """Rotary embedding of query and key. `copied_back`: false where other kernels bring gradients to tokens' order.

    Eager (x·cos + rotate_half(x)·sin): multiply 2, negate 1, concatenate 2, multiply 2, add 3 accesses in
    five kernels; fused 2 in one. cos and sin are constants: nothing is kept. `fills_cut_gradients`, backward: products
    4, negate 1, both halves' gradients 7 (`_cut_gradients`), sum of both paths 3, and a copy 2 from heads' order to
    tokens', in ten. All kernels but those of `_cut_gradients` read or write heads in tokens' order, or read cosines
    that all heads share. Torch vectorizes none of these. Each way there are five of them for a tensor, and the negation
    has half of the elements (`ROPE_SINGLE`).
    """
    fused = d.framework.fuses_rope
    size, (accesses, launches) = elements * d.act_bytes, (2, 1) if fused else (10, 5)
    back_accesses, back_launches = (17, 10) if d.framework.fills_cut_gradients else (accesses, launches)
    if d.framework.fills_cut_gradients and not copied_back:
        back_accesses, back_launches = back_accesses - 2, back_launches - 1
    ahead, back = (More(), More()) if fused else wider_rope(d)
    moved, moved_back = accesses * size + ahead.bytes * elements, back_accesses * size + back.bytes * elements
    launches, back_launches = launches + ahead.kernels, back_launches + back.kernels
    forward = memory_op("rope", F, "elementwise", elements, moved, d.act, 2 * launches)
    backward = memory_op("rope_backward", I, "elementwise", elements, moved_back, d.act, 2 * back_launches)
    if fused:
        clocks = d.framework.rope_clocks
        forward, backward = (
            replace(forward, clocks=clocks[0] * elements),
            replace(backward, clocks=clocks[1] * elements),
        )
    items: Program = (backward,)
    if d.framework.fills_cut_gradients:
        halves = _cut_gradients(d, "rope_backward_halves", elements)
        rest = replace(backward, bytes=moved_back - halves.bytes, kernels=backward.kernels - halves.kernels)
        cast_ahead, cast_back = d.code.rope_dtype == "fp32 products", d.code.rope_dtype != "own"
        forward = replace(forward, single_elements=(ROPE_SINGLE + cast_ahead) * elements)
        rest = replace(rest, single_elements=(ROPE_SINGLE + cast_back) * elements)
        items = (rest, halves)
        if d.code.rope_dtype == "promoted" and d.act_bytes < FP32_BYTES:
            items = (*_cast_products_back(rest, elements, copied_back), halves)
    ahead_items = _mixed_products(d, forward, elements) if d.code.rope_dtype == "promoted" else (forward,)
    return Operator("rope", ahead_items, items, backward_bytes=2 * elements * d.act_bytes)


def _mixed_products(d: Dims, forward: Compute, elements: float) -> tuple[Compute, ...]:
    """Rope's kernels, with the two products of 16-bit numbers and fp32 cosines as kernels of their own, which cast
    each number. The sum in fp32 and its cast after them are bound by their bytes; negation and concatenation are
    not."""
    if d.act_bytes == FP32_BYTES:
        return (forward,)
    moved = 2 * (d.act_bytes + FP32_BYTES) * elements
    products = memory_op("rope_products", F, "elementwise", 2 * elements, moved, d.act, 4)
    if not d.framework.fills_cut_gradients:
        rest = replace(forward, bytes=forward.bytes - moved, kernels=forward.kernels - 4)
        return mixed(products, 3), rest
    behind = (3 * FP32_BYTES + FP32_BYTES + d.act_bytes) * elements
    turned = replace(
        forward,
        name="rope_turned",
        bytes=forward.bytes - moved - behind,
        kernels=forward.kernels - 8,
        single_elements=max(0.0, forward.single_elements - 3 * elements),
    )
    return mixed(products, 3), turned, replace(forward, bytes=behind, kernels=4, single_elements=0.0)


def _cast_products_back(rest: Compute, elements: float, copied_back: bool) -> tuple[Compute, ...]:
    """The backward of rope in two dtypes: both products in fp32 and their casts back (8 and 6 bytes each) are bound by
    their bytes; the gradient's cast to fp32, the negation (of half of the elements), the sum and the copy are not."""
    moved, single = 2 * (8.0 + 6.0) * elements, (2.5 + copied_back) * elements
    products = replace(rest, name="rope_backward_products", bytes=moved, kernels=8, single_elements=0.0)
    others = replace(rest, bytes=rest.bytes - moved, kernels=rest.kernels - 8, single_elements=single)
    return others, products


def rope_join(d: Dims, elements: float, share: float) -> Operator:
    """The part with rope of queries' and keys' heads joined to the rest, `elements` in all: read and written.

    `fills_cut_gradients`: the backward is `_cut_gradients`; of an empty rest (Phi 3) its zeros and the sum alone, since
    a slice of all is no slice. Where rope gives fp32 ("promoted"), so does the join, of
    the `share` with rope and the rest in 16 bits; the rest is cast back, too, and its gradient to fp32 and back.
    """
    if not d.framework.fills_cut_gradients:
        return copied("rope_join", d, elements)
    size = elements * d.act_bytes
    wider = FP32_BYTES - d.act_bytes if d.code.rope_dtype == "promoted" else 0
    moved = 2 * size + (1 + share) * wider * elements
    forward = memory_op("rope_join", F, "copy", elements, moved, d.act, 2, "cat")
    forward = replace(forward, single_elements=float(elements))  # heads lie in tokens' order
    backward = _cut_gradients(d, "rope_join_backward", elements, parts=2 if share < 1 else 1)
    if not wider:
        return Operator("rope_join", (forward,), (backward,), backward_bytes=2 * size)
    rest = (1 - share) * elements
    return Operator(
        "rope_join",
        (forward, cast(d, "rope_join_cast", F, rest, kernels=0)),
        (cast(d, "rope_join_backward_cast", I, 2 * rest, kernels=2), backward),
        backward_bytes=2 * size,
    )


def _cut_gradients(d: Dims, name: str, elements: float, parts: int = 2) -> Compute:
    """Gradients of both parts into which queries and keys were cut: zeros with a part filled in (2) for each part, and
    their sum (3), in five kernels a tensor. `parts`: one where the other is all, and this one's zeros (1) stay as they
    are."""
    accesses, kernels = (7, 5) if parts == 2 else (4, 2)
    return memory_op(name, I, "elementwise", elements, accesses * elements * d.act_bytes, d.act, 2 * kernels)


def scaled_rope(d: Dims, elements: float, width: int) -> Operator:
    """Rotary embedding of query and key, of heads of `width`, whose result is scaled (YaRN, arXiv 2309.00071, section
    3.4), or that Megatron-Core does not fuse (`training.apply_rope_fusion`; models/common/embeddings/rope_utils.py:
    `_apply_rotary_pos_emb_bshd`).

    In separate operators, accesses forward: x·cos 2, -x 1, rotated half 2, times sin 2, sum 3, with the rest of the
    head, which is empty, 2: 12 in six kernels a tensor. Backward: both products 4, the half back 1 and 2, sum 3, the
    empty rest 1 and its sum 3: 14 in seven. Before each tensor cosine and sine of every position are computed (8 bytes
    each), scaled (8) and cast (4 + e), by six kernels. Counted by running such a function
    (`tests/sim/models/test_gpt_oss_kernels.py`).
    """
    if not d.framework.scales_rope_apart:
        return rope(d, elements)
    size, angles, e = elements * d.act_bytes, 2 * d.seq * width, d.act_bytes
    forward = memory_op("rope", F, "elementwise", elements, 12 * size, d.act, 12)
    backward = memory_op("rope_backward", I, "elementwise", elements, 14 * size, d.act, 14)
    cosines = memory_op("rope_cosines", F, "elementwise", 2 * angles, 2 * (5 * FP32_BYTES + e) * angles, d.act, 12)
    # Runs of torch's own functions, with none of the modules around them that a kernel of Megatron's layers pays for.
    forward_items = tuple(replace(item, plain_host=True) for item in (cosines, forward))
    return Operator("rope", forward_items, (replace(backward, plain_host=True),), backward_bytes=2 * size)
