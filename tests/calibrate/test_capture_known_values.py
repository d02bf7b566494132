"""Real values beside fake tensors: which are known."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from calibrate.capture.known_values import KnownValues  # noqa: E402


@pytest.mark.parametrize(("device", "known"), [("cpu", True), ("meta", False)])
def test_numbers_of_a_range_are_known_unless_torch_makes_none(device: str, known: bool) -> None:
    """Transformers builds a model on `meta` before it loads weights: tensors have shapes there, and no numbers."""
    values = KnownValues(False)
    with FakeTensorMode(allow_non_fake_inputs=True), values:
        with torch.device(device):
            x = torch.arange(0, 4, 2, dtype=torch.float) / 4
        found = values.of(x)
    assert x.shape == (2,)
    assert (found is not None) is known
    assert found is None or found.tolist() == [0.0, 0.5]
