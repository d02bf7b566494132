"""Embeddings of n-grams that some layers add to several residual streams (Qwen 4's per-layer embedding).

A token and those before it are hashed to one row each of several tables, whose numbers are joined to one vector. Two
matrices make of it a key for each stream and one value. Key and stream pass norms; of their product a gate for each
stream is made, which the value is multiplied by. The gated values pass a norm and a causal convolution of each channel
by itself, with a SiLU, and are added to it and to the streams (`Qwen4ExpTextPLELayer` in
transformers/models/qwen4_exp/modeling_qwen4_exp.py).

The table is split over tp by columns, as Transformers does, and the looked-up numbers gathered; all else is whole on
every rank. Its gradient is dense, as that of torch's embedding: zeroed, the tokens' rows added, accumulated.

Bytes for each of the n·hidden numbers of a token. Gate, separate operators: product (3e), sum (e), value times gate
(e + e/n), seven small kernels; backward ten accesses; in one kernel 3e + e/n, backward 5e + 2e/n. Convolution: padding
(2e), convolution (2e), SiLU (2e), two sums (6e); backward SiLU (3e), convolution (2e), padding (2e), sums of gradients
(6e), and the taps' (2e); where a compiler fuses chains 6e and 8e. About forty small kernels make the hashes.

Serving keeps of a sequence the convolution's last inputs and the last tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from sim.core.dtypes import INT64_BYTES
from sim.core.program import Compute, NeededBy, Program, Saved
from sim.models.dims import Dims, ceil_div
from sim.models.linear import linear
from sim.models.operators import F, I, Linear, Operator, W, collective, gemm, memory_op
from sim.models.streams.gated_streams import stream_norms
from sim.models.streams.sizes import Streams

if TYPE_CHECKING:
    from sim.models.serving.operators import ServingDims

HASH_KERNELS = 40
SMALL_KERNELS, KEPT_GATES = 7, 5  # of the gate, over one number a stream, and what of them stays


class NgramEmbedding(Struct, frozen=True):
    """Sizes: a table of `rows`, of which a token reads `heads`, together `width` numbers; n-grams of up to `size`
    tokens, which is the convolution's dilation, too; its `kernel` of taps."""

    streams: Streams
    rows: int
    heads: int
    width: int
    size: int
    kernel: int

    @property
    def table_elements(self) -> int:
        """Numbers of the table."""
        return self.rows * (self.width // self.heads)

    @property
    def matrix_elements(self) -> int:
        """Weights of the matrices to keys and to the value."""
        return self.width * (self.streams.width + self.streams.hidden)

    @property
    def parameters(self) -> int:
        """Table, matrices, three norms of the streams, the convolution's taps."""
        return self.table_elements + self.matrix_elements + (3 + self.kernel) * self.streams.width

    def train(self, d: Dims) -> tuple[Operator, ...]:
        """Look-up, keys and value, norms, gates, convolution and sums."""
        width = self.streams.width
        key = Linear("ngram_key", d.rows, self.width, (width,))
        value = Linear("ngram_value", d.rows, self.width, (self.streams.hidden,), save_input=False)
        return (
            self._lookup(d),
            linear(d, key),
            linear(d, value),
            stream_norms(d, "ngram_key_norm"),
            stream_norms(d, "ngram_query_norm"),
            self._gate(d),
            stream_norms(d, "ngram_value_norm"),
            self._convolution(d),
        )

    def _lookup(self, d: Dims) -> Operator:
        n, table = d.tokens * self.width, ceil_div(self.table_elements, d.tp)
        size, ids = n * d.act_bytes, d.tokens * self.heads * INT64_BYTES
        hashed = memory_op("ngram_hashes", F, "elementwise", d.tokens * self.heads, 4 * ids, d.act, HASH_KERNELS)
        forward: Program = (hashed, memory_op("ngram_embedding", F, "embedding", n / d.tp, 2 * size / d.tp, d.act))
        if d.tp > 1:
            forward = (*forward, collective("ngram_gather", "all_gather", size, F))
        added = 0.0 if d.accumulated == 1 and d.grad_bytes == d.act_bytes else d.act_bytes + 2 * d.grad_bytes
        moved = 2 * size / d.tp + table * (d.act_bytes + added)
        return Operator(
            "ngram_embedding",
            forward,
            (memory_op("ngram_embedding_wgrad", W, "embedding", n / d.tp, moved, d.act, 3),),
            (Saved("n-grams' rows", ids, NeededBy.WEIGHT_GRAD),),
            params=table,
            forward_bytes=size,
            backward_bytes=size + table * d.act_bytes,
        )

    def _gate(self, d: Dims) -> Operator:
        e, n = d.act_bytes, self.streams.number
        elements, gates = float(d.rows * self.streams.width), d.rows * n
        fused = d.framework.fuses_chains
        ahead, kernels = (3 * e + e / n, 1) if fused else (5 * e + e / n, 3 + SMALL_KERNELS)
        back, back_kernels = (5 * e + 2 * e / n, 1) if fused else (10 * e, 6 + SMALL_KERNELS)
        kept = (
            Saved("n-grams' normed keys and streams", 2 * elements * e),
            Saved("n-grams' value", elements / n * e),
            Saved("n-grams' gates", gates * e * (1 if fused else KEPT_GATES)),
        )
        return Operator(
            "ngram_gate",
            (memory_op("ngram_gate", F, "elementwise", elements, ahead * elements, d.act, kernels),),
            (memory_op("ngram_gate_backward", I, "elementwise", elements, back * elements, d.act, back_kernels),),
            kept,
            forward_bytes=elements * e,
            backward_bytes=3 * elements * e,
        )

    def _convolution(self, d: Dims) -> Operator:
        e, elements = d.act_bytes, float(d.rows * self.streams.width)
        fused = d.framework.fuses_chains
        ahead, kernels = (6, 2) if fused else (12, 5)
        back, back_kernels = (8, 2) if fused else (13, 5)
        padding = 0.0 if fused else d.batch * self.reach * self.streams.width * e
        size = elements * e
        return Operator(
            "ngram_convolution",
            (memory_op("ngram_convolution", F, "elementwise", elements, ahead * size, d.act, kernels),),
            (
                memory_op("ngram_convolution_backward", I, "elementwise", elements, back * size, d.act, back_kernels),
                memory_op("ngram_convolution_wgrad", W, "elementwise", elements, 2 * size, d.act),
            ),
            (
                Saved("n-grams' convolution's input", size + padding),
                Saved("n-grams' convolved", size),
            ),
            params=self.kernel * self.streams.width,
            forward_bytes=2 * size,
            backward_bytes=3 * size,
        )

    @property
    def reach(self) -> int:
        """Tokens before its own that the convolution reads from."""
        return (self.kernel - 1) * self.size

    def sequence_bytes(self, d: ServingDims) -> float:
        """Return the bytes that a served sequence keeps, whatever its length: the convolution's last inputs and the
        last tokens of an n-gram."""
        return self.reach * self.streams.width * d.act_bytes + (self.size - 1) * INT64_BYTES

    def served_rest(self, tp: int) -> int:
        """Weights on one rank beside its matrices: its part of the table, norms and taps."""
        return ceil_div(self.table_elements, tp) + (3 + self.kernel) * self.streams.width

    def serve(self, d: ServingDims, tokens: int) -> Program:
        """Look-up, one matrix to keys and value, norms and gates in one kernel, the convolution and sums in another."""
        e, n, looked_up = d.act_bytes, tokens * self.streams.width, tokens * self.width
        items: list[Compute] = [memory_op("ngram_embedding", F, "embedding", looked_up, 2 * looked_up * e, d.act, 2)]
        gathered = (collective("ngram_gather", "all_gather", looked_up * e, F),) if d.tp > 1 else ()
        outputs = self.streams.width + self.streams.hidden
        return (
            *items,
            *gathered,
            gemm("ngram_key_value", F, tokens, outputs, self.width, d.act),
            memory_op("ngram_gate", F, "norm", n, 3 * n * e + n / self.streams.number * e, d.act),
            memory_op("ngram_convolution", F, "elementwise", n, (self.kernel + 4) * n * e, d.act),
        )
