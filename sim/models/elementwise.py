"""Norms, rope, dropout and residual sums: bound by memory, counted access by access.

`training.framework` decides which of them share a kernel:

- eager, transformers: every torch operator is a kernel. LayerNorm is one already; RMSNorm as written in PyTorch code
  (cast to fp32, square, mean, rsqrt, scale, cast back, weight) is eight;
- megatron: norm, rope, bias-GELU, SwiGLU and bias-dropout-add are one kernel each;
- compiled: as megatron, and a chain without a matmul in it is one kernel (the residual sum and the norm after
  it); what a pointwise chain can rebuild from kept tensors is not kept (norm and activation outputs).

Accesses are per element, times the activations' bytes; a dropout mask is one byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct
from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import EAGER_NORM, Compute, Phase, Program, Saved, TensorRole
from sim.models.dims import Dims
from sim.models.operators import F, I, Operator, accumulate, memory_op
from sim.models.precision.casts import More, branch_gradient_casts, cast, in_fp32, mixed, widens_norms, wider_rope
from sim.models.torch_kernels.norm_passes import backward_accesses, gradient_reads, without_weight

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig

MASK_BYTES = 1.0
ROPE_SINGLE = 4.5  # numbers that rope's kernels of one direction handle one at a time, for each number that it rotates


class Traffic(Struct, frozen=True):
    """Bytes per element and kernels, forward and backward. `…_launches`: further launches, which take the host's time
    alone: the bytes and the device's time of such kernels are counted with the others, or are negligible."""

    forward_bytes: float
    forward_kernels: int
    backward_bytes: float
    backward_kernels: int
    forward_launches: int = 0
    backward_launches: int = 0


NormWeight = Literal["none", "activations", "fp32", "cast", "from 1"]


def rms_norm_eager(e: float, weight: NormWeight = "activations", frozen: bool = False) -> Traffic:
    """RMSNorm in separate torch kernels, `e` bytes an activation.

    Forward: x.float() (e+4), pow (8), mean (4), rsqrt and epsilon (rows only), multiply (8), to dtype (4+e),
    weight (2e). Backward: the weight's two products and sum (2e, 3e, e), to fp32 (e+4), product with rsqrt
    and its row sum (8, 12, 4), pow (8, 12), sum of the two paths (12), to dtype (4+e). Without upcasts in
    fp32. `weight` is what the normalized value is multiplied by: a weight in the activations' dtype; a weight in fp32,
    before the cast back (OLMo 2: 8; 8, 12, 4); 1 plus such a weight (Gemma); or nothing. A `frozen` weight has the
    first of its two products alone.

    These kernels are those by which measured chains (`norm_eager`) are divided. Torch launches more. Backward: the
    mean's gradient is written to all elements, the square's gradient is doubled, and in fp32 one more kernel runs on a
    number a row. The measured time of a chain includes them, so only their launches are added. Where a 16-bit weight
    multiplies in fp32, its gradient is cast, Gemma 4 casts the weight (`cast`), and Gemma adds 1 to it as well.
    """
    dtype = FP32_BYTES if weight in ("fp32", "cast", "from 1") else e
    of_weight = (2 * dtype, 1) if frozen else (6 * dtype, 3)
    own, (back, kernels) = (0.0, (0.0, 0)) if weight == "none" else (2 * dtype, of_weight)
    ones, cast = weight == "from 1", e < dtype
    more = (ones * (1 + cast) + (weight == "cast" and cast), 2 + (cast and not frozen) + (e == FP32_BYTES))
    first, last = 5 + bool(kernels), 8 + kernels
    if e == FP32_BYTES:
        return Traffic(8 + 4 + 8 + own, first, back + 8 + 12 + 4 + 8 + 12 + 12, last, *more)
    ahead = (e + 4) + 8 + 4 + 8 + (4 + e) + own
    return Traffic(ahead, 2 + first, back + (e + 4) + 8 + 12 + 4 + 8 + 12 + 12 + (4 + e), 3 + last, *more)


def layer_norm_in_fp32(e: float, weighted: bool, frozen: bool = False) -> Traffic:
    """LayerNorm of activations of `e` bytes, computed in fp32 between two casts.

    Without weights torch's own kernel (OLMo: casts e+4 and 4+e, kernel 8; backward casts, kernel 12). With weights
    separate operators (Command R, CohereLayerNorm): mean (4), difference (8), its square (8) and mean (4), difference
    (8), product with rsqrt (8), weight (8), and four kernels on rows or the weight. Backward: the weight's products and
    sum (8, 12, 4), product with rsqrt and its row sum (8, 12, 4), the difference's gradient and row sum (8, 4, 4), the
    square's (8, 8, 12), its difference's (8, 4), sums of the paths (12, 4, 12), and five kernels on rows. A `frozen`
    weight has the first of its two products alone.
    """
    casts, kernels = (0.0, 0) if e == FP32_BYTES else (2 * (e + 4), 2)
    if not weighted:
        return Traffic(casts + 8, kernels + 1, casts + 12, kernels + 1)
    return Traffic(casts + 48, kernels + 10, casts + 132 - 16 * frozen, kernels + 22 - 2 * frozen)


def norm_traffic(d: Dims, kind: str, rows: int, width: int, after_sum: bool, weighted: bool = True) -> Traffic:
    """`after_sum`: the norm right after a residual sum, whose kernel a compiler extends by the norm.

    Adapters leave its weights frozen: autograd then asks for the input's gradient alone, and torch launches no kernel
    for that of weights (aten/src/ATen/native/cuda/layer_norm_kernel.cu: `LayerNormBackwardKernelImplInternal`); one
    pass that makes both gradients stays as it is.
    """
    e, frozen = d.act_bytes, d.lora is not None
    if kind == "rmsnorm" and not d.framework.fuses_rmsnorm:
        return rms_norm_eager(e, _norm_weight(d) if weighted else "none", frozen)
    if d.norm_in_fp32 and d.framework.norms_keep_operators:
        return layer_norm_in_fp32(e, weighted, frozen)
    # of 5 accesses dx takes 3, the weight's gradient reads x and dy once more; or partial sums of it come with dx
    accesses, gradients = backward_accesses(d, rows, width), gradient_reads(d, rows, width)
    backward = (accesses - gradients) * e + gradients * d.normed_bytes
    kernels = d.framework.norm_backward_kernels - without_weight(d)
    if after_sum and d.framework.fuses_chains:
        return Traffic(d.normed_bytes, 0, backward, kernels)
    ones = d.code.norm_weights_from_1 and d.framework.norms_keep_operators
    return Traffic(e + d.normed_bytes, 1, backward, kernels, int(ones))


def _norm_weight(d: Dims) -> NormWeight:
    if not d.norm_in_fp32:
        return "activations"
    if d.code.casts_norm_weights:
        return "cast"
    return "from 1" if d.code.norm_weights_from_1 else "fp32"


def stream_norm(m: ModelConfig, d: Dims, name: str, after_sum: bool = False, keeps_input: bool = True) -> Operator:
    """The model's norm of the residual stream (`norm` over the hidden size)."""
    if widens_norms(d):
        return _of_copies(m, d, name)
    own = norm(d, name, m.norm, d.rows, d.hidden, m.norm_vectors, after_sum, keeps_input)
    if not d.wide_stream:
        return own
    return replace(own, forward=(*launches_alone(f"{name}_weights", F, m.norm_vectors), *own.forward))


def _of_copies(m: ModelConfig, d: Dims, name: str) -> Operator:
    """torch's layer norm under autocast over a stream in 16 bits: of copies in fp32, of its input and of its weights.
    The input's copy is its own, whatever else reads the stream."""
    elements = d.rows * d.hidden
    own = norm(in_fp32(d), name, m.norm, d.rows, d.hidden, m.norm_vectors)
    copies = (cast(d, f"{name}_cast", F, elements, widens=True), *launches_alone(f"{name}_weights", F, m.norm_vectors))
    return replace(
        own,
        forward=(*copies, *own.forward),
        backward=(*own.backward, cast(d, f"{name}_grad_cast", I, elements)),
    )


def norm(
    d: Dims,
    name: str,
    kind: str,
    rows: int,
    width: int,
    vectors: int = 1,
    after_sum: bool = False,
    keeps_input: bool = True,
) -> Operator:
    """LayerNorm or RMSNorm over `width` of `rows` tokens.

    Its input is kept: 4sbh for a layer's two (Korthikanti 2022, section 4.1); row statistics (8 bytes a row,
    4 for RMSNorm) are left out there and here. What a norm of separate operators keeps besides: `_kept_by_operators`.
    `vectors`: of `width` that it learns: weights, and a layer norm's biases. `keeps_input`: false where another norm
    keeps the same tensor.
    """
    elements = rows * width
    fused = d.framework.fuses_rmsnorm or kind != "rmsnorm"
    kernel = d.framework.norm_kernel if fused else EAGER_NORM
    # Kernels that a compiler generates stream as fast with a reduction in them as without (docs/programs_checked.md).
    priced_as = "elementwise" if d.framework.fuses_chains else "norm"
    t = norm_traffic(d, kind, rows, width, after_sum, vectors > 0)
    kept = Saved(f"{name} input", elements * d.act_bytes, role=TensorRole.INPUT)
    saved: tuple[Saved, ...] = (kept,) if keeps_input else ()
    if d.framework.norms_keep_operators and (kind == "rmsnorm" or d.norm_in_fp32):
        shares = not keeps_input and d.act_bytes == FP32_BYTES  # no cast makes a copy of what the other norm keeps
        saved = _kept_by_operators(d, name, kind, rows, width, vectors > 0)[int(shares) :]
    forward, backward = t.forward_bytes * elements, t.backward_bytes * elements
    return Operator(
        name,
        (
            memory_op(name, F, priced_as, elements, forward, d.act, t.forward_kernels, kernel),
            *launches_alone(f"{name}_launches", F, t.forward_launches),
        ),
        (
            memory_op(f"{name}_backward", I, priced_as, elements, backward, d.act, t.backward_kernels, kernel),
            *launches_alone(f"{name}_backward_launches", I, t.backward_launches),
        ),
        saved,
        params=width * vectors,
        tensors=(width,) * vectors,
        shared=(width,) * vectors if d.tp > 1 and d.sp else (),
        backward_bytes=2 * elements * (d.act_bytes if fused else FP32_BYTES),
    )


def launches_alone(name: str, phase: Phase, kernels: int) -> Program:
    """Kernels of which only the launch counts, each a call from Python."""
    return (memory_op(name, phase, "elementwise", kernels, FP32_BYTES * kernels, "fp32", kernels),) if kernels else ()


def _kept_by_operators(d: Dims, name: str, kind: str, rows: int, width: int, weighted: bool) -> tuple[Saved, ...]:
    """An fp32 copy of the input (the input itself where that is fp32), the root mean square's reciprocal of each row,
    the normalized value for the weight's gradient: in fp32 where the weight multiplies in fp32 (`norm_in_fp32`: Gemma,
    OLMo 2, gpt-oss, Command R), else cast back before (Llama). A layer norm so written has two differences from the
    mean in place of the copy (transformers/models/cohere/modeling_cohere.py: CohereLayerNorm). Without weights, or with
    those that adapters leave frozen, the copy and the statistics are all (nanochat's RMS norm, OLMo's layer norm,
    torch's own kernel in fp32).
    """
    n = rows * width
    copies = 2 if kind == "layernorm" and weighted else 1
    normalized = FP32_BYTES if d.norm_in_fp32 else d.act_bytes
    kept = (
        Saved(f"{name} input in fp32", copies * n * FP32_BYTES, role=TensorRole.INPUT),
        Saved(f"{name} statistics", rows * FP32_BYTES, role=TensorRole.STATISTICS),
    )
    trained = weighted and d.lora is None
    return (*kept, Saved(f"{name} normalized", n * normalized)) if trained else kept


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


def bias_apart(d: Dims, name: str, elements: int) -> Operator:
    """The sum of a projection's output of `elements` and its bias, as a kernel of its own."""
    return Operator(name, (memory_op(name, F, "elementwise", elements, 2 * elements * d.act_bytes, d.act),))


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


def copied(name: str, d: Dims, elements: float, kernels: tuple[int, int] = (1, 1)) -> Operator:
    """Tensors copied into another order, and their gradients copied back; `kernels`: of the forward and the backward.

    Each copy reads and writes all `elements` once.
    """
    moved = 2 * d.act_bytes * elements
    ahead, back = kernels
    forward, backward = (
        memory_op(n, phase, "copy", elements, moved, d.act, kernels, strided=d.framework.reads_strided)
        for n, phase, kernels in ((name, F, ahead), (f"{name}_backward", I, back))
    )
    return Operator(name, (forward,), (backward,))


def residual(d: Dims, name: str, bias_after: bool) -> Operator:
    """Bias (where the matmul could not add it), dropout and the sum with the residual stream.

    Under autocast the stream has fp32 and the branch 16 bits, to which the stream's gradient is cast on its way back.
    `scales_branches`: a kernel multiplies the branch, and one its gradient.
    """
    elements, e, wide = d.rows * d.hidden, d.act_bytes, d.of_stream.act_bytes
    mask = MASK_BYTES if d.dropout else 0.0
    moved, kernels = 2 * wide + e + mask, 1
    if not d.framework.fuses_residual:
        beside = bool(d.dropout) + bias_after
        moved, kernels = moved + 2 * e * beside, 1 + beside
    undrop = memory_op(f"{name}_dropout_backward", I, "elementwise", elements, (2 * e + mask) * elements, d.act)
    scale, unscale = (
        memory_op(f"{name}_{what}", phase, "elementwise", elements, 2 * e * elements, d.act)
        for what, phase in (("scale", F), ("scale_backward", I))
    )
    backward: Program = (
        *branch_gradient_casts(d, name, elements),
        *((undrop,) if d.dropout else ()),
        *((unscale,) if d.code.scales_branches else ()),
    )
    added = memory_op(name, F, "elementwise", elements, moved * elements, d.act, kernels)
    added = replace(added, random_numbers=float(elements)) if d.dropout else added
    summed = mixed(added, 3) if wide > e and not d.framework.fuses_chains else added
    return Operator(
        name,
        (scale, summed) if d.code.scales_branches else (summed,),
        backward,
        (Saved(f"{name} dropout mask", mask * elements),),
        forward_bytes=elements * wide,
        backward_bytes=(2 if d.dropout else 1) * elements * e,
    )


def branch_sum(d: Dims) -> Operator:
    """The sum at a residual branch, which only the backward has: the gradient of the stream plus that of the norm's
    input. A compiler fuses it into the kernel before it."""
    elements = d.rows * d.hidden
    add = accumulate(d.of_stream, "residual_grad_sum", elements, 1.0 if d.framework.fuses_chains else 3.0)
    return Operator("residual_grad_sum", (), (add,), backward_bytes=2 * elements * d.of_stream.act_bytes)
