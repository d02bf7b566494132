"""Indexers that choose whole blocks of keys for grouped queries (MiniMax M3, Qwen 4).

A few heads and one key of a token come from the hidden state; each passes an RMS norm, then rope. MiniMax M3:
every head scores all keys, the best score of a block's keys is the block's, and each head chooses for a part of the
groups of query heads; the block that the query is in is always chosen (`MiniMaxM3VLIndexer` in
transformers/models/minimax_m3_vl/modeling_minimax_m3_vl.py). Qwen 4: the keys of a whole block are averaged before
their norm, and the heads' scores of such a key pass a ReLU and are added up; the tokens of the last, unfinished block
are seen as well (`Qwen4ExpTextQSAIndexer` in transformers/models/qwen4_exp/modeling_qwen4_exp.py).

What is chosen are places alone, so that no gradient comes to an indexer from the model's loss. Its weights are frozen
here, as they are in Transformers; a loss of its own is not described.

Prices: scores are one kernel, as those of DeepSeek's indexer (`sim.models.layers.indexer`), which writes one 32-bit
score for each query and block, of each head where each chooses. The selection takes as long as that one's.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from sim.core.attention_pairs import attended_pairs
from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, Program, Saved
from sim.models.dims import Dims, ceil_div
from sim.models.layers.blocks_of_transformers import separate_block_scores
from sim.models.layers.indexer import SELECT_READS, score_kernel
from sim.models.layers.indexer_of_transformers import INDEX_BYTES
from sim.models.layers.matrix import Matrix
from sim.models.linear import linear
from sim.models.operators import F, Operator, memory_op


class BlockIndexer(Struct, frozen=True):
    """Sizes: `heads` queries of `head_dim` a token and one key; a query attends to the `top_k` tokens of the best
    blocks of `block` tokens. `pools`: what of a block becomes one, its keys' scores or its keys."""

    heads: int
    head_dim: int
    top_k: int
    block: int
    pools: Literal["scores", "keys"]

    @property
    def choices(self) -> int:
        """Selections of a token, each for a part of the query heads."""
        return self.heads if self.pools == "scores" else 1

    @property
    def beside(self) -> int:
        """Tokens that a query may see beside chosen blocks: those of an unfinished one."""
        return 0 if self.pools == "scores" else self.block - 1

    def matrix(self, hidden: int) -> Matrix:
        """The projection to queries and key, whole on every rank."""
        return Matrix("index_query_key", hidden, (self.heads * self.head_dim, self.head_dim), "plain")

    @property
    def norm_parameters(self) -> int:
        """Weights of the queries' and the key's norm."""
        return 2 * self.head_dim

    def slots(self, kv_len: int) -> int:
        """Keys that a kernel computes for each query: as many as it may see, the empty places too."""
        return min(self.top_k + self.beside, kv_len)

    def selected(self, length: int) -> float:
        """Keys that a query of a sequence of `length` tokens attends to in the mean.

        The query at place t (from 1) sees all t keys up to w = top_k + `beside`. Behind, its last block has 1 to
        `block` tokens and is one of those chosen (pooled scores), or has 0 to `block` − 1 and comes on top.
        """
        whole = min(length, self.top_k + self.beside)
        rest = length - whole
        blocks, more = divmod(rest, self.block)
        places = blocks * (self.block * (self.block - 1) // 2) + more * (more - 1) // 2  # sum of 0 to block - 1
        first = self.top_k - self.block + 1 if self.pools == "scores" else self.top_k
        return (whole * (whole + 1) / 2 + rest * first + places) / length

    def keys(self, length: int) -> int:
        """Keys of a sequence of `length` tokens that queries are scored against."""
        return length if self.pools == "scores" else length // self.block

    def core_flops(self, seq_len: int, causal_half: bool) -> float:
        """Model FLOPs of a token outside matrices: scores, forward alone."""
        return 2.0 * self.heads * self.head_dim * self.keys(seq_len) * (0.5 if causal_half else 1.0)

    def cache_bytes(self, length: float, element_bytes: float) -> float:
        """Cached keys of a sequence: one a token, or one a block and those of an unfinished block."""
        kept = length if self.pools == "scores" else length / self.block + self.block - 1
        return self.head_dim * element_bytes * kept

    def scores(self, batch: int, q_len: int, kv_len: int, dtype: str) -> Program:
        """Scores of the last `q_len` of `kv_len` tokens against all keys before them, and the selection."""
        keys = self.keys(kv_len)
        if not keys:
            return ()
        pooled = self.pools == "keys"
        seen = ceil_div(self.keys(kv_len - q_len + 1) + keys, 2) if pooled else keys  # by queries in the mean
        pairs = float(batch) * (q_len * seen if pooled else attended_pairs(q_len, kv_len, True))
        written = pairs * FP32_BYTES * (1.0 if pooled else self.heads / self.block)
        operands = batch * self.head_dim * (q_len * self.heads + keys) * 2.0
        sizes, causal = (self.heads, self.head_dim), not pooled and q_len > 1
        kernel = score_kernel((batch, q_len, max(1, seen)), sizes, causal, dtype, operands + written)
        if kv_len <= self.top_k + self.beside:  # nothing to choose
            return (kernel,)
        chosen = batch * q_len * self.choices * (self.top_k // self.block) * INDEX_BYTES
        number = written / FP32_BYTES
        return kernel, memory_op("index_select", F, "softmax", number, SELECT_READS * written + chosen, dtype)

    def made(self, act: str, element_bytes: float, tokens: int) -> tuple[Compute, ...]:
        """Norms and rope of queries and keys, and the keys' average: one kernel each, read and written."""
        n = tokens * (self.heads + 1) * self.head_dim
        names = (("index_norm", "norm"), ("index_rope", "elementwise"))
        made = tuple(memory_op(name, F, kind, n, 2 * n * element_bytes, act) for name, kind in names)
        if self.pools == "scores":
            return made
        keys = tokens * self.head_dim
        return (memory_op("index_pool", F, "elementwise", keys, keys * element_bytes, act), *made)

    def operator(self, d: Dims, hidden: int, used: bool, keeps: bool) -> Operator:
        """The indexer in training, forward alone, behind the projection that reads (and gathers) the same input.

        `used`: scores decide what is attended to; without them keys alone are made. `keeps`: a sparse kernel's backward
        reads the chosen places.
        """
        matrix = self.matrix(hidden)
        made = self.made(d.act, d.act_bytes, d.tokens)
        rows, scored = (d.batch, d.full_seq, d.full_seq), self.scores(d.batch, d.full_seq, d.full_seq, d.act)
        if used and d.framework.masks_unselected and self.pools == "scores":
            sizes = self.heads, self.head_dim, self.block
            made, scored = made[:1], separate_block_scores(sizes, rows, (d.act, d.act_bytes))
        forward = (
            *linear(d, matrix.linear(d.tokens, False)).forward,
            *made,
            *(scored if used else ()),
        )
        params = matrix.parameters + self.norm_parameters
        return Operator("block_indexer", forward, saved=self._kept(d) if keeps else (), frozen=params)

    def _kept(self, d: Dims) -> tuple[Saved, ...]:
        places = self.choices * (self.top_k // self.block)
        return (Saved("selected blocks", d.tokens * places * INDEX_BYTES),)
