"""Outliers among measured layers of experts."""

from __future__ import annotations

import numpy as np
import pytest

from sim.prices.expert_splits import within_splits
from sim.prices.kernel_file import kernel_file


def points(seconds: dict[int, float]) -> np.ndarray:
    """Points of one layer by `expert_tp`, through the bound."""
    sizes = [np.array([1.0])] * 5 + [np.array(sorted(seconds), dtype=float), np.array([1.0])]
    codes = np.zeros((7, len(seconds)), dtype=np.uint8)
    codes[5] = range(len(seconds))
    return within_splits(sizes, codes, np.array([seconds[k] for k in sorted(seconds)]))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({1: 4.0, 2: 2.0, 4: 1.0}, [4.0, 2.0, 1.0]),
        ({1: 5.0, 2: 2.5, 4: 1.0}, [5.0, 2.5, 1.0]),  # no outliers: tiles and waves
        ({1: 40.0, 2: 20.0, 4: 1.0}, [4.0, 2.0, 1.0]),  # no more than four and two rounds of a quarter
        ({2: 1.0, 4: 3.0}, [1.0, 1.0]),  # half of the work takes no longer than all
    ],
)
def test_a_layer_takes_no_longer_than_its_splits_one_after_another(given: dict[int, float], kept: list[float]) -> None:
    np.testing.assert_allclose(points(given), kept)


def test_layers_of_the_same_sizes_are_compared_and_no_others() -> None:
    sizes = [np.array([1.0, 2.0])] + [np.array([1.0])] * 4 + [np.array([1.0, 2.0]), np.array([1.0])]
    codes = np.zeros((7, 2), dtype=np.uint8)
    codes[0], codes[5] = (0, 1), (0, 1)
    np.testing.assert_array_equal(within_splits(sizes, codes, np.array([9.0, 1.0])), [9.0, 1.0])


def test_most_published_points_stand() -> None:
    shapes, seconds, _ = kernel_file("h100").points("moe_layer", "fp8")
    bounded = within_splits(shapes.sizes, shapes.codes, seconds)
    assert 0.9 < (bounded == seconds).mean() < 1.0
