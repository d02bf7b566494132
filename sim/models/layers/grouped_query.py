"""Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245); with as many key heads as heads, multi-head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from sim.core.program import Compute, Program
from sim.models.attention import Core
from sim.models.dims import Dims, ceil_div
from sim.models.elementwise import copied, norm, rope
from sim.models.layers.matrix import Matrix
from sim.models.linear import linear
from sim.models.operators import F, Operator
from sim.models.served import ServingDims, prefill_attention, unfused_attention
from sim.models.window import Window
from sim.prices.roofline import ATTENTION_DECODE, shape_flops


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """Sizes of the whole model. `qkv_bias`: query, key and value have biases although nothing else has (Qwen2);
    `qk_norm`: an RMS norm of `head_dim` weights on queries and one on keys (Qwen3). `projections`: into how many
    matmuls the model's own code splits query, key and value (GPT-2 one, Llama three). `window`: None if every query
    sees all keys before it. `qk_norm_over`: the norms' width, a head or all of them (OLMo 2). `sinks`: a learned score
    of each query head (gpt-oss), which kernels add to a row's softmax at no cost."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool
    qkv_bias: bool
    qk_norm: bool
    rope: bool
    projections: int
    window: Window | None = None
    qk_norm_over: Literal["head", "all_heads"] = "head"
    sinks: bool = False

    @property
    def widths(self) -> tuple[int, int]:
        """Width of a query or key head, and of a value head."""
        return self.head_dim, self.head_dim

    def heads_of(self, tp: int) -> tuple[int, int]:
        """Query heads and key heads of one rank; key heads are copied where tp exceeds them."""
        return ceil_div(self.heads, tp), max(1, self.kv_heads // tp)

    def matrices(self, tp: int = 1) -> tuple[Matrix, ...]:
        """Projections on one of `tp` ranks."""
        queries, keys = (n * self.head_dim for n in self.heads_of(tp))
        return (
            Matrix("qkv", self.hidden, (queries, keys, keys), "column", self.bias or self.qkv_bias, target="qkv"),
            Matrix("attention_out", queries, (self.hidden,), "row", self.bias, target="attention_out"),
        )

    def core(self, d: Dims) -> Core:
        """Shapes of the attention on one rank's tokens."""
        return Core(d.seq, d.seq, *self.heads_of(d.tp), *self.widths, window=self.window)

    def train(self, d: Dims, core: Operator) -> tuple[Operator, ...]:
        """Projection to query, key and value, their norms, rope, `core`, output projection."""
        qkv, out = self.matrices(d.tp)
        merged = self.projections == 1 or d.framework.merges_projections
        turn = (rope(d, d.tokens * sum(qkv.outputs[:2])),) if self.rope else ()
        if self.qk_norm:
            turn = (*self._head_norms(d), *turn)
        if self.sinks:
            core = replace(core, params=self.heads_of(d.tp)[0])
        if d.framework.attention_copies:
            turn = (*turn, copied("attention_copies", d, d.framework.attention_copies * d.tokens * qkv.outputs[0]))
        before = qkv.linear("attention", d.tokens, not d.framework.rebuilds_pointwise, merged)
        return linear(d, before), *turn, core, linear(d, out.linear("attention", d.tokens))

    def _head_norms(self, d: Dims) -> tuple[Operator, ...]:
        names = zip(("query_norm", "key_norm"), self.heads_of(d.tp), strict=True)
        if self.qk_norm_over == "all_heads":
            return tuple(norm(d, name, "rmsnorm", d.tokens, heads * self.head_dim, False) for name, heads in names)
        return tuple(norm(d, name, "rmsnorm", d.tokens * heads, self.head_dim, False) for name, heads in names)

    def norm_elements(self) -> int:
        """Weights of the norms inside the attention, and sinks."""
        norms = self.heads + self.kv_heads if self.qk_norm_over == "all_heads" else 2
        return (norms * self.head_dim if self.qk_norm else 0) + (self.heads if self.sinks else 0)

    def cache_elements(self, tp: int) -> int:
        """Cached numbers of one token on one rank: its key and its value for each key head."""
        return 2 * self.heads_of(tp)[1] * self.head_dim

    def seen_keys(self, length: int) -> float | None:
        """Keys that a query of a sequence of `length` sees in the mean; None where no window hides any."""
        if self.window is None or self.window.tokens >= length:
            return None
        return self.window.pairs(length, length) / length

    def kept_tokens(self, length: float) -> float:
        """Tokens of a sequence of `length` whose keys and values the cache keeps."""
        return length if self.window is None else self.window.kept(length)

    def projected(self, tp: int) -> tuple[Matrix, ...]:
        """What every token of an iteration is multiplied by before its attention."""
        return self.matrices(tp)[:-1]

    def rotated_width(self, tp: int) -> int:
        """Numbers of a token that the rope-and-cache kernel of serving engines reads and writes."""
        heads, kv_heads = self.heads_of(tp)
        return (heads + 2 * kv_heads) * self.head_dim

    def expanded_width(self, tp: int) -> int:
        """Numbers of a token's queries, keys and values in prefill, on one rank."""
        return self.rotated_width(tp)

    def prefill(self, d: ServingDims, batch: int, q_len: int, kv_len: int) -> Program:
        """`batch` prompt chunks of `q_len` tokens, each the last of the `kv_len` that they see."""
        heads, kv_heads = self.heads_of(d.tp)
        return prefill_attention(d, batch, Core(q_len, kv_len, heads, kv_heads, *self.widths, window=self.window))

    def decode(self, d: ServingDims, batch: int, kv_len: int) -> Program:
        """One new token of each of `batch` sequences against a cache of `kv_len`: bound by reading the cache."""
        heads, kv_heads = self.heads_of(d.tp)
        kv_len = max(1, round(self.kept_tokens(kv_len)))
        if not d.fused_attention:
            return unfused_attention(d, batch, Core(1, kv_len, heads, kv_heads, *self.widths))
        read = kv_heads if d.grouped_decode else heads
        moved = 2.0 * batch * self.head_dim * (heads * d.act_bytes + read * kv_len * d.kv_bytes)
        shape = (batch, heads, read, kv_len, self.head_dim)
        flops = shape_flops(ATTENTION_DECODE, shape)
        return (Compute("attention", ATTENTION_DECODE, shape, d.act, flops, moved, F),)
