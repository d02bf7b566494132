"""Relations between random scenarios; `random_scenarios.py` says which."""

from __future__ import annotations

import pytest

from tests.sim.metamorphic.random_scenarios import broken

QUICK, ALL, AT_ONCE = 60, 2000, 100


@pytest.mark.parametrize("seed", range(QUICK))
def test_relations_hold(seed: int) -> None:
    assert not broken(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK, ALL, AT_ONCE))
def test_relations_hold_for_many(first: int) -> None:
    assert not [text for seed in range(first, min(ALL, first + AT_ONCE)) if (text := broken(seed))]
