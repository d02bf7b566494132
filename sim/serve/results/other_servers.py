"""The 90 % intervals of a workload's latencies and rates, from slower and faster servers.

What is uncertain is the time that the server takes for its work (`sim.serve.results.certainty`). Where requests arrive
over time, latencies do not grow in proportion to it: close to saturation a tenth more of it may multiply what requests
wait. So the slowest and the fastest server of its interval are simulated as well. Far from saturation tokens
come out as fast as requests come in, and throughput is as certain as these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from sim.inputs.units import TIME, unit_of
from sim.results.figures import FIGURES, RATE
from sim.serve.results.records import Bounds, PercentileBounds, Percentiles, ServingIntervals, ServingResult
from sim.serve.simulation import coupling, simulate_serving

if TYPE_CHECKING:
    from sim.core.engines import Engine
    from sim.serve.results.result import ServingSimulation

FIRST_REQUESTS = 1000  # of more, the slowest and the fastest server serve only these, and their ratio holds for all
RATES = tuple(name for name in ServingIntervals.__struct_fields__ if FIGURES[name].unit is RATE)


def with_intervals(sim: ServingSimulation) -> ServingResult:
    """The result with the intervals of its latencies and rates, for which up to three more servers are simulated."""
    usual, seconds = sim.outcome, sim.end_s - sim.start_s
    fast, slow = (s / seconds if seconds > 0 else 1.0 for s in (sim.likely.low_s, sim.likely.high_s))
    others: list[tuple[float, ServingResult]] = []
    first = usual
    if sim.requests[-1].arrival_s > sim.requests[0].arrival_s and fast < slow:
        if len(sim.requests) > FIRST_REQUESTS:
            first = other_server(sim, 1.0)
        others = [(times, other_server(sim, times)) for times in (fast, slow)]

    def latency(name: str, which: str) -> Bounds:
        value, one = (getattr(getattr(result, name), which) for result in (usual, first))
        real = [times * getattr(getattr(result, name), which) for times, result in others]
        found = [value * fast, value * slow, *[value * other / one for other in real if one > 0]]
        return min(found), max(found)

    def rate(name: str) -> Bounds:
        """Bounds of a rate. A server that waits for requests has the rate of the arrivals, however fast it is."""
        value, one = getattr(usual, name), getattr(first, name)
        found = [value * getattr(result, name) / times / one for times, result in others if one > 0]
        return (min(value, *found), max(value, *found)) if found else (value / slow, value / fast)

    bounds: dict[str, Any] = {name: rate(name) for name in RATES}
    for name in ServingIntervals.__struct_fields__:
        if name not in RATES:
            bounds[name] = PercentileBounds(*[latency(name, which) for which in Percentiles.__struct_fields__])
    duration = [sim.start_s + (usual.output_tokens / rate if rate else 0.0) for rate in bounds[RATES[0]]]
    return replace(usual, intervals=ServingIntervals(**bounds), duration_interval_s=(duration[1], duration[0]))


def other_server(sim: ServingSimulation, times: float) -> ServingResult:
    """Return the result of at most `FIRST_REQUESTS` on a server that takes `times` as long for all its work.

    Its seconds are `times` as long as those of the result: in these units it is as quick as the usual server, and
    requests arrive, and a rule starts and stops replicas, in 1 / `times` of their seconds.
    """
    engine: Engine = "simpy" if coupling(sim.scenario) else "static"
    quicker = tuple([r._replace(arrival_s=r.arrival_s / times) for r in sim.requests[:FIRST_REQUESTS]])
    scenario, rule = sim.scenario, sim.scenario.for_serving.autoscaling
    if rule is not None:
        own = {key: value / times for key, value in rule if unit_of(key) is TIME}
        inference = scenario.for_serving.model_copy(update={"autoscaling": rule.model_copy(update=own)})
        scenario = scenario.unchecked_copy(update={"inference": inference})
    costs = sim.pools[0].costs if len(sim.pools) == 1 else None
    held = sim.held_bytes
    return simulate_serving(scenario, sim.profile, quicker, engine=engine, held_bytes=held, costs=costs).outcome
