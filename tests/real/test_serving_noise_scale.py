"""The gradient noise scale: unbiased where it is known, growing as a real model's loss falls."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from calibrate.noise_scale import estimate, noise_scale  # noqa: E402
from calibrate.quantization import make_small, train  # noqa: E402

torch.set_num_threads(1)


def test_a_known_noise_scale_is_found() -> None:
    """Gradients of batches of 8 from a normal distribution with |G|² = 50·0.3² and tr Σ = 50·2²."""
    draw = torch.Generator().manual_seed(0)
    gradients = [0.3 + 2.0 * torch.randn(8, 50, generator=draw, dtype=torch.float64).mean(0) for _ in range(400)]
    found = estimate(gradients, 8)
    assert found.gradient == pytest.approx(50 * 0.09, rel=0.05)
    assert found.noise == pytest.approx(50 * 4.0, rel=0.03)
    assert found.critical_batch == pytest.approx(4.0 / 0.09, rel=0.06)


def test_it_grows_as_the_loss_falls() -> None:
    """McCandlish 2018, section 3.3."""
    blocks = make_small()
    before = noise_scale(blocks, batches=24)
    after = noise_scale(train(blocks, 80), batches=24)
    assert after.critical_batch > 3 * before.critical_batch > 0
