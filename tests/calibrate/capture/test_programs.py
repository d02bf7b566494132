"""Programs of kinds that few captures have: what of them was refused or priced wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.models.captured.operators import compute_of, known
from tests.calibrate.capture.test_operators import captured, launched

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")

from calibrate.capture.failure import reason  # noqa: E402


def test_the_largest_of_rows_of_answers_is_captured(tmp_path: Path) -> None:
    """The gradient of a cumulative product asks along rows where a factor is zero (radiance fields multiply so)."""

    def make() -> Any:
        model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
        return model, lambda: model(x).cumprod(-1).sum()

    assert launched(captured(tmp_path, make), "max", "backward")


def test_a_bilinear_layer_is_products_of_matrices(tmp_path: Path) -> None:
    """torch has no kernel of its own for it: it calls products, of which a GPU needs the FLOPs."""

    def make() -> Any:
        model, x = torch.nn.Bilinear(8, 16, 4), torch.randn(32, 8)
        y = torch.randn(32, 16)
        return model, lambda: model(x, y).sum()

    program = captured(tmp_path, make)
    assert not launched(program, "_trilinear")
    flops = sum(compute_of(o).flops for o in launched(program, "bmm"))
    assert flops >= 2 * 2 * 32 * 8 * 16 * 4  # forward, and the weight's gradient
    assert all(known(o.name) for o in program.operators if o.launches)


def test_an_optimizer_of_sparse_gradients_is_refused_with_what_to_do(tmp_path: Path) -> None:
    def make() -> Any:
        model, rows = torch.nn.Embedding(64, 8, sparse=True), torch.arange(16)
        return model, lambda: model(rows).sum(), torch.optim.SparseAdam(model.parameters())

    with pytest.raises(RuntimeError) as caught:
        captured(tmp_path, make)
    assert "leave out sparse=True" in reason(caught.value)


def test_numbers_rounded_as_a_quantized_layer_has_them_are_known(tmp_path: Path) -> None:
    """Of a channel's own scale torch writes numbers and mask by two kernels (FakeQuantizeCore.cu)."""

    def make() -> Any:
        model, x = torch.nn.Linear(8, 16), torch.randn(4, 8)
        scales, zeros = torch.ones(16), torch.zeros(16, dtype=torch.int32)

        def loss() -> Any:
            whole = torch.fake_quantize_per_tensor_affine(model(x), 0.1, 0, -128, 127)
            return torch.fake_quantize_per_channel_affine(whole, scales, zeros, 1, -128, 127).sum()

        return model, loss

    program = captured(tmp_path, make)
    found = launched(program, "fake_quantize")
    assert [compute_of(o).kernels for o in found] == [1, 2]
    assert all(known(o.name) for o in program.operators if o.launches)
