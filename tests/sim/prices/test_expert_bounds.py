"""Outliers among measured layers of experts."""

from __future__ import annotations

import numpy as np
import pytest

from sim.prices.expert_bounds import EXPERT_TP, TOKENS, within_bounds
from sim.prices.kernel_file import kernel_file


def points(seconds: dict[int, float], dimension: int = EXPERT_TP) -> np.ndarray:
    """Points of one layer by `expert_tp` or another dimension, through the bounds."""
    sizes, codes = [np.array([1.0])] * 7, np.zeros((7, len(seconds)), dtype=np.uint8)
    sizes[dimension], codes[dimension] = np.array(sorted(seconds), dtype=float), range(len(seconds))
    return within_bounds(sizes, codes, np.array([seconds[k] for k in sorted(seconds)]))


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


def test_a_layer_takes_no_longer_than_with_more_tokens() -> None:
    np.testing.assert_allclose(points({1: 1.0, 4: 9.0, 8: 1.2, 16: 1.1}, TOKENS), [1.0, 1.1, 1.2, 1.1])


def test_finer_splits_of_more_tokens_bound_too() -> None:
    """A half of 192 tokens takes no longer than two quarters of 256, where quarters of 192 were not measured."""
    sizes = [np.array([192.0, 256.0]), *[np.array([1.0])] * 4, np.array([2.0, 4.0]), np.array([1.0])]
    codes = np.zeros((7, 2), dtype=np.uint8)
    codes[TOKENS], codes[EXPERT_TP] = (0, 1), (0, 1)
    np.testing.assert_array_equal(within_bounds(sizes, codes, np.array([9.0, 1.0])), [2.0, 1.0])


def test_layers_of_the_same_sizes_are_compared_and_no_others() -> None:
    np.testing.assert_array_equal(points({1024: 9.0, 2048: 1.0}, 1), [9.0, 1.0])


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("gpu", ["h100", "h200", "b200", "gb200", "b300", "l40s"])
def test_no_measured_layer_stays_half_as_long_again_as_one_of_more_tokens(gpu: str, dtype: str) -> None:
    shapes, seconds, _ = kernel_file(gpu).points("moe_layer", dtype)
    bounded = within_bounds(shapes.sizes, shapes.codes, seconds)
    order = np.lexsort(shapes.codes)  # by all but tokens, the last of which decides least
    tokens, rest = shapes.codes[TOKENS][order], shapes.codes[1:, order]
    alike = (rest[:, 1:] == rest[:, :-1]).all(axis=0) & (tokens[1:] > tokens[:-1])
    slower = bounded[order][:-1] / bounded[order][1:]
    assert slower[alike].max() <= 1.5 * (1 + 1e-6)


def test_most_published_points_stand() -> None:
    shapes, seconds, _ = kernel_file("h100").points("moe_layer", "fp8")
    bounded = within_bounds(shapes.sizes, shapes.codes, seconds)
    assert 0.9 < (bounded == seconds).mean() < 1.0
