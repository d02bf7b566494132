"""How the latencies of a served workload are distributed, in as few points however many requests there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sim.serve.inter_token import token_gaps
from sim.serve.request_times import Seconds, request_times

if TYPE_CHECKING:
    from sim.serve.result import ServingSimulation

# 0, 0.5 … 99.5, then closer, since promises are made about the slowest requests; p50, p90 and p99 are among them.
PERCENTS: NDArray[np.float64] = np.concatenate((np.arange(200) / 2, (99.6, 99.7, 99.8, 99.9, 100.0)))


class Distribution(Struct, frozen=True, eq=False):
    """A quantile function: `PERCENTS` of the values are at most `values_s`, both [points], however many requests."""

    values_s: Seconds
    slowest_s: float


def distributions(sim: ServingSimulation) -> dict[str, Distribution]:
    """By the result's key (`time_to_first_token_s`, …), the distribution whose p50, p90 and p99 the result states;
    quantities without a value are left out."""
    times = request_times(sim.sequences, sim.costs.host.times.request_s)
    gaps = token_gaps(sim.pools[-1].replicas, len(sim.costs.stages))
    of_requests = {
        "time_to_first_token_s": times.first_token_s,
        "time_per_output_token_s": times.per_output_token_s,
        "request_latency_s": times.latency_s,
    }
    found = {key: np.percentile(values, PERCENTS) for key, values in of_requests.items() if len(values)}
    if gaps is not None:
        found["inter_token_latency_s"] = np.array([gaps.quantile(p / 100) for p in PERCENTS.tolist()])
    return {key: Distribution(values, float(values[-1])) for key, values in found.items()}
