"""Prices of all-reduces that a serving engine does in kernels of its own (`sim.variants.engines.own_all_reduce`)."""

from __future__ import annotations

from collections.abc import Mapping
from math import hypot

from msgspec import Struct

from sim.prices.collective_tables import collective_cost
from sim.prices.price import Priced
from sim.prices.profile import CollectiveTable, Profile
from sim.prices.profiles import load_profile
from sim.prices.rank_prices import Pricing
from sim.prices.table_prices import nearest_source
from sim.serve.prices.fused import is_llama
from sim.variants.engines.kernel_facts import is_blackwell_ultra
from sim.variants.engines.own_all_reduce import ULTRA, OwnAllReduce

# Whose measurements others of an architecture take, where a profile has none of its own.
MEASURED = {"ampere": "a100-sxm", "hopper": "h100-sxm", "blackwell": "b200-sxm"}


class AllReduces(Struct, frozen=True):
    """The all-reduces of one engine on one cluster; `measured`: by ranks, as CUDA graphs replay them."""

    pricing: Pricing
    own: OwnAllReduce
    measured: dict[int, CollectiveTable]

    def price(self, group: str, rank: int, size_bytes: float, nccl_s: float) -> Priced | None:
        """The price in the engine's own kernel; None where NCCL has it: ranks of several nodes, or a large message, or
        where fewer ranks were measured. `nccl_s`: what NCCL takes."""
        ranks = self.pricing.group(group, rank)
        n, per_node = len(ranks), self.pricing.plan.scenario.cluster.gpus_per_node
        if size_bytes >= self.own.below.get(n, 0.0) or ranks[0] // per_node != ranks[-1] // per_node:
            return None
        if n > max(self.measured):
            return None
        # Of a number of ranks that was not measured, the next larger one.
        cost = collective_cost(self.measured[min(m for m in self.measured if m >= n)], size_bytes)
        seconds = cost.seconds * self._slower(ranks, size_bytes)
        seconds = min(seconds, nccl_s) if self.own.compared else seconds
        return Priced(seconds, cost.source, hypot(cost.uncertainty, self.own.uncertainty))

    def _slower(self, ranks: list[int], size_bytes: float) -> float:
        """How many times as long NCCL's takes on links with faults."""
        if self.pricing.healthy is self.pricing:
            return 1.0
        networks = self.pricing.network, self.pricing.healthy.network
        now_s, usual_s = (network.collective("all_reduce", ranks, size_bytes).seconds for network in networks)
        return now_s / usual_s


def all_reduces(pricing: Pricing, own: Mapping[str, OwnAllReduce]) -> AllReduces | None:
    """Prices of an engine's own all-reduce kernels (`own`, by GPU architecture); None if NCCL does them all."""
    cluster = pricing.plan.scenario.cluster
    architecture = cluster.gpu.kernel_architecture
    every_two_joined = cluster.intra_node.switched or cluster.intra_node.all_linked
    if architecture not in own or not every_two_joined or cluster.others:
        return None
    if is_llama(pricing.plan.scenario.model, own[architecture].but_llama_above):
        return None
    ultra = is_blackwell_ultra(architecture, cluster.gpu.memory_bytes)
    measured = _nearest(pricing.costs.profile, pricing.costs.engine)
    if not measured and architecture in MEASURED:
        measured = _nearest(load_profile(MEASURED[architecture]), pricing.costs.engine)
    if not measured:
        return None
    return AllReduces(pricing, own.get(ULTRA if ultra else "", own[architecture]), measured)


def _nearest(profile: Profile, engine: str) -> dict[int, CollectiveTable]:
    """A profile's all-reduces of the nearest release of an engine, or of another engine, by ranks."""
    own = [table for table in profile.collectives if table.source]
    source = nearest_source({table.source for table in own}, engine) if own else ""
    return {table.ranks: table for table in own if table.source == source}
