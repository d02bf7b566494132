"""Find the highest rate of requests that each layout of a serving scenario carries within promised latencies.

A layout is a unit that takes requests for itself: a replica of tp x pp GPUs, replicas that share their experts, or a
pool for prompts with a pool for tokens. A service of more GPUs has several units, each with its part of the requests.
Bisection simulates a unit at one rate after another. Every simulated rate is a point of the curve of throughput and
interactivity. Options of the engine (`sim.search.engine_options`) are searched for each unit: a choice that breaks a
promise at a rate just above the best rate so far carries no more, which one simulation tells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from sim.core.engines import Engine
from sim.core.errors import InputError
from sim.inputs.input_source import Source
from sim.inputs.overrides import merge
from sim.inputs.scenario import Scenario, resolve
from sim.inputs.workloads import Disaggregated, RequestPattern
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from sim.search.engine_options import Choice, as_section, by_engine, of_one_host
from sim.search.slo import Promise, share_within
from sim.search.space import divisors
from sim.serve.prices.costs import IterationCosts
from sim.serve.requests import Request, make_requests
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from sim.studies.executors import Workers, results, tracked
from sim.studies.spending import MILLION, gpu_hours_of, token_cost

CLOSE = 1.02  # bisection ends when two rates differ by less than this factor
# A single request may be shorter or longer than the pattern's mean.
ALONE = 4  # requests that show the latencies of a lone request
POOL_FROM_UNITS = 6  # fewer are mostly done before other processes have started
SLOWEST_PER_S = 1e-3  # so slow that requests never overlap
MOST_STEPS = 24  # doublings or halvings from the first guess: a factor of 16 million
# Requests arrive for at least so many of their mean latencies. By Little's law at most a fourth of them are then under
# way at once. A shorter burst is over before its queue has grown, at any rate.
LASTING = 4.0
MOST_REQUESTS = 10_000  # of a simulation, unless the scenario has more


class Point(Struct, frozen=True, dict=True):
    """Hold the result of one unit at one rate of requests. `kept`: whether it keeps all promises. `lasted`: whether the
    requests arrive for long enough to tell."""

    rate_per_s: float
    kept: bool
    lasted: bool
    share_within: float
    result: dict[str, Any]

    @property
    def carried(self) -> bool:
        """Whether the unit is known to serve this rate within the promises."""
        return self.kept and self.lasted


class Unit(Struct, frozen=True):
    """The smallest service of a layout. `degrees`: how its `gpus` are used; `changes`: the scenario's keys that say so;
    `many`: the degree that counts units."""

    gpus: int
    degrees: dict[str, int]
    changes: dict[str, Any]
    many: str = "dp"

    def of(self, count: int) -> dict[str, int]:
        """Return the degrees of a service of so many units."""
        return {**self.degrees, self.many: count * self.degrees.get(self.many, 1)}


class UnitSearch:
    """Simulate one layout's unit at different rates, each rate once."""

    def __init__(self, scenario: Scenario, profile: Profile, slo: tuple[Promise, ...]) -> None:
        self.scenario, self.profile, self.slo = scenario, profile, slo
        self.points: dict[float, Point] = {}
        alone = scenario.parallelism.dp == 1 and scenario.for_serving.disaggregated is None
        self.engine: Engine = "static" if alone else "simpy"
        self.costs: IterationCosts | None = None  # of the first simulation: the same at every rate

    def _served(self, requests: tuple[Request, ...]) -> ServingSimulation:
        served = simulate_serving(self.scenario, self.profile, requests, engine=self.engine, costs=self.costs)
        self.costs = served.pools[0].costs  # pools for prompts and for tokens make their own
        return served

    def at(self, rate_per_s: float) -> Point:
        """Simulate requests that arrive at this rate."""
        # Points are kept: the curve of all layouts consists of them.
        if rate_per_s not in self.points:
            point = self._simulated(rate_per_s, None)
            # A rate whose burst breaks a promise breaks it with more requests, too.
            while point.kept and not point.lasted and (more := self._more_requests(point)):
                point = self._simulated(rate_per_s, more)
            self.points[rate_per_s] = point
        return self.points[rate_per_s]

    def _simulated(self, rate_per_s: float, count: int | None) -> Point:
        served = self._served(requests_at(self.scenario, rate_per_s, count))
        result = served.result
        kept = all(p.kept(result) for p in self.slo)
        lasted = result["requests"] >= LASTING * rate_per_s * result["request_latency_s"]["mean"]
        return Point(rate_per_s, kept, lasted, share_within(served, self.slo), result)

    def _more_requests(self, point: Point) -> int | None:
        """Return how many requests of a pattern last long enough at a point's rate; None if they are too many, or those
        of a trace, of which there are no more."""
        found = int(point.result["requests"])
        if found >= MOST_REQUESTS or not isinstance(self.scenario.for_serving.requests, RequestPattern):
            return None
        # Latencies of a rate that is too high grow with the requests, and a few more break a promise.
        needed: int = math.ceil(1.1 * LASTING * point.rate_per_s * point.result["request_latency_s"]["mean"])
        return min(MOST_REQUESTS, 4 * found, needed)

    def _alone(self) -> bool:
        """Tell whether requests that never overlap keep all promises."""
        requests = requests_at(self.scenario, SLOWEST_PER_S)
        # A pattern's requests have one distribution, so a few suffice. All requests of a trace are simulated.
        if isinstance(self.scenario.for_serving.requests, RequestPattern):
            requests = requests[:ALONE]
        result = self._served(requests).result
        if not result["fits_in_memory"]:
            raise InputError("does not fit in memory")
        if why := result.get("does_not_start"):
            raise InputError(f"does not start: {why}")
        return all(p.kept(result) for p in self.slo)

    def highest(self, start_per_s: float, above_per_s: float = 0.0) -> Point | None:
        """Return the highest rate that is carried, within 2 %; None if requests one at a time break a promise, or if
        `above_per_s` is not carried.

        Raises:
            InputError: if the unit does not fit in memory.
        """
        # A promise that a lone request breaks is broken at every rate.
        if not self._alone() or (above_per_s and not self.at(above_per_s).carried):
            return None
        point = self.at(above_per_s or start_per_s)
        # The rate is doubled or halved until one rate is carried and the next is not.
        step = 2.0 if point.carried else 0.5
        for _ in range(MOST_STEPS):
            following = self.at(point.rate_per_s * step)
            if following.carried != point.carried:
                break
            point = following
        else:
            return point if point.carried else None
        # Latency grows with the rate, except for noise, so bisection finds the limit.
        low, high = (point, following) if point.carried else (following, point)
        while high.rate_per_s > CLOSE * low.rate_per_s:
            # The geometric mean: rates span orders of magnitude, and CLOSE is a ratio.
            middle = self.at(math.sqrt(low.rate_per_s * high.rate_per_s))
            low, high = (middle, high) if middle.carried else (low, middle)
        return low

    def limit_found(self, highest: Point | None) -> bool:
        """Tell whether the next rate above the highest breaks a promise; if not, requests are too few for the limit."""
        if highest is None:
            return True
        above = [p for p in self.points.values() if p.rate_per_s > highest.rate_per_s]
        return bool(above) and not min(above, key=lambda p: p.rate_per_s).kept


def requests_at(scenario: Scenario, rate_per_s: float, count: int | None = None) -> tuple[Request, ...]:
    """Return the scenario's requests at another rate: a pattern's Poisson process, of its own `count` or of this one;
    or a stretched trace."""
    given = scenario.for_serving.requests
    if isinstance(given, RequestPattern):
        return make_requests(given.model_copy(update={"rate_per_s": rate_per_s, "count": count or given.count}))
    found = make_requests(given)
    first, last = found[0].arrival_s, found[-1].arrival_s
    # All gaps between a trace's arrivals change by one factor, so bursts remain.
    stretch = len(found) / rate_per_s / (last - first) if last > first else 0.0
    return tuple([r._replace(arrival_s=(r.arrival_s - first) * stretch) for r in found])


def own_rate(scenario: Scenario) -> float | None:
    """Return the rate at which the scenario's own requests arrive; None if all arrive at once."""
    given = scenario.for_serving.requests
    if isinstance(given, RequestPattern):
        return given.rate_per_s
    found = make_requests(given)
    seconds = found[-1].arrival_s - found[0].arrival_s
    return len(found) / seconds if seconds > 0 else None


def units_of(base: Scenario, gpus: int) -> Iterator[Unit]:
    """Yield the units that fill a number of GPUs evenly, of the kind that the scenario is."""
    for size in divisors(gpus):
        if base.for_serving.disaggregated is not None:
            yield from _pools(size, base.for_serving.disaggregated)
            continue
        for tp in divisors(size):
            if base.model.moe is not None and size > 1:  # experts on all GPUs of the unit, attention on replicas of tp
                degrees = {"tp": tp, "dp": size // tp, "ep": size}
                yield Unit(size, degrees, {"parallelism": {**degrees, "pp": 1, "expert_tp": 1}})
            degrees = {"tp": tp, "pp": size // tp}
            # Without expert parallelism the ranks of a replica split every expert, as vLLM does by default.
            split = {} if base.model.moe is None else {"expert_tp": tp, "ep": 1}
            yield Unit(size, degrees, {"parallelism": {**degrees, "dp": 1, **split}})


def _pools(gpus: int, written: Disaggregated) -> Iterator[Unit]:
    """Yield pools of replicas for prompts and for tokens on so many GPUs in all. All GPUs of a pool share its experts
    where the scenario's pool has `ep`."""
    for first in divisors(gpus):
        for then in divisors(gpus):
            for prompts in range(1, (gpus - then) // first + 1):
                tokens, left = divmod(gpus - prompts * first, then)
                # Twice the replicas of both pools are two units.
                if left or math.gcd(prompts, tokens) > 1:
                    continue
                sizes = {"prefill": {"replicas": prompts, "tp": first}, "decode": {"replicas": tokens, "tp": then}}
                if written.prefill.ep > 1:
                    sizes["prefill"]["ep"] = prompts * first
                if written.decode.ep > 1:
                    sizes["decode"]["ep"] = tokens * then
                degrees = {f"{pool}_{key}": n for pool, size in sizes.items() for key, n in size.items()}
                yield Unit(gpus, degrees, {"inference": {"disaggregated": sizes}}, "services")


class Tuned(Struct, frozen=True):
    """A unit with the choice of options that carries the highest rate. `points`: of all choices; `refused`: why some
    cannot be simulated."""

    choice: Choice
    search: UnitSearch | None
    highest: Point | None
    points: tuple[tuple[Choice, Point], ...]
    refused: tuple[tuple[Choice, str], ...]


def tuned(of: Callable[[Choice], UnitSearch], choices: Sequence[Choice], start_per_s: float) -> Tuned:
    """Search the choices of one unit, whose searches `of` makes. A choice takes the place of an earlier one if it
    carries over 2 % more, the resolution of a rate."""
    best: tuple[Choice, UnitSearch, Point | None] | None = None
    searches: list[tuple[Choice, UnitSearch]] = []
    refused: list[tuple[Choice, str]] = []
    for choice in choices:
        known = None if best is None else best[2]
        if best is not None and known is not None and not best[1].limit_found(known):
            break  # there are too few requests to tell which choice carries more
        try:
            search = of(choice)
            highest = search.highest(start_per_s, 0.0 if known is None else CLOSE * known.rate_per_s)
        except InputError as error:
            # A layout may break a rule of the model (tp must divide heads) or not fit. The others remain.
            refused.append((choice, str(error)))
            continue
        searches.append((choice, search))
        if best is None or highest is not None:
            best = choice, search, highest
    points = tuple([(choice, p) for choice, search in searches for p in search.points.values()])
    choice, found, rate = best or ({}, None, None)
    return Tuned(choice, found, rate, points, tuple(refused))


class ServingSearch(Struct, frozen=True):
    """What is searched: layouts of a scenario on `gpus` GPUs (None: as many as it has), all with the same promises,
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
    with pool(len(units) >= POOL_FROM_UNITS) as workers:
        tasks = results(workers, _searched, [(asked, gpus, unit) for unit in units])
        found = list(tracked(tasks, "layouts", len(units)))
    layouts = [layout for each in found for layout in each.layouts]
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
        "refusals": [refusal for each in found for refusal in each.refusals],
        "same_host_times": of_one_host([str(choice["engine"]) for choice in asked.choices if "engine" in choice]),
    }


class _Found(Struct, frozen=True):
    """What a task has found for its unit: rows of the result, one layout for each engine."""

    layouts: list[dict[str, Any]]
    curve: list[dict[str, Any]]
    refusals: list[dict[str, Any]]


def _searched(asked: ServingSearch, gpus: int, unit: Unit) -> _Found:
    """Search one unit with every engine and all choices of its options, as a part of `gpus` GPUs."""
    base = resolve(asked.source, asked.name)
    wanted, profile, units = own_rate(base), load_profile(base.calibration), gpus // unit.gpus

    def of(choice: Choice) -> UnitSearch:
        data = merge(merge(dict(asked.source.data), unit.changes), as_section(choice))
        return UnitSearch(resolve(replace(asked.source, data=data), asked.name), profile, asked.slo)

    # Units share no queue, so a service of n units has n times the rate of one. The limit mostly lies within a few
    # doublings of the rate that the scenario wants of one unit.
    every = [tuned(of, choices, (wanted or 1.0) / units) for choices in by_engine(asked.choices)]
    watts = base.cluster.mean_over(gpus, lambda gpu: gpu.power_limit_w)
    figures = partial(_figures, units, gpus, asked.price_per_gpu_hour, watts)
    layouts = [_layout(unit, units, x, x.search, wanted, figures) for x in every if x.search is not None]
    curve = [_on_curve(p, unit, choice) for x in every for choice, p in x.points]
    return _Found(layouts, curve, _refusals(unit, every))


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
    return {"gpus": fewest["fewest_gpus"], "parallelism": fewest["unit"], "options": fewest["options"]}


def _figures(units: int, gpus: int, price: float | None, watts: float, point: Point) -> dict[str, Any]:
    """Return the figures of a service of equal units, each at the point's rate."""
    result = point.result
    tokens_per_s = units * result["output_tokens_per_s"]
    out = {
        "rate_per_s": units * point.rate_per_s,
        "requests": result["requests"],
        "within_slo": point.kept,
        "share_within_slo": point.share_within,
        "goodput_per_s": point.share_within * units * point.rate_per_s,
        "output_tokens_per_s": tokens_per_s,
        "output_tokens_per_s_per_gpu": tokens_per_s / gpus,
    }
    for key in ("time_to_first_token_s", "time_per_output_token_s", "inter_token_latency_s", "request_latency_s"):
        out[key] = result[key]
    if tokens_per_s > 0:
        cost = token_cost(MILLION, gpu_hours_of(MILLION, tokens_per_s / gpus), watts, price or 0.0)
        out["energy_kwh_per_million_output_tokens"] = cost.energy_kwh
        if price is not None:
            out["cost_per_million_output_tokens"] = cost.price
    return out


def _refusals(unit: Unit, every: Sequence[Tuned]) -> list[dict[str, Any]]:
    """Each reason once, with the first choice that it meets; where it meets all, the layout alone is refused."""
    first: dict[str, Choice] = {}
    for choice, reason in (refused for x in every for refused in x.refused):
        first.setdefault(reason, choice)
    alone = all(x.search is None for x in every) and len(first) == 1
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
        "output_tokens_per_s_per_gpu": point.result["output_tokens_per_s"] / unit.gpus,
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
