"""What a search's workers do: bound the layouts of one mesh, simulate one layout.

Plain functions of pickled data, so that they run in this process, in others and on a Dask cluster alike.
"""

from __future__ import annotations

import math
import pickle
import time
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from sim.errors import InputError
from sim.garbage import no_collection
from sim.graph.uses import Kept
from sim.layout.bound import ROUNDING, GridBounds, GridSearch
from sim.layout.grid_prices import GridPrices
from sim.layout.layouts import Grid, Layout, Space, scenario_of
from sim.layout.least_time import Known, least_step_s
from sim.prices.costs import Costs
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from sim.simulation import prepare
from topology.network import Network

Fate = Literal["too_large", "beaten", "refused", "simulated"]
FATES: tuple[Fate, ...] = get_args(Fate)
KEPT = 32  # ways to run layers whose compiled programs a worker keeps


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
    tools, begin = _tools(packed), time.thread_time()
    prices = GridPrices(tools.space, grid, tools.costs, tools.network)
    with no_collection():
        found = GridSearch(tools.space, grid, prices, limit_bytes).run(ceiling_s)
    return replace(found, cpu_s=time.thread_time() - begin)


def evaluate(packed: bytes, layout: Layout, limit_bytes: float = math.inf, ceiling_s: float = math.inf) -> Outcome:
    """Simulate one layout, if it fits in memory and takes no longer than `ceiling_s` as if links carried everything at
    once. The time of one that does not fit is not known: infinite."""
    tools, kept = _tools(packed), _kept(packed, layout._replace(schedule="", virtual_stages=0))
    begin = time.thread_time()
    with no_collection():  # until the step's tasks are gone
        fate, step_s, peak, reason = _evaluate(tools, kept, layout, limit_bytes, ceiling_s)
    return Outcome(layout, fate, step_s, peak, time.thread_time() - begin, reason)


class _Shared(NamedTuple):
    """What layouts share that differ in schedule and virtual stages alone: compiled programs, and those as numbers."""

    kept: Kept
    known: Known


@lru_cache(maxsize=KEPT)
def _kept(packed: bytes, way: Layout) -> _Shared:
    """That of a way to run layers; layouts next to each other often have the same."""
    return _Shared(Kept(), Known())


def _evaluate(
    tools: _Tools, shared: _Shared, layout: Layout, limit_bytes: float, ceiling_s: float
) -> tuple[Fate, float, float, str]:
    """What becomes of it, seconds, bytes, and why it was refused."""
    try:
        step = prepare(scenario_of(tools.space, layout), tools.costs, kept=shared.kept)
        peak = step.peak_bytes
        if peak > limit_bytes:
            return "too_large", math.inf, peak, ""
        if ceiling_s < math.inf and (least_s := least_step_s(step, shared.known) * ROUNDING) > ceiling_s:
            return "beaten", least_s, peak, ""
        return "simulated", step.run().step_time_s, peak, ""
    except InputError as error:
        return "refused", math.inf, math.inf, str(error)
