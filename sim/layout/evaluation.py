"""What a search's workers do: bound the layouts of one mesh, simulate one layout.

Plain functions of pickled data, so that they run in this process, in others and on a Dask cluster alike.
"""

from __future__ import annotations

import pickle
import time
from functools import lru_cache
from typing import NamedTuple

from sim.costs import Costs
from sim.errors import InputError
from sim.layout.bound import GridBounds, GridSearch
from sim.layout.grid_prices import GridPrices
from sim.layout.layouts import Grid, Layout, Space, scenario_of
from sim.profile import Profile, load_profile
from sim.simulation import simulate
from topology.network import Network


class Outcome(NamedTuple):
    """One simulated layout; where it cannot be simulated, why."""

    layout: Layout
    step_time_s: float
    peak_memory_bytes: float
    cpu_s: float  # that simulating it took
    refused: str = ""


class _Tools(NamedTuple):
    """What all tasks of one search share in a process."""

    space: Space
    profile: Profile
    costs: Costs
    network: Network


def pack(space: Space) -> bytes:
    """The search's data for its workers, its profile included, so that they need no files."""
    return pickle.dumps((space, load_profile(space.base.calibration)))


@lru_cache(maxsize=4)
def _tools(packed: bytes) -> _Tools:
    space, profile = pickle.loads(packed)  # what `pack` made, in this program
    cluster = space.base.cluster
    return _Tools(space, profile, Costs(profile, cluster.gpu), Network(cluster))


def bound_grid(packed: bytes, grid: Grid, limit_bytes: float, ceiling_s: float) -> GridBounds:
    """Bounds of a mesh's layouts; see `GridSearch.run`."""
    tools = _tools(packed)
    prices = GridPrices(tools.space, grid, tools.costs, tools.network)
    return GridSearch(tools.space, grid, prices, limit_bytes).run(ceiling_s)


def evaluate(packed: bytes, layout: Layout) -> Outcome:
    """Simulate one layout in full."""
    tools = _tools(packed)
    begin = time.thread_time()
    try:
        simulation = simulate(scenario_of(tools.space, layout), costs=tools.costs)
        peak = max(float(curve.total.max()) for curve in simulation.memory)
        return Outcome(layout, simulation.step_time_s, peak, time.thread_time() - begin)
    except InputError as error:
        return Outcome(layout, float("inf"), float("inf"), time.thread_time() - begin, str(error))
