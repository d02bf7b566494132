"""Attention of several new tokens of each sequence, as drafted ones are checked."""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.program import Compute, Program
from sim.models.layers import Attention
from sim.models.served import ServingDims
from sim.prices.roofline import ATTENTION_DECODE


def of_queries(attention: Attention, dims: ServingDims, batch: int, kv_len: int, queries: int) -> Program:
    """Attention of `queries` tokens of each sequence: the cache is read once for all of them (as by FlashInfer's and
    TensorRT-LLM's kernels for drafted tokens), and what is computed is as much as for single ones."""
    single = attention.decode(dims, batch, kv_len)
    if queries == 1:
        return single
    several = attention.decode(dims, batch * queries, kv_len)
    return tuple(
        [
            replace(one, flops=many.flops) if isinstance(one, Compute) and one.kind == ATTENTION_DECODE else many
            for one, many in zip(single, several, strict=True)
            if isinstance(many, Compute)
        ]
    )
