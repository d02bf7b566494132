"""Measured seconds between measured sizes."""

from __future__ import annotations

import math
from itertools import product

import pytest

from sim.prices.nested_grid import NestedGrid

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def both(a: float, b: float) -> float:
    return 3.0 + 2.0 * a + 5.0 * b + 0.5 * a * b


@pytest.mark.parametrize("at", [(3, 5), (64, 100), (1, 256), (500, 3), (700, 900), (2.5, 7.5)])
def test_seconds_linear_in_each_size_are_given_back_inside_and_beyond(at: tuple[float, float]) -> None:
    grid = NestedGrid({(a, b): both(a, b) for a, b in product(SIZES, SIZES)})
    assert grid.at(at) == pytest.approx(both(*at))


def test_sizes_may_be_measured_beside_few_of_the_others() -> None:
    """Two grids of other sizes, one in the gaps of the other, as profilers write them."""
    rows: dict[tuple[int, ...], float] = {(a, b): both(a, b) for a, b in product(SIZES[::2], SIZES)}
    rows |= {(a, b): both(a, b) for a, b in product(SIZES[1::2], (3, 300))}
    grid = NestedGrid(rows)
    assert [grid.at(at) for at in ((2, 50), (3, 90), (100, 200))] == pytest.approx(
        [both(2, 50), both(3, 90), both(100, 200)]
    )


def test_a_power_is_given_back() -> None:
    grid = NestedGrid({(a,): 2.0 * a**1.7 for a in SIZES}, power=0)
    assert [grid.at([a]) for a in (3, 100, 1000)] == pytest.approx([2.0 * a**1.7 for a in (3, 100, 1000)])


@pytest.mark.parametrize("left_out", [112, 128, 144, 192, 256, 272, 320, 336])
def test_a_jump_behind_a_tile_stays_where_it_is(left_out: int) -> None:
    """Kernels whose time grows with whole tiles of 64 or 128 rows: also at the last size before a jump and the first
    behind it, which a line between both neighbours would put in the middle of it."""
    for tile in (64, 128):
        stairs = {(n,): 1.0 * math.ceil(n / tile) for n in range(16, 513, 16)}
        kept = NestedGrid({size: s for size, s in stairs.items() if size != (left_out,)})
        assert kept.at([left_out]) == pytest.approx(stairs[left_out,])


def test_time_never_falls_beyond_the_largest_size() -> None:
    falling = NestedGrid({(n,): 2.0 - n / 1000 for n in SIZES})
    assert falling.at([10_000]) == pytest.approx(2.0 - 256 / 1000)


def test_less_than_the_smallest_size_takes_less_but_no_less_than_its_part() -> None:
    grid = NestedGrid({(a, b): both(a, b) for a, b in product((16, 32), (512, 1024))})
    assert grid.at((20, 100)) == pytest.approx(both(20, 100))
    steep = NestedGrid({(512,): 1.0, (1024,): 10.0})
    assert steep.at([256]) == pytest.approx(0.5)
