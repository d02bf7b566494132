"""Slow ranks and links of a serving workload: one replica's prices, stage by stage.

Tensor-parallel ranks meet in every layer, so a stage computes at the pace of its slowest rank, and its collectives take
as long as on the slowest link that its group uses. Replicas serve their own requests and do not wait for each other.
What a result says about prices (sources, communication's share) is that of healthy ranks.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from sim.inputs.scenario import Scenario
from sim.prices.rank_prices import Pricing
from sim.ranks.faults import compute_scales, link_scales, nic_scales
from sim.serve.prices.costs import IterationCosts
from topology.network import Network


def replica_costs(healthy: IterationCosts, scenario: Scenario, replica: int) -> IterationCosts:
    """Prices of one data-parallel replica; `healthy` itself where nothing disturbs it."""
    own = _of_stages(healthy, scenario, replica * healthy.plan.mesh.strides["dp"])
    return own[0] if len(own) == 1 else replace(healthy, of_stages=own)


def _of_stages(healthy: IterationCosts, scenario: Scenario, first: int) -> tuple[IterationCosts, ...]:
    """Prices of each stage of a disturbed replica whose ranks begin with `first`; of one that nothing disturbs
    `healthy` alone. A draft is on the last stage's ranks."""
    scales, links, nics = compute_scales(scenario), link_scales(scenario), nic_scales(scenario)
    plan = healthy.plan
    layers = tuple(replace(s, rank=s.rank + first) for s in healthy.stages)
    members = [plan.mesh.along(["tp", "cp"], s.rank) for s in layers]
    if not links and not nics and not any(r in scales for ranks in members for r in ranks):
        return (healthy,)
    changed: dict[str, Any] = {}
    if links or nics:
        pricing = Pricing(plan, healthy.prices.pricing.costs, Network(scenario.cluster, links, nics))
        reduces = healthy.prices.own
        changed = {"pricing": pricing, "own": None if reduces is None else replace(reduces, pricing=pricing)}
    draft = None if healthy.draft is None else _of_stages(healthy.draft, scenario, layers[-1].rank)[0]
    out = []
    for s, ranks in zip(layers, members, strict=True):
        slowdown = max(scales.get(r, 1.0) for r in ranks)
        prices = replace(healthy.prices, rank=s.rank, slowdown=slowdown, **changed)
        out.append(healthy.with_prices(prices, layers, draft))
    return tuple(out)
