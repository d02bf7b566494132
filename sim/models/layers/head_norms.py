"""Norms of queries and keys: layer norms of each head (Persimmon, Phi; with weights of its own for each head: Command
R+, StableLM 2), and sums over ranks for norms over all heads (OLMo 2, MiniMax-M2)."""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, Phase, Program, Saved
from sim.models.dims import Dims
from sim.models.norm import norm
from sim.models.operators import F, I, Operator, collective, memory_op
from sim.models.torch_kernels.layer_norm_clocks import layer_norm_clocks

SUMS_BYTES = 2 * FP32_BYTES  # of a token: one sum over its queries and one over its keys


def head_layer_norm(d: Dims, name: str, rows: int, width: int, vectors: int = 2) -> Operator:
    """A layer norm with `vectors` of weights and biases over rows as narrow as one head. In these the fp32 mean and
    deviation of each row, which torch's native_layer_norm keeps, are no negligible part of the memory.

    Transformers norms heads in tokens' order, of which torch copies its input first, and backward input and gradient
    (aten/src/ATen/native/layer_norm.cpp: `expect_contiguous`). Narrow rows take longer by their instructions than by
    their bytes.
    """
    made = norm(d, name, "layernorm", rows, width, vectors)
    made = replace(made, saved=(*made.saved, Saved(f"{name} statistics", 2 * FP32_BYTES * rows)))
    if not d.framework.runs_model_code:
        return made
    n = rows * width
    ahead, back = (
        memory_op(f"{name}_{what}", phase, "copy", copies * n, copies * 2 * n * d.act_bytes, d.act, 0)
        for what, phase, copies in (("order", F, 1), ("order_backward", I, 2))
    )
    ahead, back = (replace(i, single_elements=float(i.shape[0])) for i in (ahead, back))
    normed, undone = (_in_rows(d, items, rows, width) for items in (made.forward, made.backward))
    return replace(made, forward=(ahead, *normed), backward=(back, *undone))


def norms_by_head(d: Dims, name: str, tokens: int, heads: int, width: int) -> Operator:
    """Layer norms without biases of `tokens` tokens' heads, [tokens, heads, width], each head with its own weights.

    One norm for all of them (transformers/models/cohere/modeling_cohere.py, 5.24: CohereLayerNorm), or where the
    model's code has a module for each head these in turn, whose results are joined, and whose gradients are
    (transformers/models/stablelm/modeling_stablelm.py: StableLmLayerNormPerHead).
    """
    rows = tokens * heads
    if not d.code.norms_heads_in_turn:
        return norm(d, name, "layernorm", rows, width, heads)
    made = head_layer_norm(d, name, rows, width, heads)
    ahead, back = (_in_turn(items, heads) for items in (made.forward, made.backward))
    n = rows * width
    join, join_back = (
        replace(memory_op(f"{name}_join", phase, "copy", n, 2 * n * d.act_bytes, d.act), single_elements=float(n))
        for phase in (F, I)
    )
    return replace(made, forward=(*ahead, join), backward=(*back, join_back))


def sums_over_heads(d: Dims, width: int) -> Operator:
    """Return the all-reduces over tp of norms over all heads: forward for each token the sum of squares of its queries
    and that of its keys, backward the two sums of input times gradient; fp32 [tokens, 2], one each way. `width`:
    numbers of a token's queries and keys on this rank.

    As vLLM runs MiniMax-M2 (`MiniMaxText01RMSNormTP.forward_qk`). A norm that is one kernel can then no longer sum by
    itself: a kernel before it reads queries and keys, or these and their gradients. Left out: implementations that
    gather whole queries and keys (vLLM's OLMo 2, Transformers' `colwise_gather_output`).
    """
    elements = d.tokens * width

    def summed(name: str, phase: Phase, reads: int) -> Program:
        apart = memory_op(name, phase, "norm", elements, reads * elements * d.act_bytes, d.act)
        total = collective(f"{name}_total", "all_reduce", SUMS_BYTES * d.tokens, phase)
        return (apart, total) if d.framework.fuses_rmsnorm else (total,)

    return Operator("head_sums", summed("head_sums", F, 1), summed("head_sums_backward", I, 2))


def _in_turn(program: Program, heads: int) -> Program:
    """The program of norms of all heads as `heads` times as many kernels, each over one head."""
    return tuple(replace(i, kernels=i.kernels * heads) if isinstance(i, Compute) else i for i in program)


def _in_rows(d: Dims, items: Program, rows: int, width: int) -> Program:
    """The layer norm's kernels, with what their instructions take."""
    found = []
    for item in items:
        if isinstance(item, Compute):
            clocks = layer_norm_clocks(rows, width, item.phase is not F, d.act_bytes < FP32_BYTES)
            found.append(replace(item, clocks=clocks.shared, lone_clocks=clocks.alone))
    return tuple(found)
