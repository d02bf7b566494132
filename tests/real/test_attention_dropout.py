"""Fused attention with dropout is the unfused one with the same mask, and its mask is a fair one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from calibrate.bundled_model import attention_dropout
from calibrate.bundled_model.attention_dropout import Dropped, DroppedAttention, Piece

B, HEADS, KV, S, D = 2, 4, 2, 40, 8


def _inputs() -> list[Tensor]:
    torch.manual_seed(1)
    shapes = (B, HEADS, S, D), (B, KV, S, D), (B, KV, S, D)
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


def _unfused(q: Tensor, k: Tensor, v: Tensor, dropped: Dropped) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * D**-0.5
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    at = torch.arange(S)
    factors = dropped.factors(B, HEADS, at, at, q.dtype)
    return (torch.softmax(scores.masked_fill(hidden, -math.inf), -1) * factors) @ v


@pytest.mark.parametrize("tile", [S, 16])
def test_it_is_unfused_attention_with_that_mask(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients, in one tile and in several."""
    monkeypatch.setattr(attention_dropout, "TILE", tile)
    dropped, results = Dropped(0.3), []
    for fused in (True, False):
        inputs = _inputs()
        torch.manual_seed(7)
        out = DroppedAttention(dropped)(*inputs) if fused else _unfused(*inputs, dropped.draw())
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_a_piece_has_the_whole_mask_s_part() -> None:
    """Whatever heads and positions a rank holds."""
    whole = Dropped(0.4, seed=5).factors(B, HEADS, torch.arange(S), torch.arange(S), torch.float64)
    rows, columns = torch.tensor([3, 30, 31]), torch.tensor([0, 17, 4])
    part = Dropped(0.4, first_head=2, seed=5).factors(B, 2, rows, columns, torch.float64)
    assert torch.equal(part, whole[:, 2:][:, :, rows][..., columns])


def test_as_many_are_dropped_as_asked_for() -> None:
    """Over all, within each row and column, and of neighbours together: within five standard deviations."""
    p, n = 0.1, 512
    kept = Dropped(p, seed=123456).factors(2, 4, torch.arange(n), torch.arange(n), torch.float64) > 0
    pairs = [kept[..., 1:] & kept[..., :-1], kept[..., 1:, :] & kept[..., :-1, :], kept[:, 1:] & kept[:, :-1]]
    for share, expected, count in (
        (kept.double().mean(), 1 - p, kept.numel()),
        (kept.double().mean((0, 1, 2)), 1 - p, 8 * n),
        (kept.double().mean(3), 1 - p, n),
        *((both.double().mean(), (1 - p) ** 2, both.numel()) for both in pairs),
    ):
        off = (share - expected).abs().max() / math.sqrt(expected * (1 - expected) / count)
        assert float(off) < 5


def test_every_forward_draws_anew_and_again_from_the_same_seed() -> None:
    """As recomputation does, which restores the generator."""
    q, k, v = _inputs()
    torch.manual_seed(3)
    first, second = (DroppedAttention(Dropped(0.5))(q, k, v) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(first, DroppedAttention(Dropped(0.5))(q, k, v))
    assert not torch.equal(first, second)


def test_sixteen_bits_are_summed_in_fp32() -> None:
    q, k, v = (x.detach().bfloat16() for x in _inputs())
    at = torch.arange(S)
    out, lse = Piece(Dropped(0.2, seed=1), at, at).forward(q, k, v, causal=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
