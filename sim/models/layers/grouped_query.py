"""Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245); with as many KV heads as heads, multi-head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from msgspec import Struct
from msgspec.structs import replace

from sim.core.operator_kinds import ATTENTION_DECODE, shape_flops
from sim.core.program import Compute, Item, ModelPart, Program
from sim.inputs.windows import Window
from sim.models.attention.context_parallel import attention_core
from sim.models.attention.core import Core, attention_flops
from sim.models.attention.head_copies import ordered_heads, output_copied, repeated
from sim.models.attention.latent_kernels import rope_of_pairs
from sim.models.attention.masked_windows import masked_window
from sim.models.attention.query_factor import query_factor
from sim.models.attention.split_gradients import clamped, clamped_apart, joined_gradients, split_by_index
from sim.models.dims import Dims, Shard, ceil_div, packed_batch
from sim.models.elementwise import bias_apart, copied
from sim.models.layers.head_gate import element_gate, head_gate, served_element_gate, served_head_gate
from sim.models.layers.head_norms import SUMS_BYTES, head_layer_norm, norms_by_head, sums_over_heads
from sim.models.layers.matrix import Matrix
from sim.models.linear import linear
from sim.models.norm import norm
from sim.models.operators import F, I, Operator, collective, keeping, memory_op
from sim.models.precision.casts import rope_gives_fp32
from sim.models.rope import cosines_repeated, rope, rope_join, scaled_rope
from sim.models.serving.operators import (
    ServingDims,
    norm_quantizes,
    prefill_attention,
    roped_heads,
    served_linear,
    unfused_attention,
)

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario


MEASURED_GROUP = 32  # query heads of a KV head that the measured kernels read once


class GroupedQueryAttention(Struct, frozen=True):
    """Sizes of the whole model. `qkv_bias`: query, key and value have biases although nothing else has (Qwen2);
    `qk_norm`: an RMS norm of `head_dim` weights on queries and one on keys (Qwen3), one without weights (l2), or
    two layer norms. `projections`: into how many matmuls the model's own code splits query, key and value (GPT-2
    one, Llama three). `window`: None if every query sees all keys before it. `qk_norm_over`: the norms' width, a
    head or all of them (OLMo 2).
    `norm_weights`: they have weights. `sinks`: a learned score of each query head (gpt-oss), which kernels add to a
    row's softmax at no cost. `gate`: a second query projection whose sigmoid multiplies the result (Qwen3-Next), or one
    number of each head and token that does (`per_head`: LFM3). `softcap`: scores are capped (Gemma 2). `rope_share`: of
    a head's width, rotated apart and joined to the rest (GLM-4.5); None: whole heads are. `scaled_rope`: what is
    rotated is scaled (gpt-oss). `value_norm`: an RMS norm without weights on each head's values; `values_are_keys`:
    values are what the key projection gives (Gemma 4). `v_head_dim`: the width of a value head where it is not
    `head_dim`."""

    part: ClassVar = ModelPart.ATTENTION

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool
    out_bias: bool
    qkv_bias: bool
    qk_norm: Literal[False, True, "layernorm", "by_head", "l2"]
    rope: bool
    projections: int
    window: Window | None = None
    qk_norm_over: Literal["head", "all_heads"] = "head"
    norm_weights: bool = True
    sinks: bool = False
    gate: Literal[False, True, "per_head"] = False
    softcap: bool = False
    rope_share: float | None = None
    scaled_rope: bool = False
    value_norm: bool = False
    values_are_keys: bool = False
    v_head_dim: int | None = None

    @property
    def widths(self) -> tuple[int, int]:
        """Width of a query or key head, and of a value head."""
        return self.head_dim, self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def weighs_norms(self) -> bool:
        """Whether the norms of queries and keys have weights."""
        return self.qk_norm not in (False, "l2") and self.norm_weights

    def heads_of(self, tp: int) -> tuple[int, int]:
        """Query heads and KV heads of one rank; KV heads are copied where tp exceeds them."""
        return ceil_div(self.heads, tp), max(1, self.kv_heads // tp)

    def matrices(self, tp: int = 1) -> tuple[Matrix, ...]:
        """All matrices on one of `tp` ranks."""
        return self.qkv_and_out(tp)

    def qkv_and_out(self, tp: int) -> tuple[Matrix, Matrix]:
        """Query, key and value (and gate) as one, and the output's, on one of `tp` ranks."""
        heads, kv_heads = self.heads_of(tp)
        queries, keys, of_value = heads * self.head_dim, kv_heads * self.head_dim, self.widths[1]
        values = () if self.values_are_keys else (kv_heads * of_value,)
        gates = (heads,) if self.gate == "per_head" else ()
        return (
            Matrix(
                "qkv",
                self.hidden,
                (queries * (2 if self.gate is True else 1), keys, *values, *gates),
                "column",
                self.bias or self.qkv_bias,
                target="qkv",
                module="qkv_linear",
            ),
            Matrix(
                "attention_out",
                heads * of_value,
                (self.hidden,),
                "row",
                self.out_bias,
                target="attention_out",
                module="attn_proj",
            ),
        )

    def core(self, d: Dims) -> Core:
        """Shapes of the attention on one rank's tokens."""
        sizes = (*self.heads_of(d.tp), *self.widths)
        wide = self.rope and rope_gives_fp32(d)
        return Core(d.seq, d.seq, *sizes, window=self.window, softcap=self.softcap, sinks=self.sinks, wide_keys=wide)

    def train(self, scenario: Scenario, d: Dims, shard: Shard) -> tuple[Operator, ...]:
        """Projection to query, key and value, their norms, rope, core, output projection."""
        qkv, out = self.qkv_and_out(d.tp)
        if self.gate is True and d.code.gate_apart:
            queries = qkv.outputs[0] // 2
            qkv = replace(qkv, outputs=(queries, *qkv.outputs[1:], queries))
        merged = self._in_one(d) or d.framework.merges_projections
        projection = linear(d, qkv.linear(d.tokens, merged=merged))
        if d.framework.merges_projections:  # queries, keys and values apart (Megatron-Core's muon.py: `muon_split_qkv`)
            projection = replace(projection, products=tuple((n, qkv.inputs) for n in qkv.outputs))
        return (
            projection,
            *self._before_core(d, qkv, out),
            self._core(scenario, d, shard, merged),
            *self._gates(d, d.tokens * out.inputs),
            linear(d, replace(out.linear(d.tokens), original=d.saves_originals)),
        )

    def _in_one(self, d: Dims) -> bool:
        """Tell whether one matmul makes queries, keys and values in the model's own code."""
        return self.projections == 1 or d.code.clamps_qkv == "merged"

    def _joins(self, d: Dims) -> bool:
        """Tell whether a head's part with rope is joined to the rest by a kernel of its own."""
        return self._has_joined_rope and not d.framework.fuses_rope and not d.framework.scales_rope_apart

    @property
    def _has_joined_rope(self) -> bool:
        return self.rope and self.rope_share is not None

    def _rope_elements(self, d: Dims) -> int:
        """Numbers of the queries and keys with rope on this rank, [tokens, heads, head_dim]."""
        return d.tokens * self._rope_heads_of(d) * self.head_dim

    def _before_core(self, d: Dims, qkv: Matrix, out: Matrix) -> Iterator[Operator]:
        """Yield what runs between the projection and the core, in this order."""
        f = d.framework
        if qkv.bias and f.adds_projection_bias_apart:
            yield bias_apart(d, "qkv_bias", d.tokens * sum(qkv.outputs))
        if f.ropes_in_projection and self.rope:
            yield self._rope_in_projection(d)
            return
        if f.copies_split_projection and d.fused_attention:
            yield from self._split(d)
        elif f.joins_split_gradients and self._in_one(d):
            yield from self._gradients_put_together(d)
        elif d.code.clamps_qkv == "apart":
            yield clamped_apart(d, d.tokens * self.expanded_width(d.tp))
        yield from self._head_norms(d)
        if self.rope:
            yield self._rope(d, self._rope_elements(d))
        if self._joins(d):
            yield rope_join(d, self._rope_elements(d), self.rope_share or 1.0)
        yield from query_factor(d, d.tokens * out.inputs)
        copies = f.attention_copies
        if copies.tensors and (copies.of_one_sequence or d.batch > 1):
            yield copied("attention_copies", d, copies.tensors * d.tokens * out.inputs, copies.kernels)

    def _core(self, scenario: Scenario, d: Dims, shard: Shard, merged: bool) -> Operator:
        """The attention itself, with what it keeps and copies; `merged`: one matmul makes queries, keys and values."""
        own, (qkv, out) = repeated(d, self.core(d)), self.qkv_and_out(d.tp)
        core = ordered_heads(d, own, self.attended(scenario, d, shard), self.rope, self._has_joined_rope)
        if self._joins(d):
            core = output_copied(d, core, d.tokens * out.inputs)
        if self.sinks:
            core = replace(core, params=self.heads_of(d.tp)[0])
        # rope has made queries and keys anew; a layer norm of torch's keeps the old ones itself
        keeps = d.framework.keeps_merged_outputs and self.qk_norm != "layernorm"
        repeats = repeated(d, masked_window(d, self.core(d), packed_batch(scenario))).repeats
        copied = d.code.split in ("index", "shards") or repeats > 1
        keeps = keeps and not copied  # values that are not copied are a part of the merged result
        if self.rope and merged and keeps and d.fused_attention:
            core = keeping(core, "queries and keys before rope", self._rope_elements(d) * d.act_bytes)
        if d.framework.keeps_ordered_heads and self.heads == self.kv_heads and d.fused_attention:
            core = keeping(core, "keys and values beside queries", d.tokens * sum(qkv.outputs[1:3]) * d.act_bytes)
        return core

    def rope_heads(self, tp: int) -> int:
        """Heads of one rank with rope: queries and keys."""
        return sum(self.heads_of(tp))

    def _rope_heads_of(self, d: Dims) -> int:
        """Return the heads on one rank that rope's kernels rotate. Falcon's code copies several keys for every query
        head first (FalconAttention._split_heads), so that rope rotates as many keys as queries."""
        copied_first = d.code.split == "index" and self.kv_heads > 1
        return 2 * self.heads_of(d.tp)[0] if copied_first else self.rope_heads(d.tp)

    def attended(self, scenario: Scenario, d: Dims, shard: Shard) -> Operator:
        """The core: every query against the keys that it sees."""
        return attention_core(scenario, d, shard, self.core(d))

    def _rope(self, d: Dims, elements: int) -> Operator:
        """The rotary embedding of queries and keys of `elements`."""
        share = 1.0 if self.rope_share is None else self.rope_share
        width = round(self.head_dim * share)
        # torchtitan's models that norm heads with weights of their own (Qwen 3) multiply cosines and sines.
        complex_in_trainer = d.framework.multiplies_complex_rope and self.qk_norm in (False, "l2")
        if self.scaled_rope or (d.framework.scales_rope_apart and not d.framework.fuses_rope):
            return scaled_rope(d, elements * share, width)
        if d.code.rope_pairs == "complex" or complex_in_trainer:
            return rope_of_pairs(d, elements * share)
        of_norms = d.code.split == "select" and self.qk_norm == "layernorm"  # which copy what they are given
        return cosines_repeated(d, rope(d, elements * share, d.code.split != "heads" and not of_norms), width)

    def _rope_in_projection(self, d: Dims) -> Operator:
        """One kernel that reads the projection's result and writes rotated queries and keys, and values; its backward
        reads three gradients and writes one (Transformer Engine, pytorch/attention/rope.py: `FusedQKVRoPEFunc`)."""
        made, values = self._rope(d, self._rope_elements(d)), d.tokens * self.heads_of(d.tp)[1] * self.widths[1]

        def with_values(item: Item) -> Item:
            if not isinstance(item, Compute):
                return item
            return replace(item, bytes=item.bytes + 2 * values * d.act_bytes, kernels=1)

        forward, backward = (tuple(map(with_values, items)) for items in (made.forward, made.backward))
        return replace(made, forward=forward, backward=backward)

    def _split(self, d: Dims) -> tuple[Operator, ...]:
        """Copies of what was cut out of one projection, whose rows hold each KV head's queries, key and value.

        The queries of several KV heads lie apart and become one row of heads (`reshape`). Where rope makes keys anew,
        values have other strides than keys and are made contiguous. The three gradients are joined (`torch.cat`), but
        if the kernel wrote all of them into one tensor, as it does for equal heads without rope.
        """
        heads, kv_heads = self.heads_of(d.tp)
        grouped = heads > kv_heads
        queries = d.tokens * heads * self.head_dim if grouped and kv_heads > 1 else 0
        values = d.tokens * kv_heads * self.widths[1] if self.rope else 0
        if not (grouped or self.rope):
            return ()
        joined = d.tokens * self.expanded_width(d.tp)
        e, kernels = 2 * d.act_bytes, bool(queries) + bool(values)
        copied = queries + values  # whose heads lie apart, so that torch's kernel moves one number at a time
        ahead = memory_op("split_copies", F, "copy", copied, e * copied, d.act, kernels)
        back = memory_op("split_copies_backward", I, "copy", joined, e * joined, d.act)
        forward = (replace(ahead, plain_host=True, single_elements=float(copied)),) if kernels else ()
        return (Operator("split_copies", forward, (replace(back, plain_host=True),)),)

    def _gradients_put_together(self, d: Dims) -> tuple[Operator, ...]:
        """Return the kernel that joins the gradients of queries, keys and values to that of the projection's result."""
        whole = d.tokens * self.expanded_width(d.tp)
        if d.code.clamps_qkv == "merged":
            return (clamped(d, whole), joined_gradients(d, whole))
        if d.code.split == "index":
            return (split_by_index(d, whole, d.tokens * self.heads_of(d.tp)[1] * self.head_dim),)
        return (joined_gradients(d, whole),) if not self.rope or d.code.split != "split" else ()

    def _gates(self, d: Dims, elements: int) -> tuple[Operator, ...]:
        if self.gate == "per_head":
            return (head_gate(d, elements, d.tokens * self.heads_of(d.tp)[0]),)
        return (element_gate(d, elements),) if self.gate else ()

    def _head_norms(self, d: Dims) -> tuple[Operator, ...]:
        """Norms of queries, keys and values."""
        heads, kv_heads = self.heads_of(d.tp)
        of_values = norm(
            d, "value_norm", "rmsnorm", d.tokens * kv_heads, self.widths[1], 0, keeps_input=not self.values_are_keys
        )
        values = (of_values,) if self.value_norm else ()
        if not self.qk_norm:
            return values
        names, vectors = (("query_norm", heads), ("key_norm", kv_heads)), int(self.weighs_norms)
        if self.qk_norm_over == "all_heads":
            norms = [norm(d, name, "rmsnorm", d.tokens, n * self.head_dim, vectors) for name, n in names]
            sums = (sums_over_heads(d, (heads + kv_heads) * self.head_dim),) if d.tp > 1 else ()
            return (*sums, *norms, *values)
        if self.qk_norm == "layernorm":
            return (*(head_layer_norm(d, name, d.tokens * n, self.head_dim) for name, n in names), *values)
        if self.qk_norm == "by_head":
            return (*(norms_by_head(d, name, d.tokens, n, self.head_dim) for name, n in names), *values)
        each = [norm(d, name, "rmsnorm", d.tokens * n, self.head_dim, vectors) for name, n in names]
        return (*each, *values)

    def other_parameters(self) -> int:
        """Weights of the norms inside the attention, and sinks."""
        of_all = self.qk_norm_over == "all_heads" or self.qk_norm == "by_head"
        norms = self.heads + self.kv_heads if of_all else 2
        norms *= 2 if self.qk_norm == "layernorm" else 1  # which have biases too
        return (norms * self.head_dim if self.weighs_norms else 0) + (self.heads if self.sinks else 0)

    def seen_keys(self, length: int) -> float | None:
        """Keys that a query of a sequence of `length` sees in the mean; None where no window hides any."""
        if self.window is None or self.window.tokens >= length:
            return None
        return self.window.pairs(length, length) / length

    def key(self, seq_len: int) -> str:
        """Return what of a block's key the model's own sizes do not say."""
        seen = self.seen_keys(seq_len)
        return "" if seen is None else f" seen_keys={seen:g}"

    def core_flops(self, seq_len: int, causal_half: bool) -> float:
        """Model FLOPs of a token outside matrices, forward and backward: see `attention_flops`."""
        return attention_flops(self.heads, self.widths, self.seen_keys(seq_len), seq_len, causal_half)

    def kept_tokens(self, length: float) -> float:
        """Tokens of a sequence of `length` whose keys and values the cache keeps."""
        return length if self.window is None else self.window.kept(length)

    def sequence_bytes(self, d: ServingDims, length: float) -> float:
        """Cache of a sequence of `length` tokens on one rank."""
        of_token = self.heads_of(d.tp)[1] * sum(self.widths)  # its key and its value for each KV head
        return of_token * d.kv_bytes * self.kept_tokens(length)

    def serve(self, d: ServingDims, tokens: int) -> Program:
        """Return what depends on an iteration's number of tokens alone, up to the sum over tp."""
        qkv, out = self.qkv_and_out(d.tp)
        n = tokens * out.inputs
        gate = (served_element_gate(d, n),) if self.gate else ()
        if self.gate == "per_head":
            gate = (served_head_gate(d, n, tokens * self.heads_of(d.tp)[0]),)
        whole, values = self.expanded_width(d.tp), self.heads_of(d.tp)[1] * self.widths[1]
        rotated = roped_heads(d, tokens, (whole - values, whole), self.qk_norm is not False)
        split = self.qk_norm_over == "all_heads" and d.tp > 1
        sums = (collective("head_sums_total", "all_reduce", SUMS_BYTES * tokens, F),) if split else ()
        first = served_linear(d, qkv, tokens, norm_quantizes(d, tokens))
        quantized = "attention" in d.quantizing and not gate
        return (*first, *sums, *rotated, *gate, *served_linear(d, out, tokens, quantized))

    def expanded_width(self, tp: int) -> int:
        """Numbers of a token's queries, keys and values on one rank, which the rope-and-cache kernel of serving engines
        reads and writes."""
        heads, kv_heads = self.heads_of(tp)
        return heads * self.head_dim + kv_heads * sum(self.widths)

    def prefill(self, d: ServingDims, batch: int, q_len: int, kv_len: int) -> Program:
        """`batch` prompt chunks of `q_len` tokens, each the last of the `kv_len` that they see."""
        heads, kv_heads = self.heads_of(d.tp)
        return prefill_attention(d, batch, Core(q_len, kv_len, heads, kv_heads, *self.widths, window=self.window))

    def decode(self, d: ServingDims, batch: int, kv_len: int, queries: int = 1) -> Program:
        """`queries` new tokens of each of `batch` sequences against a cache of `kv_len`: bound by reading it once for
        all of them (as FlashInfer's and TensorRT-LLM's kernels for drafted tokens do).

        With more than `MEASURED_GROUP` query heads a KV head the measured library, TensorRT-LLM, reads the cache once
        for each head. FlashAttention packs all heads of a group into rows of one tile (hopper/heuristics.h:
        should_pack_gqa), so with `any_group` the efficiency is that of `MEASURED_GROUP` heads.
        """
        heads, kv_heads = self.heads_of(d.tp)
        kv_len = max(1, round(self.kept_tokens(kv_len)))
        if not d.fused_attention:
            return unfused_attention(d, batch, Core(queries, kv_len, heads, kv_heads, *self.widths))
        alone = kv_heads if d.grouped_decode else heads  # as if these were all different
        read = kv_heads + d.group_reads * (alone - kv_heads)
        moved = float(batch) * sum(self.widths) * (queries * heads * d.act_bytes + read * kv_len * d.kv_bytes)
        flops = queries * shape_flops(ATTENTION_DECODE, (batch, heads, alone, kv_len, self.head_dim))
        asked = min(heads, MEASURED_GROUP * alone) if d.any_group else heads
        shape = (batch, asked, alone, kv_len, self.head_dim)
        return (Compute("attention", ATTENTION_DECODE, shape, d.act, flops, moved, F),)
