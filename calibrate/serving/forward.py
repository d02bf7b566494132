"""Runs the bundled model over a flat batch of tokens of many sequences, which reads and writes the paged cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import accumulate
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calibrate.bundled_model.model import Build, Embedding, Head, Layer, Router, make_blocks
from calibrate.bundled_model.rotation import Constants
from calibrate.serving.cache import PagedCache
from sim.inputs.model_config import ModelConfig
from sim.inputs.training_config import Training

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """The part of a sequence that an iteration computes: tokens `start` to `end`, logits after the last `logits`."""

    sequence: int
    tokens: tuple[int, ...]
    start: int
    logits: int = 1

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


Mark = float | torch.cuda.Event  # a moment: of a clock or, on a GPU, in the order of its stream


@dataclass(slots=True)
class Spent:
    """Begin and end of parts of a forward: each layer's attention core; final norm and output matrix.

    A GPU's are known once it has computed all; nothing waits for it between parts, as nothing does when it serves.
    """

    cores: list[tuple[Mark, Mark]] = field(default_factory=list)
    head: tuple[Mark, Mark] = (0.0, 0.0)

    @property
    def core_seconds(self) -> list[float]:
        """Return the seconds of each layer's attention core."""
        return [_seconds_between(*pair) for pair in self.cores]

    @property
    def head_seconds(self) -> float:
        """Return the seconds of final norm and output matrix."""
        return _seconds_between(*self.head)


def _mark(device: torch.device, clock: Clock) -> Mark:
    if device.type != "cuda":
        return clock()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_between(first: Mark, then: Mark) -> float:
    if isinstance(first, float) and isinstance(then, float):
        return then - first
    assert not isinstance(first, float)
    assert not isinstance(then, float)
    return float(first.elapsed_time(then)) / 1e3


@dataclass(frozen=True, slots=True)
class Model:
    """The blocks of `calibrate.bundled_model.model`: embedding, layers, head."""

    config: ModelConfig
    blocks: list[nn.Module]

    @property
    def dtype(self) -> torch.dtype:
        return next(self.blocks[0].parameters()).dtype

    @property
    def device(self) -> str:
        return str(next(self.blocks[0].parameters()).device)

    @property
    def constants(self) -> Constants:
        return self.parts[1][0].constants

    @property
    def parts(self) -> tuple[Embedding, list[Layer], Head]:
        """Return embedding, layers and head."""
        embedding, *layers, head = self.blocks
        return cast(Embedding, embedding), cast(list[Layer], layers), cast(Head, head)


def make_model(
    m: ModelConfig, positions: int, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu"
) -> Model:
    """Make the model for sequences of up to `positions` tokens; the router's probabilities choose the experts."""
    training = Training(seq_len=positions, global_batch_size=1, precision="fp32")
    blocks = make_blocks(m, training, range(m.layers + 2), Build(device, dtype, seed))
    for router in (x for block in blocks for x in block.modules() if isinstance(x, Router)):
        router.balanced = False
    return Model(m, blocks)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions: x [tokens, heads, head_dim], cos and sin [tokens, 1, head_dim / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a batch's tokens are: positions [tokens], cache slots [tokens], and which rows attend together.

    All lie on the model's device: they are made on the host, and copied once for all layers.
    """

    positions: Tensor
    slots: Tensor
    prompts: tuple[tuple[slice, SequenceChunk, Tensor, Tensor], ...]  # rows, part, block table [1, blocks], mask
    singles: Tensor  # rows of sequences with one token
    tables: Tensor  # their block tables [singles, blocks]
    mask: Tensor  # keys that they see [singles, 1, 1, blocks · block_tokens]


def _places(cache: PagedCache, parts: Items[SequenceChunk]) -> _Places:
    device = cache.keys.device
    positions = torch.cat([torch.arange(p.start, p.end) for p in parts])
    slots = torch.cat([cache.slots(p.sequence, p.start, p.end) for p in parts])
    prompts, singles, row = [], [], 0
    for p in parts:
        if len(p.tokens) > 1:
            table = cache.tables[p.sequence][: -(-p.end // cache.block_tokens)]
            seen = torch.arange(p.end) <= torch.arange(p.start, p.end)[:, None]
            rows = slice(row, row + len(p.tokens))
            prompts.append((rows, p, torch.tensor([table]).to(device), seen.to(device)))
        else:
            singles.append((row, p))
        row += len(p.tokens)
    size = max((-(-p.end // cache.block_tokens) for _, p in singles), default=0)
    tables = _integers([(cache.tables[p.sequence][:size] + [0] * size)[:size] for _, p in singles])
    ends = _integers([p.end for _, p in singles])
    mask = (torch.arange(size * cache.block_tokens) < ends[:, None])[:, None, None]
    rows_of = _integers([r for r, _ in singles])
    positions, slots, rows_of, tables, mask = (t.to(device) for t in (positions, slots, rows_of, tables, mask))
    return _Places(positions, slots, tuple(prompts), rows_of, tables, mask)


def _integers(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@torch.no_grad()
def forward(
    model: Model,
    cache: PagedCache,
    parts: Items[SequenceChunk],
    spent: Spent | None = None,
    clock: Clock = time.perf_counter,
) -> Tensor:
    """Compute all parts in one pass and return the logits after each part's last tokens: [wanted tokens, vocab].

    Prompts attend one by one over their own blocks. Single tokens attend together, padded to the longest sequence.
    When its parts begin and end (on a CPU by `clock`) is added to `spent`.
    """
    m = model.config
    places = _places(cache, parts)
    tokens = torch.tensor([t for p in parts for t in p.tokens]).to(model.device)
    embedding, layers, head = model.parts
    x = embedding.look_up(tokens)
    if embedding.positions is not None:
        x = x + embedding.positions[places.positions]
    for i, layer in enumerate(layers):
        x = x + layer.proj(attention(model, cache, i, layer.qkv(layer.norm1(x)), places, spent, clock))
        x = x + layer.mlp(layer.norm2(x))
    ends = accumulate(len(p.tokens) for p in parts)
    wanted = [row for p, end in zip(parts, ends, strict=True) for row in range(end - p.logits, end)]
    begin = _mark(x.device, clock) if spent is not None else 0.0
    logits: Tensor = head.output(head.norm(x[wanted]))
    if spent is not None:
        spent.head = begin, _mark(x.device, clock)
    return logits[:, : m.vocab]


def attention(
    model: Model,
    cache: PagedCache,
    layer: int,
    qkv: Tensor,
    places: _Places,
    spent: Spent | None = None,
    clock: Clock = time.perf_counter,
) -> Tensor:
    """Write the batch's keys and values and attend: [tokens, (heads + 2 kv_heads) · d] → [tokens, heads · d]."""
    m, c = model.config, model.constants
    q, k, v = qkv.view(len(qkv), -1, m.head_dim).split((m.heads, m.kv_heads, m.kv_heads), 1)
    if m.positions == "rope":
        cos, sin = c.cos[places.positions], c.sin[places.positions]
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    cache.write(layer, places.slots, k, v)
    out = torch.empty_like(q)
    begin = _mark(q.device, clock) if spent is not None else 0.0
    for rows, part, table, seen in places.prompts:
        keys, values = (t[:, : part.end] for t in cache.read(layer, table))
        out[rows] = _attend(q[rows][None], keys, values, seen)[0]
    if len(places.singles):
        keys, values = cache.read(layer, places.tables)
        out[places.singles] = _attend(q[places.singles][:, None], keys, values, places.mask)[:, 0]
    if spent is not None:
        spent.cores.append((begin, _mark(q.device, clock)))
    return out.flatten(1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend with q [batch, tokens, heads, d] to k and v [batch, kv, kv_heads, d]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped).transpose(1, 2)
