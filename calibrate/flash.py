"""FlashAttention tile by tile in plain torch, forward and backward: online softmax over blocks that fit in SRAM.

    python -m calibrate.flash

Algorithms 1 and 4 of Dao et al. 2022 (arXiv 2205.14135), with the loop over queries outside as in FlashAttention-2
(arXiv 2307.08691, algorithm 1). The matrix of scores never exists as a whole. The command compares results and
gradients with torch's own attention, and counts what each block moves between HBM and SRAM. Its times say nothing about
the kernel's, as a Python loop over tiles is slow.

Documentation: docs/fused_kernels.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import click
import torch
from torch import Tensor

from sim.commands.command import Command, run_command


@dataclass
class Traffic:
    """Elements read from and written to HBM."""

    read: int = 0
    written: int = 0

    def load(self, *tensors: Tensor) -> None:
        """Count tensors that a block reads from HBM."""
        self.read += sum(t.numel() for t in tensors)

    def store(self, *tensors: Tensor) -> None:
        """Count tensors that a block writes to HBM."""
        self.written += sum(t.numel() for t in tensors)

    @property
    def total(self) -> int:
        """Elements read and written."""
        return self.read + self.written


def block_sizes(sram_bytes: float, head_dim: int, element_bytes: int = 2) -> tuple[int, int]:
    """Return a tile's rows of queries and of keys, so that blocks of q, k, v and the result fit (algorithm 1, line 1).

    >>> block_sizes(192 * 1024, 64)
    (64, 384)
    """
    columns = max(1, int(sram_bytes // (4 * head_dim * element_bytes)))
    return min(columns, head_dim), columns


def _masked(scores: Tensor, first_row: int, first_column: int, causal: bool) -> Tensor:
    if not causal:
        return scores
    rows = torch.arange(first_row, first_row + scores.shape[-2]).unsqueeze(1)
    columns = torch.arange(first_column, first_column + scores.shape[-1])
    return scores.masked_fill(columns > rows, -math.inf)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, rows: int, columns: int, causal: bool, traffic: Traffic
) -> tuple[Tensor, Tensor]:
    """Compute attention of q, k, v [..., seq, head_dim] in tiles of `rows` × `columns`.

    Also returns each row's log-sum-exp [..., seq]. A block of queries keeps its running maximum m, its running sum l
    and its unscaled result o. A new block of scores rescales l and o by exp(m_old − m_new).
    """
    scale, seq = q.shape[-1] ** -0.5, q.shape[-2]
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    for i in range(0, seq, rows):
        q_i = q[..., i : i + rows, :]
        traffic.load(q_i)
        o, m = torch.zeros_like(q_i), q_i.new_full(q_i.shape[:-1], -math.inf)
        total = torch.zeros_like(m)
        for j in range(0, min(seq, i + rows) if causal else seq, columns):
            k_j, v_j = k[..., j : j + columns, :], v[..., j : j + columns, :]
            traffic.load(k_j, v_j)
            s = _masked(scale * q_i @ k_j.transpose(-1, -2), i, j, causal)
            highest = torch.maximum(m, s.amax(-1))
            p = torch.exp(s - highest.unsqueeze(-1))
            shrink = torch.exp(m - highest)
            total = shrink * total + p.sum(-1)
            o = shrink.unsqueeze(-1) * o + p @ v_j
            m = highest
        out[..., i : i + rows, :] = o / total.unsqueeze(-1)
        lse[..., i : i + rows] = m + total.log()
        traffic.store(o, m)
    return out, lse


def flash_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    rows: int,
    columns: int,
    causal: bool,
    traffic: Traffic,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v; scores are computed again from the saved log-sum-exp (algorithm 4).

    A block of keys stays in SRAM with its two gradients during the loop over the blocks of queries.
    """
    scale, seq = q.shape[-1] ** -0.5, q.shape[-2]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (grad * out).sum(-1)  # the row sums of P times dP
    traffic.load(grad, out)
    traffic.store(delta)
    for j in range(0, seq, columns):
        here = slice(j, j + columns)
        k_j, v_j = k[..., here, :], v[..., here, :]
        traffic.load(k_j, v_j)
        for i in range(j // rows * rows if causal else 0, seq, rows):
            at = slice(i, i + rows)
            q_i, grad_i = q[..., at, :], grad[..., at, :]
            traffic.load(q_i, grad_i, dq[..., at, :], lse[..., at], delta[..., at])
            s = _masked(scale * q_i @ k_j.transpose(-1, -2), i, j, causal)
            p = torch.exp(s - lse[..., at].unsqueeze(-1))
            dv[..., here, :] += p.transpose(-1, -2) @ grad_i
            ds = p * (grad_i @ v_j.transpose(-1, -2) - delta[..., at].unsqueeze(-1)) * scale
            dq[..., at, :] += ds @ k_j
            dk[..., here, :] += ds.transpose(-1, -2) @ q_i
            traffic.store(dq[..., at, :])
        traffic.store(k_j, v_j)
    return dq, dk, dv


class Flash(torch.autograd.Function):
    """Attention in tiles as an operator of autograd; it saves q, k, v, the result and one number for each row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: int, columns: int, causal: bool) -> Tensor:
        """Compute attention; see `flash_forward`."""
        out, lse = flash_forward(q, k, v, rows, columns, causal, Traffic())
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.sizes = rows, columns, causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute gradients; see `flash_backward`."""
        q, k, v, out, lse = ctx.saved_tensors
        rows, columns, causal = ctx.sizes
        return (*flash_backward(q, k, v, out, lse, grad, rows, columns, causal, Traffic()), None, None, None)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, rows: int = 64, columns: int = 64, causal: bool = True) -> Tensor:
    """Compute attention of q, k, v [..., seq, head_dim] with a backward."""
    out: Tensor = Flash.apply(q, k, v, rows, columns, causal)
    return out


def unfused_accesses(seq: int, head_dim: int) -> int:
    """Return the elements that one head's unfused forward moves (algorithm 0).

    q, k, v and the result move once; scores and probabilities are written and read.
    """
    return 4 * seq * head_dim + 4 * seq * seq


@click.command("flash", cls=Command)
def main() -> None:
    """Compare with torch's attention, and print how much tiles of several sizes move."""
    torch.manual_seed(0)
    seq, head_dim = 1024, 64
    q, k, v = (torch.randn(1, 2, seq, head_dim, dtype=torch.float64, requires_grad=True) for _ in range(3))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    weight = torch.randn_like(wanted)
    expected = torch.autograd.grad((wanted * weight).sum(), (q, k, v))
    found = flash_attention(q, k, v)
    gradients = torch.autograd.grad((found * weight).sum(), (q, k, v))
    print(
        f"tiles of 64 x 64 against torch, {seq} tokens, causal: result differs by {_most(found, wanted):.1e}, "
        f"gradients by {max(map(_most, gradients, expected)):.1e}"
    )
    print(f"\n{'SRAM':>12} {'tile':>10} {'moved, forward':>16} {'backward':>10} {'unfused forward':>16}")
    q1, k1, v1 = (t[0, 0].detach() for t in (q, k, v))
    for kib in (16, 48, 96, 192, 228):
        rows, columns = block_sizes(kib * 1024, head_dim)
        there, back = Traffic(), Traffic()
        out, lse = flash_forward(q1, k1, v1, rows, columns, False, there)
        flash_backward(q1, k1, v1, out, lse, out, rows, columns, False, back)
        print(
            f"{kib:>8} KiB {rows:>4} x {columns:<4} {there.total / 1e6:>14.2f} M {back.total / 1e6:>8.2f} M "
            f"{unfused_accesses(seq, head_dim) / 1e6:>14.2f} M"
        )


def _most(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


if __name__ == "__main__":
    run_command(main)
