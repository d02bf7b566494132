"""The highest rate of requests that layouts of a serving scenario carry within promised latencies.

A layout is a replica of tp x pp GPUs; a service of more GPUs has several, each with its part of the requests. A replica
is simulated at one rate after another, by bisection; every rate that was tried is a point of the curve of throughput
against interactivity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from sim.core.errors import InputError
from sim.inputs.input_source import Source
from sim.inputs.overrides import merge
from sim.inputs.scenario import Scenario, resolve
from sim.inputs.workloads import RequestPattern
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from sim.search.slo import Promise, share_within
from sim.search.space import divisors
from sim.serve.requests import Request, make_requests
from sim.serve.simulation import simulate_serving

CLOSE = 1.02  # rates that differ by less are one
# One request may be shorter or longer than the pattern's mean; a few even that out.
ALONE = 4  # equal requests that show what one takes by itself
SLOWEST_PER_S = 1e-3  # requests that never meet
# Doublings: a factor of 16 million either way from the first guess.
MOST_STEPS = 24


class Point(Struct, frozen=True, dict=True):
    """One replica at one rate of requests."""

    rate_per_s: float
    kept: bool
    share_within: float
    result: dict[str, Any]


class ReplicaSearch:
    """Rates of one layout's replica; answers are kept."""

    def __init__(self, scenario: Scenario, profile: Profile, slo: tuple[Promise, ...]) -> None:
        self.scenario, self.profile, self.slo = scenario, profile, slo
        self.points: dict[float, Point] = {}

    def at(self, rate_per_s: float) -> Point:
        """Simulate requests that come at this rate."""
        # The curve of all layouts is made of these points, so each rate is simulated once and kept.
        if rate_per_s not in self.points:
            requests = requests_at(self.scenario, rate_per_s)
            served = simulate_serving(self.scenario, self.profile, requests, engine="static")
            result = served.result
            kept = all(p.kept(result) for p in self.slo)
            self.points[rate_per_s] = Point(rate_per_s, kept, share_within(served, self.slo), result)
        return self.points[rate_per_s]

    def _alone(self) -> bool:
        """Whether requests that never meet keep all promises."""
        requests = requests_at(self.scenario, SLOWEST_PER_S)
        # A pattern's requests are drawn alike. Those of a trace differ, and all of them must keep the promise.
        if isinstance(self.scenario.for_serving.requests, RequestPattern):
            requests = requests[:ALONE]
        result = simulate_serving(self.scenario, self.profile, requests, engine="static").result
        if not result["fits_in_memory"]:
            raise InputError("does not fit in memory")
        return all(p.kept(result) for p in self.slo)

    def highest(self, start_per_s: float) -> Point | None:
        """The highest rate that keeps all promises, to 2 %; None where requests one at a time do not.

        Raises:
            InputError: where the replica does not fit in memory.
        """
        # A promise that a lone request breaks is broken at every rate. No bisection is needed to tell.
        if not self._alone():
            return None
        point = self.at(start_per_s)
        # Away from the first guess by doubling or halving, until one rate keeps the promises and the next does not.
        step = 2.0 if point.kept else 0.5
        for _ in range(MOST_STEPS):
            following = self.at(point.rate_per_s * step)
            if following.kept != point.kept:
                break
            point = following
        else:
            return point if point.kept else None  # kept even where all come at once: `limit_found` tells
        # Latency grows with the rate, as queues do, so bisection is right up to noise, which CLOSE covers.
        low, high = (point, following) if point.kept else (following, point)
        while high.rate_per_s > CLOSE * low.rate_per_s:
            # The geometric mean, since rates span orders of magnitude and CLOSE is a ratio.
            middle = self.at(math.sqrt(low.rate_per_s * high.rate_per_s))
            low, high = (middle, high) if middle.kept else (low, middle)
        return low

    def limit_found(self, highest: Point | None) -> bool:
        """Whether a rate above the highest breaks a promise. Otherwise requests are too few to find the limit."""
        return highest is None or any(not p.kept for p in self.points.values() if p.rate_per_s > highest.rate_per_s)


def requests_at(scenario: Scenario, rate_per_s: float) -> tuple[Request, ...]:
    """The scenario's requests at another rate: a pattern's Poisson process, or a trace drawn out or together."""
    given = scenario.for_serving.requests
    if isinstance(given, RequestPattern):
        return make_requests(given.model_copy(update={"rate_per_s": rate_per_s}))
    found = make_requests(given)
    first, last = found[0].arrival_s, found[-1].arrival_s
    # A trace keeps its bursts and lulls; only the distances between its arrivals change.
    stretch = len(found) / rate_per_s / (last - first) if last > first else 0.0
    return tuple([r._replace(arrival_s=(r.arrival_s - first) * stretch) for r in found])


def own_rate(scenario: Scenario) -> float | None:
    """The rate at which the scenario's own requests come; None where all come at once."""
    given = scenario.for_serving.requests
    if isinstance(given, RequestPattern):
        return given.rate_per_s
    found = make_requests(given)
    seconds = found[-1].arrival_s - found[0].arrival_s
    return len(found) / seconds if seconds > 0 else None


def replicas_of(gpus: int) -> Iterator[tuple[int, int]]:
    """tp and pp of replicas that fill a number of GPUs evenly."""
    for size in divisors(gpus):
        for tp in divisors(size):
            yield tp, size // tp


def search_serving(
    source: Source,
    name: str,
    slo: tuple[Promise, ...],
    gpus: int | None = None,
    price_per_gpu_hour: float | None = None,
) -> dict[str, Any]:
    """Search, and return the result in the form of `--json`: format sim-serving-search/1.

    Raises:
        InputError: for a scenario that is no serving workload or wrong, or a static batch.
    """
    base = resolve(source, name)
    if base.for_serving.batching == "static":
        raise InputError(
            f"{source.label}: inference.batching: a static batch has no rate of requests; write continuous"
        )
    if base.for_serving.disaggregated is not None:
        raise InputError(f"{source.label}: inference.disaggregated: --slo lays out replicas that do all of a request")
    if base.for_serving.autoscaling is not None:
        raise InputError(f"{source.label}: inference.autoscaling: --slo lays out replicas that are always on")
    if base.parallelism.cp > 1:
        raise InputError(f"{source.label}: parallelism.cp: found {base.parallelism.cp}; --slo lays out tp, pp and dp")
    if base.parallelism.ep > 1:
        raise InputError(f"{source.label}: parallelism.ep: found {base.parallelism.ep}; --slo lays out tp, pp and dp")
    gpus = gpus or base.parallelism.ranks
    wanted, profile = own_rate(base), load_profile(base.calibration)
    layouts: list[dict[str, Any]] = []
    refusals: list[dict[str, Any]] = []
    curve: list[dict[str, Any]] = []
    for tp, pp in replicas_of(gpus):
        replicas, layout = gpus // (tp * pp), {"tp": tp, "pp": pp}
        try:
            # One replica is simulated: replicas share no queue, so a service of n has n times its rate.
            parallelism = merge(dict(source.data.get("parallelism") or {}), {**layout, "dp": 1})
            if base.model.moe is not None:
                # Without expert parallelism the ranks of a replica split every expert, as vLLM does by default.
                parallelism["expert_tp"] = tp
            scenario = resolve(replace(source, data={**source.data, "parallelism": parallelism}), name)
            search = ReplicaSearch(scenario, profile, slo)
            # The rate that is wanted of one replica: the answer mostly lies within a few doublings of it.
            highest = search.highest((wanted or 1.0) / replicas)
        except InputError as error:
            # A layout may break a rule of the model (heads by tp) or not fit. The others are still worth an answer.
            refusals.append({"parallelism": layout, "reason": str(error)})
            continue
        row: dict[str, Any] = {"parallelism": {**layout, "dp": replicas}, "gpus": gpus, "replica_gpus": tp * pp}
        sizes = replicas, gpus, price_per_gpu_hour, base.cluster.gpu.power_limit_w
        row |= _figures(highest, *sizes) if highest else {"rate_per_s": 0.0}
        row["limit_found"] = search.limit_found(highest)
        if wanted is not None:
            own = search.at(wanted / replicas)
            row["own_rate"] = _figures(own, *sizes)
            # A replica that is found to carry 2 % less than wanted may carry it: the search is no finer than that.
            known = highest if row["limit_found"] else None
            needed = math.ceil(wanted / known.rate_per_s / CLOSE) if known else None
            row["fewest_gpus"] = None if needed is None else max(1, needed) * tp * pp
        layouts.append(row)
        curve += [_on_curve(p, layout, tp * pp) for p in search.points.values()]
    # All fill the same GPUs, so the rate alone ranks them.
    layouts.sort(key=lambda row: -row["rate_per_s"])
    enough = [row for row in layouts if row.get("fewest_gpus")]
    fewest = min(enough, key=lambda row: (row["fewest_gpus"], -row["rate_per_s"]), default=None)
    # A layout whose limit is not known may need one replica alone.
    unknown = [row["replica_gpus"] for row in layouts if not row["limit_found"]]
    if fewest is not None and any(n < fewest["fewest_gpus"] for n in unknown):
        fewest = None
    return {
        "format": "sim-serving-search/1",
        "name": base.name,
        "gpus": gpus,
        "slo": [p.text for p in slo],
        "wanted_rate_per_s": wanted,
        "best": layouts,
        "fewest_gpus": None
        if fewest is None
        else {
            "gpus": fewest["fewest_gpus"],
            "parallelism": {k: fewest["parallelism"][k] for k in ("tp", "pp")},
        },
        "curve": _front(curve),
        "refusals": refusals,
    }


def _figures(point: Point, replicas: int, gpus: int, price: float | None, power_limit_w: float) -> dict[str, Any]:
    """What a service of equal replicas does at a rate; replicas serve their requests by themselves."""
    result = point.result
    tokens_per_s = replicas * result["output_tokens_per_s"]
    out = {
        "rate_per_s": replicas * point.rate_per_s,
        "within_slo": point.kept,
        "share_within_slo": point.share_within,
        "goodput_per_s": point.share_within * replicas * point.rate_per_s,
        "output_tokens_per_s": tokens_per_s,
        "output_tokens_per_s_per_gpu": tokens_per_s / gpus,
    }
    for key in ("time_to_first_token_s", "time_per_output_token_s", "inter_token_latency_s", "request_latency_s"):
        out[key] = result[key]
    if tokens_per_s > 0:
        # At the power limit, as `sim.run --price` counts it: a bound, since decoding draws less.
        hours = gpus / 3600.0 / tokens_per_s * 1e6
        out["energy_kwh_per_million_output_tokens"] = hours * power_limit_w / 1e3
        if price is not None:
            out["cost_per_million_output_tokens"] = price * hours
    return out


def _on_curve(point: Point, layout: dict[str, int], gpus: int) -> dict[str, Any]:
    # The median user: interactivity is a user's experience, where a mean would follow the longest answers.
    per_token_s = point.result["time_per_output_token_s"]["p50"]
    return {
        "parallelism": layout,
        "rate_per_s_per_gpu": point.rate_per_s / gpus,
        "tokens_per_s_per_user": 1.0 / per_token_s if per_token_s > 0 else 0.0,
        "output_tokens_per_s_per_gpu": point.result["output_tokens_per_s"] / gpus,
        "within_slo": point.kept,
    }


def _front(curve: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Points that no other beats in both tokens a second for a user and for a GPU, from the most for a user on."""
    # From the quickest user on, a point is on the line if it gives a GPU more than all before it.
    best, out = -1.0, []
    ordered = sorted(curve, key=lambda p: (-p["tokens_per_s_per_user"], -p["output_tokens_per_s_per_gpu"]))
    for point in ordered:
        if point["output_tokens_per_s_per_gpu"] > best:
            best = point["output_tokens_per_s_per_gpu"]
            out.append(point)
    return out
