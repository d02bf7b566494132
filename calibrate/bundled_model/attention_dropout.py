"""Fused attention with dropout for CPUs, whose fused kernels have no dropout. Scores exist only tile by tile.

The dropout mask is a function of the layer's seed and of a probability's position (sequence, head, query, key). So each
rank computes the mask of any block by itself, however heads and sequence are split, and the backward computes the mask
again instead of keeping it. FlashAttention's kernels do the same with Philox and another order of positions
(csrc/flash_attn/src/dropout.h in Dao-AILab/flash-attention). The tensors kept for the backward are theirs too: queries,
keys, values, output and log-sum-exp.

The softmax's sum is taken before dropout (Dao et al. 2022, arXiv 2205.14135, algorithm 2). So partial results over
blocks of keys are combined by their log-sum-exps, as without dropout.

Documentation: docs/context_parallel.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

TILE = 128  # queries at once
WORD = 1 << 32


def _scattered(x: Tensor) -> Tensor:
    """Hash 32-bit numbers one to one, so that near numbers end far apart.

    Mueller's integer hash: two rounds of xor-shift and multiply, and a last xor-shift
    (https://github.com/skeeto/hash-prospector compares it with others).
    """
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & (WORD - 1)
    return (x >> 16) ^ x


@dataclass(frozen=True, slots=True)
class Dropped:
    """Which of attention's probabilities are dropped, each with probability `p`.

    `first_head`: the number of this rank's first query head among all query heads of the layer.
    """

    p: float
    first_head: int = 0
    seed: int = 0

    def draw(self) -> Dropped:
        """Return a copy with a new seed, taken from torch's generator, for one forward."""
        return replace(self, seed=int(torch.randint(WORD // 2, ())))

    def factors(self, batch: int, heads: int, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """Return 0 or 1 / (1 − p) for each probability [batch, heads, queries, keys].

        `queries` and `keys` are positions in the sequence.
        """
        x = torch.tensor(self.seed)
        for places in (torch.arange(batch), torch.arange(heads) + self.first_head, queries, keys):
            x = _scattered(x[..., None] ^ _scattered(places + 1))
        kept: Tensor = x >= round(self.p * WORD)
        return kept.to(dtype).mul_(1.0 / (1.0 - self.p))


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of an attention: its dropout, and the positions of its queries and keys in the sequence."""

    dropped: Dropped
    queries: Tensor
    keys: Tensor

    def tiles(self, q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Yield for each tile its rows, the columns that they see, their scores and their dropout factors.

        A score is −inf if the query does not see the key.
        """
        for start in range(0, q.shape[2], TILE):
            rows = slice(start, min(start + TILE, q.shape[2]))
            columns = slice(0, rows.stop if causal else k.shape[2])
            scores = q[:, :, rows] @ k[:, :, columns].transpose(2, 3) * q.shape[-1] ** -0.5
            if causal:
                hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu_(1 + start)
                scores = scores.masked_fill_(hidden, -math.inf)
            places = self.queries[rows], self.keys[columns]
            yield rows, columns, scores, self.dropped.factors(q.shape[0], q.shape[1], *places, scores.dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Compute attention: q [b, heads, n, d], k and v [b, kv_heads, m, d] → [b, heads, n, d].

        Also returns the log-sum-exp [b, heads, n]. With `causal`, query i sees keys up to i.
        """
        heads, kept = q.shape[1], q
        q, k, v = (_wide(x) for x in (q, k, v))
        k, v = _repeated(k, heads), _repeated(v, heads)
        out, lse = torch.empty_like(q.transpose(1, 2)).transpose(1, 2), q.new_empty(q.shape[:3])
        for rows, columns, scores, factors in self.tiles(q, k, causal):
            lse[:, :, rows] = scores.logsumexp(-1)
            p = scores.sub_(lse[:, :, rows, None]).exp_().mul_(factors)
            out[:, :, rows] = p @ v[:, :, columns]
        return out.to(kept.dtype), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v in their dtypes.

        With the `out` and `lse` of whole rows they are this block's share of the gradients.
        """
        types, heads, kv_heads = (q.dtype, k.dtype, v.dtype), q.shape[1], k.shape[1]
        grad, q, k, v, out = (_wide(x) for x in (grad, q, k, v, out))
        k, v = _repeated(k, heads), _repeated(v, heads)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, columns, scores, factors in self.tiles(q, k, causal):
            p, g = scores.sub_(lse[:, :, rows, None]).exp_(), grad[:, :, rows]
            dv[:, :, columns] += (p * factors).transpose(2, 3) @ g
            dp = (g @ v[:, :, columns].transpose(2, 3)).mul_(factors)
            ds = p.mul_(dp.sub_((g * out[:, :, rows]).sum(-1, keepdim=True))).mul_(q.shape[-1] ** -0.5)
            dq[:, :, rows] = ds @ k[:, :, columns]
            dk[:, :, columns] += ds.transpose(2, 3) @ q[:, :, rows]
        dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
        return dq.to(types[0]), dk.to(types[1]), dv.to(types[2])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, dropped: Dropped) -> Tensor:
        whole = torch.arange(q.shape[2])
        piece = ctx.piece = Piece(dropped.draw(), whole, whole)
        out, lse = piece.forward(q, k, v, causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.piece.backward(grad, *ctx.saved_tensors, causal=True), None


@dataclass(frozen=True, slots=True)
class DroppedAttention:
    """Causal attention of whole sequences with dropout: a layer's `Core`."""

    dropped: Dropped

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _Attention.apply(q, k, v, self.dropped)
        return out


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize == 2 else x


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)
