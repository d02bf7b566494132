"""Context parallelism: attention over a sequence whose tokens are split over several ranks.

- Ring attention (Liu et al. 2023, arXiv 2310.01889): keys and values circulate, and every rank attends to each block
  as it arrives. Two partial results are combined by their log-sum-exps. In the backward keys and values circulate
  again, followed by their gradients, to which every rank adds its share. Each transfer starts before the computation
  that hides it.
- All-gather (Llama 3, arXiv 2407.21783, sec. 3.3.2): the same blocks, after all keys and values are gathered.
- All-to-all (DeepSpeed-Ulysses, arXiv 2309.14509): exchanges heads for tokens, so that each rank has whole sequences
  of some heads.

Three splits: contiguous; zigzag, 2 · ranks pieces of which rank r holds r and 2 · ranks − 1 − r, so that all ranks
compute equally much; striped (Brandon et al. 2023, arXiv 2311.09431), token i on rank i mod ranks.

Documentation: docs/context_parallel.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calibrate.bundled_model.attention_dropout import Dropped, DroppedAttention, Piece
from calibrate.bundled_model.model import Core, causal_attention
from calibrate.parallel.comm import Group

KV, DKV = 1, 2  # tags of keys and values, and of their gradients


def own_positions(seq_len: int, ranks: int, rank: int, split: str) -> Tensor:
    """Return the positions in the sequence of a rank's tokens, in the rank's order.

    >>> [own_positions(8, 2, r, "zigzag").tolist() for r in (0, 1)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    whole = torch.arange(seq_len)
    if split == "zigzag":
        pieces = whole.chunk(2 * ranks)
        return torch.cat((pieces[rank], pieces[2 * ranks - 1 - rank]))
    return whole[rank::ranks] if split == "striped" else whole.chunk(ranks)[rank]


class View(NamedTuple):
    """Hold the part of a block of keys that a rank's queries see: which queries, which keys, and whether with a causal
    mask."""

    queries: slice
    keys: slice
    causal: bool


def view(rank: int, source: int, n: int, split: str) -> View | None:
    """Return what the n queries of `rank` see of the n keys of `source`; None if nothing.

    In all three splits this is a whole block, half a block or a causal triangle, so no other mask is needed. With
    striped tokens, query i of rank r is at i · ranks + r. It sees key j of an earlier rank up to j = i, of a later rank
    up to j = i − 1.
    """
    whole, half = slice(0, n), n // 2
    if source == rank:
        return View(whole, whole, True)
    if split == "contiguous":
        return View(whole, whole, False) if source < rank else None
    if split == "zigzag":
        earlier = source < rank
        return View(whole, slice(0, half), False) if earlier else View(slice(half, n), whole, False)
    return View(whole, whole, True) if source < rank else View(slice(1, n), slice(0, n - 1), True)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute fused attention [b, heads, n, d] and its log-sum-exp [b, heads, n]; grouped queries share keys."""
    if q.device.type == "cpu":
        found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return found
    k, v = (_repeat(x, q.shape[1]) for x in (k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return out, lse[..., : q.shape[2]]


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's gradients; with output and log-sum-exp of whole rows they are the block's share of the sum."""
    if q.device.type == "cpu":
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal
        )
        return found
    heads = k.shape[1]
    k, v = (_repeat(x, q.shape[1]) for x in (k, v))
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, padded, seed, seed, 0.0, [True, True, True, False], causal
    )
    return dq, _fold(dk, heads), _fold(dv, heads)


def _repeat(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def _fold(x: Tensor, heads: int) -> Tensor:
    out: Tensor = x.unflatten(1, (heads, -1)).sum(2)
    return out


class _Sum:
    """Attention over several blocks of keys: outputs joined by their log-sum-exps (Milakov and Gimelshein 2018,
    arXiv 1805.02867). The first block sees all queries.
    """

    def __init__(self) -> None:
        self.parts: tuple[Tensor, Tensor] | None = None  # the sum so far, and its log-sum-exp

    def total(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention of queries `q` in their dtype, and its log-sum-exp."""
        assert self.parts is not None
        return self.parts[0].to(q.dtype), self.parts[1]

    def add(self, queries: slice, out: Tensor, lse: Tensor) -> None:
        if self.parts is None:
            wide = out.float() if out.dtype in (torch.bfloat16, torch.float16) else out
            self.parts = wide, lse
            return
        mine, seen = (x[:, :, queries] for x in self.parts)
        both = torch.logaddexp(seen, lse)
        mine.mul_((seen - both).exp_()[..., None]).add_(out * (lse - both).exp_()[..., None])
        seen.copy_(both)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The computation of one attention's queries on this rank for each block of keys and values [2, b, heads, n, d]."""

    group: Group
    split: str
    dropped: Dropped | None = None

    def see(self, source: int, n: int) -> View | None:
        return view(self.group.index, source, n, self.split)

    def forward(self, total: _Sum, q: Tensor, kv: Tensor, source: int) -> None:
        seen = self.see(source, q.shape[2])
        if seen is not None:
            (k, v), piece = kv[:, :, :, seen.keys], self._piece(seen, source, q.shape[2])
            forward = _forward if piece is None else piece.forward
            total.add(seen.queries, *forward(q[:, :, seen.queries], k, v, seen.causal))

    def _piece(self, seen: View, source: int, n: int) -> Piece | None:
        """Return the block's dropout, which depends on its queries' and keys' positions in the whole sequence."""
        if self.dropped is None:
            return None
        mine, theirs = (
            own_positions(n * self.group.size, self.group.size, r, self.split) for r in (self.group.index, source)
        )
        return Piece(self.dropped, mine[seen.queries], theirs[seen.keys])

    def backward(self, saved: Sequence[Tensor], grad: Tensor, kv: Tensor, source: int, dq: Tensor) -> Tensor | None:
        """Add to `dq` and return this rank's share of the gradients of keys and values."""
        q, out, lse = saved
        seen = self.see(source, q.shape[2])
        if seen is None:
            return None
        rows, (k, v), piece = seen.queries, kv[:, :, :, seen.keys], self._piece(seen, source, q.shape[2])
        backward = _backward if piece is None else piece.backward
        mine, dk, dv = backward(grad[:, :, rows], q[:, :, rows], k, v, out[:, :, rows], lse[:, :, rows], seen.causal)
        dq[:, :, rows] += mine
        if seen.keys == slice(0, q.shape[2]):
            return torch.stack((dk, dv))
        share = torch.zeros_like(kv)
        share[0, :, :, seen.keys], share[1, :, :, seen.keys] = dk, dv
        return share


def _kept(ctx: Any, q: Tensor, k: Tensor, v: Tensor, total: _Sum, blocks: _Blocks) -> Tensor:
    """Keep what the backward needs; return the attention of queries `q`."""
    out, lse = total.total(q)
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.blocks = blocks
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: _Blocks) -> Tensor:
        group, kv, total = blocks.group, torch.stack((k, v)), _Sum()
        for step in range(group.size):
            coming = group.start_shift(kv, KV) if step < group.size - 1 else None
            blocks.forward(total, q, kv, (group.index - step) % group.size)
            kv = coming.wait() if coming is not None else kv
        return _kept(ctx, q, k, v, total, blocks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, out, lse), blocks = ctx.saved_tensors, ctx.blocks
        group, kv, dq, dkv = blocks.group, torch.stack((k, v)), torch.zeros_like(q), None
        for step in range(group.size):
            coming = group.start_shift(kv, KV) if step < group.size - 1 else None
            share = blocks.backward((q, out, lse), grad, kv, (group.index - step) % group.size, dq)
            collected = dkv.wait() if dkv is not None else None
            if share is None:
                share = collected
            elif collected is not None:
                share += collected
            kv = coming.wait() if coming is not None else kv
            dkv = group.start_shift(share, DKV)
        assert dkv is not None  # a group has at least one rank
        dk, dv = dkv.wait()
        return dq, dk, dv, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: _Blocks) -> Tensor:
        group, total = blocks.group, _Sum()
        everyones = group.all_gather(torch.stack((k, v))[None])
        for step in range(group.size):
            source = (group.index - step) % group.size
            blocks.forward(total, q, everyones[source], source)
        return _kept(ctx, q, k, v, total, blocks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, out, lse), blocks = ctx.saved_tensors, ctx.blocks
        group, dq = blocks.group, torch.zeros_like(q)
        everyones = group.all_gather(torch.stack((k, v))[None])
        shares = torch.zeros_like(everyones)
        for source in range(group.size):
            share = blocks.backward((q, out, lse), grad, everyones[source], source, dq)
            if share is not None:
                shares[source] = share
        dk, dv = group.reduce_scatter(shares)[0]
        return dq, dk, dv, None


class _Exchange(torch.autograd.Function):
    """[b, heads, n, d] of own tokens ↔ [b, heads / ranks, ranks · n, d] of all tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchanged(x, group, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(grad, ctx.group, not ctx.to_heads), None, None


def _exchanged(x: Tensor, group: Group, to_heads: bool) -> Tensor:
    """Split one dimension into a piece for each rank, exchange the pieces, concatenate along the other dimension."""
    cut, join = (1, 2) if to_heads else (2, 1)
    pieces = torch.stack(x.chunk(group.size, cut))
    one = [1] * group.size
    return torch.cat(group.all_to_all(pieces, one, one).unbind(0), join)


@dataclass(frozen=True, slots=True)
class ContextAttention:
    """Causal attention of this rank's queries over all ranks' keys and values. [b, heads, n, d] each."""

    group: Group
    method: str  # ring | all_gather | all_to_all
    split: str
    dropped: Dropped | None = None  # of attention's probabilities

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.method != "all_to_all":
            attention = _Ring if self.method == "ring" else _Gathered
            dropped = None if self.dropped is None else self.dropped.draw()
            joined: Tensor = attention.apply(q, k, v, _Blocks(self.group, self.split, dropped))
            return joined
        least = max(k.shape[1], self.group.size)  # fewer KV heads than ranks are repeated
        k, v = (_repeat(x, least) if x.shape[1] < least else x for x in (k, v))
        q, k, v = (_Exchange.apply(x, self.group, True) for x in (q, k, v))
        out: Tensor = _Exchange.apply(self._core(q.shape[1])(q, k, v), self.group, False)
        return out

    def _core(self, heads: int) -> Core:
        """Return the attention of the `heads` whole heads that this rank has after the exchange."""
        if self.dropped is None:
            return causal_attention
        first = self.dropped.first_head + self.group.index * heads
        return DroppedAttention(replace(self.dropped, first_head=first))
