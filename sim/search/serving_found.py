"""What a search for serving layouts found, as records (format sim-serving-search/1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.results.records import Record
from sim.search.engine_options import Choice
from sim.serve.results.records import Percentiles


class ServedRate(Record, frozen=True, kw_only=True):
    """A service at one rate of requests.

    `requests`: how many were simulated, of one unit; `within_slo`: whether all promises are kept; `share_within_slo`:
    the part of the requests within the promises; `goodput_per_s`: of these requests. The cost needs a price.
    """

    rate_per_s: float
    requests: int
    within_slo: bool
    share_within_slo: float
    goodput_per_s: float
    output_tokens_per_s: float
    output_tokens_per_s_per_gpu: float
    time_to_first_token_s: Percentiles
    time_per_output_token_s: Percentiles
    inter_token_latency_s: Percentiles
    request_latency_s: Percentiles
    energy_kwh_per_million_output_tokens: float | None = None
    cost_per_million_output_tokens: float | None = None


class AtOwnRate(Record, frozen=True):
    """A layout at the scenario's own rate, and the fewest GPUs that carry this rate, None where that is unknown."""

    own_rate: ServedRate
    fewest_gpus: int | None


class Broken(Record, frozen=True):
    """A promise as `--slo` says it, which no rate keeps: what it comes to, and the most that was promised."""

    promise: str
    found_s: float
    promised_s: float


class ServingLayout(Record, frozen=True, kw_only=True):
    """A service of equal units.

    `unit`: the degrees of one, of `unit_gpus` GPUs. `rate_per_s`: the highest rate that keeps the promises, 0 where
    none does; `highest`: the service at that rate. `limit_found`: whether a higher rate is known to break a promise.
    `broken`: where no rate keeps them all, the promises that a request breaks even if no other comes meanwhile.
    """

    inlined = ("highest", "wanted")

    parallelism: Mapping[str, int]
    gpus: int
    unit: Mapping[str, int]
    options: Choice
    unit_gpus: int
    rate_per_s: float
    highest: ServedRate | None = None
    limit_found: bool
    wanted: AtOwnRate | None = None
    broken: tuple[Broken, ...] = ()

    @property
    def excess(self) -> float:
        """How many times as long as promised the worst broken latency is; 1 where none is broken."""
        return max([b.found_s / b.promised_s for b in self.broken], default=1.0)


class FewestGpus(Record, frozen=True):
    """The smallest service that carries the scenario's own rate."""

    gpus: int
    parallelism: Mapping[str, int]
    options: Mapping[str, Any]


class CurvePoint(Record, frozen=True, kw_only=True):
    """One simulated rate of one layout: the speed of the median user against the throughput of a GPU."""

    parallelism: Mapping[str, int]
    options: Choice
    rate_per_s_per_gpu: float
    tokens_per_s_per_user: float
    output_tokens_per_s_per_gpu: float
    within_slo: bool


class RefusedLayout(Record, frozen=True):
    """Why a layout with these options of the engine cannot be simulated."""

    parallelism: Mapping[str, int]
    options: Choice
    reason: str


class ServingSearchResult(Record, frozen=True, kw_only=True):
    """What a search for serving layouts found.

    `best`: the highest rate first. `curve`: the Pareto front of speed and throughput, the fastest user first.
    `same_host_times`: engines that share one record of host times. `unsearched`: of a search that Ctrl-C ended, the
    number of layouts and engines that it had not come to.
    """

    format: str = "sim-serving-search/1"
    name: str
    gpus: int
    slo: tuple[str, ...]
    wanted_rate_per_s: float | None
    best: tuple[ServingLayout, ...]
    fewest_gpus: FewestGpus | None
    curve: tuple[CurvePoint, ...]
    refusals: tuple[RefusedLayout, ...]
    same_host_times: tuple[tuple[str, ...], ...]
    unsearched: int | None = None
