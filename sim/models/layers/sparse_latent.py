"""DeepSeek's sparse attention: latent attention over the keys that an indexer selects (DeepSeek-V3.2-Exp, 2025, 2.1).

In multi-query mode all heads read one latent of a token, so a kernel reads a query's selected latents once for all
heads (FlashMLA, Megatron's `sparse_mla`): the up-projection of keys is taken to the queries, that of values to the
result. Kernels compute all `top_k` places of a query, the empty ones of early queries too: on an H200 8,192 tokens take
FlashMLA 3.98 ms behind 128 tokens and behind 12,288 (NVIDIA AIConfigurator 0.12, glm5_dsa_attn_module).

A sequence of at most `top_k` tokens is dense latent attention. So is the warm-up (`training.indexer: warm_up`), and
separate operators (`attention: unfused`) or Transformers mask what is not selected: keys and values of every head, all
pairs computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Program
from sim.models.activation_memory.recompute_modules import inside
from sim.models.attention.context_parallel import gathered_blocks
from sim.models.attention.core import Core
from sim.models.attention.sparse_kernel import sparse_kernel
from sim.models.dims import Dims, Shard, ceil_div
from sim.models.layers.indexer import IndexedKeys, Indexer, index_operator, scores
from sim.models.layers.indexer_of_transformers import selection_mask
from sim.models.layers.latent import LatentAttention, latent_norm
from sim.models.layers.matrix import Matrix
from sim.models.layers.shared_vectors import latents_shared, per_head, sparse_core
from sim.models.linear import linear
from sim.models.operators import F, Operator
from sim.models.serving.latents import queries_joined
from sim.models.serving.operators import ServingDims

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario

LEAST_HEADS = 64  # of a served kernel; fewer are padded (FlashMLA)
FP8_SCALED = 128  # numbers of an 8-bit latent that share a 32-bit scale; the rope key stays in 16 bits (FlashMLA)


class SparseLatentAttention(LatentAttention, frozen=True, kw_only=True):
    """Latent attention with an `indexer`. `selects` false: it attends to what the indexer of an earlier layer selected
    (Hunyuan 4), and has none itself."""

    indexer: Indexer
    selects: bool = True

    def matrices(self, tp: int = 1) -> tuple[Matrix, ...]:
        """Return the matrices of latent attention, with the indexer's before the last two."""
        *first, up, out = (*self._gate(tp), *self.projections(tp))
        return (*first, *self._index_matrices, up, out)

    @property
    def _index_matrices(self) -> tuple[Matrix, ...]:
        assert self.query_rank is not None
        return self.indexer.matrices(self.hidden, self.query_rank) if self.selects else ()

    def served_matrices(self, d: ServingDims) -> tuple[Matrix, ...]:
        """The indexer's key and its heads' weights as one matmul in 16 bits, where the engine has it so."""
        found = self.matrices(d.tp)
        if not d.latents.merged_index or not self.selects:
            return found
        *before, key, weights, up, out = found
        widths = (key.width, weights.width)
        return (*before, Matrix("index_key_weights", self.hidden, widths, "plain", sixteen_bit=True), up, out)

    def other_parameters(self) -> int:
        """Norms of latents and of the indexer's key."""
        return super().other_parameters() + (self.indexer.norm_parameters if self.selects else 0)

    def key(self, seq_len: int) -> str:
        """The indexer's sizes."""
        x = self.indexer
        return f" indexer={x.heads},{x.head_dim},{x.top_k}" + ("" if self.selects else " reused")

    def seen_keys(self, length: int) -> float | None:
        """Keys that a query attends to in the mean; None where it is all of them."""
        return None if length <= self.indexer.top_k else self.indexer.selected(length)

    def core_flops(self, seq_len: int, causal_half: bool) -> float:
        """Main attention over the selected keys, in the widths of the model's heads whatever the kernel multiplies, and
        the indexer; less the input gradients of its matrices, which nobody asks for."""
        spared = 2.0 * sum(m.elements for m in self._index_matrices)
        index = self.indexer.core_flops(seq_len, causal_half) if self.selects else 0.0
        return super().core_flops(seq_len, causal_half) + index - spared

    def indexer_gradient_flops(self, seq_len: int) -> float:
        """Return what of a token's model FLOPs is for the indexer's gradients: of scores, and 2 for each weight."""
        if not self.selects:
            return 0.0
        return self.indexer.score_gradient_flops(seq_len) + 2.0 * sum(m.elements for m in self._index_matrices)

    def train(self, scenario: Scenario, d: Dims, shard: Shard) -> tuple[Operator, ...]:
        """Latents, indexer, and the core over what it selects."""
        x, p = self.indexer, scenario.parallelism
        mode = scenario.for_training.indexer
        own = Core(d.seq, d.seq, 1, 1, 1, 1)
        blocks = (own,) if d.cp == 1 else gathered_blocks(own, d.cp, shard.cp_rank, p.cp_split)
        pieces = tuple((b.q_len, b.kv_len) for b in blocks)
        keys = IndexedKeys(d.batch, pieces, striped=d.cp > 1 and p.cp_split == "striped")
        dense = mode == "warm_up" or d.full_seq <= x.top_k
        trained = mode != "frozen" and not d.framework.masks_unselected
        indexer: tuple[Operator, ...] = ()
        if self.selects:
            indexer = (index_operator(x, d, self, keys, trained, dense, mode == "warm_up"),)
        if dense or d.framework.masks_unselected or not d.fused_attention:
            masked = d.framework.masks_unselected and d.fused_attention  # a mask of numbers for all pairs
            core = replace(self.core(d), causal=dense and not masked, masked=masked)
            parts = self.expanded(scenario, d, shard, core)
            chosen = (*indexer, *self._selection_mask(d, keys)) if masked else indexer
            return (*parts[:2], *chosen, *parts[2:])  # behind the query latent, its input
        return self._absorbed(d, indexer, x.slots(d.full_seq))

    def _selection_mask(self, d: Dims, keys: IndexedKeys) -> tuple[Operator, ...]:
        """What makes the selected keys a mask, in layers that reuse an earlier selection too."""
        slots = float(d.tokens * self.indexer.slots(keys.kv_len))
        pairs = float(keys.batch * sum(q * kv for q, kv in keys.pieces))
        return (Operator("index_attention_mask", (selection_mask(pairs, slots),)),)

    def _absorbed(self, d: Dims, indexer: tuple[Operator, ...], slots: int) -> tuple[Operator, ...]:
        """Operators of the multi-query mode; the latents' rope key is rotated, and gathered over tp with the latent."""
        *query, kv_down, _, out = self.projections(d.tp)
        heads = ceil_div(self.heads, d.tp)
        down, up = (linear(d, m.linear(d.rows if m.split == "plain" else d.tokens)) for m in query)
        shared = (latents_shared(d, self.latent_rank + self.rope_width),) if d.tp > 1 else ()
        return (
            down,
            *self._normed(d, self.query_rank or 0),
            *indexer,
            *inside("mla_up_proj", (up,)),
            linear(d, kv_down.linear(d.rows, False)),
            latent_norm(d, "kv", self.latent_rank),
            *inside("mla_up_proj", self.rotary(d, heads)),
            *shared,
            *inside("mla_up_proj", (per_head(d, "query_absorb", heads, self.plain_width, self.latent_rank, True),)),
            *(linear(d, gate.linear(d.tokens, False)) for gate in self._gate(d.tp)),
            sparse_core(d, heads, slots, self.shared_width, self.latent_rank, sinks=heads if self.sinks else 0),
            per_head(d, "value_expand", heads, self.latent_rank, self.value_width, False),
            *self.gating(d),
            linear(d, replace(out.linear(d.tokens), original=d.saves_originals)),
        )

    def sequence_bytes(self, d: ServingDims, length: float) -> float:
        """Latents and rope keys as the cache keeps them, and the indexer's keys in 8 bits."""
        return super().sequence_bytes(d, length) + (self.indexer.key_cache_bytes if self.selects else 0.0) * length

    def entry_bytes(self, d: ServingDims) -> float:
        """An 8-bit latent has a 32-bit scale for 128 numbers, its rope key 16 bits: 656 bytes (FlashMLA's README)."""
        if d.kv_bytes != 1.0:
            return super().entry_bytes(d)
        return self.latent_rank + FP32_BYTES * ceil_div(self.latent_rank, FP8_SCALED) + self.rope_width * d.act_bytes

    def rotated_width(self, tp: int) -> int:
        """Numbers of a token that the rope-and-cache kernel reads and writes, the indexer's queries and key too."""
        index = (self.indexer.heads + 1) * self.indexer.head_dim if self.selects else 0
        return super().rotated_width(tp) + index

    def prefill(self, d: ServingDims, batch: int, q_len: int, kv_len: int) -> Program:
        """Up to `top_k` keys as dense latent attention, which is quicker there (the report's masked mode for short
        prompts); beyond in multi-query mode."""
        if kv_len <= self.indexer.top_k or not d.fused_attention:
            return super().prefill(d, batch, q_len, kv_len)
        return self._served(d, batch, q_len, kv_len, "prefill")

    def decode(self, d: ServingDims, batch: int, kv_len: int, queries: int = 1) -> Program:
        """`queries` tokens of each of `batch` sequences: scores of all cached keys, then the latents that each token
        selects, in a list of its own."""
        index = self._index(d, (batch, queries, kv_len), self.indexer.key_read_bytes(queries))
        if not d.fused_attention:
            return (*index, *super().decode(d, batch, kv_len, queries))
        return (*index, *super().decode(d, batch * queries, self.indexer.slots(kv_len)))

    def _index(self, d: ServingDims, rows: tuple[int, int, int], key_bytes: float) -> Program:
        return scores(self.indexer, rows, d.index_dtype, key_bytes=key_bytes) if self.selects else ()

    def _served(self, d: ServingDims, batch: int, q_len: int, kv_len: int, name: str) -> Program:
        heads, rank, width = ceil_div(self.heads, d.tp), self.latent_rank, self.latent_rank + self.rope_width
        tokens, slots = batch * q_len, self.indexer.slots(kv_len)
        shape = (tokens, 1, 1, max(heads, LEAST_HEADS), slots, width, rank, 0)
        moved = tokens * heads * (width + rank) * d.act_bytes + batch * kv_len * self.entry_bytes(d)
        absorb, expand = self._absorbing(d, tokens)
        return (
            *self._index(d, (batch, q_len, kv_len), self.indexer.key_cache_bytes),
            *absorb,
            *queries_joined(d, tokens, self._heads(d.tp)),
            sparse_kernel(name, F, shape, d.act, moved),
            *expand,
        )
