"""Search the layouts of a serving scenario by the rate of requests that they carry within promised latencies.

A service of more GPUs has several units (`sim.search.serving_units`), each with its part of the requests. Every
simulated rate is a point of the curve of throughput and interactivity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from sim.core.errors import InputError
from sim.core.executors import SoFar, Workers, results, tracked
from sim.inputs.input_source import Source
from sim.inputs.overrides import merge
from sim.inputs.scenario import Scenario, resolve
from sim.prices.profiles import load_profile
from sim.search.engine_options import Choice, as_section, by_engine, of_one_host
from sim.search.serving_found import (
    AtOwnRate,
    CurvePoint,
    FewestGpus,
    RefusedLayout,
    ServedRate,
    ServingLayout,
    ServingSearchResult,
)
from sim.search.serving_units import CLOSE, Point, Tuned, Unit, UnitSearch, own_rate, tuned, units_of
from sim.studies.promised_latencies import Promise
from sim.studies.spending import MILLION, gpu_hours_of, token_cost

POOL_FROM_TASKS = 6  # fewer are mostly done before other processes have started
SHORTER = (
    "those that take longest come first; fewer GPUs, and fewer or shorter requests (inference.requests), take less time"
)


class ServingSearch(Struct, frozen=True):
    """A space to search: layouts of a scenario on `gpus` GPUs (None: as many as it has), all with the same promises,
    and each with every engine and all choices of its options."""

    source: Source
    name: str
    slo: tuple[Promise, ...]
    gpus: int | None = None
    price_per_gpu_hour: float | None = None
    choices: tuple[Choice, ...] = ({},)


def search_serving(
    asked: ServingSearch, pool: Callable[[bool], AbstractContextManager[Workers]]
) -> ServingSearchResult:
    """Search all replicas, a task for each. `pool`: where tasks run, told whether they are many. Ctrl-C ends the search
    with what it found.

    Raises:
        KeyboardInterrupt: at Ctrl-C before anything was found.
        InputError: for a scenario that is wrong, no serving workload, or has a section that `--slo` does not support.
    """
    base = resolve(asked.source, asked.name)
    _check(base, asked.source.label)
    pools = base.for_serving.disaggregated
    gpus = asked.gpus or (base.parallelism.ranks if pools is None else pools.ranks)
    # Pipelines and many replicas first: their iterations are simulated one by one, so they take longest.
    units = sorted(units_of(base, gpus), key=lambda unit: -max(unit.degrees.get("pp", 1), unit.degrees.get("dp", 1)))
    engines = by_engine(asked.choices)
    work = [(asked, gpus, unit, choices) for unit in units for choices in engines]
    found: SoFar[_Found] = SoFar()
    with found.or_interrupted(), pool(len(work) >= POOL_FROM_TASKS) as workers:
        found.extend(tracked(results(workers, _searched, work), "layouts", len(work), SHORTER))
    of_unit = [found[i : i + len(engines)] for i in range(0, len(found), len(engines))]
    # All layouts fill the same GPUs, so the rate alone ranks them.
    layouts = sorted((each.layout for each in found if each.layout is not None), key=lambda row: -row.rate_per_s)
    return ServingSearchResult(
        name=base.name,
        gpus=gpus,
        slo=tuple(p.text for p in asked.slo),
        wanted_rate_per_s=own_rate(base),
        best=tuple(layouts),
        fewest_gpus=_fewest(layouts),
        curve=_front([point for each in found for point in each.curve]),
        # Of an interrupted search the last units have no findings.
        refusals=tuple(r for unit, each in zip(units, of_unit, strict=False) for r in _refusals(unit, each)),
        unsearched=len(work) - len(found) if found.interrupted else None,
        same_host_times=of_one_host([str(choice["engine"]) for choice in asked.choices if "engine" in choice]),
    )


def _check(base: Scenario, label: str) -> None:
    """Refuse what a search of rates cannot have.

    Raises:
        InputError: naming the section; `label` names the file.
    """
    cp, serving = base.parallelism.cp, base.for_serving
    for refused, why in (
        (serving.batching == "static", "inference.batching: a static batch has no rate of requests; write continuous"),
        (serving.autoscaling is not None, "inference.autoscaling: --slo searches replicas that are always on"),
        (
            serving.requests.max_concurrency is not None,
            "inference.requests.max_concurrency: --slo searches the rate of requests; leave it out",
        ),
        (serving.afd is not None, "inference.afd: --slo searches GPUs that compute attention and experts"),
        (cp > 1, f"parallelism.cp: found {cp}; --slo searches tp, pp, dp, ep and pools"),
    ):
        if refused:
            raise InputError(f"{label}: {why}")


class _Found(Struct, frozen=True):
    """The findings of a task for its unit and engine: no layout where all choices are refused, and why they are."""

    layout: ServingLayout | None
    curve: list[CurvePoint]
    refused: tuple[tuple[Choice, str], ...]


def _searched(asked: ServingSearch, gpus: int, unit: Unit, choices: tuple[Choice, ...]) -> _Found:
    """Search one unit with all `choices` of an engine's options, as a part of `gpus` GPUs."""
    base = resolve(asked.source, asked.name)
    wanted, profile, units = own_rate(base), load_profile(base.calibration), gpus // unit.gpus

    def of(choice: Choice) -> UnitSearch:
        data = merge(merge(dict(asked.source.data), unit.changes), as_section(choice))
        return UnitSearch(resolve(replace(asked.source, data=data), asked.name), profile, asked.slo)

    # Units share no queue, so a service of n units has n times the rate of one. The limit mostly lies within a few
    # doublings of the rate that the scenario wants of one unit.
    found = tuned(of, choices, (wanted or 1.0) / units)
    watts = base.cluster.mean_over(gpus, lambda gpu: gpu.power_limit_w)
    served = partial(_served, units, gpus, asked.price_per_gpu_hour, watts)
    layout = None if found.search is None else _layout(unit, units, found, found.search, wanted, served)
    return _Found(layout, [_on_curve(p, unit, choice) for choice, p in found.points], found.refused)


def _layout(
    unit: Unit,
    units: int,
    found: Tuned,
    search: UnitSearch,
    wanted_per_s: float | None,
    served: Callable[[Point], ServedRate],
) -> ServingLayout:
    """Return what a service of equal units carries: at the highest rate, and at the scenario's own."""
    highest, limit_found = found.highest, search.limit_found(found.highest)
    wanted = None
    if wanted_per_s is not None:
        needed = None
        if highest is not None and limit_found:
            # CLOSE is the search's resolution: a unit whose limit is 2 % below the wanted rate may carry it.
            needed = max(1, math.ceil(wanted_per_s / highest.rate_per_s / CLOSE)) * unit.gpus
        wanted = AtOwnRate(served(search.at(wanted_per_s / units)), needed)
    return ServingLayout(
        parallelism=unit.of(units),
        gpus=units * unit.gpus,
        unit=unit.degrees,
        options=found.choice,
        unit_gpus=unit.gpus,
        rate_per_s=units * highest.rate_per_s if highest else 0.0,
        highest=served(highest) if highest else None,
        limit_found=limit_found,
        wanted=wanted,
        broken=search.broken() if highest is None else (),
    )


def _fewest(layouts: Sequence[ServingLayout]) -> FewestGpus | None:
    """Return the fewest GPUs that carry the scenario's own rate, as far as that is known."""
    enough = [(row.wanted.fewest_gpus, row) for row in layouts if row.wanted and row.wanted.fewest_gpus]
    if not enough:
        return None
    gpus, fewest = min(enough, key=lambda pair: (pair[0], -pair[1].rate_per_s))
    # A layout whose limit is not known may need only one unit.
    if any(row.unit_gpus < gpus for row in layouts if not row.limit_found):
        return None
    many = "services" if "services" in fewest.parallelism else "dp"
    degrees = {**fewest.unit, many: gpus // fewest.unit_gpus * fewest.unit.get(many, 1)}
    return FewestGpus(gpus, degrees, fewest.options)


def _served(units: int, gpus: int, price: float | None, watts: float, point: Point) -> ServedRate:
    """Return a service of equal units, each at the point's rate."""
    tokens_per_s, times = units * point.tokens_per_s, point.latencies
    cost = None
    if tokens_per_s > 0:
        cost = token_cost(MILLION, gpu_hours_of(MILLION, tokens_per_s / gpus), watts, price or 0.0)
    return ServedRate(
        rate_per_s=units * point.rate_per_s,
        requests=point.requests,
        within_slo=point.kept,
        share_within_slo=point.share_within,
        goodput_per_s=point.share_within * units * point.rate_per_s,
        output_tokens_per_s=tokens_per_s,
        output_tokens_per_s_per_gpu=tokens_per_s / gpus,
        time_to_first_token_s=times["time_to_first_token_s"],
        time_per_output_token_s=times["time_per_output_token_s"],
        inter_token_latency_s=times["inter_token_latency_s"],
        request_latency_s=times["request_latency_s"],
        energy_kwh_per_million_output_tokens=None if cost is None else cost.energy_kwh,
        cost_per_million_output_tokens=None if cost is None or price is None else cost.price,
    )


def _refusals(unit: Unit, every: Sequence[_Found]) -> list[RefusedLayout]:
    """Return each reason once, with the first choice that it meets; where it meets all, the layout alone is refused."""
    first: dict[str, Choice] = {}
    for choice, reason in (refused for x in every for refused in x.refused):
        first.setdefault(reason, choice)
    alone = all(x.layout is None for x in every) and len(first) == 1
    return [RefusedLayout(unit.degrees, {} if alone else choice, reason) for reason, choice in first.items()]


def _on_curve(point: Point, unit: Unit, choice: Choice) -> CurvePoint:
    # The median user, because a mean would follow the slowest answers.
    per_token_s = point.latencies["time_per_output_token_s"].p50
    return CurvePoint(
        parallelism=unit.degrees,
        options=choice,
        rate_per_s_per_gpu=point.rate_per_s / unit.gpus,
        tokens_per_s_per_user=1.0 / per_token_s if per_token_s > 0 else 0.0,
        output_tokens_per_s_per_gpu=point.tokens_per_s / unit.gpus,
        within_slo=point.kept,
    )


def _front(curve: Sequence[CurvePoint]) -> tuple[CurvePoint, ...]:
    """Return the Pareto front of tokens per second per user and per GPU, the fastest user first."""
    # From the fastest user on, a point is on the front if it gives a GPU more than all points before it.
    best, out = -1.0, []
    for point in sorted(curve, key=lambda p: (-p.tokens_per_s_per_user, -p.output_tokens_per_s_per_gpu)):
        if point.output_tokens_per_s_per_gpu > best:
            best = point.output_tokens_per_s_per_gpu
            out.append(point)
    return tuple(out)
