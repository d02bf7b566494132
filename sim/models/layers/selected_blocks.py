"""Grouped queries over the blocks of keys that an indexer chooses (MiniMax M3, Qwen 4).

A kernel computes for each query the keys of its blocks, the empty places of early queries too: for the query heads of
one key and value head at once, which share a selection. It is priced as the sparse kernel of DeepSeek's attention with
so many heads (`sim.models.layers.shared_vectors`): no kernel of grouped queries was measured.

Where a query sees all keys anyway (a sequence no longer than what is chosen), it is attention over all tokens. Separate
operators (`attention: unfused`) and Transformers compute all pairs and mask those that were not chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.core.program import Compute, Phase, Program
from sim.models.attention.context_parallel import attention_core
from sim.models.attention.core import core_part
from sim.models.attention.sparse_kernel import sparse_kernel
from sim.models.dims import Dims, Shard
from sim.models.layers.block_indexer import BlockIndexer
from sim.models.layers.blocks_of_transformers import block_mask
from sim.models.layers.grouped_query import GroupedQueryAttention
from sim.models.layers.matrix import Matrix
from sim.models.operators import F, I, Operator
from sim.models.serving.operators import ServingDims, served_linear

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario


class SelectedBlocksAttention(GroupedQueryAttention, frozen=True, kw_only=True):
    """Grouped-query attention with an `indexer` of blocks."""

    indexer: BlockIndexer

    def matrices(self, tp: int = 1) -> tuple[Matrix, ...]:
        """Return the matrices of grouped queries, with the indexer's between them."""
        first, last = self.qkv_and_out(tp)
        return first, self.indexer.matrix(self.hidden), last

    def other_parameters(self) -> int:
        """Norms inside the attention and of the indexer."""
        return super().other_parameters() + self.indexer.norm_parameters

    def key(self, seq_len: int) -> str:
        """The indexer's sizes."""
        x = self.indexer
        return f" blocks={x.pools},{x.heads},{x.head_dim},{x.top_k},{x.block}"

    def seen_keys(self, length: int) -> float | None:
        """Keys that a query attends to in the mean; None where it is all of them."""
        return None if self._sees_all(length) else self.indexer.selected(length)

    def _sees_all(self, length: int) -> bool:
        return length <= self.indexer.slots(length)

    def core_flops(self, seq_len: int, causal_half: bool) -> float:
        """Attention to what is chosen, and scores; less the gradients of the indexer's matrix, which nobody asks
        for."""
        spared = 4.0 * self.indexer.matrix(self.hidden).elements
        return super().core_flops(seq_len, causal_half) + self.indexer.core_flops(seq_len, causal_half) - spared

    def train(self, scenario: Scenario, d: Dims, shard: Shard) -> tuple[Operator, ...]:
        """Grouped queries' operators, with the indexer behind the first projection, which reads the same input."""
        first, *rest = super().train(scenario, d, shard)
        masks = d.framework.masks_unselected or not d.fused_attention
        used = masks or not self._sees_all(d.full_seq)
        return (first, self.indexer.operator(d, self.hidden, used, used and not masks), *rest)

    def attended(self, scenario: Scenario, d: Dims, shard: Shard) -> Operator:
        """The core over what is chosen; all pairs where it is masked, or where all keys are seen. torch's kernels get
        the mask as a tensor of numbers, where scores are pooled one of each head (MiniMax M3)."""
        masks, own = d.framework.masks_unselected or not d.fused_attention, self.core(d)
        if masks or self._sees_all(d.full_seq):
            masked = masks and d.framework.sees_masks(d.fused_attention, d.attention_kernel, d.cp)
            apart = self.heads_of(d.tp)[0] if masked and self.indexer.pools == "scores" else 1
            own = replace(own, causal=not masks, masked=masked, mask_heads=apart)
            core = attention_core(scenario, d, shard, own)
            if apart == 1:
                return core
            made = block_mask(float(d.batch * d.seq * d.full_seq), self.indexer.choices, apart)
            return replace(core, forward=(made, *core.forward))
        forward, backward = self._kernel(d, "attention", F), self._kernel(d, "attention_backward", I)
        return core_part(d, own, (own,), (forward,), (backward,))

    def _kernel(self, d: Dims, name: str, phase: Phase) -> Compute:
        heads, kv_heads = self.heads_of(d.tp)
        width, value = self.widths
        passes = 1 if phase is F else 2
        slots = self.indexer.slots(d.full_seq)
        shape = (d.tokens * kv_heads, 1, 1, heads // kv_heads, slots, width, value, 0)
        moved = passes * d.tokens * (heads + kv_heads) * (width + value) * d.act_bytes
        return sparse_kernel(name, phase, shape, d.act, moved)

    def sequence_bytes(self, d: ServingDims, length: float) -> float:
        """Keys and values of all tokens, and the indexer's keys in the activations' format."""
        return super().sequence_bytes(d, length) + self.indexer.cache_bytes(length, d.act_bytes)

    def serve(self, d: ServingDims, tokens: int) -> Program:
        """The linear part of grouped queries, with the indexer's projection, norms and rope."""
        first, *rest = super().serve(d, tokens)
        index = served_linear(d, self.indexer.matrix(self.hidden), tokens)
        return (first, *index, *self.indexer.made(d.act, d.act_bytes, tokens), *rest)

    def prefill(self, d: ServingDims, batch: int, q_len: int, kv_len: int) -> Program:
        """The core for prompts: grouped queries' while a query sees all keys, else scores and the sparse kernel."""
        if self._sees_all(kv_len):
            return super().prefill(d, batch, q_len, kv_len)
        index = self.indexer.scores(batch, q_len, kv_len, d.act)
        if not d.fused_attention:
            return (*index, *super().prefill(d, batch, q_len, kv_len))
        (heads, kv_heads), (width, value) = self.heads_of(d.tp), self.widths
        shape = (batch * q_len * kv_heads, 1, 1, heads // kv_heads, self.indexer.slots(kv_len), width, value, 0)
        moved = batch * (width + value) * (q_len * heads * d.act_bytes + kv_len * kv_heads * d.kv_bytes)
        return (*index, sparse_kernel("prefill", F, shape, d.act, moved))

    def decode(self, d: ServingDims, batch: int, kv_len: int, queries: int = 1) -> Program:
        """`queries` tokens of each of `batch` sequences: scores of all cached keys, then the keys and values that each
        token has chosen are read."""
        index = self.indexer.scores(batch, queries, kv_len, d.act)
        if self._sees_all(kv_len) or not d.fused_attention:
            return (*index, *super().decode(d, batch, kv_len, queries))
        return (*index, *super().decode(d, batch * queries, self.indexer.slots(kv_len)))
