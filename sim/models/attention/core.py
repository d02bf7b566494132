"""The attention core: fused (FlashAttention-like) or unfused, whole or over blocks of keys.

Fused: Dao et al. 2022 and 2023. Unfused: two batched matmuls with scale-mask-softmax and dropout between
them.
"""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

from sim.core.attention_pairs import half_diagonal_pairs
from sim.core.dtypes import FP32_BYTES
from sim.core.operator_kinds import ATTENTION_LAUNCHES
from sim.core.program import ALIGNED, Compute, Item, Program, Saved, TensorRole
from sim.inputs.windows import Window
from sim.models.attention.score_kernels import (
    RAISED,
    Passes,
    joins_sinks,
    masked_bytes,
    run_passes,
    score_gradient_bytes,
    score_passes,
    scored_bytes,
    softmax_bytes,
)
from sim.models.attention.sink_factor import factor_backward, factor_forward, factor_saved
from sim.models.attention.torch_choice import chosen_kernel
from sim.models.dims import Dims
from sim.models.elementwise import MASK_BYTES
from sim.models.operators import F, I, Operator, gemm, memory_op

LSE_BYTES = 4.0  # a row's log-sum-exp, fp32


class Core(Struct, frozen=True):
    """Shapes of one attention: `[batch, heads, q_len, head_dim]` against kv_len keys.

    `causal`: the mask is aligned to the last key, so that query i of q sees kv − q + i + 1 keys.
    `share` replaces the share of the q·kv scores that the mask leaves, where it is not that triangle. `window`: what of
    the causal keys a query sees; only fused kernels skip the others. `softcap`: scores pass c·tanh(x / c) (Gemma 2,
    arXiv 2408.00118, section 2), which fused kernels do on the way. `sinks`: see `GroupedQueryAttention`. `packed`: of
    these scores what lies within documents; fused kernels of packed sequences compute no others. `filled`: of the
    queries those of documents, the others are padding. `documents`: equal ones with as many tokens and squares.
    `repeats`: `kv_heads` counts each key and value head so often, once for each query head that shares it. `wide_keys`:
    queries and keys come in fp32 and are cast for the matmuls. `masked`: of a fused kernel, a tensor of numbers for all
    pairs says what is hidden, of all heads or of each (`mask_heads`; `sim.models.attention.masked_windows`).
    """

    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    causal: bool = True
    share: float | None = None
    window: Window | None = None
    softcap: bool = False
    sinks: bool = False
    packed: float = 1.0
    filled: float = 1.0
    documents: float = 1.0
    repeats: int = 1
    wide_keys: bool = False
    masked: bool = False
    mask_heads: int = 1

    @property
    def visible(self) -> float:
        """Scores computed by a kernel that skips what is masked, per batch and head (`half_diagonal_pairs` when
        causal; with a window exactly what it shows).
        """
        whole = self._of_one_document
        return whole if self.packed == 1.0 else whole * self.packed

    @property
    def _of_one_document(self) -> float:
        if self.share is not None:
            return self.share * self.q_len * self.kv_len
        if self.windowed is not None:
            return float(self.windowed.pairs(self.q_len, self.kv_len))
        if self.causal:
            return half_diagonal_pairs(self.q_len, self.kv_len)
        return float(self.q_len * self.kv_len)

    @property
    def windowed(self) -> Window | None:
        """The window, where it hides any key that is there."""
        return self.window if self.window is not None and self.window.tokens < self.kv_len else None


def attention_flops(
    heads: int, widths: tuple[int, int], seen_keys: float | None, seq_len: int, causal_half: bool
) -> float:
    """Model FLOPs of a token in the core, forward and backward: 12·heads·head_dim·seq_len, halved when causal
    (Chowdhery 2022, appendix B); of a window what it shows (`seen_keys`) is counted as it is."""
    seen = seq_len * (0.5 if causal_half else 1.0) if seen_keys is None else seen_keys
    return 6.0 * heads * sum(widths) * seen


def core_forward(d: Dims, c: Core, name: str = "attention") -> Program:
    """Fused: one kernel, 2·b·a·q·kv·(d + d_v) flops, half when causal; q, k, v read, o written."""
    if not d.fused_attention:
        return _unfused_forward(d, c, name)
    moved = _qo_bytes(d, c) + kv_bytes(d, c) + d.batch * c.heads * c.q_len * LSE_BYTES
    return (_fused(d, c, name, "attention_forward", c.head_dim + c.v_head_dim, moved),)


def core_backward(d: Dims, c: Core, name: str = "attention_backward") -> Program:
    """Fused: five matmuls where the forward has two (Dao 2023, section 3.1): scores, dQ and dK over `head_dim`, dP and
    dV over `v_head_dim`. q, k, v, o, dO are read; dQ, dK, dV written (and the rows' dO·o sums).
    """
    if not d.fused_attention:
        return _unfused_backward(d, c, name)
    moved = 2 * (_qo_bytes(d, c) + kv_bytes(d, c)) + 2 * d.batch * c.heads * c.q_len * LSE_BYTES
    return (_fused(d, c, name, "attention_backward", 3 * c.head_dim + 2 * c.v_head_dim, moved),)


def _qo_bytes(d: Dims, c: Core) -> float:
    return d.batch * c.q_len * c.heads * (c.head_dim + c.v_head_dim) * d.act_bytes


def kv_bytes(d: Dims, c: Core) -> float:
    """A rank's keys and values, with as many heads as they have (grouped queries have fewer)."""
    return d.batch * c.kv_len * c.kv_heads * (c.head_dim + c.v_head_dim) * d.act_bytes


def _fused(d: Dims, c: Core, name: str, kind: str, widths: int, moved: float) -> Compute:
    """`widths`: of all the matmuls together, each over one score."""
    flops = 2.0 * d.batch * c.heads * c.visible * widths
    number, q, kv = (1, c.q_len, c.kv_len) if c.windowed is None else c.windowed.blocks(c.q_len, c.kv_len)
    if c.packed < 1.0:
        number, q, kv = packed_blocks(c)
    shape = (d.batch * number, c.heads, c.kv_heads, q, kv, c.head_dim, c.v_head_dim, int(c.causal))
    phase = F if kind == "attention_forward" else I
    # Those that frameworks choose multiply 16 bits or fewer.
    kernel = d.attention_kernel or ("" if d.act == "fp32" else d.framework.attention_kernel)
    kernel = chosen_kernel(kernel, (c.head_dim, c.v_head_dim), d.attention_dropout, c.masked)
    name = f"{name}:{kernel}" if kernel else name
    return Compute(
        name,
        kind,
        shape,
        d.act,
        flops,
        moved,
        phase,
        ATTENTION_LAUNCHES[kind],
        one_call=True,
        kernel=kernel,
        drops=bool(d.attention_dropout),
        masked=c.masked,
    )


def packed_blocks(c: Core) -> tuple[int, int, int]:
    """Equal blocks with as many queries and pairs as a packed sequence's documents: their number, and the queries and
    keys of each. Padding has none. A window's blocks have at most its queries, as in `Window.blocks`.

    >>> packed_blocks(Core(4096, 4096, 1, 1, 64, 64, packed=0.25, documents=4.0))
    (4, 1024, 1024)
    >>> packed_blocks(Core(4096, 4096, 1, 1, 64, 64, packed=1 / 16, filled=0.25))
    (1, 1024, 1024)
    """
    tokens = max(1, round(c.q_len * c.filled))
    number = max(1, round(c.documents))
    if c.windowed is not None:
        number = max(number, -(-tokens // c.windowed.tokens))
    queries = -(-tokens // number)
    seen = c.visible / (number * queries)  # of a query, in the mean
    return number, queries, max(1, round(seen + queries / 2 if c.causal else seen))


def _scores(d: Dims, c: Core) -> float:
    return float(d.batch * c.heads * c.q_len * c.kv_len)


def _unfused_forward(d: Dims, c: Core, name: str) -> Program:
    """QKᵀ, scale-mask-softmax, dropout, AV, and the copy of the context to `[tokens, heads · head_dim]`."""
    found = unfused_core(d.batch, c, d.act, d.act_bytes, score_passes(d, c)[0], bool(d.attention_dropout), name)
    scores, *between, product, copied = found
    assert isinstance(scores, Compute)
    assert isinstance(product, Compute)
    biases = (_copied_biases(d, c, name),) if d.code.scale == "matmul" else ()
    return (
        *biases,
        _of_scores(d, scores),
        *between,
        _by_probabilities(d, c, product),
        *factor_forward(d, c, name),
        _ordering(d, copied),
    )


def _copied_biases(d: Dims, c: Core, name: str) -> Compute:
    """ALiBi's numbers, which `baddbmm`'s own call copies to the place of all scores, to add the product to them.

    torch's aten/src/ATen/native/cuda/Blas.cpp: baddbmm_out_cuda_impl; bytes as of a captured call's copy.
    """
    n = _scores(d, c)
    return replace(memory_op(f"{name}_biases", F, "copy", n, 2 * d.act_bytes * n, d.act, 0), single_elements=n)


def _by_probabilities(d: Dims, c: Core, product: Compute) -> Compute:
    """A matmul of probabilities, whose rows have a sink's more at their end: a part of each, of odd rows, is read where
    it lies (transformers/models/gpt_oss/modeling_gpt_oss.py: eager_attention_forward, `probs[..., :-1]`), unless
    dropout or a cast has copied it."""
    copied = bool(d.attention_dropout) or masked_bytes(d, scored_bytes(d)) > d.act_bytes or d.act_bytes >= FP32_BYTES
    if not joins_sinks(d, c) or not d.framework.softmax_in_fp32 or copied:
        return product
    return replace(product, alignment=math.gcd(ALIGNED, c.kv_len + 1))


def _of_scores(d: Dims, product: Compute) -> Compute:
    """The matmul of queries and keys, or a gradient of it, in the dtype of the scores."""
    size = scored_bytes(d)
    return product if size == d.act_bytes else replace(product, dtype="fp32", bytes=product.bytes * size / d.act_bytes)


def _ordering(d: Dims, item: Item) -> Item:
    """A copy of the context between tokens' and heads' order by torch, which does not vectorize it."""
    if not isinstance(item, Compute) or d.framework.fuses_chains:
        return item
    return replace(item, single_elements=float(item.shape[0]))


def unfused_core(batch: int, c: Core, act: str, e: float, softmax: Passes, dropout: bool, name: str) -> Program:
    """QKᵀ, scale-mask-softmax, dropout, AV, and the copy of the context, of `batch` sequences, kernel by kernel.

    `e`: bytes of an element of the activations. The query heads that share a KV head are stacked as rows of one
    matmul.
    """
    n = float(batch * c.heads * c.q_len * c.kv_len)
    batch, rows = _stacked(batch, c)
    context = batch * rows * c.v_head_dim
    items: list[Item] = [
        gemm(f"{name}_scores", F, rows, c.kv_len, c.head_dim, act, batch),
        *run_passes(softmax, name, F, n, act),
    ]
    if dropout:
        dropped = memory_op(f"{name}_dropout", F, "elementwise", n, (2 * e + MASK_BYTES) * n, act)
        items.append(replace(dropped, random_numbers=n))
    items += [
        gemm(f"{name}_context", F, rows, c.v_head_dim, c.kv_len, act, batch),
        memory_op(f"{name}_context_copy", F, "copy", context, 2 * context * e, act),
    ]
    return tuple(items)


def _stacked(batch: int, c: Core) -> tuple[int, int]:
    """Batch and rows of the unfused matmuls."""
    return batch * c.kv_heads, c.heads // c.kv_heads * c.q_len


def _unfused_backward(d: Dims, c: Core, name: str) -> Program:
    """Four batched matmuls (dV, dA, dQ, dK), dropout and softmax backward."""
    n, e = _scores(d, c), d.act_bytes
    batch, rows = _stacked(d.batch, c)
    context = batch * rows * c.v_head_dim
    copied = _ordering(d, memory_op(f"{name}_context_copy", I, "copy", context, 2 * context * e, d.act))
    items: list[Item] = [
        *factor_backward(d, c, name),
        *(() if d.framework.tokens_first else (copied,)),
        _by_probabilities(d, c, gemm(f"{name}_dv", I, c.kv_len, c.v_head_dim, rows, d.act, batch)),
        gemm(f"{name}_dprobs", I, rows, c.kv_len, c.v_head_dim, d.act, batch),
    ]
    if d.attention_dropout:
        items.append(memory_op(f"{name}_dropout", I, "elementwise", n, (2 * e + MASK_BYTES) * n, d.act))
    items += [
        *run_passes(score_passes(d, c)[1], name, I, n, d.act),
        _of_scores(d, gemm(f"{name}_dq", I, rows, c.head_dim, c.kv_len, d.act, batch)),
        _of_scores(d, gemm(f"{name}_dk", I, c.kv_len, c.head_dim, rows, d.act, batch)),
        *_scaled_gradients(d, c, name),
    ]
    return tuple(items)


def _scaled_gradients(d: Dims, c: Core, name: str) -> Program:
    """The gradients of queries and keys times the scale, which the forward's matmul has applied."""
    if d.code.scale != "matmul":
        return ()
    sizes = (d.batch * c.head_dim * n for n in (c.heads * c.q_len, c.kv_heads * c.kv_len))
    return tuple(memory_op(f"{name}_scale", I, "elementwise", n, 2 * d.act_bytes * n, d.act) for n in sizes)


def core_saved(d: Dims, own: Core, blocks: tuple[Core, ...], exchanged: bool = False) -> tuple[Saved, ...]:
    """Return what the core keeps of its own queries, keys and values, and per block of scores.

    Unfused (Korthikanti 2022, section 4.1): q, k 4sbh, v 2sbh, softmax output 2as²b, dropout mask as²b,
    dropped output 2as²b. Fused: q, k, v and the log-sum-exp 4asb; the output is the projection's input, and kept beside
    it where the projection keeps 8 bits of it (the kernel's backward reads the 16; `Dims.saves_originals`: it keeps the
    16), where the kernel has 8 bits, and where it is `exchanged` between the two: what the projection keeps is then
    what came from other ranks. Copies of keys and values for each query head
    are kept.
    """
    multiplied = d.act_bytes if d.fused_attention else scored_bytes(d)
    q = d.batch * own.heads * own.q_len * own.head_dim * multiplied
    kv = d.batch * own.kv_heads * own.kv_len
    saved = [
        Saved("query", q, role=TensorRole.INPUT),
        Saved("key", kv * own.head_dim * multiplied, role=TensorRole.INPUT, keys=True),
        Saved("value", kv * own.v_head_dim * d.act_bytes, role=TensorRole.INPUT, keys=True),
    ]
    if d.fused_attention:
        rows = d.batch * own.heads * own.q_len
        # Else the projection keeps this very tensor.
        apart = d.recipe is not None and d.recipe.keeps_quantized and not d.saves_originals
        beside = exchanged or apart or d.fp8_attention
        output = Saved("output", rows * own.v_head_dim * d.act_bytes if beside else 0.0)
        statistics = Saved("log-sum-exp", rows * LSE_BYTES, role=TensorRole.STATISTICS)
        return (*saved, statistics, output)
    scores = sum(_scores(d, c) for c in blocks)
    saved += _softmax_saved(d, own, scores)
    if d.attention_dropout:
        saved += [
            Saved("dropout mask", scores * MASK_BYTES),
            Saved("dropped probabilities", scores * d.act_bytes),
        ]
    return tuple(saved)


def _softmax_saved(d: Dims, own: Core, scores: float) -> list[Saved]:
    """Probabilities, in the activations' dtype and, where separate operators made them in fp32, in that, too; a cap's
    tanh; of sinks that are joined to the scores as a column, that column and the place of each row's maximum.
    """
    rows = scores / own.kv_len
    joined, e = scores + (rows if joins_sinks(d, own) else 0.0), d.act_bytes
    made = softmax_bytes(d, own) if d.framework.softmax_in_fp32 else e
    if made > e:
        saved = [Saved("softmax output", scores * e), Saved("softmax output in fp32", joined * made)]
    else:
        saved = [Saved("softmax output", joined * e)]
    shifted = ("all", "sinks") if joins_sinks(d, own) else ("all",)
    if d.framework.softmax_in_fp32 and d.code.shifts_by_largest in shifted:
        saved.append(Saved("maximum's place", rows * 8.0, role=TensorRole.STATISTICS))
    if d.framework.softmax_in_fp32 and d.code.mask == RAISED:
        saved.append(Saved("masked scores", scores * masked_bytes(d, scored_bytes(d))))
    if own.softcap and not d.framework.fuses_chains:
        saved.append(Saved("capped scores' tanh", scores * d.act_bytes))
    saved += factor_saved(d, own, scores, masked_bytes(d, scored_bytes(d)))
    return saved


def core_part(
    d: Dims, own: Core, blocks: tuple[Core, ...], forward: Program, backward: Program, exchanged: bool = False
) -> Operator:
    """The core as a part; `blocks` are the shapes it is computed in (one without context parallelism). `exchanged`:
    other ranks get its output before it is projected."""
    e = d.act_bytes
    tensors = _qo_bytes(d, own) + kv_bytes(d, own)
    most = 0.0 if d.fused_attention else max((_scores(d, c) for c in blocks), default=0.0)
    out = d.batch * own.heads * own.q_len * own.v_head_dim * e
    return Operator(
        "attention",
        forward,
        backward,
        core_saved(d, own, blocks, exchanged),
        forward_bytes=2 * most * e,
        backward_bytes=tensors + most * score_gradient_bytes(d, own) + out,
        core=True,
        output_bytes=out,
    )
