"""Attention in which all heads read one vector of a token, of which each query has a list: operators in training.

A kernel reads what a query's list names once for all of its heads (FlashMLA, Megatron-Core's `sparse_mla`).
"""

from __future__ import annotations

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Item, NeededBy, Saved, TensorRole
from sim.models.attention.core import LSE_BYTES
from sim.models.attention.sparse_kernel import sparse_kernel
from sim.models.dims import Dims
from sim.models.operators import F, I, Operator, W, accumulation, collective, gemm


def sparse_core(
    d: Dims, heads: int, slots: int, width: int, value: int, per_token: float = 1.0, sinks: int = 0
) -> Operator:
    """Each token's heads against its own `slots` vectors of `width` numbers, of which `value` are the value.

    `per_token`: vectors for each token of the sequence, compressed ones included. `sinks`: learned scores of heads.
    Kept: queries, this rank's vectors, the result and its log-sum-exp. Over cp vectors are gathered, for backward once
    more, and their gradients reduce-scattered; these are added up in fp32 (a vector is read by many queries).
    """
    e, tokens = d.act_bytes, d.tokens
    vectors = tokens * d.cp * width * per_token
    query, result, own = tokens * heads * width * e, tokens * heads * value * e, tokens * width * per_token * e
    moved = query + result + vectors * e
    shape = (tokens, 1, 1, heads, slots, width, value, 0)
    forward: list[Item] = [sparse_kernel("attention", F, shape, d.act, moved)]
    again = 2 * moved + 2 * vectors * FP32_BYTES
    backward: list[Item] = [sparse_kernel("attention_backward", I, shape, d.act, again)]
    if d.cp > 1:
        forward.insert(0, collective("latent_gather", "all_gather", vectors * e, F, group="cp"))
        backward.insert(0, collective("latent_regather", "all_gather", vectors * e, I, group="cp"))
        backward.append(collective("latent_grad_scatter", "reduce_scatter", vectors * e, I, group="cp"))
    saved = (
        Saved("query", query, role=TensorRole.INPUT),
        Saved("latents", own, role=TensorRole.INPUT),
        Saved("log-sum-exp", tokens * heads * LSE_BYTES, role=TensorRole.STATISTICS),
        Saved("output", result),  # which what comes next reads too
    )
    gathered = vectors * e if d.cp > 1 else 0.0
    return Operator(
        "attention",
        tuple(forward),
        tuple(backward),
        saved,
        params=sinks,
        forward_bytes=gathered,
        backward_bytes=query + result + gathered + vectors * FP32_BYTES,
        core=True,
        output_bytes=result,
    )


def per_head(d: Dims, name: str, heads: int, inputs: int, outputs: int, keeps: bool) -> Operator:
    """A product of every head with its own piece of the up-projection, in 16 bits; `keeps`: its input."""
    e, n = d.act_bytes, heads * inputs * outputs
    written, added = accumulation(d, f"{name}_wgrad", n)
    forward = (gemm(name, F, d.tokens, outputs, inputs, d.act, heads),)
    backward = (
        gemm(f"{name}_dgrad", I, d.tokens, inputs, outputs, d.act, heads),
        gemm(f"{name}_wgrad", W, outputs, inputs, d.tokens, d.act, heads, out_bytes=written),
        *added,
    )
    size = d.tokens * heads * inputs * e
    saved = (Saved(f"{name} input", size, NeededBy.WEIGHT_GRAD, TensorRole.INPUT),) if keeps else ()
    return Operator(
        name,
        forward,
        backward,
        saved,
        params=n,
        weights=((heads * min(inputs, outputs), max(inputs, outputs)),),
        backward_bytes=d.tokens * heads * (inputs + outputs) * e,
    )


def latents_shared(d: Dims, width: int) -> Operator:
    """A token's latent is read by the heads of all ranks of tp, whose gradients of it are summed: under sequence
    parallelism one rank makes it, else each does."""
    size = d.tokens * width * d.act_bytes
    if not d.sp:
        return Operator("latents", (), (collective("latent_tp_grad_all_reduce", "all_reduce", size, I),))
    gather = collective("latent_tp_gather", "all_gather", size, F)
    return Operator("latents", (gather,), (collective("latent_tp_grad_scatter", "reduce_scatter", size, I),))
