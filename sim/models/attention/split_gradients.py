"""How the gradients of queries, keys and values become that of the one matmul's result that they were cut from."""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.program import Saved
from sim.models.dims import Dims
from sim.models.operators import F, I, Operator, accumulate, memory_op

INDEX_PUT_KERNELS = 8  # of torch's sort of one index and its sum by index (ATen/native/cuda/Indexing.cu)


def joined_gradients(d: Dims, elements: int) -> Operator:
    """The gradients of queries, keys and values, `elements` in all, become one tensor for the matmul before them.

    Where each is put into zeros of that size (`select`), all three together read their elements, write them and three
    times as many zeros. Two sums follow.

    Where heads lie beside each other, each with its three parts (`heads`), a second kernel copies what was joined.
    Where the parts lie in several pieces (`shards`), the forward copies each of them (`reshape`).
    """
    if d.code.split == "select":
        put = memory_op("split_backward", I, "copy", elements, 5 * elements * d.act_bytes, d.act, 6, "slice_backward")
        added = replace(accumulate(d, "split_gradient_sum", 2 * elements), kernels=2)
        return Operator("split", (), (replace(put, single_elements=float(elements)), added))
    joined = memory_op("split_backward", I, "copy", elements, 2 * elements * d.act_bytes, d.act, kernel="cat")
    if d.code.split == "shards":
        copies = memory_op("split_copies", F, "copy", elements, 2 * elements * d.act_bytes, d.act, 3)
        return Operator("split", (replace(copies, single_elements=float(elements)),), (joined,))
    of_heads = d.code.split == "heads"
    in_heads_order = 0.0 if d.fused_attention and not of_heads else float(elements)  # what unfused attention gives
    joined = replace(joined, single_elements=in_heads_order)
    if not of_heads:
        return Operator("split", (), (joined,))
    turned = memory_op("split_order_backward", I, "copy", elements, 2 * elements * d.act_bytes, d.act)
    return Operator("split", (), (joined, replace(turned, single_elements=float(elements))))


def clamped(d: Dims, elements: int, tensors: int = 1) -> Operator:
    """The clamp, from both sides, of matmuls' results: `tensors` tensors with `elements` numbers in all. It keeps what
    it reads.

    Backward, as torch dispatches `clamp_backward` (tools/autograd/derivatives.yaml): is the input at least and at most
    its limit (a byte of truth each), are both true (in place, three bytes), the gradient where they are, a number.
    """
    e = d.act_bytes
    forward = memory_op("qkv_clamp", F, "elementwise", elements, 2 * e * elements, d.act, tensors)
    truths = memory_op("qkv_clamp_truths", I, "elementwise", elements, (2 * (e + 1) + 3) * elements, d.act, 3 * tensors)
    chosen = memory_op("qkv_clamp_backward", I, "elementwise", elements, (2 * e + 1) * elements, d.act, tensors)
    number = memory_op("qkv_clamp_number", I, "elementwise", tensors, e * tensors, d.act, tensors)
    return Operator(
        "qkv_clamp",
        (forward,),
        (number, truths, replace(chosen, single_elements=float(elements))),
        (Saved("qkv before its clamp", e * elements),),
    )


def clamped_apart(d: Dims, elements: int) -> Operator:
    """Queries, keys and values, of `elements` in all, each clamped in place, so that autograd copies it first to keep
    what the backward reads (transformers/models/olmo/modeling_olmo.py, 5.24: OlmoAttention.forward)."""
    made = clamped(d, elements, 3)
    copies = memory_op("qkv_clamp_copies", F, "copy", elements, 2 * d.act_bytes * elements, d.act, 3)
    return replace(made, forward=(copies, *made.forward))


def split_by_index(d: Dims, whole: int, keys: int) -> Operator:
    """Keys and values, of `keys` elements each, that lists of one index copy out of a result of `whole` elements.

    Backward: zeros for each of them (written) and torch's `index_put_` (accumulate), which reads the gradient, reads
    and writes its place. The queries' gradient is put into zeros as a slice's is; two sums of whole results follow
    (transformers/models/falcon/modeling_falcon.py: FalconAttention._split_heads).
    """
    e, queries = d.act_bytes, whole - 2 * keys
    copies = memory_op("split_index", F, "embedding", 2 * keys, 4 * keys * e, d.act, 2, "index")
    zeros = memory_op("split_zeros", I, "elementwise", 2 * whole, 2 * whole * e, d.act, 2)
    put = memory_op(
        "split_index_put", I, "embedding", 2 * keys, 6 * keys * e, d.act, 2 * INDEX_PUT_KERNELS, "index_put"
    )
    sliced = memory_op("split_backward", I, "copy", queries, (whole + 2 * queries) * e, d.act, 2, "slice_backward")
    return Operator("split", (copies,), (zeros, put, sliced, accumulate(d, "split_gradient_sum", 2 * whole)))
