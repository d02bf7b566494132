"""The embedding: token look-up (vocabulary-parallel), learned positions, dropout.

Nobody waits for the gradient of its output, so all of its backward is weight gradient (torch's pipelining leaves the
first stage's whole backward to `backward_weight_one_chunk`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.core.dtypes import INT64_BYTES
from sim.core.program import Block, BlockKind, ModelPart, NeededBy, Program, Saved
from sim.models.activation_memory.recompute import as_block, keep_all
from sim.models.dims import Dims, ceil_div, dims
from sim.models.layer import shape_key
from sim.models.layer_inputs import layer_inputs_of
from sim.models.linear import in_order
from sim.models.lora import frozen
from sim.models.norm import stream_norm
from sim.models.operators import F, Operator, W, collective, memory_op, of_part
from sim.models.precision.casts import mixed
from sim.models.streams.hyper_connections import copied_to_streams

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig
    from sim.inputs.scenario import Scenario


def embedding_block(scenario: Scenario) -> Block:
    """Look-up, sum over vocabulary shards (a reduce-scatter with sp), positions, norm, dropout."""
    m, found = scenario.model, dims(scenario)
    d = replace(found, wide_stream=False) if found.wide_stream else found.of_stream  # its norm widens the stream
    own = (lookup(scenario, d), *_positions(m, d), *_norm(m, d), *_dropout(d), *copied_to_streams(d))
    parts = of_part(ModelPart.EMBEDDING, (*own, *_of_layers(m, d)))
    if d.lora is not None:  # nothing behind the first adapter needs a gradient
        parts = tuple(replace(frozen(p), backward=(), saved=(), backward_bytes=0.0) for p in parts)
    key = (
        f"embedding {shape_key(m, d)} vocab={d.vocabulary_of(m) * d.tp} positions={m.positions} dropout={d.dropout:g}"
        f"{' normed' if m.embedding_norm else ''}{' frozen' if d.lora else ''}"
        + ("" if m.layer_embedding is None else f" of layers={layer_inputs_of(m)!r}")
    )
    return as_block("embedding", BlockKind.EMBEDDING, key, parts, keep_all(parts))


def table_elements(scenario: Scenario) -> int:
    """Elements of this rank's part of an embedding or output matrix: padded vocabulary / tp · hidden."""
    return dims(scenario).vocabulary_of(scenario.model) * int(scenario.model.hidden)


def lookup(scenario: Scenario, d: Dims) -> Operator:
    """Rows read and written; backward zeroes a dense gradient, adds the tokens' rows and accumulates it.

    Every rank looks up what its part of the vocabulary holds and zeroes the rest, then they sum
    (Megatron-LM).
    """
    return _looked_up(d, "embedding", d.hidden, table_elements(scenario))


def _of_layers(m: ModelConfig, d: Dims) -> tuple[Operator, ...]:
    """Embeddings of a token for each layer: the look-up in their table, and what is made of the embedding's result."""
    own = layer_inputs_of(m)
    if own is None:
        return ()
    table = ceil_div(own.table_elements, d.tp)
    found = _looked_up(d, "layer_inputs_embedding", own.layers * own.width, table)
    return (replace(found, saved=()), *own.made(d))  # the tokens are the embedding's


def _looked_up(d: Dims, name: str, width: int, table: int) -> Operator:
    """The look-up of rows of `width` numbers in this rank's `table` of as many elements."""
    n = d.tokens * width
    size = n * d.act_bytes
    masked = 2 * size if d.tp > 1 else 0.0
    forward: Program = (memory_op(name, F, "embedding", n, 2 * size + masked, d.act, 2 if masked else 1),)
    added = 0.0 if d.accumulated == 1 and d.grad_bytes == d.act_bytes else d.act_bytes + 2 * d.grad_bytes
    moved = 2 * size + masked + table * d.act_bytes
    backward: Program = (memory_op(f"{name}_wgrad", W, "embedding", n, moved, d.act, 3 - bool(added)),)
    if added:
        added_up = memory_op(f"{name}_accumulate", W, "elementwise", table, table * added, d.act)
        backward = (*backward, added_up if d.grad_bytes == d.act_bytes else mixed(added_up, 3))
    if d.tp > 1:
        kind = "reduce_scatter" if d.sp else "all_reduce"
        forward += (*in_order(d, name, size, F), collective(f"{name}_{kind}", kind, size, F))
        if d.sp:
            gather = collective(f"{name}_grad_gather", "all_gather", size, W)
            backward = (gather, *in_order(d, f"{name}_grad", size, W, gathered=True), *backward)
    return Operator(
        name,
        forward,
        backward,
        (Saved("tokens", d.tokens * INT64_BYTES, NeededBy.WEIGHT_GRAD),),
        params=table,
        forward_bytes=size,
        backward_bytes=size + table * d.act_bytes,
        returns_gradient=d.grad_bytes == d.act_bytes,
    )


def _positions(m: ModelConfig, d: Dims) -> tuple[Operator, ...]:
    """A learned table `[max_positions, hidden]`, whole on every rank, added to the tokens' rows."""
    if m.positions != "learned":
        return ()
    n = d.rows * d.hidden
    add = memory_op("positions", F, "elementwise", n, 3 * n * d.act_bytes, d.act)
    grad = memory_op("positions_wgrad", W, "embedding", n, 2 * n * d.act_bytes, d.act, 2)
    return (
        Operator(
            "positions",
            (add,),
            (grad,),
            params=m.max_positions * m.hidden,
            forward_bytes=n * d.act_bytes,
            backward_bytes=n * d.act_bytes,
        ),
    )


def _norm(m: ModelConfig, d: Dims) -> tuple[Operator, ...]:
    """The norm of the embedding's result (BLOOM, arXiv 2211.05100, section 3.2.3)."""
    if not m.embedding_norm:
        return ()
    own = stream_norm(m, d, "embedding_norm")
    return (replace(own, backward=tuple(replace(item, phase=W) for item in own.backward)),)


def _dropout(d: Dims) -> tuple[Operator, ...]:
    if not d.dropout:
        return ()
    n = d.rows * d.hidden
    moved = n * (2 * d.act_bytes + 1)
    return (
        Operator(
            "embedding_dropout",
            (replace(memory_op("embedding_dropout", F, "elementwise", n, moved, d.act), random_numbers=float(n)),),
            (memory_op("embedding_dropout_backward", W, "elementwise", n, moved, d.act),),
            (Saved("dropout mask", float(n)),),
            backward_bytes=2 * n * d.act_bytes,
        ),
    )
