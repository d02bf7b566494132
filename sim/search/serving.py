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
ALONE = 4  # equal requests that show what one takes by itself
SLOWEST_PER_S = 1e-3  # requests that never meet
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
        if not self._alone():
            return None
        point = self.at(start_per_s)
        step = 2.0 if point.kept else 0.5
        for _ in range(MOST_STEPS):
            following = self.at(point.rate_per_s * step)
            if following.kept != point.kept:
                break
            point = following
        else:
            return point if point.kept else None  # kept even where all come at once
        low, high = (point, following) if point.kept else (following, point)
        while high.rate_per_s > CLOSE * low.rate_per_s:
            middle = self.at(math.sqrt(low.rate_per_s * high.rate_per_s))
            low, high = (middle, high) if middle.kept else (low, middle)
        return low


def requests_at(scenario: Scenario, rate_per_s: float) -> tuple[Request, ...]:
    """The scenario's requests at another rate: a pattern's Poisson process, or a trace drawn out or together."""
    given = scenario.for_serving.requests
    if isinstance(given, RequestPattern):
        return make_requests(given.model_copy(update={"rate_per_s": rate_per_s}))
    found = make_requests(given)
    first, last = found[0].arrival_s, found[-1].arrival_s
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
            parallelism = merge(dict(source.data.get("parallelism") or {}), {**layout, "dp": 1})
            if base.model.moe is not None:
                parallelism["expert_tp"] = tp
            scenario = resolve(replace(source, data={**source.data, "parallelism": parallelism}), name)
            search = ReplicaSearch(scenario, profile, slo)
            highest = search.highest((wanted or 1.0) / replicas)
        except InputError as error:
            refusals.append({"parallelism": layout, "reason": str(error)})
            continue
        row: dict[str, Any] = {"parallelism": {**layout, "dp": replicas}, "gpus": gpus, "replica_gpus": tp * pp}
        row |= _figures(highest, replicas, gpus, price_per_gpu_hour) if highest else {"rate_per_s": 0.0}
        if wanted is not None:
            own = search.at(wanted / replicas)
            row["own_rate"] = _figures(own, replicas, gpus, price_per_gpu_hour)
            needed = math.ceil(wanted / highest.rate_per_s / CLOSE) if highest else None
            row["fewest_gpus"] = None if needed is None else max(1, needed) * tp * pp
        layouts.append(row)
        curve += [_on_curve(p, layout, tp * pp) for p in search.points.values()]
    layouts.sort(key=lambda row: -row["rate_per_s"])
    enough = [row for row in layouts if row.get("fewest_gpus")]
    fewest = min(enough, key=lambda row: (row["fewest_gpus"], -row["rate_per_s"]), default=None)
    return {
        "format": "sim-serving-search/1",
        "name": base.name,
        "gpus": gpus,
        "slo": [p.text for p in slo],
        "wanted_rate_per_s": wanted,
        "best": layouts,
        "fewest_gpus": None if fewest is None else {
            "gpus": fewest["fewest_gpus"], "parallelism": {k: fewest["parallelism"][k] for k in ("tp", "pp")},
        },
        "curve": _front(curve),
        "refusals": refusals,
    }  # fmt: skip


def _figures(point: Point, replicas: int, gpus: int, price: float | None) -> dict[str, Any]:
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
    if price is not None and tokens_per_s > 0:
        out["cost_per_million_output_tokens"] = price * gpus / 3600.0 / tokens_per_s * 1e6
    return out


def _on_curve(point: Point, layout: dict[str, int], gpus: int) -> dict[str, Any]:
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
    best, out = -1.0, []
    ordered = sorted(curve, key=lambda p: (-p["tokens_per_s_per_user"], -p["output_tokens_per_s_per_gpu"]))
    for point in ordered:
        if point["output_tokens_per_s_per_gpu"] > best:
            best = point["output_tokens_per_s_per_gpu"]
            out.append(point)
    return out
