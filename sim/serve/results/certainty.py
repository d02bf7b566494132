"""How uncertain the time is that a server takes for its work.

By the simulator's errors on published tables (`sim.results.evidence`), and by what the engine's record says about its
host. `sim.serve.results.other_servers` makes the intervals of latencies of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.core.units import percent
from sim.inputs.engine_file import engine_of
from sim.inputs.serving_formats import linear_format
from sim.prices.likeness import Features, active_billions
from sim.results.certainty import StepInterval, interval_by_evidence
from sim.results.evidence import SERVING

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario
    from sim.prices.profile import Profile

TOLD = 0.005  # of the whole: less uncertainty of the host is counted, but not worth a word


def serving_features(scenario: Scenario) -> Features:
    """Features of a serving scenario; `bits`: of the weights of linear layers."""
    i, p, m, gpu = scenario.for_serving, scenario.parallelism, scenario.model, scenario.cluster.gpu
    bits = 8 * linear_format(i, gpu.peak_flops_per_s)[1]
    layout, engine = (p.ranks, p.tp, p.pp, p.cp, p.ep, False), engine_of(i.engine)
    return Features(
        gpu.name, gpu.architecture, SERVING, active_billions(m), *layout, bits, 1, engine.product, engine.date
    )


def server_interval(
    scenario: Scenario,
    profile: Profile,
    seconds: float,
    shares: Mapping[tuple[str, str, float], float],
    host_uncertainty: float,
) -> StepInterval:
    """`seconds` of work on the fastest and on the slowest server; `shares`: of it by operator kind, source and
    uncertainty; `host_uncertainty`: the standard deviation that the host gives the whole, a part of 1."""
    features = None if scenario.model.program is not None else serving_features(scenario)
    likely = interval_by_evidence(scenario, profile, seconds, shares, features, host_uncertainty)
    if host_uncertainty <= TOLD:
        return likely
    return replace(likely, why=f"{likely.why}; the host adds {percent(host_uncertainty)}")
