"""DeepSeek V4's attention: one vector of a token is key and value of all heads; old tokens are compressed.

A query sees its window, and of the tokens before it one vector for each `rate` tokens: a weighted sum of theirs, by a
softmax over the window of `rate` tokens for each number (DeepSeek-V4 report, 2026, section 2.3; `DeepseekV4Attention`
in transformers/models/deepseek_v4/modeling_deepseek_v4.py). With an `indexer` (layers of kind compressed_sparse) it
sees the best `top_k` of these vectors, and each is made of two windows' tokens, so that its projections are twice as
wide. Queries come from a latent, a norm without weights follows; rope rotates the last `rope_width` numbers of queries
and keys, and rotates the result's back, as values were rotated too. The result is brought to the hidden size by two
matrices, the first one for each group of heads.

A kernel reads what a query sees once for all its heads, as in DeepSeek's sparse attention (FlashMLA): window and
selected vectors are one list, of which the empty places of early queries are computed too; of `rate` tokens' vectors
that no indexer selects, those that are there. In separate operators (`attention: unfused`), and in Transformers, all
pairs of tokens and vectors are computed and masked. Left out: padding of the cache's pages, and the places that a
draft needs in the window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.operator_kinds import ATTENTION_DECODE
from sim.core.program import Compute, ModelPart, NeededBy, Program, Saved, TensorRole
from sim.inputs.windows import Window
from sim.models.attention.context_parallel import attention_core
from sim.models.attention.core import Core, attention_flops
from sim.models.attention.latent_kernels import latent_rope
from sim.models.attention.sparse_kernel import sparse_kernel
from sim.models.dims import Dims, Shard, ceil_div
from sim.models.layers.compressed_index import CompressedIndexer
from sim.models.layers.indexer import IndexedKeys, index_operator, scores
from sim.models.layers.latent import LATENT_HEADS, latent_norm
from sim.models.layers.matrix import Matrix
from sim.models.layers.shared_vectors import latents_shared, per_head, sparse_core
from sim.models.layers.sparse_latent import LEAST_HEADS
from sim.models.linear import linear
from sim.models.norm import norm
from sim.models.operators import F, I, Operator, gemm, keeping, memory_op
from sim.models.serving.operators import ServingDims, rope_cache, served_linear, unfused_attention

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario

# vLLM's `fp8_ds_mla` cache of V4: numbers without rope in 8 bits, those with it in 16, a scale of a byte for each 64 of
# the former, padded to 8: 448 + 128 + 8 = 584 bytes.
SCALED, SCALE_BYTES = 64, 8


class CompressedAttention(Struct, frozen=True):
    """Sizes of the whole model. `rate` None: a layer with a window alone. `indexer` None: a query sees every compressed
    vector before it."""

    part: ClassVar = ModelPart.ATTENTION

    hidden: int
    heads: int
    head_dim: int
    rope_width: int
    query_rank: int
    groups: int
    output_rank: int
    window: Window
    rate: int | None = None
    indexer: CompressedIndexer | None = None

    @property
    def widths(self) -> tuple[int, int]:
        """Width of a query or key head, and of a value head."""
        return self.head_dim, self.head_dim

    @property
    def shared_width(self) -> int:
        """Numbers of a token that all heads read."""
        return self.head_dim

    @property
    def compressed_width(self) -> int:
        """Numbers of a token that go into compressed vectors: into one, or with an indexer into two."""
        return 0 if self.rate is None else self.head_dim * (1 if self.indexer is None else 2)

    def vectors(self, length: int) -> int:
        """Compressed vectors of a sequence of `length` tokens."""
        return 0 if self.rate is None else length // self.rate

    def matrices(self, tp: int = 1) -> tuple[Matrix, ...]:
        """All matrices on one of `tp` ranks; those of keys, compression and indexer are whole on every rank."""
        *first, down, up = self._projections(tp)
        c = self.compressed_width
        compress = (Matrix("compress", self.hidden, (c, c), "plain"),) if c else ()
        index = () if self.indexer is None else self.indexer.matrices(self.hidden, self.query_rank)
        return (*first, *compress, *index, down, up)

    def _projections(self, tp: int) -> tuple[Matrix, ...]:
        heads, groups = ceil_div(self.heads, tp), ceil_div(self.groups, tp)
        return (
            Matrix("query_down", self.hidden, (self.query_rank,), "plain", module="qkv_linear"),
            Matrix("query_up", self.query_rank, (heads * self.head_dim,), "column"),
            Matrix("key_value", self.hidden, (self.head_dim,), "plain"),
            Matrix("output_down", self.heads // self.groups * self.head_dim, (groups * self.output_rank,), "column"),
            Matrix(
                "attention_out",
                groups * self.output_rank,
                (self.hidden,),
                "row",
                target="attention_out",
                module="attn_proj",
            ),
        )

    def other_parameters(self) -> int:
        """Norms of the latent, of keys and of compressed vectors, sinks, and the places' biases of compression."""
        own = self.query_rank + self.head_dim + self.heads
        if self.rate is not None:
            own += self.rate * self.compressed_width + self.head_dim
        return own + (0 if self.indexer is None else self.indexer.norm_parameters)

    def seen_keys(self, length: int) -> float:
        """Tokens of the window and compressed vectors that a query of a sequence of `length` sees in the mean.

        The query at place t (from 1) sees ⌊t / rate⌋ vectors, at most k. With m = min(k, ⌊n / rate⌋) these are
        rate·m·(m − 1)/2 + m·(n − m·rate + 1) for all queries of n tokens.
        """
        seen = self.window.pairs(length, length)
        if self.rate is not None:
            m = self.vectors(length) if self.indexer is None else min(self.indexer.top_k, self.vectors(length))
            seen += self.rate * m * (m - 1) // 2 + m * (length - m * self.rate + 1)
        return seen / length

    def slots(self, q_len: int, kv_len: int) -> int:
        """Vectors that a kernel computes for each of the last `q_len` of `kv_len` tokens, in the mean."""
        near, last = min(self.window.tokens, kv_len), self.vectors(kv_len)
        if self.indexer is not None:
            return near + min(self.indexer.top_k, last)
        return near + (last + self.vectors(kv_len - q_len + 1) + 1) // 2

    def key(self, seq_len: int) -> str:
        """Return what of a block's key the model's own sizes do not say."""
        return f" rate={self.rate} seen_keys={self.seen_keys(seq_len):g}"

    def core_flops(self, seq_len: int, causal_half: bool) -> float:
        """Model FLOPs of a token outside matrices, forward and backward: attention to what a query sees, and the
        indexer's scores, less the input gradients of its matrices."""
        flops = attention_flops(self.heads, self.widths, self.seen_keys(seq_len), seq_len, causal_half)
        x = self.indexer
        if x is None:
            return flops
        spared = 2.0 * sum(m.elements for m in x.matrices(self.hidden, self.query_rank))
        return flops + x.core_flops(max(1, self.vectors(seq_len)), causal_half) - spared

    def indexer_gradient_flops(self, seq_len: int) -> float:
        """Return what of a token's model FLOPs is for the indexer's gradients."""
        x = self.indexer
        if x is None:
            return 0.0
        weights = sum(m.elements for m in x.matrices(self.hidden, self.query_rank))
        return x.score_gradient_flops(max(1, self.vectors(seq_len))) + 2.0 * weights

    def train(self, scenario: Scenario, d: Dims, shard: Shard) -> tuple[Operator, ...]:
        """Queries, keys, compressed vectors and what the indexer selects, the core, the grouped output projection."""
        query_down, query_up, key_value, _, out = self._projections(d.tp)
        heads, groups = ceil_div(self.heads, d.tp), ceil_div(self.groups, d.tp)
        masks = d.framework.masks_unselected or not d.fused_attention
        mode = scenario.for_training.indexer
        shared = self.head_dim + ceil_div(self.head_dim * self.vectors(d.full_seq), d.full_seq)
        return (
            linear(d, query_down.linear(d.rows)),
            latent_norm(d, "query", self.query_rank),
            *self._selection(d, mode == "trained" and not d.framework.masks_unselected),
            linear(d, query_up.linear(d.tokens)),
            self._query_norm(d, heads),
            linear(d, key_value.linear(d.rows, False)),  # its input is that of the first matrix
            latent_norm(d, "key", self.head_dim),
            latent_rope(d, d.tokens * (heads + 1) * self.rope_width),
            *self._compression(d),
            *((latents_shared(d, shared),) if d.tp > 1 else ()),
            self._dense_core(scenario, d, shard, heads) if masks else self._core(d, heads),
            latent_rope(d, d.tokens * heads * self.rope_width),
            per_head(d, "output_down", groups, self.heads // self.groups * self.head_dim, self.output_rank, masks),
            linear(d, replace(out.linear(d.tokens), original=d.saves_originals)),
        )

    def _query_norm(self, d: Dims, heads: int) -> Operator:
        """A norm of each query head without weights; separate operators keep the queries beside their fp32 copy."""
        own = norm(d, "query_norm", "rmsnorm", d.tokens * heads, self.head_dim, 0)
        if not d.framework.norms_keep_operators or d.act_bytes == FP32_BYTES:
            return own
        beside = Saved("query_norm input", d.tokens * heads * self.head_dim * d.act_bytes)
        return replace(own, saved=(*own.saved, beside))

    def _selection(self, d: Dims, trained: bool) -> tuple[Operator, ...]:
        """The indexer over compressed vectors; queries lie evenly over the sequence."""
        last = self.vectors(d.full_seq)
        if self.indexer is None or not last:
            return ()
        keys = IndexedKeys(d.batch, ((d.seq, last),), striped=True)
        return (index_operator(self.indexer, d, self, keys, trained, last <= self.indexer.top_k, False),)

    def _compression(self, d: Dims) -> tuple[Operator, ...]:
        """Two projections of every token, a softmax over each window, the weighted sum, its norm and rope.

        Accesses of the 2·c numbers of a token. A compiler makes one kernel of softmax and sum: read (1); backward read
        and written (2). In separate operators, as in Megatron-Core too (its pull request 6404), each series is laid out
        anew (2), gates have their biases added (1), are cast to fp32 and back (3), multiply (1.5) and are summed (0.5);
        backward twice as much.
        """
        c = self.compressed_width
        if not c or self.rate is None:
            return ()
        project = Matrix("compress", self.hidden, (c, c), "plain")
        both, e = 2 * c * d.rows, d.act_bytes
        ahead, kernels = (1.0, 1) if d.framework.fuses_chains else (8.0, 12)
        made = d.rows * self.head_dim / self.rate
        forward = memory_op("compress_pool", F, "softmax", both, (ahead * both + made) * e, d.act, kernels)
        back = memory_op("compress_pool_backward", I, "softmax", both, (2 * ahead * both + made) * e, d.act, kernels)
        size = both * e
        if not d.framework.fuses_chains:  # values, and the softmax in fp32 and cast back
            size = both / 2 * (FP32_BYTES + e + (e if e < FP32_BYTES else 0.0))
        kept = Saved("compression's operands", size, NeededBy.INPUT_GRAD, TensorRole.INPUT)
        params = self.rate * c + self.head_dim
        pool = Operator("compress_pool", (forward,), (back,), (kept,), params=params, backward_bytes=both * e)
        return linear(d, project.linear(d.rows, False)), pool

    def _core(self, d: Dims, heads: int) -> Operator:
        per_token = 1.0 + self.vectors(d.full_seq) / d.full_seq
        slots = self.slots(d.full_seq, d.full_seq)
        return sparse_core(d, heads, slots, self.head_dim, self.head_dim, per_token, heads)

    def _dense_core(self, scenario: Scenario, d: Dims, shard: Shard, heads: int) -> Operator:
        """All tokens and vectors against every query. Sinks are fp32, so that separate operators make the softmax in
        fp32, too, and keep it and its cast."""
        keys = d.seq + self.vectors(d.full_seq)
        own = Core(d.seq, keys, heads, 1, self.head_dim, self.head_dim, causal=False, sinks=True)
        core = replace(attention_core(scenario, d, shard, own), params=heads)
        if not d.framework.softmax_in_fp32 or d.act_bytes == FP32_BYTES:
            return core
        return keeping(core, "softmax output in fp32", d.tokens * heads * (keys + 1) * FP32_BYTES)

    def entry_bytes(self, d: ServingDims) -> float:
        """Bytes of a vector in the cache."""
        if d.kv_bytes != 1.0:
            return self.head_dim * d.kv_bytes
        plain = self.head_dim - self.rope_width
        return plain + self.rope_width * d.act_bytes + ceil_div(ceil_div(plain, SCALED), SCALE_BYTES) * SCALE_BYTES

    def state_bytes(self) -> float:
        """Bytes of a sequence's tokens that no compressed vector holds yet, and of the series before: projections and
        gates in fp32 (`kv_state` and `score_state` of DeepSeek's inference code)."""
        if self.rate is None:
            return 0.0
        windows = 1 if self.indexer is None else 2
        own = 2 * windows * self.rate * self.compressed_width
        return FP32_BYTES * (own + (0 if self.indexer is None else 2 * windows * self.rate * self.indexer.key_width))

    def sequence_bytes(self, d: ServingDims, length: float) -> float:
        """The window's vectors, compressed ones, the indexer's keys in 8 bits, and the state of compression."""
        total = self.entry_bytes(d) * self.window.kept(length) + self.state_bytes()
        if self.rate is not None:
            index = 0.0 if self.indexer is None else self.indexer.key_cache_bytes
            total += (self.entry_bytes(d) + index) * length / self.rate
        return total

    def serve(self, d: ServingDims, tokens: int) -> Program:
        """Return what depends on an iteration's number of tokens alone, up to the sum over tp."""
        *first, down, out = self.matrices(d.tp)
        groups, width = ceil_div(self.groups, d.tp), self.heads // self.groups * self.head_dim
        items = [item for matrix in first for item in served_linear(d, matrix, tokens)]
        items.append(rope_cache(d, tokens, self.expanded_width(d.tp)))
        if self.rate is not None:
            n = 2 * self.compressed_width * tokens
            items.append(memory_op("compress_pool", F, "softmax", n, n * (d.act_bytes + FP32_BYTES), d.act))
        unturn = tokens * ceil_div(self.heads, d.tp) * self.rope_width
        items.append(memory_op("output_rope", F, "elementwise", unturn, 2 * unturn * d.act_bytes, d.act))
        items.append(gemm(down.name, F, tokens, self.output_rank, width, d.act, groups))
        return (*items, *served_linear(d, out, tokens))

    def expanded_width(self, tp: int) -> int:
        """Numbers of a token's queries, key and indexer that the rope-and-cache kernel reads and writes."""
        index = 0 if self.indexer is None else (self.indexer.heads + 1) * self.indexer.head_dim
        return (ceil_div(self.heads, tp) + 1) * self.head_dim + index

    def prefill(self, d: ServingDims, batch: int, q_len: int, kv_len: int) -> Program:
        """`batch` prompt chunks of `q_len` tokens, each the last of the `kv_len` that they see."""
        heads, slots, tokens = ceil_div(self.heads, d.tp), self.slots(q_len, kv_len), batch * q_len
        if not d.fused_attention:
            own = Core(q_len, slots, heads, 1, *self.widths, causal=False)
            return (*self._index(d, batch, q_len, kv_len), *unfused_attention(d, batch, own))
        shape = (tokens, 1, 1, max(heads, LEAST_HEADS), slots, *self.widths, 0)
        read = min(kv_len, q_len + self.window.tokens) + self.vectors(kv_len)
        moved = 2 * tokens * heads * self.head_dim * d.act_bytes + batch * read * self.entry_bytes(d)
        return (*self._index(d, batch, q_len, kv_len), sparse_kernel("prefill", F, shape, d.act, moved))

    def decode(self, d: ServingDims, batch: int, kv_len: int, queries: int = 1) -> Program:
        """`queries` tokens of each of `batch` sequences: bound by reading what each sees, as latent attention's."""
        heads, slots, tokens = ceil_div(self.heads, d.tp), self.slots(1, kv_len), batch * queries
        index = self._index(d, batch, queries, kv_len, decodes=True)
        if not d.fused_attention:
            return (*index, *unfused_attention(d, batch, Core(queries, slots, heads, 1, *self.widths)))
        moved = tokens * (slots * self.entry_bytes(d) + 2 * heads * self.head_dim * d.act_bytes)
        flops = 2.0 * tokens * heads * slots * sum(self.widths)
        shape = (tokens, min(heads, LATENT_HEADS), 1, slots, self.head_dim)
        return (*index, Compute("attention", ATTENTION_DECODE, shape, d.act, flops, moved, F))

    def _index(self, d: ServingDims, batch: int, q_len: int, kv_len: int, decodes: bool = False) -> Program:
        """The indexer over compressed vectors; the first of the queries sees fewer than the last."""
        x, last = self.indexer, self.vectors(kv_len)
        if x is None or not last:
            return ()
        seen = max(1, ceil_div(self.vectors(kv_len - q_len + 1) + last, 2))
        read = x.key_read_bytes(q_len) if decodes else x.key_cache_bytes
        return scores(x, (batch, q_len, last), d.index_dtype, seen, read)
