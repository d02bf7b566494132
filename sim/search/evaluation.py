"""Run a search's tasks in its workers: bound the parts of a mesh, simulate one layout.

The tasks are plain functions of pickled data, so they run in this process, in others and on a Dask cluster.
`limit_bytes` is what a layout's allocator may reserve of each GPU; None stands for `memory_limit` of the layout.
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
from sim.results.beside_allocator import left_of, memory_limit
from sim.results.records import Record
from sim.search.bound import MeshSearch
from sim.search.bounded import ROUNDING, Bounds
from sim.search.least_time import least_time_s
from sim.search.mesh_prices import MeshPrices
from sim.search.space import Layout, MeshSizes, PartialLayout, Space, scenario_of
from sim.simulation import prepare
from topology.network import Network

Fate = Literal["too_large", "beaten", "refused", "simulated"]
FATES: tuple[Fate, ...] = get_args(Fate)
KEPT_PROGRAMS = 32  # layouts that differ in more than the schedule, whose compiled programs a worker keeps
KEPT_MESHES = 256  # meshes whose blocks and prices a worker keeps for all their layouts


class Outcome(NamedTuple):
    """Hold what became of one evaluated layout.

    `fate`: "too_large" (it does not fit in memory), "beaten" (its least time is too long; `step_time_s` is that least
    time), "refused" (by the simulator or the trainer) or "simulated" (in full). Unknown times and memory are infinite.
    """

    layout: Layout
    fate: Fate
    step_time_s: float
    peak_memory_bytes: float
    peak_reserved_bytes: float
    cpu_s: float  # of the evaluation
    reason: str = ""  # why it was refused


class LayoutMeans(Record, frozen=True):
    """A layout's MFU, exposed communication in seconds and bubble fraction, as means over the ranks."""

    mfu: float
    exposed_comm_s: float
    bubble_fraction: float


class _Tools(NamedTuple):
    """Hold what all tasks of one search share in a process."""

    space: Space
    profile: Profile
    costs: Costs
    network: Network
    programs: dict[Program, Program]  # programs of blocks, one copy of each for all meshes


def pack(space: Space) -> bytes:
    """Return the search's data for its workers as bytes, with its profile, so that workers need no files."""
    # Executors would pickle the space anew for each of thousands of tasks. Bytes are pickled faster.
    return pickle.dumps((space, load_profile(space.base.calibration)))


# The key is the packed bytes: tasks of one search share prices, also in a worker that outlives the search.
@lru_cache(maxsize=4)
def _tools(packed: bytes) -> _Tools:
    space, profile = pickle.loads(packed)  # safe: `pack` of this program made the bytes
    cluster = space.base.cluster
    costs = costs_on(cluster.gpu, profile, ranks_on_node(cluster, space.gpus))  # every layout uses all GPUs
    return _Tools(space, profile, costs, Network(cluster), {})


def bound_mesh(packed: bytes, mesh: MeshSizes, limit_bytes: float | None) -> Bounds:
    """Bound the partial layouts of a mesh; see `MeshSearch.partial_layouts`."""
    return _timed(lambda: _mesh_search(packed, mesh, limit_bytes).partial_layouts())


def bound_partial_layout(
    packed: bytes, partial: PartialLayout, limit_bytes: float | None, patience_s: float, ceiling_s: float
) -> Bounds:
    """Bound the layouts of a partial layout; see `MeshSearch.layouts`."""
    return _timed(lambda: _mesh_search(packed, partial.mesh, limit_bytes).layouts(partial, patience_s, ceiling_s))


def _timed(bound: Callable[[], Bounds]) -> Bounds:
    # Thread time leaves out other processes on the worker's core.
    begin = time.thread_time()
    # Millions of objects are made and dropped, few of them in cycles, so frequent collections waste time.
    with rare_collection():
        found = bound()
    return replace(found, cpu_s=time.thread_time() - begin)


# The partial layouts of a mesh come one by one, between those of other meshes, so a worker keeps several meshes.
@lru_cache(maxsize=KEPT_MESHES)
def _mesh_search(packed: bytes, mesh: MeshSizes, limit_bytes: float | None) -> MeshSearch:
    tools = _tools(packed)
    if limit_bytes is None:
        limit_bytes = left_of(tools.space.base.cluster.gpu).limit  # NCCL's buffers depend on the layout
    prices = MeshPrices(tools.space, mesh, tools.costs, tools.network, tools.programs)
    return MeshSearch(tools.space, mesh, prices, limit_bytes)


def evaluate(
    packed: bytes, layout: Layout, limit_bytes: float | None = math.inf, patience_s: float = math.inf
) -> Outcome:
    """Simulate one layout, if it fits in memory and its least time is not above `patience_s` seconds.

    The outcome's step time is infinite if the layout does not fit or is refused.
    """
    # A schedule orders a stage's actions but does not change them, so the key leaves it out.
    tools, cache = _tools(packed), _program_cache(packed, layout._replace(schedule="", virtual_stages=0))
    begin = time.thread_time()
    with rare_collection():
        fate, step_s, peak, reserved, reason = _evaluate(tools, cache, layout, limit_bytes, patience_s)
    return Outcome(layout, fate, step_s, peak, reserved, time.thread_time() - begin, reason)


@lru_cache(maxsize=KEPT_PROGRAMS)
def _program_cache(packed: bytes, layout: Layout) -> ProgramCache:
    """Return the cache of compiled programs for all layouts that differ only in schedule and virtual stages."""
    # The arguments are only the key of `lru_cache`.
    return ProgramCache()


def means_of(packed: bytes, layout: Layout) -> LayoutMeans:
    """Return what the whole simulation of a layout says beside its time and memory."""
    tools = _tools(packed)
    # A separate cache: the few layouts with details must not push the search's programs out.
    step = prepare(scenario_of(tools.space, layout), tools.costs, cache=ProgramCache()).run().outcome
    mean = step.mean_rank
    return LayoutMeans(step.utilization.mfu, mean.exposed_comm_s, mean.bubble_fraction)


def _evaluate(
    tools: _Tools, cache: ProgramCache, layout: Layout, limit_bytes: float | None, patience_s: float
) -> tuple[Fate, float, float, float, str]:
    """Return the layout's fate, step time in seconds, peak and reserved bytes, and the reason of a refusal."""
    try:
        scenario = scenario_of(tools.space, layout)
        # The cheapest test comes first: a trainer's refusal needs no prices.
        if tools.space.trainer and (reasons := reasons_against(scenario, tools.space.trainer)):
            return "refused", math.inf, math.inf, math.inf, f"{tools.space.trainer}: {reasons[0]}"
        step = prepare(scenario, tools.costs, cache=cache)
        # Exact memory follows from the order of actions and from sizes, so no engine has to run.
        peak = step.peak_bytes
        most = memory_limit(scenario, scenario.cluster.gpu).limit if limit_bytes is None else limit_bytes
        if peak > most:
            return "too_large", math.inf, peak, peak, ""
        # The least time has one task for each action and is far cheaper than the full graph with collectives and links.
        if patience_s < math.inf and (least_s := least_time_s(step) * ROUNDING) > patience_s:
            return "beaten", least_s, peak, peak, ""
        done = step.run()
        if done.reserved_bytes > most:
            return "too_large", math.inf, peak, done.reserved_bytes, ""
        return "simulated", done.step_time_s, peak, done.reserved_bytes, ""
    # The simulator refuses some of thousands of layouts. A refusal must not end the search.
    except InputError as error:
        return "refused", math.inf, math.inf, math.inf, str(error)
