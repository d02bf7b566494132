"""The lightning indexer of DeepSeek's sparse attention: which keys a query attends to (DeepSeek-V3.2-Exp, 2025, 2.1).

score(t, s) = Σ_j w(t, j) · ReLU(q(t, j) · k(s)) over a few heads that share one key of a token; the `top_k` keys with
the highest scores are attended to. Queries come from the query latent, key and weights from the hidden state; the key
passes a LayerNorm (`DeepseekV32Indexer` in transformers/models/deepseek_v32/modular_deepseek_v32.py).

Training (section 2.2): the indexer reads detached inputs and learns by a loss of its own, the KL divergence between its
softmax and the main attention's probabilities, summed over all heads. In sparse training the loss is over the selected
keys, in the dense warm-up over all. Nothing of it enters the residual stream's gradient, so its backward has the phase
of a weight gradient.

As Megatron-Core runs it (megatron/core/transformer/experimental_attention_variant/dsa.py): whole on every
tensor-parallel rank, its inputs gathered under sequence parallelism, the target's probabilities summed over tp. Over
context-parallel ranks the keys are gathered.

Prices: scores are one kernel (DeepGEMM's `fp8_mqa_logits`), written down as a fused attention of as many flops: that of
half the heads. It writes a 32-bit score of each pair. The selection takes as long as three reads of these (1.5 TB/s of
an H200, NVIDIA AIConfigurator 0.12, glm5_topk_module, the newest keys best; random scores take twice as long).
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from sim.core.attention_pairs import attended_pairs
from sim.core.dtypes import FP32_BYTES, dtype_bytes
from sim.core.operator_kinds import SCORES, SPARSE, shape_flops
from sim.core.program import Compute, Item, NeededBy, Program, Saved, TensorRole
from sim.models.dims import Dims, ceil_div
from sim.models.layers.indexer_of_transformers import INDEX_BYTES, separate_bytes, separate_rope, separate_scores
from sim.models.layers.matrix import Matrix
from sim.models.linear import linear
from sim.models.operators import F, Operator, W, collective, memory_op

SELECT_READS = 3.0  # of the scores, by a selection
SCALED = 128  # numbers of an 8-bit key that share a 32-bit scale
# New tokens of a sequence for which a decode's kernel reads the keys once (DeepGEMM, `fp8_paged_mqa_logits`: next_n).
QUERIES_AT_ONCE = 2


class Indexer(Struct, frozen=True):
    """Sizes: `heads` queries of `head_dim` a token, one key, and the keys that a query then attends to."""

    heads: int
    head_dim: int
    top_k: int

    def matrices(self, hidden: int, query_rank: int) -> tuple[Matrix, ...]:
        """Projections, whole on every rank. Heads' weights are never quantized (vLLM, deepseek_v2.py, Indexer; SGLang,
        dsa_indexer.py: weights_proj)."""
        return (
            Matrix("index_query", query_rank, (self.heads * self.head_dim,), "plain"),
            Matrix("index_key", hidden, (self.head_dim,), "plain"),
            Matrix("index_weights", hidden, (self.heads,), "plain", sixteen_bit=True),
        )

    @property
    def norm_parameters(self) -> int:
        """Weight and bias of the key's LayerNorm."""
        return 2 * self.head_dim

    @property
    def key_cache_bytes(self) -> float:
        """Bytes of a token's cached key: 8 bits a number and a 32-bit scale for 128, whatever the main cache is kept in
        (vLLM: `DeepseekV32IndexerCache`, 132 bytes)."""
        return self.head_dim + FP32_BYTES * -(-self.head_dim // SCALED)

    def key_read_bytes(self, queries: int) -> float:
        """Bytes that a decode of `queries` new tokens of a sequence reads for each cached key."""
        return self.key_cache_bytes * ceil_div(queries, QUERIES_AT_ONCE)

    @property
    def kept_key_numbers(self) -> int:
        """Numbers of a token that training keeps of its key: before and after the norm."""
        return 2 * self.head_dim

    def slots(self, kv_len: int) -> int:
        """Keys that a sparse kernel computes for each query: as many as it may select, the empty places too."""
        return min(self.top_k, kv_len)

    def selected(self, length: int) -> float:
        """Keys that a query of a sequence of `length` attends to in the mean: min(top_k, its own place from 1)."""
        k = min(self.top_k, length)
        return k - k * (k - 1) / 2 / length

    def core_flops(self, seq_len: int, causal_half: bool) -> float:
        """Model FLOPs of a token outside matrices: scores of all keys forward, and their gradients."""
        seen = seq_len * (0.5 if causal_half else 1.0)
        return 2.0 * self.heads * self.head_dim * seen + self.score_gradient_flops(seq_len)

    def score_gradient_flops(self, seq_len: int) -> float:
        """Model FLOPs of a token for the gradients of query and key, over the selected keys."""
        return 4.0 * self.heads * self.head_dim * self.selected(seq_len)


class Indexed(Protocol):
    """An attention that an indexer selects keys for."""

    @property
    def hidden(self) -> int:
        """Width of the hidden state."""
        ...

    @property
    def heads(self) -> int:
        """Query heads."""
        ...

    @property
    def query_rank(self) -> int | None:
        """Width of the latent that queries come from."""
        ...

    @property
    def widths(self) -> tuple[int, int]:
        """Width of a query or key head, and of a value head."""
        ...

    @property
    def shared_width(self) -> int:
        """Numbers of a token that all heads read."""
        ...

    @property
    def rope_width(self) -> int:
        """Numbers of a head that rope rotates, the indexer's heads too."""
        ...


class IndexedKeys(Struct, frozen=True):
    """Queries of one rank and the keys that they may see: pieces of (queries, keys up to the last of them).

    `striped`: a piece's queries do not end the sequence but lie evenly over it.
    """

    batch: int
    pieces: tuple[tuple[int, int], ...]
    striped: bool = False

    @property
    def pairs(self) -> float:
        """Causal pairs of all pieces."""
        return float(self.batch * sum(_pairs(q, kv, self.striped) for q, kv in self.pieces))

    @property
    def kv_len(self) -> int:
        """Keys that the last query sees."""
        return max(kv for _, kv in self.pieces)


def _pairs(q_len: int, kv_len: int, striped: bool) -> int:
    return attended_pairs(q_len, ceil_div(kv_len, 2) if striped else kv_len, not striped)


def scores(
    x: Indexer, rows: tuple[int, int, int], dtype: str, seen: int | None = None, key_bytes: float | None = None
) -> Program:
    """Scores of causal pairs and the selection; `rows`: sequences, queries and keys of each.

    `seen`: keys that a query sees in the mean, where the queries do not lie beside the last keys: their kernel is one
    of so many keys without a mask. `key_bytes`: read for each key; without them it is new and as wide as a query.
    """
    batch, q_len, kv_len = rows
    pairs = float(batch * (attended_pairs(q_len, kv_len, True) if seen is None else q_len * seen))
    width, sizes = x.head_dim * dtype_bytes(dtype), (x.heads, x.head_dim)
    operands = batch * (q_len * x.heads * width + kv_len * (width if key_bytes is None else key_bytes))
    written, keys, causal = pairs * FP32_BYTES, kv_len if seen is None else seen, seen is None and q_len > 1
    kernel = score_kernel((batch, q_len, keys), sizes, causal, dtype, operands + written)
    if kv_len <= x.top_k:  # nothing to choose
        return (kernel,)
    chosen = batch * q_len * x.slots(kv_len) * INDEX_BYTES
    return kernel, memory_op("index_select", F, "softmax", pairs, SELECT_READS * written + chosen, dtype)


def score_kernel(
    rows: tuple[int, int, int], sizes: tuple[int, int], causal: bool, dtype: str, moved_bytes: float
) -> Compute:
    """The kernel of scores alone; `rows`: sequences, queries and keys of each; `sizes`: heads and their width.

    It is written as attention of half the heads, with values as wide as keys: as many flops as scores of all heads.
    """
    (batch, q_len, keys), (heads, width) = rows, sizes
    shape = (batch, max(1, heads // 2), 1, q_len, keys, width, width, int(causal))
    flops = shape_flops("attention_forward", shape)
    return Compute("index_scores", "attention_forward", shape, dtype, flops, moved_bytes, F, kernel=SCORES)


def index_operator(
    x: Indexer, d: Dims, of: Indexed, keys: IndexedKeys, trained: bool, dense: bool, alone: bool
) -> Operator:
    """The indexer in training: its matmuls, scores and selection; backward the loss and its gradients where `trained`.

    Kept: queries, keys and weights, for the loss's gradient, and the selected places, for the core's backward too.
    `dense`: the loss is over all keys. `alone`: nothing else is trained, so that it keeps its matmuls' inputs itself,
    and the main attention's queries and keys for the target.
    """
    assert of.query_rank is not None
    matrices, e, tokens = x.matrices(of.hidden, of.query_rank), d.act_bytes, d.tokens
    forward: list[Item] = []
    if d.sp:
        size = tokens * (of.hidden + of.query_rank) * e
        forward.append(collective("index_input_gather", "all_gather", size, F))
    linears = [linear(d, m.linear(tokens, False)) for m in matrices]
    forward += [i for part in linears for i in part.forward]
    norm = tokens * x.head_dim
    forward.append(memory_op("index_key_norm", F, "norm", norm, 2 * norm * e, d.act))
    rotated = tokens * (x.heads + 1) * x.head_dim
    plain = memory_op("index_rope", F, "elementwise", rotated, 2 * rotated * e, d.act, 2)
    turned = float(tokens * (x.heads + 1) * of.rope_width)
    masks = d.framework.masks_unselected
    forward += separate_rope(turned, rotated, (d.act, e)) if masks else (plain,)
    if d.cp > 1:
        forward.append(collective("index_key_gather", "all_gather", tokens * d.cp * x.head_dim * e, F, group="cp"))
    found, alive_bytes = _scores_of(x, d, keys)
    forward += found
    slots = keys.kv_len if dense else x.slots(keys.kv_len)
    params = sum(m.parameters for m in matrices) + x.norm_parameters
    saved = [] if dense or masks else [Saved("selected keys", tokens * slots * INDEX_BYTES)]
    if not trained:
        return Operator("indexer", tuple(forward), (), tuple(saved), frozen=params, forward_bytes=alive_bytes)
    saved += _kept_for_loss(x, d, of, alone)
    pairs = keys.pairs if dense else float(tokens * slots)
    return Operator(
        "indexer",
        tuple(forward),
        (*_loss_backward(x, d, of, slots, pairs), *(i for part in linears for i in part.backward if _weights_own(i))),
        tuple(saved),
        params=params,
        weights=tuple((m.width, m.inputs) for m in matrices),
        tensors=(*(m.elements for m in matrices), x.head_dim, x.head_dim),
        forward_bytes=pairs * FP32_BYTES,
        backward_bytes=2 * pairs * FP32_BYTES + rotated * e,
        learns_alone=True,
    )


def _scores_of(x: Indexer, d: Dims, keys: IndexedKeys) -> tuple[Program, float]:
    """Return scores and selection of all pieces, and the bytes that separate operators hold at once."""
    rows = [(keys.batch, q, kv) for q, kv in keys.pieces]
    if not d.framework.masks_unselected:
        return tuple(i for r in rows for i in scores(x, r, d.act, ceil_div(r[2], 2) if keys.striped else None)), 0.0
    sizes, act = (x.heads, x.head_dim), (d.act, d.act_bytes)
    chosen = [float(batch * q * x.slots(kv)) for batch, q, kv in rows]
    truths = d.fused_attention
    items = tuple(i for r, c in zip(rows, chosen, strict=True) for i in separate_scores(sizes, r, act, c, truths))
    return items, max(separate_bytes(sizes, r) for r in rows)


def _kept_for_loss(x: Indexer, d: Dims, of: Indexed, alone: bool) -> list[Saved]:
    """Return the tensors that a trained indexer keeps for the gradients of its loss; `alone` as in `index_operator`."""
    assert of.query_rank is not None
    e, tokens = d.act_bytes, d.tokens
    saved = [
        Saved("index queries", tokens * x.heads * x.head_dim * e, NeededBy.WEIGHT_GRAD, TensorRole.INPUT),
        Saved("index keys", tokens * x.kept_key_numbers * e, NeededBy.WEIGHT_GRAD, TensorRole.INPUT),
        Saved("index weights", tokens * x.heads * FP32_BYTES, NeededBy.WEIGHT_GRAD),
    ]
    if alone:
        heads = -(-of.heads // d.tp)
        inputs = tokens * (of.hidden + of.query_rank + 2 * heads * of.widths[0]) * e
        saved.append(Saved("inputs and target's operands", inputs, NeededBy.WEIGHT_GRAD, TensorRole.INPUT))
    return saved


def _loss_backward(x: Indexer, d: Dims, of: Indexed, slots: int, pairs: float) -> Program:
    """The target (scores of the main attention, summed over its heads and over tp), softmax and divergence, the
    gradients of index queries and keys (scores again, two products), and the norm's."""
    heads, width = -(-of.heads // d.tp), of.shared_width
    items: list[Item] = [
        _kernel("index_target", d, slots, max(1, heads // 2), width, pairs),
        memory_op("index_loss", W, "softmax", pairs, 4 * pairs * FP32_BYTES, d.act, 2),
        _kernel("index_scores_wgrad", d, slots, 3 * x.heads // 2, x.head_dim, pairs),
    ]
    if d.tp > 1:
        items.insert(1, collective("index_target_sum", "all_reduce", pairs * FP32_BYTES, W))
    if d.cp > 1:
        size = d.tokens * d.cp * x.head_dim * d.act_bytes
        items.append(collective("index_key_grad_scatter", "reduce_scatter", size, W, group="cp"))
    norm = d.tokens * x.head_dim
    items.append(memory_op("index_key_norm_wgrad", W, "norm", norm, 5 * norm * d.act_bytes, d.act, 2))
    return tuple(items)


def _weights_own(item: Item) -> bool:
    """Tell whether a linear layer's weight gradient needs it: not the input's gradient."""
    return item.phase is W or (isinstance(item, Compute) and item.kind == "cast")


def _kernel(name: str, d: Dims, slots: int, heads: int, width: int, pairs: float) -> Compute:
    """Products of each token's `heads` with its own `slots` keys."""
    shape = (d.tokens, 1, 1, heads, slots, width, width, 0)
    flops = 4.0 * pairs * heads * width
    moved = d.act_bytes * (d.tokens * heads * width + d.tokens * d.cp * width) + pairs * FP32_BYTES
    return Compute(name, "attention_forward", shape, d.act, flops, moved, W, kernel=SPARSE)
