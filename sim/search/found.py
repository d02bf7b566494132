"""What a search found, as records: the layouts and how many of them were looked at (format sim-search/1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sim.core.units import counted
from sim.inputs.calibration_input import not_measured
from sim.inputs.scenario import Scenario
from sim.results.beside_allocator import left_of, memory_limit
from sim.results.fit import judge
from sim.results.records import Record
from sim.results.training_run import TrainingRun
from sim.search.best_first import BestFirst, pareto
from sim.search.evaluation import LayoutMeans, Outcome
from sim.search.runnable import Runnable
from sim.search.space import LAID_OUT, Layout, Linked, Space, scenario_of
from sim.search.why_none import why_none_legal


class FoundLayout(Record, frozen=True, kw_only=True):
    """A simulated layout. `tokens_per_s_per_gpu`: over all GPUs of the search; `peak_memory_bytes`: allocated on the
    fullest GPU; `peak_reserved_bytes`: what its allocator holds for that;
    `parallelism`: the layout's keys of that section."""

    step_time_s: float
    tokens_per_s_per_gpu: float
    peak_memory_bytes: float
    peak_reserved_bytes: float
    layout: Layout
    parallelism: Mapping[str, Any]


class BestLayout(FoundLayout, frozen=True, kw_only=True):
    """One of the best layouts, with the whole scenario, so that it runs without the search's options.

    `memory_limit_bytes`: what its allocator may reserve of a GPU; `tight`: it fits with the odds `fit_odds`. A map's
    cells have no `runnable`, and a search without a price no cost. `training_run`: the whole training, where
    `training.tokens` gives its length; `training_cost`: its GPU hours at the price.
    """

    inlined = ("means", "runnable")

    means: LayoutMeans
    memory_limit_bytes: float
    tight: bool
    fit_odds: float
    scenario: Scenario
    runnable: Runnable | None = None
    cost_per_trillion_tokens: float | None = None
    training_run: TrainingRun | None = None
    training_cost: float | None = None


class Refusal(Record, frozen=True):
    """Why the simulator refuses layouts, and how many."""

    reason: str
    count: int


class SearchResult(Record, frozen=True, kw_only=True):
    """What a search found.

    `memory_limit_bytes`: what any layout may take of a GPU; `counts`: layouts by outcome (`BestFirst`);
    `too_large_bytes`: what the smallest layout needs where none fits; `cpu_s`: of all workers, by what it was for;
    `rates`: per second of a worker, so that searches on different numbers of cores compare. `not_measured`: what
    to say where the GPU's kernels were not measured. `unexamined`: of a search that Ctrl-C ended, the number of layouts
    that it had neither evaluated nor ruled out; faster ones may be among them.
    """

    format: str = "sim-search/1"
    name: str
    gpus: int
    not_measured: str = ""
    objective: str
    memory_limit_bytes: float
    only: Mapping[str, Sequence[Any]]
    linked: tuple[Linked, ...]
    trainer: str | None
    best: tuple[BestLayout, ...]
    pareto: tuple[FoundLayout, ...]
    evaluated: tuple[FoundLayout, ...]
    counts: Mapping[str, int]
    why_none_legal: str
    too_large_bytes: float | None
    refusals: tuple[Refusal, ...]
    wall_s: float
    cores: int
    cpu_s: Mapping[str, float]
    rates: Mapping[str, float]
    price_per_gpu_hour: float | None
    unexamined: int | None = None


class ClusterSearch(Record, frozen=True):
    """The search of one cluster and number of GPUs among several. `cluster`: empty if it is the scenario's own."""

    inlined = ("search",)

    cluster: str
    search: SearchResult


class ClustersResult(Record, frozen=True, kw_only=True):
    """A search of each of several clusters. `gpus`: of each search; a tuple where several numbers are compared, which
    is format 2. `unsearched`: the number of searches that Ctrl-C left out."""

    format: str
    name: str
    gpus: int | tuple[int, ...]
    clusters: tuple[ClusterSearch, ...]
    unsearched: int | None = None

    @property
    def interrupted(self) -> bool:
        """Tell whether Ctrl-C ended a search or left one out."""
        return bool(self.unsearched) or any(one.search.unexamined is not None for one in self.clusters)

    @property
    def of_sizes(self) -> bool:
        """Tell whether several numbers of GPUs are compared."""
        return not isinstance(self.gpus, int)

    @property
    def what(self) -> str:
        """Say which layouts are compared.

        >>> several_searches((8, 16), ()).what
        'the best layouts of 8 and 16 GPUs'
        """
        if isinstance(self.gpus, int):
            gpus = counted(self.gpus, "GPU")
        else:
            *first, last = map(str, self.gpus)
            gpus = f"{', '.join(first)} and {last} GPUs"
        return f"the best layouts of {gpus}" + " of each cluster" * any(one.cluster for one in self.clusters)


def several_searches(
    gpus: Sequence[int], searches: Sequence[ClusterSearch], unsearched: int | None = None
) -> ClustersResult:
    """The result of these searches of so many GPUs each: in format 1 with one number, else in format 2.

    >>> several_searches((8,), ()).format, several_searches((8, 16), ()).format
    ('sim-search-clusters/1', 'sim-search-clusters/2')
    """
    name = searches[0].search.name if searches else ""
    number, of = (1, gpus[0]) if len(gpus) == 1 else (2, tuple(gpus))
    return ClustersResult(
        format=f"sim-search-clusters/{number}", name=name, gpus=of, clusters=tuple(searches), unsearched=unsearched
    )


def make_result(
    found: BestFirst, objective: str, best: Sequence[BestLayout], price_per_gpu_hour: float | None = None
) -> SearchResult:
    """Return the result of a search that has ended. `best`: `best_layout` of each of its best outcomes."""
    space, c = found.space, found.counts
    looked_at = c["pruned_by_memory"] + c["pruned_by_bound"] + c["evaluated"]
    return SearchResult(
        name=space.base.name,
        gpus=space.gpus,
        not_measured=not_measured(space.base.cluster),
        objective=objective,
        memory_limit_bytes=limit_of_any(found),
        only=space.only,
        linked=space.linked,
        trainer=space.trainer or None,
        best=tuple(best),
        pareto=tuple(FoundLayout(**_figures(space, o)) for o in pareto(found.fitting)),
        evaluated=tuple(FoundLayout(**_figures(space, o)) for o in found.fitting),
        counts=found.counts,
        # This goes through the whole space again, so only if no layout is legal.
        why_none_legal="" if found.counts["legal"] else why_none_legal(space),
        too_large_bytes=found.too_large_bytes if math.isfinite(found.too_large_bytes) else None,
        refusals=tuple(Refusal(reason, n) for reason, n in found.refusals.most_common()),
        wall_s=found.wall_s,
        cores=found.cores,
        cpu_s=found.cpu_s,
        rates=_rates(found),
        price_per_gpu_hour=price_per_gpu_hour,
        unexamined=c["legal"] - looked_at if found.interrupted else None,
    )


def limit_of_any(found: BestFirst) -> float:
    """Return the bytes of a GPU that no layout of the search may exceed."""
    return left_of(found.space.base.cluster.gpu).limit if found.limit_bytes is None else found.limit_bytes


def _rates(found: BestFirst) -> dict[str, float]:
    c, cpu_s, per_core = found.counts, found.cpu_s, found.wall_s * found.cores
    evaluating_s = sum(cpu_s.values()) - cpu_s["bounding"]
    return {
        "pruned_by_bound_or_evaluated_per_s_per_core": (c["pruned_by_bound"] + c["evaluated"]) / per_core,
        "legal_per_s_per_core": c["legal"] / per_core,
        "evaluated_per_s_per_core": c["evaluated"] / evaluating_s if evaluating_s else 0.0,
        "simulated_per_s_per_core": c["simulated"] / cpu_s["simulated"] if cpu_s["simulated"] else 0.0,
    }


def best_layout(found: BestFirst, outcome: Outcome, means: LayoutMeans) -> BestLayout:
    """Return one of a search's best layouts with its scenario and the memory that it was allowed."""
    scenario = scenario_of(found.space, outcome.layout)
    limit_bytes = memory_limit(scenario, scenario.cluster.gpu).limit if found.limit_bytes is None else found.limit_bytes
    fit = judge(outcome.peak_reserved_bytes, limit_bytes)
    return BestLayout(
        **_figures(found.space, outcome),
        means=means,
        memory_limit_bytes=limit_bytes,
        tight=fit.state == "tight",
        fit_odds=fit.odds,
        scenario=scenario,
    )


def _figures(space: Space, outcome: Outcome) -> dict[str, Any]:
    t = space.training
    tokens = t.global_batch_size * t.seq_len
    return {
        "step_time_s": outcome.step_time_s,
        # Divided by all GPUs of the space, so that layouts compare with those of a search over other numbers of GPUs.
        "tokens_per_s_per_gpu": tokens / outcome.step_time_s / space.gpus if outcome.step_time_s else 0.0,
        "peak_memory_bytes": outcome.peak_memory_bytes,
        "peak_reserved_bytes": outcome.peak_reserved_bytes,
        "layout": outcome.layout,
        "parallelism": {key: getattr(outcome.layout, key) for key in LAID_OUT},
    }
