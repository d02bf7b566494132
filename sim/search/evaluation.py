"""What a search's workers do: bound the parts of a mesh, simulate one layout.

Plain functions of pickled data, so that they run in this process, in others and on a Dask cluster alike.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from msgspec.structs import replace

from sim.core.errors import InputError
from sim.core.gc_paused import rare_collection
from sim.core.program import Program
from sim.emit import reasons_against
from sim.graph.compiled import ProgramCache
from sim.prices.operator_prices import Costs
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from sim.prices.shared_cores import costs_on, ranks_on_node
from sim.results.beside_allocator import allocator_bytes
from sim.search.bound import ROUNDING, Bounds, GridSearch
from sim.search.least_time import least_time_s
from sim.search.mesh_prices import GridPrices
from sim.search.space import Grid, Layout, Space, Way, scenario_of
from sim.simulation import prepare
from topology.network import Network

Fate = Literal["too_large", "beaten", "refused", "simulated"]
FATES: tuple[Fate, ...] = get_args(Fate)
KEPT_PROGRAMS = 32  # ways to run layers whose compiled programs a worker keeps
KEPT_MESHES = 256  # whose blocks and prices a worker keeps: without them each of their ways would build and price anew


class Outcome(NamedTuple):
    """One evaluated layout, and what became of it: it does not fit; it is too slow even as if links carried everything
    at once, `step_time_s` being a least time; the simulator refuses it; it was simulated in full."""

    layout: Layout
    fate: Fate
    step_time_s: float
    peak_memory_bytes: float
    cpu_s: float  # that evaluating it took
    reason: str = ""  # of a refusal


class _Tools(NamedTuple):
    """What all tasks of one search share in a process."""

    space: Space
    profile: Profile
    costs: Costs
    network: Network
    programs: dict[Program, Program]  # of blocks, each once for all meshes


def pack(space: Space) -> bytes:
    """The search's data for its workers, its profile included, so that they need no files."""
    # Pickled here once. Executors would otherwise pickle the space anew for each of thousands of tasks.
    return pickle.dumps((space, load_profile(space.base.calibration)))


# By the packed bytes, so that tasks of one search share prices in a worker that outlives several searches.
@lru_cache(maxsize=4)
def _tools(packed: bytes) -> _Tools:
    space, profile = pickle.loads(packed)  # what `pack` made, in this program
    cluster = space.base.cluster
    costs = costs_on(cluster.gpu, profile, ranks_on_node(cluster, space.gpus))  # every layout has all the ranks
    return _Tools(space, profile, costs, Network(cluster), {})


def bound_grid(packed: bytes, grid: Grid, limit_bytes: float) -> Bounds:
    """Bounds of the ways to run layers on a mesh; see `GridSearch.ways`."""
    return _timed(lambda: _grid_search(packed, grid, limit_bytes).ways())


def bound_way(packed: bytes, way: Way, limit_bytes: float, patience_s: float, ceiling_s: float) -> Bounds:
    """Bounds of the layouts of a way; see `GridSearch.layouts`."""
    return _timed(lambda: _grid_search(packed, way.grid, limit_bytes).layouts(way, patience_s, ceiling_s))


def _timed(bound: Callable[[], Bounds]) -> Bounds:
    # Thread time: a worker that shares its core must not count the time of others.
    begin = time.thread_time()
    # Layouts make and drop objects by the million, and few of these form cycles.
    with rare_collection():
        found = bound()
    return replace(found, cpu_s=time.thread_time() - begin)


# By all that decides a mesh's bounds. Its ways are looked at one by one, those of other meshes between them.
@lru_cache(maxsize=KEPT_MESHES)
def _grid_search(packed: bytes, grid: Grid, limit_bytes: float) -> GridSearch:
    tools = _tools(packed)
    prices = GridPrices(tools.space, grid, tools.costs, tools.network, tools.programs)
    return GridSearch(tools.space, grid, prices, limit_bytes)


def evaluate(packed: bytes, layout: Layout, limit_bytes: float = math.inf, patience_s: float = math.inf) -> Outcome:
    """Simulate one layout, if it fits in memory and takes no longer than `patience_s` as if links carried everything at
    once. The time of one that does not fit is not known: infinite."""
    # A schedule orders a stage's actions and does not change them, so its name is left out of the key.
    tools, cache = _tools(packed), _program_cache(packed, layout._replace(schedule="", virtual_stages=0))
    begin = time.thread_time()
    with rare_collection():
        fate, step_s, peak, reason = _evaluate(tools, cache, layout, limit_bytes, patience_s)
    return Outcome(layout, fate, step_s, peak, time.thread_time() - begin, reason)


@lru_cache(maxsize=KEPT_PROGRAMS)
def _program_cache(packed: bytes, way: Layout) -> ProgramCache:
    """Compiled programs shared by all layouts that differ only in schedule; neighbours in the search usually do."""
    # The arguments are the key alone.
    return ProgramCache()


def detail(packed: bytes, layout: Layout) -> dict[str, float]:
    """What a list of layouts says of each besides its time and memory; they are means over the ranks."""
    tools = _tools(packed)
    # A cache of its own: details are of a few best layouts, and must not push the search's programs out.
    step = prepare(scenario_of(tools.space, layout), tools.costs, cache=ProgramCache()).run().outcome
    mean = step.mean_rank
    return {"mfu": step.utilization.mfu, "exposed_comm_s": mean.exposed_comm_s, "bubble_fraction": mean.bubble_fraction}


def _evaluate(
    tools: _Tools, cache: ProgramCache, layout: Layout, limit_bytes: float, patience_s: float
) -> tuple[Fate, float, float, str]:
    """What becomes of it, seconds, bytes, and why it was refused."""
    try:
        scenario = scenario_of(tools.space, layout)
        # The cheapest test first. A trainer's refusal needs no prices at all.
        if tools.space.trainer and (reasons := reasons_against(scenario, tools.space.trainer)):
            return "refused", math.inf, math.inf, f"{tools.space.trainer}: {reasons[0]}"
        step = prepare(scenario, tools.costs, cache=cache)
        # Exact memory follows from lists and sizes. No engine has to run for a layout that does not fit.
        peak = step.peak_bytes
        gpu = scenario.cluster.gpu
        # A limit of one's own stands as it is.
        if peak > (allocator_bytes(scenario, gpu) if limit_bytes == gpu.memory_bytes else limit_bytes):
            return "too_large", math.inf, peak, ""
        # The least time has one task an action, where the full graph has collectives and links: it is far cheaper.
        if patience_s < math.inf and (least_s := least_time_s(step) * ROUNDING) > patience_s:
            return "beaten", least_s, peak, ""
        return "simulated", step.run().step_time_s, peak, ""
    # A search over thousands of layouts meets some that the simulator has a rule against. One refusal must not end it.
    except InputError as error:
        return "refused", math.inf, math.inf, str(error)
