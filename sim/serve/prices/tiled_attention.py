"""Attention of single tokens in kernels that give each query head a tile of its own: FlashAttention 2 beside prompts.

vLLM since 0.8 computes attention of an iteration's prompts and single tokens in one call (v1/attention/backends/
flash_attn.py: flash_attn_varlen_func with the longest chunk as max_seqlen_q). FlashAttention 2, its kernel where there
is no FlashAttention 3 (fa_utils.py, get_flash_attn_version: compute capability 9.0), joins the query heads of a KV head
and splits keys only where each sequence has one query (vllm-project/flash-attention, csrc/flash_attn/flash_api.cpp,
mha_varlen_fwd: seqlenq_ngroups_swapped asks for max_seqlen_q 1) and no window slides (likewise: window_size_left < 0,
which vLLM sets only for layers with a sliding window). Beside a prompt, with drafted tokens to check, or in a layer
with a sliding window, each query head of a sequence has a tile of 64 rows (flash_fwd_launch_template.h,
run_mha_fwd_splitkv_dispatch: kBlockM), of which one row, or one for each drafted token, is of use. Keys that no query
of a tile sees are skipped (flash_fwd_kernel.h: n_block_min):

    flops of tiles = 2 · sequences · heads · ceil(queries / 64) · 64 · keys · (head_dim + v_head_dim)

Attention of these tokens takes as long as its tiles, or as reading the cache where that takes longer. Assumptions:
tiles multiply as fast as those of a long prompt, and heads of a group find keys in the L2 cache that another has read.
Both are lower bounds: a launch's blocks go through all sequences before they come to the next head, so a large batch's
keys have left the cache by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.core.program import Compute
from sim.inputs.engine_file import engine_of
from sim.models.dims import ceil_div
from sim.models.layers.grouped_query import GroupedQueryAttention
from sim.serve.prices.iteration_parts import Key
from sim.serve.prices.operator_prices import OperatorPrices, PricedProgram
from sim.variants.engines.kernel_facts import is_datacenter_blackwell

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario
    from sim.models.layers import Attention
    from sim.models.serving.operators import ServingDims

TILE_ROWS = 64
LONG = 16384  # tokens of a prompt whose attention is bound by its products
WIDEST_HEAD = 256  # flash_api.cpp: head dimension at most 256
SIXTEEN_BITS = 2.0  # bytes; of a cache in fewer FlashAttention 2 reads none (fa_utils.py, flash_attn_supports_fp8)


def tiled_attentions(scenario: Scenario, d: ServingDims, attentions: tuple[Attention, ...]) -> tuple[bool, ...]:
    """Which of a model's attentions have such kernels on a scenario's GPUs."""
    gpu, engine = scenario.cluster.gpu, engine_of(scenario.for_serving.engine)
    of_datacenter = is_datacenter_blackwell(gpu.kernel_architecture, gpu.memory_bytes)
    here = ("datacenter_blackwell" if of_datacenter else gpu.kernel_architecture) in engine.tiled_heads
    one_kernel = d.fused_attention and d.cp == 1 and d.kv_bytes == SIXTEEN_BITS
    return tuple([here and one_kernel and _has_kernel(attention) for attention in attentions])


def _has_kernel(attention: Attention) -> bool:
    if not isinstance(attention, GroupedQueryAttention):
        return False
    return not attention.sinks and max(attention.widths) <= WIDEST_HEAD


def slides(attention: Attention) -> bool:
    """Whether single tokens have tiles of their own without prompts beside them, too."""
    window = attention.window if isinstance(attention, GroupedQueryAttention) else None
    return window is not None and not window.chunked


def tile_flops(attention: GroupedQueryAttention, d: ServingDims, sequences: int, keys: float, queries: int) -> float:
    """Flops of the tiles of so many sequences, each with `queries` tokens that see `keys`."""
    rows = ceil_div(queries, TILE_ROWS) * TILE_ROWS
    heads, _ = attention.heads_of(d.tp)
    return 2.0 * sequences * heads * rows * attention.kept_tokens(keys) * sum(attention.widths)


def tiled(
    key: Key, attention: Attention, d: ServingDims, prices: OperatorPrices, alone: PricedProgram
) -> PricedProgram:
    """Price attention of single tokens in tiles; the key's sizes, and the price `alone`, are those of `Work.DECODE`."""
    assert isinstance(attention, GroupedQueryAttention)
    prompt = attention.prefill(d, 1, LONG, LONG)
    flops = sum([item.flops for item in prompt if isinstance(item, Compute)])
    long = prices.priced(prompt)
    share = tile_flops(attention, d, key.a, key.b, key.c) / flops
    if share * long.seconds <= alone.seconds:
        return alone
    return PricedProgram(share * long.seconds, 0.0, {kind: share * s for kind, s in long.shares.items()})
