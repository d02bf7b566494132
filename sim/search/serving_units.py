"""Find the highest rate of requests that one unit of a serving layout carries within promised latencies.

A layout is a unit that takes requests for itself: a replica of tp x pp GPUs, replicas that share their experts, or a
pool for prompts with a pool for tokens. Bisection simulates a unit at one rate after another. Options of the engine
(`sim.search.engine_options`) are searched for each unit: a choice that breaks a promise at a rate just above the best
rate so far carries no more, which one simulation tells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from msgspec import Struct

from sim.core.engines import Engine
from sim.core.errors import InputError
from sim.inputs.scenario import Scenario
from sim.inputs.workloads import Disaggregated, PoolSize, RequestPattern
from sim.prices.profile import Profile
from sim.search.engine_options import Choice
from sim.search.serving_found import Broken
from sim.search.space import divisors
from sim.serve.prices.costs import IterationCosts
from sim.serve.requests import Request, make_requests
from sim.serve.results.records import Percentiles
from sim.serve.results.result import ServingSimulation
from sim.serve.results.serving_warnings import why_not_served
from sim.serve.simulation import simulate_serving
from sim.studies.promised_latencies import Promise, share_within

CLOSE = 1.02  # bisection ends when two rates differ by less than this factor
# A single request may be shorter or longer than the pattern's mean.
ALONE = 4  # requests that show the latencies of a lone request
SLOWEST_PER_S = 1e-3  # so slow that requests never overlap
MOST_STEPS = 24  # doublings or halvings from the first guess: a factor of 16 million
# Requests arrive for at least so many of their mean latencies. By Little's law at most a fourth of them are then under
# way at once. A shorter burst is over before its queue has grown, at any rate.
LASTING = 4.0
MOST_REQUESTS = 10_000  # of a simulation, unless the scenario has more


class Point(Struct, frozen=True, dict=True):
    """Hold the result of one unit at one rate of requests. `kept`: whether it keeps all promises. `lasted`: whether the
    requests arrive for long enough to tell. `tokens_per_s`: see `lasting_tokens_per_s`. `latencies`: by their keys in a
    result."""

    rate_per_s: float
    kept: bool
    lasted: bool
    share_within: float
    tokens_per_s: float
    requests: int
    latencies: Mapping[str, Percentiles]

    @property
    def carried(self) -> bool:
        """Tell whether the unit is known to serve this rate within the promises."""
        return self.kept and self.lasted


class Unit(Struct, frozen=True):
    """The smallest service of a layout. `degrees`: how its `gpus` are used; `changes`: the scenario's keys that say so;
    `many`: the degree that counts units."""

    gpus: int
    degrees: dict[str, int]
    changes: dict[str, Any]
    many: str = "dp"

    def of(self, count: int) -> dict[str, int]:
        """Return the degrees of a service of `count` units."""
        return {**self.degrees, self.many: count * self.degrees.get(self.many, 1)}


class UnitSearch:
    """Simulate one layout's unit at different rates, each rate once."""

    def __init__(self, scenario: Scenario, profile: Profile, slo: tuple[Promise, ...]) -> None:
        self.scenario, self.profile, self.slo = scenario, profile, slo
        self.points: dict[float, Point] = {}
        alone = scenario.parallelism.dp == 1 and scenario.for_serving.disaggregated is None
        self.engine: Engine = "static" if alone else "simpy"
        self.costs: IterationCosts | None = None  # of the first simulation: the same at every rate
        self.lone: Mapping[str, Percentiles] = {}  # latencies of requests that never overlap

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
        # Not the whole result, whose parts of the time take as long as many iterations and interest nobody here.
        times, found = served.latencies, len(served.sequences)
        kept = all(p.kept(times) for p in self.slo)
        lasted = found >= LASTING * rate_per_s * times["request_latency_s"].mean
        tokens_per_s = lasting_tokens_per_s(served, rate_per_s, kept and lasted)
        return Point(rate_per_s, kept, lasted, share_within(served, self.slo), tokens_per_s, found, times)

    def _more_requests(self, point: Point) -> int | None:
        """Return how many requests of a pattern last long enough at a point's rate; None if they are too many, or those
        of a trace, of which there are no more."""
        found = point.requests
        if found >= MOST_REQUESTS or not isinstance(self.scenario.for_serving.requests, RequestPattern):
            return None
        # Latencies of a rate that is too high grow with the requests, and a few more break a promise.
        needed: int = math.ceil(1.1 * LASTING * point.rate_per_s * point.latencies["request_latency_s"].mean)
        return min(MOST_REQUESTS, 4 * found, needed)

    def _alone(self) -> bool:
        """Tell whether requests that never overlap keep all promises."""
        requests = requests_at(self.scenario, SLOWEST_PER_S)
        # A pattern's requests have one distribution, so a few suffice. All requests of a trace are simulated.
        if isinstance(self.scenario.for_serving.requests, RequestPattern):
            requests = requests[:ALONE]
        served = self._served(requests)
        if not served.outcome.fits_in_memory or served.outcome.does_not_start:
            raise InputError(why_not_served(served) or "does not fit in memory")
        self.lone = served.latencies
        return all(p.kept(served.latencies) for p in self.slo)

    def broken(self) -> tuple[Broken, ...]:
        """Return the promises that no rate keeps, and what they come to for requests that never overlap, or, if these
        keep all of them, at the lowest rate that was simulated."""
        found = self.lone
        if all(p.kept(found) for p in self.slo) and self.points:
            found = self.points[min(self.points)].latencies
        return tuple([Broken(p.text, p.value(found), p.seconds) for p in self.slo if not p.kept(found)])

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


def lasting_tokens_per_s(served: ServingSimulation, rate_per_s: float, carried: bool) -> float:
    """Return the output tokens a second of a service that goes on, without the first answers, beside which few run,
    and without what the last ones take after the last arrival.

    A `carried` rate is served as it comes: the rate times the mean answer. Above, where a queue grows, it is what is
    made between the mean latency after the first arrival and the last arrival, a request's tokens spread evenly.
    """
    requests = [s.request for s in served.sequences]
    offered = rate_per_s * sum(r.output_tokens for r in requests) / len(requests)
    if carried:
        return offered
    rows = [(s.first_token_s, s.finish_s, s.request.output_tokens) for s in served.sequences]
    first, finish, tokens = np.array(rows, dtype=np.float64).T
    arrivals = [s.arrival_s for s in served.sequences]
    end = max(arrivals)
    begin = min(min(arrivals) + float(served.times.latency_s.mean()), (min(arrivals) + end) / 2)
    if end <= begin:
        return min(offered, served.output_tokens_per_s)
    inside = np.minimum(finish, end) - np.maximum(first, begin)
    share = np.where(
        finish > first, inside / np.where(finish > first, finish - first, 1.0), (first > begin) & (first < end)
    )
    return min(offered, float((share.clip(0.0, 1.0) * tokens).sum() / (end - begin)))


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
    """Yield the ways to divide `gpus` GPUs into a pool of replicas for prompts and one for tokens.

    In a pool that sets `ep` (`written`: the scenario's pools), all GPUs share the experts. In one that sets
    `expert_tp` alone, and has replicas that share experts, all GPUs split each expert.
    """
    for first, then in product(divisors(gpus), repeat=2):
        for prompts in range(1, (gpus - then) // first + 1):
            tokens, left = divmod(gpus - prompts * first, then)
            # Twice the replicas of both pools are two units.
            if left or math.gcd(prompts, tokens) > 1:
                continue
            sizes = {
                "prefill": {"replicas": prompts, "tp": first, **_experts_of(written.prefill, prompts * first)},
                "decode": {"replicas": tokens, "tp": then, **_experts_of(written.decode, tokens * then)},
            }
            degrees = {f"{pool}_{key}": n for pool, size in sizes.items() for key, n in size.items()}
            yield Unit(gpus, degrees, {"inference": {"disaggregated": sizes}}, "services")


def _experts_of(pool: PoolSize, ranks: int) -> dict[str, int]:
    """Return how the `ranks` GPUs of a pool divide the experts."""
    if pool.ep > 1:
        return {"ep": ranks} | ({"expert_tp": 1} if pool.expert_tp else {})
    return {"ep": 1, "expert_tp": ranks} if pool.sharing_replicas > 1 else {}


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
