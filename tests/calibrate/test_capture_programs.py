"""Programs of kinds that few captures have: what of them was refused or priced wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.models.captured.operators import compute_of, known
from tests.calibrate.test_capture_operators import captured, launched

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")


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
