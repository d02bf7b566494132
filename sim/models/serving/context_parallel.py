"""Attention while serving over context-parallel ranks: prompts and caches are split over them.

Every rank holds all of its tp share of the weights, 1/cp of each prompt chunk's tokens (2·cp pieces, of which rank r
holds r and 2cp − 1 − r: zigzag) and 1/cp of each sequence's cache. For a chunk of q tokens, the last of the kv that
they see, a rank has q' = q/cp queries and 1/cp of the pairs of queries and keys, q' · (kv − (q − 1)/2).

- ring (Yang et al. 2024, "Context Parallelism for Scalable Million-Token Inference", arXiv 2411.01783, section 3:
  pass-KV; as in training, `sim.models.attention.context_parallel`): cp blocks of kv/cp keys, each computed while the
  next keys and values come; later blocks join the fp32 sum by their log-sum-exps.
- all_gather (Llama 3, arXiv 2407.21783, section 3.3.2): all keys and values first, copied into the sequence's order.

Single tokens are shared out over the ranks as well. Their queries are gathered, every rank attends to its part of the
cache, and partial results with their log-sum-exps go back to the rank of each token in an all-to-all, where they are
joined (that paper's batched ring pass-Q decode without the ring; vLLM's decode context parallelism).

Left out: pass-Q for prompts with long histories; caches that are split unevenly.
"""

from __future__ import annotations

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, Item, Program, Wait
from sim.models.dims import ceil_div
from sim.models.layers.grouped_query import GroupedQueryAttention
from sim.models.operators import F, collective, memory_op
from sim.models.serving.operators import ServingDims


def split_prefill(d: ServingDims, attention: GroupedQueryAttention, batch: int, q: int, kv: int) -> Program:
    """One rank's attention of `batch` chunks of `q` tokens, each the last of the `kv` that they see."""
    own = ceil_div(q, d.cp)
    heads, kv_heads = attention.heads_of(d.tp)
    token_bytes = kv_heads * sum(attention.widths) * d.kv_bytes
    if d.cp_method == "all_gather":
        size = batch * kv * token_bytes
        return (
            collective("attention_gather_kv", "all_gather", size, F, group="cp"),
            memory_op("attention_order_kv", F, "copy", size / d.kv_bytes, 2 * size, d.act),
            *attention.prefill(d, batch, own, max(own, round(kv - (q - own) / 2))),
        )
    keys = max(own, round((kv - (q - 1) / 2) / d.cp + (own - 1) / 2))
    message, n = batch * ceil_div(kv, d.cp) * token_bytes, batch * own * heads * attention.widths[1]
    items: list[Item] = []
    for step in range(d.cp):
        name, last = f"ring_kv{step}", step == d.cp - 1
        items += [] if last else [collective(name, "send_recv", message, F, name, "cp")]
        items += attention.prefill(d, batch, own, keys)
        moved = n * (2 * FP32_BYTES + d.act_bytes)
        items += [memory_op(f"attention_merge{step}", F, "elementwise", n, moved, d.act)] if step else []
        items += [] if last else [Wait(name, F)]
    return tuple(items)


def split_decode(d: ServingDims, attention: GroupedQueryAttention, batch: int, kv: int) -> Program:
    """One rank's attention of a token of each of `batch` sequences against a cache of `kv`, 1/cp of which it holds."""
    n = batch * attention.heads_of(d.tp)[0]
    width = attention.widths[1]
    partial = width * d.act_bytes + FP32_BYTES
    # Every rank joins the partial results of its own tokens, a cp-th of them.
    moved = n * partial + n / d.cp * width * d.act_bytes
    joined: Compute = memory_op("attention_join", F, "elementwise", n * width, moved, d.act)
    return (
        collective("attention_gather_queries", "all_gather", n * width * d.act_bytes, F, group="cp"),
        *attention.decode(d, batch, ceil_div(kv, d.cp)),
        collective("attention_return", "all_to_all", n * partial, F, group="cp"),
        joined,
    )
