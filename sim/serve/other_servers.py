"""The 90 % intervals of a workload's latencies and rates, from slower and faster servers.

What is uncertain is the time that the server takes for its work (`sim.serve.certainty`). Where requests arrive over
time, latencies do not grow in proportion to it: close to saturation a tenth more of it may multiply what requests wait.
So the slowest and the fastest server of its interval are simulated as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.serve.records import Bounds, PercentileBounds, Percentiles, ServingIntervals, ServingResult
from sim.serve.simulation import coupling, simulate_serving

if TYPE_CHECKING:
    from sim.engine.shared_links import Engine
    from sim.serve.result import ServingSimulation

FIRST_REQUESTS = 1000  # of more, the slowest and the fastest server serve only these, and their ratio holds for all


def with_intervals(sim: ServingSimulation) -> ServingResult:
    """The result with the intervals of its latencies and rates, for which up to three more servers are simulated."""
    return replace(sim.outcome, intervals=_intervals(sim))


def _intervals(sim: ServingSimulation) -> ServingIntervals:
    usual = sim.outcome
    low_s, high_s = usual.duration_interval_s
    fast, slow = (s / usual.duration_s if usual.duration_s > 0 else 1.0 for s in (low_s, high_s))
    others: list[tuple[float, ServingResult]] = []
    first = usual
    if sim.requests[-1].arrival_s > sim.requests[0].arrival_s and fast < slow:
        if len(sim.requests) > FIRST_REQUESTS:
            first = other_server(sim, 1.0)
        others = [(times, other_server(sim, times)) for times in (fast, slow)]

    def bounds(value: float, one: float, each: list[float]) -> Bounds:
        """Of a latency, which is `one` on the usual server's first requests and `each` on the others'."""
        found = [value * fast, value * slow, *[value * other / one for other in each if one > 0]]
        return min(found), max(found)

    def latency(name: str) -> PercentileBounds:
        value: Percentiles = getattr(usual, name)
        own: Percentiles = getattr(first, name)
        real = [(times, getattr(result, name)) for times, result in others]
        return PercentileBounds(
            *[
                bounds(getattr(value, which), getattr(own, which), [times * getattr(p, which) for times, p in real])
                for which in Percentiles.__struct_fields__
            ]
        )

    def rate(value: float) -> Bounds:
        return value / slow, value / fast

    return ServingIntervals(
        request_latency_s=latency("request_latency_s"),
        time_to_first_token_s=latency("time_to_first_token_s"),
        time_per_output_token_s=latency("time_per_output_token_s"),
        inter_token_latency_s=latency("inter_token_latency_s"),
        output_tokens_per_s=rate(usual.output_tokens_per_s),
        output_tokens_per_s_per_gpu=rate(usual.output_tokens_per_s_per_gpu),
    )


def other_server(sim: ServingSimulation, times: float) -> ServingResult:
    """Return the result of at most `FIRST_REQUESTS` on a server that takes `times` as long for all its work.

    Its seconds are `times` as long as those of the result: in these units it is as quick as the usual server, and
    requests arrive in 1 / `times` of their seconds.
    """
    engine: Engine = "simpy" if coupling(sim.scenario) else "static"
    quicker = tuple([r._replace(arrival_s=r.arrival_s / times) for r in sim.requests[:FIRST_REQUESTS]])
    costs = sim.pools[0].costs if len(sim.pools) == 1 else None
    held = sim.held_bytes
    return simulate_serving(sim.scenario, sim.profile, quicker, engine=engine, held_bytes=held, costs=costs).outcome
