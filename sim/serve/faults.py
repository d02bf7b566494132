"""Slow ranks and links of a serving workload: one replica's prices, stage by stage.

Tensor-parallel ranks meet in every layer, so a stage computes at the pace of its slowest rank, and its collectives take
as long as on the slowest link that its group uses. Replicas serve their own requests and do not wait for each other.
What a result says about prices (sources, communication's share) is that of healthy ranks.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from sim.inputs.scenario import Scenario
from sim.prices.rank_prices import Pricing
from sim.ranks.faults import compute_scales, link_scales, nic_scales
from sim.serve.costs import IterationCosts, Load
from topology.network import Network


class FaultyCosts(Struct, frozen=True):
    """Prices of one replica's iterations, every stage with its own."""

    stages: tuple[IterationCosts, ...]

    def stage_seconds(self, load: Load) -> tuple[float, ...]:
        """As `IterationCosts.stage_seconds`."""
        return tuple(own.stage_seconds(load)[i] for i, own in enumerate(self.stages))

    def decode_run(self, decodes: int, first_kv: int, steps: int) -> list[float]:
        """As `IterationCosts.decode_run`, which has one stage."""
        return self.stages[0].decode_run(decodes, first_kv, steps)

    def send_s(self, stage: int, tokens: int) -> float:
        """As `IterationCosts.send_s`."""
        return self.stages[stage].send_s(stage, tokens)


def replica_costs(healthy: IterationCosts, scenario: Scenario, replica: int) -> IterationCosts | FaultyCosts:
    """Prices of one data-parallel replica; `healthy` itself where nothing disturbs it."""
    scales, links, nics = compute_scales(scenario), link_scales(scenario), nic_scales(scenario)
    plan = healthy.plan
    first = replica * plan.mesh.strides["dp"]
    layers = tuple(replace(s, rank=s.rank + first) for s in healthy.stages)
    members = [plan.mesh.along(["tp", "cp"], s.rank) for s in layers]
    if not links and not nics and not any(r in scales for ranks in members for r in ranks):
        return healthy
    pricing = None
    if links or nics:
        pricing = Pricing(plan, healthy.prices.pricing.costs, Network(scenario.cluster, links, nics))
    stages = []
    for s, ranks in zip(layers, members, strict=True):
        slowdown = max(scales.get(r, 1.0) for r in ranks)
        prices = replace(healthy.prices, rank=s.rank, slowdown=slowdown)
        if pricing is not None:
            own = healthy.prices.own
            own = None if own is None else replace(own, pricing=pricing)
            prices = replace(prices, pricing=pricing, own=own)
        stages.append(
            replace(
                healthy,
                prices=prices,
                stages=layers,
                priced_programs={},
                seconds={},
                of_tokens={},
                without_attention={},
                chunks={},
                lines={},
            )
        )
    return FaultyCosts(tuple(stages))
