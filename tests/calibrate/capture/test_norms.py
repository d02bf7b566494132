"""Which kernels the gradients of captured norms are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.models.captured.operators import compute_of
from tests.calibrate.capture.test_operators import captured, launched

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_frozen_norm_has_no_kernel_for_its_weights_gradient(tmp_path: Path, kind: str) -> None:
    """It reads its input and its result's gradient and writes the input's, as with adapters."""
    rows, width = 128, 64

    def make() -> Any:
        frozen, trained = (getattr(torch.nn, kind)(width) for _ in range(2))
        frozen.requires_grad_(False)
        model, x = torch.nn.Sequential(torch.nn.Linear(width, width), frozen, trained), torch.randn(rows, width)
        return model, lambda: model(x).square().sum()

    found = [compute_of(o) for o in launched(captured(tmp_path, make), "norm", "backward")]
    assert [c.kernels for c in found] == [2, 1]  # the last norm's comes first
    assert found[1].bytes == pytest.approx(3 * rows * width * 4, rel=0.02)  # and statistics and weights
