"""The bound on memory under FSDP2, whose last unit alone is gathered while the loss runs its backward."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.search.bound import MeshSearch
from sim.search.mesh_prices import MeshPrices
from sim.search.space import Layout, MeshSizes, scenario_of
from sim.simulation import prepare
from tests.sim.search.search_spaces import varied
from topology.network import Network


@pytest.mark.parametrize("framework", ["transformers", "compiled", "eager"])
def test_no_step_needs_less_than_the_bound(framework: str) -> None:
    """A large vocabulary and one sequence: the peak is the loss's."""
    change: dict[str, Any] = {"model": {"vocab": 128256}, "training": {"framework": framework, "seq_len": 4096}}
    space = varied(change, 8)
    x = Layout(1, False, 1, 1, 8, 1, 3, "1f1b", 1, 1, "full", "none")
    mesh = MeshSizes(*(getattr(x, k) for k in MeshSizes._fields))
    costs = Costs(load_profile(space.base.calibration), space.base.cluster.gpu)
    search = MeshSearch(space, mesh, MeshPrices(space, mesh, costs, Network(space.base.cluster)), math.inf)
    peak = max(float(c.total.max()) for c in prepare(scenario_of(space, x), search.prices.costs).run().memory)
    assert 0.9 * peak <= search.memory.least_bytes(x) <= peak
