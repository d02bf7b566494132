"""Serving operators of one rank: what an iteration over some prompt tokens and some single tokens launches.

A layer's work falls into parts that depend on different things, so that each is priced once and kept:
`layer_tokens` on the number of tokens in the batch alone (projections, norms, MLP or experts, all-reduces),
`prefill_attention` on a prompt chunk and what it sees, `decode_attention` on how many sequences add a token
and how long they are. Elementwise chains are fused as serving engines fuse them (vLLM's and TensorRT-LLM's
add-and-norm, rope with the cache's write, SiLU-and-multiply): five small kernels a layer.

Multi-head latent attention keeps the latent and the shared rope key (DeepSeek-V2, arXiv 2405.04434, section 2.1.2):
prefill expands them to keys and values of every head, decode absorbs the up-projections into query and output, so
that all heads read one latent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from sim.dtypes import dtype_bytes, sixteen_bit
from sim.models.dims import ceil_div
from sim.models.moe import expert_load
from sim.models.operators import F, collective, gemm, memory_op
from sim.prices.roofline import ATTENTION_DECODE, MOE_LAYER, PREFILL, attended_pairs, shape_flops
from sim.program import Compute, Item, Program

if TYPE_CHECKING:
    from sim.inputs.model_config import MoeConfig
    from sim.inputs.scenario import ModelConfig, Scenario

FP32_BYTES = 4.0
OUTLIER_SHARE = 0.001  # LLM.int8(): more than 99.9 % of values are multiplied in 8 bits (arXiv 2208.07339, section 1)
LATENT_HEADS = 16  # assumption: however many heads read one latent, their kernel is as efficient as with so many
INT4_GROUP = 128  # weights that share one 16-bit scale in group-wise 4-bit formats (GPTQ, arXiv 2210.17323, section 5)


@dataclass(frozen=True, slots=True)
class ServingDims:
    """Sizes on one rank; heads, vocabulary and MLP width are tensor-parallel shares.

    `act`: dtype of activations; `linear`: dtype in which linear layers multiply; `weight_bytes`: per element of
    their weights in memory, scales included; `kv_bytes`: per element of the cache; `dispatch_bytes`: of what is sent to
    experts; `one_kernel`: experts are one operator, for which there are measured ones.
    """

    model: ModelConfig
    tp: int
    sp: bool
    ep: int
    expert_tp: int
    heads: int
    kv_heads: int
    vocab: int
    act: str
    linear: str
    quantization: str
    act_bytes: float
    weight_bytes: float
    kv_bytes: float
    dispatch_bytes: float
    one_kernel: bool = False


class Weight(NamedTuple):
    """A linear layer's matrix on this rank; `quantized` ones are kept and multiplied as the scenario says."""

    name: str
    k: int
    n: int
    quantized: bool = True


def serving_dims(scenario: Scenario) -> ServingDims:
    """Sizes of one rank of a serving scenario.

    A format that the GPU cannot multiply (fp8 or int8 without a peak for it) still saves memory: weights are
    converted on the fly and multiplied in 16 bits, as Marlin kernels do.
    """
    m, p, i = scenario.model, scenario.parallelism, scenario.inference
    assert i is not None
    act = sixteen_bit(i.precision)
    linear, weight = _formats(i.quantization, i.precision, scenario.cluster.gpu.peak_flops_per_s, act)
    return ServingDims(
        model=m, tp=p.tp, sp=p.sp and p.tp > 1, ep=p.ep, expert_tp=p.expert_tp,
        heads=ceil_div(m.heads, p.tp), kv_heads=max(1, m.kv_heads // p.tp), vocab=m.padded_vocab(p.tp) // p.tp,
        act=act, linear=linear, quantization=i.quantization, act_bytes=dtype_bytes(act), weight_bytes=weight,
        kv_bytes=dtype_bytes(i.kv_cache.dtype or act), dispatch_bytes=dtype_bytes(p.ep_dispatch_dtype or act),
    )  # fmt: skip


def _formats(quantization: str, precision: str, peaks: dict[str, float], act: str) -> tuple[str, float]:
    """The dtype linear layers multiply in, and their weights' bytes per element."""
    if quantization == "none":
        return precision, dtype_bytes(precision)
    if quantization == "int4_weight_only":
        return act, dtype_bytes("int4") + 2.0 / INT4_GROUP
    if quantization == "fp8" and "fp8" in peaks:
        return "fp8", dtype_bytes("fp8")
    if quantization == "llm_int8" and "int8" in peaks:
        return "int8", dtype_bytes("int8")
    return act, 1.0


def kv_bytes_per_token(d: ServingDims) -> float:
    """Cache of one token in one layer on one rank: keys and values of its heads, or the whole latent.

    >>> from sim.inputs.scenario import parse_scenario
    >>> s = parse_scenario({"model": "llama3-8b", "cluster": "dgx-h100",
    ...     "inference": {"requests": {"prompt_len": 8, "output_len": 8}}})
    >>> kv_bytes_per_token(serving_dims(s)) * s.model.layers
    131072.0
    """
    m = d.model
    if m.mla is not None:
        return (m.mla.kv_lora_rank + m.mla.qk_rope_head_dim) * d.kv_bytes
    return 2 * d.kv_heads * m.head_dim * d.kv_bytes


def attention_weights(d: ServingDims) -> tuple[Weight, ...]:
    """Projections around the attention; of MLA all but the up-projection of the latent."""
    m = d.model
    if m.mla is None:
        return (
            Weight("qkv", m.hidden, (d.heads + 2 * d.kv_heads) * m.head_dim),
            Weight("attention_out", d.heads * m.head_dim, m.hidden),
        )
    c = m.mla
    qk = c.qk_nope_head_dim + c.qk_rope_head_dim
    query = (
        (Weight("query", m.hidden, d.heads * qk),)
        if c.q_lora_rank is None
        else (Weight("query_down", m.hidden, c.q_lora_rank), Weight("query_up", c.q_lora_rank, d.heads * qk))
    )
    return (
        *query,
        Weight("kv_down", m.hidden, c.kv_lora_rank + c.qk_rope_head_dim),
        Weight("attention_out", d.heads * c.v_head_dim, m.hidden),
    )


def latent_up(d: ServingDims) -> Weight | None:
    """MLA's up-projection from the latent to every head's keys and values; None without MLA."""
    c = d.model.mla
    return None if c is None else Weight("kv_up", c.kv_lora_rank, d.heads * (c.qk_nope_head_dim + c.v_head_dim))


def mlp_weights(d: ServingDims, ffn: int) -> tuple[Weight, Weight]:
    """Up (with the gate) and down projection of inner width `ffn`, split over tp."""
    inner = ceil_div(ffn, d.tp)
    up = inner * (2 if d.model.mlp == "swiglu" else 1)
    return Weight("mlp_up", d.model.hidden, up), Weight("mlp_down", inner, d.model.hidden)


def layer_elements(d: ServingDims, sparse: bool) -> tuple[int, int]:
    """Elements of a layer on this rank: of quantized weights, and of what stays in 16 bits (norms, biases, router)."""
    m = d.model
    weights = [*attention_weights(d), *([w] if (w := latent_up(d)) else [])]
    rest = 2 * m.hidden * (2 if m.norm == "layernorm" and m.bias else 1)
    quantized = 0
    if sparse and m.moe is not None:
        local, ffn = ceil_div(m.moe.experts, d.ep), ceil_div(m.moe.ffn, d.expert_tp)
        quantized = local * ffn * m.hidden * (3 if m.mlp == "swiglu" else 2)
        rest += m.hidden * m.moe.experts
        if m.moe.shared_experts:
            weights += mlp_weights(d, m.moe.ffn * m.moe.shared_experts)
    else:
        weights += mlp_weights(d, m.ffn)
    if m.mla is not None:
        rest += (m.mla.q_lora_rank or 0) + m.mla.kv_lora_rank
    if m.qk_norm:
        rest += 2 * m.head_dim
    if m.bias:
        rest += sum(w.n for w in weights)
    elif m.qkv_bias:
        rest += weights[0].n
    return quantized + sum(w.k * w.n for w in weights), rest


def layer_tokens(d: ServingDims, sparse: bool, tokens: int) -> Program:
    """All of a layer that depends on the number of tokens alone; `tokens` may be split between prompts and decodes."""
    m = d.model
    *before, out = attention_weights(d)
    items: list[Item] = [_add_norm(d, "attention_norm", tokens)]
    for w in before:
        items += _linear(d, w, tokens)
    width = d.heads * m.head_dim + 2 * d.kv_heads * m.head_dim
    if m.mla is not None:
        width = d.heads * m.head_dim + m.mla.kv_lora_rank + m.mla.qk_rope_head_dim
    items.append(memory_op("rope_cache", F, "elementwise", tokens * width, 2 * tokens * width * d.act_bytes, d.act))
    items += _linear(d, out, tokens)
    items += _reduce(d, "attention_out", tokens)
    items.append(_add_norm(d, "mlp_norm", tokens))
    items += _experts(d, m.moe, tokens) if sparse and m.moe is not None else _mlp(d, m.ffn, tokens, "mlp")
    return (*items, *_reduce(d, "mlp_down", tokens))


def _add_norm(d: ServingDims, name: str, tokens: int) -> Compute:
    """The residual sum and the norm after it in one kernel: branch and stream read, stream and input written.

    It streams as an elementwise chain does, unlike torch's LayerNorm, for which kind `norm` stands: Liger-Kernel's
    fused_add_rms_norm on an H100 takes the time of these four accesses at 0.85 of the bandwidth (liger_kernels.json).
    """
    n = tokens * d.model.hidden
    return memory_op(name, F, "elementwise", n, 4 * n * d.act_bytes, d.act)


def _linear(d: ServingDims, w: Weight, tokens: int, batch: int = 1) -> list[Item]:
    """`[tokens, k] x [k, n]`, with the conversions that the weights' format needs."""
    if not w.quantized:
        return [gemm(w.name, F, tokens, w.n, w.k, d.act, batch)]
    activations, out = tokens * w.k, tokens * w.n
    if d.linear == d.act:
        product = gemm(w.name, F, tokens, w.n, w.k, d.act, batch)
        moved = (activations + out) * d.act_bytes + w.k * w.n * d.weight_bytes
        return [replace(product, bytes=batch * moved)]
    cast = memory_op(f"{w.name}_quantize", F, "cast", activations, activations * (d.act_bytes + 1.0), d.act)
    if d.linear != "int8":
        return [cast, gemm(w.name, F, tokens, w.n, w.k, d.linear, batch, out_bytes=out * d.act_bytes)]
    outliers = math.ceil(w.k * OUTLIER_SHARE)
    moved = out * (FP32_BYTES + 2 * d.act_bytes)
    return [
        cast,
        memory_op(f"{w.name}_outliers", F, "copy", tokens * outliers, 2 * tokens * outliers * d.act_bytes, d.act),
        gemm(w.name, F, tokens, w.n, w.k, "int8", batch, out_bytes=out * FP32_BYTES),
        gemm(f"{w.name}_outliers", F, tokens, w.n, outliers, d.act, batch),
        memory_op(f"{w.name}_dequantize", F, "elementwise", out, moved, d.act),
    ]


def _reduce(d: ServingDims, name: str, tokens: int) -> list[Item]:
    """The sum over tp of a row-parallel layer; with sequence parallelism as its two halves."""
    if d.tp == 1:
        return []
    size = tokens * d.model.hidden * d.act_bytes
    if d.sp:
        halves = (("scatter", "reduce_scatter"), ("gather", "all_gather"))
        return [collective(f"{name}_{half}", kind, size, F) for half, kind in halves]
    return [collective(f"{name}_sum", "all_reduce", size, F)]


def _mlp(d: ServingDims, ffn: int, tokens: int, name: str) -> list[Item]:
    up, down = mlp_weights(d, ffn)
    inner = tokens * down.k
    reads = up.n // down.k + 1
    act = memory_op(f"{name}_{d.model.mlp}", F, "elementwise", inner, reads * inner * d.act_bytes, d.act)
    return [*_linear(d, up, tokens), act, *_linear(d, down, tokens)]


def active_experts(moe: MoeConfig, local: int, tokens: float) -> int:
    """Experts of `local` that at least one of `tokens` tokens chose, as expected when all are equally likely.

    E·(1 − (1 − k/E)^T): a single token reads the weights of its top-k experts alone.
    """
    chosen = 1.0 - (1.0 - min(1.0, moe.top_k / moe.experts)) ** tokens
    return max(1, min(local, round(local * float(chosen))))


def _experts(d: ServingDims, moe: MoeConfig, tokens: int) -> list[Item]:
    """Router, this rank's part of the routed experts, shared experts.

    Tokens are whole on every rank of a tp group, so experts split within it need no all-to-all: the sum over tp
    adds their parts. Experts split over more ranks than tp get their tokens by all-to-all from the other replicas.
    """
    span = d.ep * d.expert_tp / d.tp
    pooled = max(1, round(tokens * span))  # of all replicas that share the experts, or this copy's part
    load = expert_load(moe, pooled, 0)
    local = ceil_div(moe.experts, d.ep)
    rows = max(1.0, max(sum(load[r * local : (r + 1) * local]) for r in range(d.ep)))
    groups = active_experts(moe, local, pooled)
    sent = tokens * moe.top_k * d.model.hidden / d.tp
    routed = [_moe_kernel(d, moe, rows, groups)] if d.one_kernel else _moe_kernels(d, moe, tokens, rows, groups)
    if span > 1:
        dispatch, combine = (
            collective(name, "all_to_all", sent * size, F, group="ep")
            for name, size in (("dispatch", d.dispatch_bytes), ("combine", d.act_bytes))
        )
        routed = [dispatch, *routed, combine]
    shared = _mlp(d, moe.ffn * moe.shared_experts, tokens, "shared") if moe.shared_experts else []
    return [gemm("router", F, tokens, moe.experts, d.model.hidden, d.act), *routed, *shared]


def _moe_kernel(d: ServingDims, moe: MoeConfig, rows: float, groups: int) -> Item:
    """All from the choice of experts to the weighted sum, as libraries were measured: by the tokens that give this rank
    as many `rows` when spread evenly; of its experts `groups` have any."""
    h, inner, matrices = d.model.hidden, ceil_div(moe.ffn, d.expert_tp), 3 if d.model.mlp == "swiglu" else 2
    alike = max(1, round(rows * d.ep / moe.top_k))
    shape = (alike, h, moe.ffn, moe.top_k, moe.experts, d.expert_tp, d.ep)
    moved = groups * matrices * h * inner * d.weight_bytes + rows * (2 * h + matrices * inner) * d.act_bytes
    return Compute("experts", MOE_LAYER, shape, experts_dtype(d), 2.0 * matrices * rows * h * inner, moved, F)


def _moe_kernels(d: ServingDims, moe: MoeConfig, tokens: int, rows: float, groups: int) -> list[Item]:
    """The same kernel by kernel, where nobody measured it."""
    m, h = d.model, d.model.hidden
    ffn = ceil_div(moe.ffn, d.expert_tp)
    inner = ffn * (2 if m.mlp == "swiglu" else 1)
    moved = (inner // ffn + 1) * rows * ffn * d.act_bytes
    return [
        memory_op("router_top_k", F, "softmax", tokens * moe.experts, 8.0 * tokens * moe.experts, d.act),
        memory_op("permute", F, "permute", rows * h, 2 * rows * h * d.act_bytes, d.act),
        _grouped(d, "experts_up", groups, rows, inner, h),
        memory_op(f"experts_{m.mlp}", F, "elementwise", rows * ffn, moved, d.act),
        _grouped(d, "experts_down", groups, rows, h, ffn),
        memory_op("unpermute", F, "permute", rows * h, (rows + tokens) * h * d.act_bytes, d.act),
    ]


def experts_dtype(d: ServingDims) -> str:
    """In which the experts' matmuls run."""
    return d.linear if d.linear != "int8" else d.act


def _grouped(d: ServingDims, name: str, groups: int, rows: float, n: int, k: int) -> Compute:
    moved = rows * (k + n) * d.act_bytes + groups * k * n * d.weight_bytes
    shape = (groups, max(1, round(rows / groups)), n, k)
    return Compute(name, "grouped_gemm", shape, experts_dtype(d), 2.0 * rows * n * k, moved, F)


def prefill_attention(d: ServingDims, batch: int, q_len: int, kv_len: int) -> Program:
    """`batch` prompt chunks of `q_len` tokens, each the last of the `kv_len` that they see."""
    c = d.model.mla
    if c is None:
        return (_attention(d, batch, d.heads, d.kv_heads, q_len, kv_len, d.model.head_dim, d.model.head_dim),)
    up = latent_up(d)
    assert up is not None
    expand = _linear(d, up, batch * kv_len)
    qk = c.qk_nope_head_dim + c.qk_rope_head_dim
    return (*expand, _attention(d, batch, d.heads, d.heads, q_len, kv_len, qk, c.v_head_dim))


def decode_attention(d: ServingDims, batch: int, kv_len: int) -> Program:
    """One new token of each of `batch` sequences against a cache of `kv_len`: bound by reading the cache.

    Kernels of grouped queries were measured to 32 query heads a key head; beyond, the library's one reads the cache
    once for each head, which those of latent attention do not. So of a latent `LATENT_HEADS` heads are asked for, and
    their efficiency is that of all.
    """
    c = d.model.mla
    if c is None:
        moved = 2.0 * batch * d.model.head_dim * (d.heads * d.act_bytes + d.kv_heads * kv_len * d.kv_bytes)
        shape = (batch, d.heads, d.kv_heads, kv_len, d.model.head_dim)
        flops = shape_flops(ATTENTION_DECODE, shape)
        return (Compute("attention", ATTENTION_DECODE, shape, d.act, flops, moved, F),)
    rank = c.kv_lora_rank
    absorb = gemm("query_absorb", F, batch, rank, c.qk_nope_head_dim, d.act, d.heads)
    expand = gemm("value_expand", F, batch, c.v_head_dim, rank, d.act, d.heads)
    latent = batch * kv_len * (rank + c.qk_rope_head_dim) * d.kv_bytes  # the values are part of what was read as keys
    queries = batch * d.heads * (2 * rank + c.qk_rope_head_dim) * d.act_bytes
    flops = 2.0 * batch * d.heads * kv_len * (2 * rank + c.qk_rope_head_dim)
    shape = (batch, min(d.heads, LATENT_HEADS), 1, kv_len, rank + c.qk_rope_head_dim)
    return (absorb, Compute("attention", ATTENTION_DECODE, shape, d.act, flops, latent + queries, F), expand)


def _attention(
    d: ServingDims, batch: int, heads: int, kv_heads: int, q: int, kv: int, width: int, v_width: int
) -> Compute:
    flops = 2.0 * batch * heads * attended_pairs(q, kv, True) * (width + v_width)
    moved = batch * (width + v_width) * (heads * q * d.act_bytes + kv_heads * kv * d.kv_bytes)
    shape = (batch, heads, kv_heads, q, kv, width, v_width, int(q > 1))
    return Compute(PREFILL, "attention_forward", shape, d.act, flops, moved, F)


def embedding_tokens(d: ServingDims, tokens: int) -> Program:
    """The look-up; over a split vocabulary its sum."""
    n = tokens * d.model.hidden
    op = memory_op("embedding", F, "embedding", n, 2 * n * d.act_bytes, d.act)
    return (op, *_reduce(d, "embedding", tokens))


def head_samples(d: ServingDims, samples: int) -> Program:
    """Final norm, logits and greedy choice for the last token of `samples` sequences; 16 bits in every format."""
    n = samples * d.vocab
    items: list[Item] = [
        _add_norm(d, "final_norm", samples),
        *_linear(d, Weight("output", d.model.hidden, d.vocab, quantized=False), samples),
    ]
    if d.tp > 1:
        items.append(collective("logits_gather", "all_gather", n * d.tp * d.act_bytes, F))
    items.append(memory_op("sample", F, "softmax", n * d.tp, n * d.tp * d.act_bytes, d.act))
    return tuple(items)
