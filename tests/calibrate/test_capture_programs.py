"""Programs of kinds that few captures have: what of them was refused or priced wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.calibrate.test_capture_operators import captured, launched

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")


def test_the_largest_of_rows_of_answers_is_captured(tmp_path: Path) -> None:
    """The gradient of a cumulative product asks along rows where a factor is zero (radiance fields multiply so)."""

    def make() -> Any:
        model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
        return model, lambda: model(x).cumprod(-1).sum()

    assert launched(captured(tmp_path, make), "max", "backward")
