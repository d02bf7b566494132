"""Search the layouts of a serving scenario by the rate of requests that they carry within promised latencies.

A service of more GPUs has several units (`sim.search.serving_units`), each with its part of the requests. Every
simulated rate is a point of the curve of throughput and interactivity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from sim.core.errors import InputError
from sim.core.executors import Workers, results, tracked
from sim.inputs.input_source import Source
from sim.inputs.overrides import merge
from sim.inputs.scenario import resolve
from sim.prices.profiles import load_profile
from sim.search.engine_options import Choice, as_section, by_engine, of_one_host
from sim.search.serving_units import CLOSE, Point, Tuned, Unit, UnitSearch, own_rate, tuned, units_of
from sim.studies.promised_latencies import QUANTITIES, Promise
from sim.studies.spending import MILLION, gpu_hours_of, token_cost

POOL_FROM_TASKS = 6  # fewer are mostly done before other processes have started


class ServingSearch(Struct, frozen=True):
    """A space to search: layouts of a scenario on `gpus` GPUs (None: as many as it has), all with the same promises,
    and each with every engine and all choices of its options."""

    source: Source
    name: str
    slo: tuple[Promise, ...]
    gpus: int | None = None
    price_per_gpu_hour: float | None = None
    choices: tuple[Choice, ...] = ({},)


def search_serving(asked: ServingSearch, pool: Callable[[bool], AbstractContextManager[Workers]]) -> dict[str, Any]:
    """Search all replicas, a task for each, and return the result in format sim-serving-search/1. `pool`: where tasks
    run, told whether they are many.

    Raises:
        InputError: for a scenario that is wrong, no serving workload, or has a section that `--slo` does not support.
    """
    base = resolve(asked.source, asked.name)
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
            raise InputError(f"{asked.source.label}: {why}")
    pools = base.for_serving.disaggregated
    gpus = asked.gpus or (base.parallelism.ranks if pools is None else pools.ranks)
    # Pipelines and many replicas first: their iterations are simulated one by one, so they take longest.
    units = sorted(units_of(base, gpus), key=lambda unit: -max(unit.degrees.get("pp", 1), unit.degrees.get("dp", 1)))
    engines = by_engine(asked.choices)
    work = [(asked, gpus, unit, choices) for unit in units for choices in engines]
    with pool(len(work) >= POOL_FROM_TASKS) as workers:
        found = list(tracked(results(workers, _searched, work), "layouts", len(work)))
    layouts = [layout for each in found for layout in each.layouts]
    of_unit = [found[i : i + len(engines)] for i in range(0, len(found), len(engines))]
    # All layouts fill the same GPUs, so the rate alone ranks them.
    layouts.sort(key=lambda row: -row["rate_per_s"])
    return {
        "format": "sim-serving-search/1",
        "name": base.name,
        "gpus": gpus,
        "slo": [p.text for p in asked.slo],
        "wanted_rate_per_s": own_rate(base),
        "best": layouts,
        "fewest_gpus": _fewest(layouts),
        "curve": _front([point for each in found for point in each.curve]),
        "refusals": [refusal for unit, each in zip(units, of_unit, strict=True) for refusal in _refusals(unit, each)],
        "same_host_times": of_one_host([str(choice["engine"]) for choice in asked.choices if "engine" in choice]),
    }


class _Found(Struct, frozen=True):
    """The findings of a task for its unit and engine: rows of the result (no layout where all choices are refused), and
    why choices are refused."""

    layouts: list[dict[str, Any]]
    curve: list[dict[str, Any]]
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
    figures = partial(_figures, units, gpus, asked.price_per_gpu_hour, watts)
    layouts = [] if found.search is None else [_layout(unit, units, found, found.search, wanted, figures)]
    return _Found(layouts, [_on_curve(p, unit, choice) for choice, p in found.points], found.refused)


def _layout(
    unit: Unit,
    units: int,
    found: Tuned,
    search: UnitSearch,
    wanted_per_s: float | None,
    figures: Callable[[Point], dict[str, Any]],
) -> dict[str, Any]:
    """Return what a service of equal units carries: at the highest rate, and at the scenario's own."""
    highest = found.highest
    row: dict[str, Any] = {"parallelism": unit.of(units), "gpus": units * unit.gpus, "unit": unit.degrees}
    row |= {"options": dict(found.choice), "unit_gpus": unit.gpus}
    row |= figures(highest) if highest else {"rate_per_s": 0.0}
    row["limit_found"] = search.limit_found(highest)
    if wanted_per_s is not None:
        row["own_rate"] = figures(search.at(wanted_per_s / units))
        # CLOSE is the search's resolution: a unit whose limit is 2 % below the wanted rate may carry it.
        known = highest if row["limit_found"] else None
        needed = math.ceil(wanted_per_s / known.rate_per_s / CLOSE) if known else None
        row["fewest_gpus"] = None if needed is None else max(1, needed) * unit.gpus
    return row


def _fewest(layouts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the fewest GPUs that carry the scenario's own rate, as far as that is known."""
    enough = [row for row in layouts if row.get("fewest_gpus")]
    fewest = min(enough, key=lambda row: (row["fewest_gpus"], -row["rate_per_s"]), default=None)
    # A layout whose limit is not known may need only one unit.
    unknown = [row["unit_gpus"] for row in layouts if not row["limit_found"]]
    if fewest is None or any(n < fewest["fewest_gpus"] for n in unknown):
        return None
    unit, many = fewest["unit"], "services" if "services" in fewest["parallelism"] else "dp"
    degrees = {**unit, many: fewest["fewest_gpus"] // fewest["unit_gpus"] * unit.get(many, 1)}
    return {"gpus": fewest["fewest_gpus"], "parallelism": degrees, "options": fewest["options"]}


def _figures(units: int, gpus: int, price: float | None, watts: float, point: Point) -> dict[str, Any]:
    """Return the figures of a service of equal units, each at the point's rate."""
    result = point.result
    tokens_per_s = units * point.tokens_per_s
    out = {
        "rate_per_s": units * point.rate_per_s,
        "requests": result["requests"],
        "within_slo": point.kept,
        "share_within_slo": point.share_within,
        "goodput_per_s": point.share_within * units * point.rate_per_s,
        "output_tokens_per_s": tokens_per_s,
        "output_tokens_per_s_per_gpu": tokens_per_s / gpus,
    }
    for key in QUANTITIES.values():
        out[key] = result[key]
    if tokens_per_s > 0:
        cost = token_cost(MILLION, gpu_hours_of(MILLION, tokens_per_s / gpus), watts, price or 0.0)
        out["energy_kwh_per_million_output_tokens"] = cost.energy_kwh
        if price is not None:
            out["cost_per_million_output_tokens"] = cost.price
    return out


def _refusals(unit: Unit, every: Sequence[_Found]) -> list[dict[str, Any]]:
    """Return each reason once, with the first choice that it meets; where it meets all, the layout alone is refused."""
    first: dict[str, Choice] = {}
    for choice, reason in (refused for x in every for refused in x.refused):
        first.setdefault(reason, choice)
    alone = not any(x.layouts for x in every) and len(first) == 1
    return [
        {"parallelism": unit.degrees, "options": {} if alone else dict(choice), "reason": reason}
        for reason, choice in first.items()
    ]


def _on_curve(point: Point, unit: Unit, choice: Choice) -> dict[str, Any]:
    # The median user, because a mean would follow the slowest answers.
    per_token_s = point.result["time_per_output_token_s"]["p50"]
    return {
        "parallelism": unit.degrees,
        "options": dict(choice),
        "rate_per_s_per_gpu": point.rate_per_s / unit.gpus,
        "tokens_per_s_per_user": 1.0 / per_token_s if per_token_s > 0 else 0.0,
        "output_tokens_per_s_per_gpu": point.tokens_per_s / unit.gpus,
        "within_slo": point.kept,
    }


def _front(curve: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the Pareto front of tokens per second per user and per GPU, the fastest user first."""
    # From the fastest user on, a point is on the front if it gives a GPU more than all points before it.
    best, out = -1.0, []
    ordered = sorted(curve, key=lambda p: (-p["tokens_per_s_per_user"], -p["output_tokens_per_s_per_gpu"]))
    for point in ordered:
        if point["output_tokens_per_s_per_gpu"] > best:
            best = point["output_tokens_per_s_per_gpu"]
            out.append(point)
    return out
