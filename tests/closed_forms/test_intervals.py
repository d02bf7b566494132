"""Intervals of 90 % and the roofline that they lie around, against the distributions' own quantiles."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest

from sim.core.normal import NINETY_BY_MEAN, NINETY_PERCENT, SIGMA_PER_MAD
from sim.core.operator_kinds import MEMORY_BOUND
from sim.prices.roofline import Device
from sim.validation.prediction import spread

NORMAL = NormalDist()


def test_nine_of_ten_values_lie_within_the_interval() -> None:
    """Of a log-normal value: from value / (1 + zσ) to value (1 + zσ) or as near as σ is small."""
    assert NORMAL.cdf(NINETY_PERCENT) - NORMAL.cdf(-NINETY_PERCENT) == pytest.approx(0.9, abs=1e-3)
    found = spread(1.0, 0.01)
    assert found.high == pytest.approx(1 + 0.01645, abs=1e-3)
    assert found.low == pytest.approx(1 - 0.01645, abs=1e-3)


def test_the_mean_and_the_median_of_errors_tell_their_spread() -> None:
    """E|x| = σ √(2/π), and half of |x| are below σ Φ⁻¹(3/4)."""
    assert pytest.approx(NORMAL.inv_cdf(0.95) / math.sqrt(2 / math.pi), rel=1e-3) == NINETY_BY_MEAN
    assert pytest.approx(1 / NORMAL.inv_cdf(0.75), rel=1e-4) == SIGMA_PER_MAD


@pytest.mark.parametrize("kind", MEMORY_BOUND)
def test_what_memory_binds_takes_its_bytes_whatever_it_computes(kind: str) -> None:
    device = Device("x", {"bf16": 1e12}, 1e12)
    assert device.seconds(kind, 1e15, 1e9, "bf16") == 1e-3
    assert device.seconds("gemm", 1e15, 1e9, "bf16") == 1e3
