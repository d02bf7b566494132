"""Prices of all-reduces that a serving engine does in kernels of its own (`sim.variants.engines.own_all_reduce`)."""

from __future__ import annotations

from collections.abc import Mapping
from math import hypot

from msgspec import Struct

from sim.prices.price import Priced
from sim.prices.rank_prices import Pricing
from sim.serve.prices.fused import is_llama
from sim.variants.engines.kernel_facts import is_blackwell_ultra
from sim.variants.engines.own_all_reduce import TIMES, ULTRA, KernelTimes, OwnAllReduce, all_reduce_s


class AllReduces(Struct, frozen=True):
    """The all-reduces of one engine on one cluster."""

    pricing: Pricing
    own: OwnAllReduce
    times: KernelTimes

    def price(self, group: str, rank: int, size_bytes: float, nccl_s: float) -> Priced | None:
        """The price in the engine's own kernel; None where NCCL has it: ranks of several nodes, or a large message.
        `nccl_s`: what NCCL takes."""
        ranks = self.pricing.group(group, rank)
        n, per_node = len(ranks), self.pricing.plan.scenario.cluster.gpus_per_node
        if size_bytes >= self.own.below.get(n, 0.0) or ranks[0] // per_node != ranks[-1] // per_node:
            return None
        shots = 1 if size_bytes < self.own.one_shot_below[n] else 2
        seconds = all_reduce_s(self.times, n, size_bytes, shots) * self._slower(ranks, size_bytes)
        seconds = min(seconds, nccl_s) if self.own.compared else seconds
        return Priced(seconds, "topology", hypot(self.times.uncertainty, self.own.uncertainty))

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
    if architecture not in own or architecture not in TIMES or not every_two_joined or cluster.others:
        return None
    if is_llama(pricing.plan.scenario.model, own[architecture].but_llama_above):
        return None
    times, link_bytes_per_s = TIMES[architecture], cluster.intra_node.usable_bytes_per_s
    times = times._replace(bytes_per_s=min(times.bytes_per_s, link_bytes_per_s))
    ultra = is_blackwell_ultra(architecture, cluster.gpu.memory_bytes)
    return AllReduces(pricing, own.get(ULTRA if ultra else "", own[architecture]), times)
