"""How many copies of tokens each expert gets, and each rank."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from msgspec import Struct

from sim.models.dims import Dims, Shard, ceil_div

if TYPE_CHECKING:
    from sim.inputs.model_config import MoeConfig
    from sim.inputs.scenario import Scenario


class Routing(Struct, frozen=True):
    """One rank's tokens in an expert layer, copies counted.

    `tokens`: this rank's own, before copying to their top-k experts; `sent`: copies it sends to their
    experts; `received`: copies that its experts compute; `wire`: copies that cross the network, the larger of
    out and in.
    """

    tokens: int
    experts: int
    sent: float
    received: float
    wire: float


def expert_load(moe: MoeConfig, tokens: int, layer: int) -> tuple[float, ...]:
    """Token copies of each expert, out of `tokens` · top_k in all.

    Balanced: equal. Else expert popularity falls as rank^-zipf, the order drawn from (seed, layer), no expert
    with more copies than there are tokens. A capacity factor drops what exceeds ceil(factor · tokens · top_k
    / experts).
    """
    if moe.imbalance == "balanced":
        load = (tokens * moe.top_k / moe.experts,) * moe.experts
    else:
        load = _zipf(moe.experts, moe.top_k, moe.imbalance.zipf, moe.imbalance.seed, layer, tokens)
    if moe.capacity_factor is None:
        return load
    capacity = -(-moe.capacity_factor * tokens * moe.top_k // moe.experts)
    return tuple(min(x, capacity) for x in load)


@lru_cache(maxsize=1024)
def _zipf(experts: int, top_k: int, zipf: float, seed: int, layer: int, tokens: int) -> tuple[float, ...]:
    import numpy as np

    weight = np.arange(1, experts + 1, dtype=np.float64) ** -zipf
    load = np.zeros(experts)
    left = float(tokens * top_k)
    free = np.ones(experts, dtype=bool)
    while left > 1e-9 and free.any():  # an expert sees a token once at most: what is above goes to the others
        load[free] += left * weight[free] / weight[free].sum()
        left = float(np.clip(load - tokens, 0, None).sum())
        load = np.minimum(load, tokens)
        free = load < tokens
    order = np.random.default_rng([seed, layer]).permutation(experts)
    return tuple(float(x) for x in load[order])


def routing(scenario: Scenario, d: Dims, layer: int, shard: Shard) -> Routing:
    """Tensor-parallel ranks share their tokens out; all ranks of an ep group route alike."""
    moe, p = moe_of(scenario), scenario.parallelism
    tokens = ceil_div(d.tokens, d.tp)
    load = expert_load(moe, tokens * p.ep, layer)
    local = ceil_div(moe.experts, p.ep)
    received = sum(load[shard.ep_rank * local : (shard.ep_rank + 1) * local])
    sent = sum(load) / p.ep
    nodes = moe.max_nodes_per_token
    share = 1.0 if nodes is None else min(1.0, nodes / moe.top_k)
    return Routing(tokens, min(local, moe.experts), sent, received, max(sent, received) * share)


def moe_of(scenario: Scenario) -> MoeConfig:
    """The experts of a model that has them."""
    assert scenario.model.moe is not None
    return scenario.model.moe
