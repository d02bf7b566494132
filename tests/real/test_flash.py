"""The tiled kernel is attention, forward and backward, whatever the tiles, and moves what tiles move."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from calibrate.flash import (  # noqa: E402
    Traffic,
    block_sizes,
    flash_attention,
    flash_forward,
    unfused_accesses,
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (16, 128), (100, 7), (1000, 1000)])
def test_result_and_gradients_are_torchs(rows: int, columns: int, causal: bool) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 3, 150, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    found = flash_attention(q, k, v, rows, columns, causal)
    weight = torch.randn_like(wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad((found * weight).sum(), (q, k, v)),
        torch.autograd.grad((wanted * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_scores_that_would_overflow_do_not() -> None:
    q = torch.full((64, 8), 40.0)
    out = flash_attention(q, q, torch.ones(64, 8), 16, 16)
    torch.testing.assert_close(out, torch.ones(64, 8))


def test_tiles_move_queries_once_and_keys_once_for_each_block_of_queries() -> None:
    q, k, v = (torch.randn(256, 32) for _ in range(3))
    traffic = Traffic()
    flash_forward(q, k, v, 64, 32, False, traffic)
    blocks = 256 // 64
    assert traffic.read == 256 * 32 + blocks * 2 * 256 * 32
    assert traffic.written == 256 * 32 + 256


def test_a_larger_chip_moves_less_and_all_move_less_than_whole_scores() -> None:
    q, k, v = (torch.randn(1024, 64) for _ in range(3))
    moved = []
    for kib in (8, 16, 64):
        traffic = Traffic()
        flash_forward(q, k, v, *block_sizes(kib * 1024, 64), False, traffic)
        moved.append(traffic.total)
    assert moved[0] > moved[1] > moved[2]
    assert moved[1] < unfused_accesses(1024, 64)


def test_what_backward_needs_grows_with_the_length_not_its_square() -> None:
    saved: list[int] = []
    for seq in (128, 256):
        q = torch.randn(seq, 16, requires_grad=True)
        kept: list[int] = []

        def count(t: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept.append(t.numel())
            return t

        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            flash_attention(q, q, q)
        saved.append(sum(kept))
    assert saved[1] == 2 * saved[0]
