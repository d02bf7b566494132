"""Serving operators of one rank: sizes, and what layers of every kind, the embedding and the head are made of.

An iteration computes some prompt tokens and some single tokens. The work of a layer (`sim.models.layers`) falls into
parts that depend on different things, so that each is priced once and kept: `serve_tokens` depends on the number of
tokens in the batch alone (projections, norms, MLP or experts, all-reduces), `prefill` on a prompt chunk and what it
sees, `decode` on how many sequences add a token and how long they are. Elementwise chains are fused as serving engines
fuse them (vLLM's and TensorRT-LLM's add-and-norm, rope with the cache's write, SiLU-and-multiply): five small kernels
in each layer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from sim.core.attention_pairs import attended_pairs
from sim.core.dtypes import FP32_BYTES, dtype_bytes
from sim.core.program import Compute, Item, Program
from sim.core.quantization import Quantization, Quantizing
from sim.core.sampler import Sampler
from sim.models.attention.core import Core, unfused_core
from sim.models.attention.score_kernels import ScorePass
from sim.models.layer_inputs import layer_inputs_of
from sim.models.moe.eplb import BalancedExperts
from sim.models.operators import F, collective, gemm, memory_op
from sim.models.serving.sampling import chosen_tokens
from sim.models.streams.sizes import Streams, streams_of

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig
    from sim.inputs.serving_keys import Sampling
    from sim.models.layers.matrix import Matrix

OUTLIER_SHARE = 0.001  # LLM.int8(): more than 99.9 % of values are multiplied in 8 bits (arXiv 2208.07339, section 1)

# Up-projections of latents that decode absorbs: kept and multiplied in 16 bits, in fp8, or kept in fp8 and converted to
# 16 bits before each product.
Absorbed = Literal["wide", "narrow", "widened"]


class ServedLatents(NamedTuple):
    """Kernels of latent attention. `merged_down`: one matmul gives both latents; `joins_queries`: decode's kernel takes
    a query's two parts as one tensor; `merges_context`: attention to what is cached before a chunk is a kernel of its
    own; `absorbed_tokens`: iterations of at most this many prompt tokens attend as decode does, in the latent's width;
    so do prompts behind fewer cached tokens than `absorbed_context`, but not none; `joins_latents`: a kernel joins each
    token's latent and rope key before they are cached; `absorbed`: how decode absorbs the up-projections;
    `merged_index`: one matmul in 16 bits gives an indexer's key and its heads' weights; `cache_apart`: a kernel ropes,
    and another writes the cache.
    """

    merged_down: bool = True
    joins_queries: bool = False
    merges_context: bool = False
    absorbed_tokens: int = 0
    absorbed_context: float = 0.0
    joins_latents: bool = False
    absorbed: Absorbed = "wide"
    merged_index: bool = False
    cache_apart: bool = False

    def absorbs(self, tokens: int, cached: int) -> bool:
        """Tell whether prompts of `tokens` tokens behind `cached` cached ones attend in the latent's width."""
        return tokens <= self.absorbed_tokens or 0 < cached < self.absorbed_context


class ServedRope(NamedTuple):
    """Kernels between the projection and attention of layers with rope: `rope` of rope alone, `normed` with norms of
    heads as well, whose own kernels write their results (`writes`), or only sums, which rope's kernels take up."""

    rope: int = 1
    normed: int = 1
    writes: bool = False


class ServedElements(NamedTuple):
    """Hold the number of weights on a rank: those of attention's and of an MLP's or shared experts' linear layers and
    of routed experts, which serving may quantize, and the rest, which stays in 16 bits."""

    attention: int
    mlp: int
    experts: int
    rest: int

    @property
    def linear(self) -> int:
        """Weights of all linear layers but routed experts."""
        return self.attention + self.mlp


class LinearFormat(NamedTuple):
    """How a checkpoint keeps a branch of a layer, where that is not its usual format; fields as those of `ServingDims`,
    `absorbed` as `ServedLatents` has it."""

    linear: str
    weight_bytes: float
    expert_linear: str
    expert_weight_bytes: float
    quantizing: tuple[Quantizing, ...]
    absorbed: Absorbed
    table: str
    expert_table: str
    one_kernel: bool = False


class LayerFormats(NamedTuple):
    """How a checkpoint keeps a layer's attention, and its MLP or experts."""

    attention: LinearFormat
    mlp: LinearFormat


class ServingDims(Struct, frozen=True):
    """Sizes on one rank; `vocab` is its tensor-parallel share.

    `act`: dtype of activations; `linear`: dtype in which linear layers multiply; `weight_bytes`: per element of their
    weights in memory, scales included, `expert_weight_bytes` of routed experts'; `table`, `expert_table`: formats of
    both in tables of measurements (`sim.core.quantization.TABLE_FORMATS`); `kv_bytes`: per element of the cache;
    `dispatch_bytes`: of what is sent to experts; `one_kernel`: experts are one operator, for which there are measured
    ones; `fused_attention`: attention is one kernel, else two batched matmuls with a softmax between them;
    `grouped_decode`: that of single tokens reads a KV head once, else once for each of its query heads; `group_reads`:
    the part of these further reads that comes from memory; `any_group`: once for however many query heads;
    `sampler`: the kernels that choose tokens, `sampling`: how they choose (None: the largest logit); `fp32_states`:
    states are kept in fp32, unless the model says their dtype; `index_dtype`: dtype of an indexer's scores, 8 bits
    where the GPU multiplies them;
    `gathers`: ranks that share experts get the tokens of all, and `sums`: the sums of all their results; `prompt_sums`:
    whether all-reduces gather tokens where prompts are among them (`prompts`), and sum up experts' results;
    `quantizing`: what writes the few bits that the next matmul of a dense layer reads, so that no kernel of its own
    does; `norm_in_sum_bytes`: of an all-reduce over tp that also adds and norms, at most, `experts_sum_norms`: experts'
    does, too; `expert_nodes`: NVLink domains that the experts lie in; `once_to`: of these, or of the ranks of a single
    one, how many there are to which a token travels once, whatever experts it has there; 0: a copy for each expert;
    `eplb`: how experts are placed on ranks, None: in their order; `shared_tp`: ranks that split shared experts, which
    see the tokens of all replicas then, 0: those of tp; `dense_tp`, `head_tp`: likewise of dense MLPs and of the output
    matrix; `cp`: ranks over which prompts and caches are split; `latents`: kernels of latent attention; `roped`: of
    rope and heads' norms; `shared_beside`: the most tokens of which a second stream computes shared experts beside
    routed ones; `fuses_shared`: the shared one is one more routed expert.
    """

    model: ModelConfig
    tp: int
    sp: bool
    ep: int
    expert_tp: int
    vocab: int
    act: str
    linear: str
    quantization: Quantization
    act_bytes: float
    weight_bytes: float
    expert_weight_bytes: float
    kv_bytes: float
    dispatch_bytes: float
    expert_linear: str = ""
    table: str = ""
    expert_table: str = ""
    one_kernel: bool = False
    fused_attention: bool = True
    grouped_decode: bool = True
    group_reads: float = 1.0
    any_group: bool = True
    sampler: Sampler = Sampler()
    sampling: Sampling | None = None
    fp32_states: bool = False
    index_dtype: str = "bf16"
    gathers: bool = False
    sums: bool = False
    prompt_sums: tuple[bool, bool] = (False, False)
    prompts: bool = False
    once_to: int = 0
    expert_nodes: int = 1
    eplb: BalancedExperts | None = None
    shared_tp: int = 0
    dense_tp: int = 0
    head_tp: int = 0
    head_vocab: int = 0  # of the output matrix's entries on a rank, where head_tp ranks split it
    cp: int = 1
    cp_method: str = "ring"
    quantizing: tuple[Quantizing, ...] = ()
    norm_in_sum_bytes: float = 0.0
    experts_sum_norms: bool = False
    latents: ServedLatents = ServedLatents()
    roped: ServedRope = ServedRope()
    shared_beside: float = 0.0
    fuses_shared: bool = False

    def state_bytes(self, dtype: str | None) -> float:
        """Bytes of a number of a recurrent layer's state; `dtype`: the model's own, None where it says none."""
        if dtype is not None:
            return dtype_bytes(dtype)
        return FP32_BYTES if self.fp32_states else self.act_bytes

    def kept_as(self, form: LinearFormat) -> ServingDims:
        """These sizes for a branch of a layer in a format of its own."""
        latents = self.latents._replace(absorbed=form.absorbed)
        return replace(
            self,
            linear=form.linear,
            weight_bytes=form.weight_bytes,
            expert_linear=form.expert_linear,
            expert_weight_bytes=form.expert_weight_bytes,
            quantizing=form.quantizing,
            table=form.table,
            expert_table=form.expert_table,
            one_kernel=form.one_kernel,
            latents=latents,
        )

    @property
    def stream_width(self) -> int:
        """Numbers of a token in the residual stream, of all its streams."""
        return self.model.hidden * self.model.hyper_connections

    @property
    def all_reduces_tokens(self) -> bool:
        """Tell whether all-reduces gather the tokens of all replicas, as SGLang does where prompts are among them."""
        return self.prompts and self.prompt_sums[0]

    @property
    def token_gathering(self) -> Literal["all_reduce", "all_gather"]:
        """The collective that gives each rank the tokens of all replicas."""
        return "all_reduce" if self.all_reduces_tokens else "all_gather"

    @property
    def experts_dtype(self) -> str:
        """The dtype of the experts' matmuls: `expert_linear` where it differs; LLM.int8() leaves them in 16 bits."""
        if self.expert_linear:
            return self.expert_linear
        return self.linear if self.linear != "int8" else self.act


def served_add_norm(d: ServingDims, name: str, tokens: int) -> Compute:
    """The residual sum and the norm after it in one kernel: branch and stream read, stream and input written.

    It streams as an elementwise chain does, unlike torch's LayerNorm, for which kind `norm` stands: Liger-Kernel's
    fused_add_rms_norm on an H100 takes the time of these four accesses at 0.85 of the bandwidth (liger_kernels.json).
    """
    n = tokens * d.model.hidden
    return memory_op(name, F, "elementwise", n, 4 * n * d.act_bytes, d.act)


def rope_cache(d: ServingDims, tokens: int, width: int) -> Compute:
    """Rope and the cache's write in one kernel: `width` numbers of a token read and written."""
    n = tokens * width
    return memory_op("rope_cache", F, "elementwise", n, 2 * n * d.act_bytes, d.act)


def roped_heads(d: ServingDims, tokens: int, widths: tuple[int, int], normed: bool) -> Program:
    """Rope, norms of heads (`normed`) and the cache's write; `widths`: numbers of a token's queries and keys, and with
    its values. Kernels of rope have equal parts of its numbers, as those of norms have."""
    rotated, whole = (tokens * width for width in widths)

    def parts(name: str, kernels: int, elements: int, accesses: int) -> list[Compute]:
        size = accesses * elements * d.act_bytes / max(1, kernels)
        return [memory_op(name, F, "elementwise", elements / kernels, size, d.act) for _ in range(kernels)]

    norms = parts("head_norms", d.roped.normed - d.roped.rope if normed else 0, rotated, 1 + d.roped.writes)
    return (*norms, *parts("rope_cache", d.roped.rope, whole, 2))


def served_norm(d: ServingDims, name: str, tokens: int) -> Compute:
    """A norm alone: read and written once."""
    n = tokens * d.model.hidden
    return memory_op(name, F, "elementwise", n, 2 * n * d.act_bytes, d.act)


def served_sum_of_streams(d: ServingDims, name: str, tokens: int, streams: Streams, numbers: int) -> Program:
    """The `numbers` weights of a branch and its normed input, as fused kernels; gated: norm, gates and their mean."""
    width = streams.width
    n = tokens * width
    once = n * d.act_bytes
    if not streams.gated:
        product = gemm(f"{name}_weights", F, tokens, numbers, width, d.act)
        return product, memory_op(name, F, "elementwise", n, once * (1 + 1 / streams.number), d.act, 2)
    return (
        memory_op(f"{name}_norm", F, "elementwise", n, 2 * once, d.act),
        gemm(f"{name}_gates_down", F, tokens, streams.rank + numbers, width, d.act),
        gemm(f"{name}_gates_up", F, tokens, width, streams.rank, d.act),
        memory_op(name, F, "elementwise", n, once * (2 + 1 / streams.number), d.act),
    )


def served_spread(d: ServingDims, name: str, tokens: int) -> Compute:
    """A branch's result added to the mixed streams, in one kernel."""
    n = tokens * d.model.hyper_connections * d.model.hidden
    return memory_op(name, F, "elementwise", n, n * d.act_bytes * (2 + 1 / d.model.hyper_connections), d.act)


def norm_quantizes(d: ServingDims, tokens: int) -> bool:
    """Whether the kernel of the norm before a matmul also quantizes its input."""
    return ("sums" if sum_norms(d, tokens) else "norms") in d.quantizing


def sum_norms(d: ServingDims, tokens: int) -> bool:
    """Whether the all-reduce over tp before a norm computes that norm, too."""
    return d.tp > 1 and not d.sp and tokens * d.model.hidden * d.act_bytes <= d.norm_in_sum_bytes


def served_linear(d: ServingDims, matrix: Matrix, tokens: int, quantized: bool = False) -> list[Item]:
    """`[tokens, inputs] x [inputs, outputs]`, with the conversions that the weights' format needs; `quantized`: what
    comes before has converted the input."""
    name, k, n = matrix.name, matrix.inputs, matrix.width
    activations, out = tokens * k, tokens * n
    if d.linear == d.act or matrix.sixteen_bit:
        product = gemm(name, F, tokens, n, k, d.act, kernel="" if matrix.sixteen_bit else d.table)
        weight_bytes = d.act_bytes if matrix.sixteen_bit else d.weight_bytes
        return [replace(product, bytes=(activations + out) * d.act_bytes + k * n * weight_bytes)]
    moved = activations * (d.act_bytes + 1.0)
    cast = memory_op(f"{name}_quantize", F, "cast", activations, moved, d.act, kernel="quantize")
    if d.linear != "int8":
        return [
            *([] if quantized else [cast]),
            gemm(name, F, tokens, n, k, d.linear, out_bytes=out * d.act_bytes, kernel=d.table),
        ]
    outliers = math.ceil(k * OUTLIER_SHARE)
    moved = out * (FP32_BYTES + 2 * d.act_bytes)
    return [
        cast,
        memory_op(f"{name}_outliers", F, "copy", tokens * outliers, 2 * tokens * outliers * d.act_bytes, d.act),
        gemm(name, F, tokens, n, k, "int8", out_bytes=out * FP32_BYTES, kernel=d.table),
        gemm(f"{name}_outliers", F, tokens, n, outliers, d.act),
        memory_op(f"{name}_dequantize", F, "elementwise", out, moved, d.act),
    ]


def served_sum(d: ServingDims, name: str, tokens: int) -> list[Item]:
    """The sum over tp of a row-parallel layer; with sequence parallelism as its two halves."""
    if d.tp == 1:
        return []
    size = tokens * d.model.hidden * d.act_bytes
    if d.sp:
        halves = (("scatter", "reduce_scatter"), ("gather", "all_gather"))
        return [collective(f"{name}_{half}", kind, size, F) for half, kind in halves]
    return [collective(f"{name}_sum", "all_reduce", size, F)]


SOFTMAX_ACCESSES = 2.0  # scores read, probabilities written, those that the mask hides too


def unfused_attention(d: ServingDims, batch: int, core: Core) -> Program:
    """Attention of `batch` sequences kernel by kernel, all q·kv scores in memory: as training's unfused one
    (`sim.models.attention.core`), of prompts and, with one query each, of single tokens.
    """
    softmax = ScorePass("softmax", SOFTMAX_ACCESSES * d.act_bytes)
    return unfused_core(batch, core, d.act, d.act_bytes, (softmax,), False, "attention")


def prefill_attention(d: ServingDims, batch: int, core: Core, kernel: str = "") -> Program:
    """Causal attention of `batch` prompt chunks; fused as serving libraries run it. `kernel`: as in `Compute`."""
    if not d.fused_attention:
        return unfused_attention(d, batch, core)
    c, q, kv = core, core.q_len, core.kv_len
    pairs, read = float(attended_pairs(q, kv, True)), float(kv)
    if c.windowed is not None:
        seen, reached = c.windowed.pairs(q, kv), c.windowed.reach(q, kv)
        number, q, kv = c.windowed.blocks(q, kv)
        batch, pairs, read = batch * number, seen / number, reached / number
    widths = c.head_dim + c.v_head_dim
    flops = 2.0 * batch * c.heads * pairs * widths
    moved = batch * widths * (c.heads * q * d.act_bytes + c.kv_heads * read * d.kv_bytes)
    shape = (batch, c.heads, c.kv_heads, q, kv, c.head_dim, c.v_head_dim, int(q > 1))
    return (Compute("prefill", "attention_forward", shape, d.act, flops, moved, F, kernel=kernel, served=True),)


def embedding_tokens(d: ServingDims, tokens: int) -> Program:
    """The look-up; over a split vocabulary its sum."""
    n = tokens * d.model.hidden
    op = memory_op("embedding", F, "embedding", n, (1 + d.model.hyper_connections) * n * d.act_bytes, d.act)
    own = layer_inputs_of(d.model)
    return (
        op,
        *served_sum(d, "embedding", tokens),
        *(() if own is None else own.serve_made(tokens, d.act, d.act_bytes)),
    )


def head_samples(d: ServingDims, samples: int) -> Program:
    """Final norm, logits and the choice of the last token of `samples` sequences; weights and logits have 16 bits in
    every format. Every rank of tp chooses out of all logits (`sim.models.serving.sampling`). The ranks of several
    replicas that split the output matrix gather the hidden states, and then the logits, of all replicas' samples, and
    keep their own (SGLang, srt/layers/logits_processor.py: do_tensor_parallel_all_gather_dp_attn).
    """
    n, elements = samples * d.vocab, samples * d.vocab * d.tp
    act = d.act_bytes
    streams = streams_of(d.model)
    numbers = 0 if streams.gated else streams.number
    norm = [served_add_norm(d, "final_norm", samples)]
    items: list[Item] = [
        *(norm if streams.number == 1 else served_sum_of_streams(d, "head_streams", samples, streams, numbers)),
    ]
    if d.head_tp:
        of_all, hidden = samples * d.head_tp // d.tp, d.model.hidden  # samples of all replicas
        items += [
            collective("head_gather", "all_gather", of_all * hidden * act, F, group="experts"),
            gemm("output", F, of_all, d.head_vocab, hidden, d.act),
            collective("logits_gather", "all_gather", of_all * d.head_vocab * d.head_tp * act, F, group="experts"),
            memory_op("own_logits", F, "copy", elements, 2 * elements * act, d.act),
        ]
    else:
        items.append(gemm("output", F, samples, d.vocab, d.model.hidden, d.act))
        if d.tp > 1:
            items.append(collective("logits_gather", "all_gather", n * d.tp * act, F))
    return (*items, *chosen_tokens(d.sampler, d.sampling, samples, d.vocab * d.tp, act, d.act))
