"""How the latencies of a served workload are distributed, in as few points however many requests there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sim.serve.results.latencies import Seconds

if TYPE_CHECKING:
    from sim.serve.results.result import ServingSimulation

# 0, 0.5 … 99.5, then closer, since promises are made about the slowest requests; p50, p90 and p99 are among them.
PERCENTS: NDArray[np.float64] = np.concatenate((np.arange(200) / 2, (99.6, 99.7, 99.8, 99.9, 100.0)))


def distributions(sim: ServingSimulation) -> dict[str, Seconds]:
    """By the result's key (`time_to_first_token_s`, …), what `PERCENTS` of its values are at most, [points]; the result
    states p50, p90 and p99 of them. Quantities without a value are left out."""
    of_requests = {
        "time_to_first_token_s": sim.times.first_token_s,
        "time_per_output_token_s": sim.times.per_output_token_s,
        "request_latency_s": sim.times.latency_s,
    }
    found = {key: np.percentile(values, PERCENTS) for key, values in of_requests.items() if len(values)}
    if sim.gaps is not None:
        found["inter_token_latency_s"] = np.array([sim.gaps.quantile(p / 100) for p in PERCENTS.tolist()])
    return found
