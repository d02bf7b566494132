"""What a search's workers do: bound the layouts of one mesh, simulate one layout.

Plain functions of pickled data, so that they run in this process, in others and on a Dask cluster alike.
"""

from __future__ import annotations

import math
import pickle
import time
from functools import lru_cache
from typing import NamedTuple

from sim.errors import InputError
from sim.graph.contended import shared_links
from sim.layout.bound import ROUNDING, GridBounds, GridSearch
from sim.layout.grid_prices import GridPrices
from sim.layout.layouts import Grid, Layout, Space, scenario_of
from sim.prices.costs import Costs
from sim.prices.profile import Profile, load_profile
from sim.simulation import no_collection, simulate
from topology.network import Network


class Outcome(NamedTuple):
    """One simulated layout; where it cannot be simulated, why."""

    layout: Layout
    step_time_s: float
    peak_memory_bytes: float
    cpu_s: float  # that simulating it took
    refused: str = ""
    beaten: bool = False  # too slow even as if links carried everything at once, which `step_time_s` then is


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


def evaluate(packed: bytes, layout: Layout, limit_bytes: float = math.inf, ceiling_s: float = math.inf) -> Outcome:
    """Simulate one layout: as if links carried everything at once, and if it then fits in memory (which is the same)
    and takes no longer than `ceiling_s`, with links shared."""
    tools = _tools(packed)
    begin = time.thread_time()
    with no_collection():  # until the step's tasks are gone
        step_s, peak, beaten, refused = _evaluate(tools, layout, limit_bytes, ceiling_s)
    return Outcome(layout, step_s, peak, time.thread_time() - begin, refused, beaten)


def _evaluate(tools: _Tools, layout: Layout, limit_bytes: float, ceiling_s: float) -> tuple[float, float, bool, str]:
    """Seconds, bytes, whether beaten, and why it was refused."""
    try:
        scenario = scenario_of(tools.space, layout)
        simulation = simulate(scenario, costs=tools.costs, share_links=False)
        peak = max(float(curve.total.max()) for curve in simulation.memory)
        beaten = simulation.step_time_s * ROUNDING > ceiling_s
        if peak <= limit_bytes and not beaten and shared_links(simulation.pricing, simulation.schedule):
            simulation = simulate(scenario, costs=tools.costs)
        return simulation.step_time_s, peak, beaten, ""
    except InputError as error:
        return math.inf, math.inf, False, str(error)
