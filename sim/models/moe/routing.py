"""How many copies of tokens each expert gets, and each rank."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from msgspec import Struct

from sim.models.dims import Dims, Shard, ceil_div
from sim.models.moe.chance import copies_beyond
from sim.variants.dispatchers import ALL_TO_ALL, DISPATCHERS, Dispatcher

if TYPE_CHECKING:
    from sim.inputs.model_config import MoeConfig
    from sim.inputs.parallelism import Parallelism
    from sim.inputs.scenario import Scenario


class Routing(Struct, frozen=True):
    """One rank's tokens in an expert layer, copies counted.

    `tokens`: this rank's own, before copying to their top-k experts; `sent`: copies it sends to their experts;
    `received`: copies that its experts compute, in the mean over layers, with rows that fill up tiles before or on
    arrival; `fullest`: in one layer on the rank with most, for which all others wait; `wire`: copies that are sent, the
    larger of out and in; `arrived`: tokens that a rank gets if each comes to it once; `domain_experts`: experts in a
    rank's NVLink domain; `dispatcher`: who takes copies there.
    """

    tokens: int
    experts: int
    sent: float
    received: float
    fullest: float
    wire: float
    arrived: float
    domain_experts: float
    dispatcher: Dispatcher


def expert_load(moe: MoeConfig, tokens: int, layer: int) -> tuple[float, ...]:
    """Token copies of each expert, out of `tokens` · copies in all (top_k, where there are no zero experts).

    Balanced: equal. Else expert popularity falls as rank^-zipf, the order drawn from (seed, layer), no expert
    with more copies than there are tokens. A capacity factor drops what exceeds ceil(factor · tokens · copies
    / experts); `pad_to_capacity` fills every expert up to that.
    """
    if moe.imbalance == "balanced":
        load = (tokens * moe.copies / moe.experts,) * moe.experts
    else:
        load = _zipf(moe.experts, moe.copies, moe.imbalance.zipf, moe.imbalance.seed, layer, tokens)
    if moe.capacity_factor is None:
        return load
    capacity = -(-moe.capacity_factor * tokens * moe.copies // moe.experts)
    return tuple(capacity if moe.pad_to_capacity else min(x, capacity) for x in load)


@lru_cache(maxsize=1024)
def _zipf(experts: int, copies: float, zipf: float, seed: int, layer: int, tokens: int) -> tuple[float, ...]:
    import numpy as np

    weight = np.arange(1, experts + 1, dtype=np.float64) ** -zipf
    load = np.zeros(experts)
    left = tokens * copies
    free = np.ones(experts, dtype=bool)
    while left > 1e-9 and free.any():  # an expert sees a token once at most: what is above goes to the others
        load[free] += left * weight[free] / weight[free].sum()
        left = float(np.clip(load - tokens, 0, None).sum())
        load = np.minimum(load, tokens)
        free = load < tokens
    order = np.random.default_rng([seed, layer]).permutation(experts)
    return tuple(float(x) for x in load[order])


def routing(scenario: Scenario, d: Dims, layer: int, shard: Shard) -> Routing:
    """Tensor-parallel ranks share their tokens out; all ranks of an ep group route alike, but for what chance adds.

    A dispatcher that goes by places sends a token once to each node of the ep group that has experts of it. Where the
    group lies within one NVLink domain these are ranks.
    """
    moe, p = moe_of(scenario), scenario.parallelism
    tokens = ceil_div(d.tokens, d.tp)
    even = moe if scenario.uneven_experts else moe.model_copy(update={"imbalance": "balanced"})
    load = expert_load(even, tokens * p.ep, layer)
    local = ceil_div(moe.experts, p.ep)
    received = sum(load[shard.ep_rank * local : (shard.ep_rank + 1) * local])
    sent = sum(load) / p.ep
    dispatcher, nodes = dispatcher_of(p), expert_nodes(p, scenario.cluster.domain_gpus)
    to_ranks = min(1.0, ranks_of_a_token(moe, p.ep, nodes) / moe.copies)
    to_nodes = min(1.0, nodes_of_a_token(moe, nodes) / moe.copies)
    share = (to_nodes if nodes > 1 else to_ranks) if dispatcher.once_to_a_place else 1.0
    by_chance = d.framework.routes_by_chance and moe.imbalance == "balanced" and moe.capacity_factor is None
    at_home, on_arrival = _filled_up(scenario, d, dispatcher, moe.experts, local)
    received, sent = received + at_home, sent + at_home
    fullest = received
    if by_chance and p.ep > 1:
        fullest += copies_beyond(moe, tokens * p.ep * p.expert_tp, p.ep) / p.expert_tp
    wire, beside, arrived = max(sent, fullest) * share, moe.experts / nodes, fullest * to_ranks
    received, fullest = received + on_arrival, fullest + on_arrival
    return Routing(tokens, min(local, moe.experts), sent, received, fullest, wire, arrived, beside, dispatcher)


def _filled_up(scenario: Scenario, d: Dims, dispatcher: Dispatcher, experts: int, local: int) -> tuple[float, float]:
    """Rows that fill up experts' tiles: those that are sent from home, and those that are made where tokens arrive.

    With a capacity each expert's rows are assumed to fill whole tiles.
    """
    by_map = fills_map(scenario, d)
    by_library = dispatcher.fills_tiles and d.recipe is not None and moe_of(scenario).capacity_factor is None
    if by_map and not dispatcher.copies_on_arrival:
        return lacking_rows(scenario, d) * experts, 0.0
    return 0.0, lacking_rows(scenario, d) * local if by_map or by_library else 0.0


def lacking_rows(scenario: Scenario, d: Dims) -> float:
    """Return the rows that an expert lacks to whole tiles in the mean: (tile − 1)/2."""
    return (aligned_rows(scenario, d) - 1) / 2


def aligned_rows(scenario: Scenario, d: Dims) -> int:
    """Rows to a multiple of which each expert's are filled up for matmuls in 8 bits and fewer (Megatron-Core 0.16.1,
    fp8_utils.py: `get_fp8_align_size`; fp4_utils.py: `get_fp4_align_size`; of fused experts since 0.18.0,
    transformer/moe/moe_utils.py: `get_align_size_for_quantization`)."""
    tile = 16 if d.recipe is None else {"fp8": 16, "mxfp8": 32, "nvfp4": 128}[d.recipe.format]
    return max(tile, d.framework.fused_experts_tile) if fuses_experts(scenario, d) else tile


def fuses_experts(scenario: Scenario, d: Dims) -> bool:
    """Tell whether one kernel computes an expert's matmul and its activation, which needs matmuls in 8 bits."""
    return scenario.for_training.fused_experts and d.quantized


def fills_map(scenario: Scenario, d: Dims) -> bool:
    """Tell whether tokens that did not choose an expert are sent to it as well, so that its rows need no copies that
    fill them up (Megatron-Core's `moe_router_padding_for_quantization`): each rank fills each expert's, or where copies
    are made on arrival each rank its own experts'."""
    t = scenario.training
    asked = t is not None and t.moe_router_padding_for_quantization and d.recipe is not None
    return asked and not dispatcher_of(scenario.parallelism).fills_tiles


def dispatcher_of(p: Parallelism) -> Dispatcher:
    """Who takes tokens to their experts; a library that goes by places has nothing to do on one rank."""
    return DISPATCHERS[p.ep_dispatcher or "all_to_all"] if p.ep > 1 else ALL_TO_ALL


def nodes_of_a_token(moe: MoeConfig, nodes: int) -> float:
    """Return on how many of `nodes` a token's experts lie: as many as chance gives to its experts and to its groups of
    experts, of which each has some, and at most as many as the model allows (`max_nodes_per_token`).

    >>> from sim.inputs.model_config import MoeConfig
    >>> free, limited = (MoeConfig(experts=256, top_k=8, ffn=1, max_nodes_per_token=m) for m in (None, 4))
    >>> round(nodes_of_a_token(free, 8), 2), nodes_of_a_token(limited, 8), round(nodes_of_a_token(limited, 4), 2)
    (5.29, 4.0, 3.61)
    >>> grouped = MoeConfig(experts=256, top_k=8, ffn=1, groups=8, top_groups=4)
    >>> round(nodes_of_a_token(grouped, 8), 2), round(nodes_of_a_token(grouped, 4), 2)
    (4.0, 3.14)
    """
    found = places_by_chance(moe.experts, moe.copies, nodes)
    if moe.groups is not None and moe.top_groups is not None and nodes <= moe.groups:
        found = min(found, places_by_chance(moe.groups, moe.top_groups, nodes))
    return min(found, float(moe.max_nodes_per_token or nodes))


def ranks_of_a_token(moe: MoeConfig, ranks: int, nodes: int) -> float:
    """Return on how many of the `ranks` of an ep group a token's experts lie, if these are chosen by chance on as many
    of the group's `nodes` as the model allows.

    >>> from types import SimpleNamespace as N
    >>> free = N(max_nodes_per_token=None, experts=64, copies=8)
    >>> [round(ranks_of_a_token(free, ranks, 1), 2) for ranks in (8, 64)]
    [5.43, 8.0]
    """
    allowed = moe.max_nodes_per_token
    share = 1.0 if allowed is None or nodes == 1 else min(1.0, allowed / nodes)
    return places_by_chance(moe.experts * share, moe.copies, ranks * share)


def places_by_chance(experts: float, copies: float, places: float) -> float:
    """Return on how many of `places`, each with as many of the `experts`, as many different ones as `copies` lie, by
    chance.

    A place without any has probability C(experts - own, copies) / C(experts, copies), here by gamma functions.

    >>> round(places_by_chance(256, 8, 4), 3)
    3.614
    """
    others = experts - experts / places
    if copies > others:
        return min(places, copies)
    parts = ((others, 1.0), (experts - copies, 1.0), (others - copies, -1.0), (experts, -1.0))
    missed = math.exp(sum(sign * math.lgamma(n + 1.0) for n, sign in parts))
    return places * (1.0 - missed)


def expert_nodes(p: Parallelism, domain_gpus: int) -> int:
    """NVLink domains that the ranks of an ep group lie in."""
    order = tuple(p.rank_order.split("-"))
    return _nodes(order, (p.tp, p.cp, p.dp, p.pp), p.ep, p.expert_tp, domain_gpus)


@lru_cache(maxsize=1024)
def _nodes(order: tuple[str, ...], sizes: tuple[int, int, int, int], ep: int, expert_tp: int, domain: int) -> int:
    """NVLink domains that the first ep group lies in: every `expert_tp`-th of the first ranks of a stage."""
    size = dict(zip(("tp", "cp", "dp", "pp"), sizes, strict=True))
    found = set()
    for position in range(0, ep * expert_tp, expert_tp):
        rank, stride, left = 0, 1, position
        for name in order:
            if name != "pp":
                left, own = divmod(left, size[name])
                rank += own * stride
            stride *= size[name]
        found.add(rank // domain)
    return len(found)


def moe_of(scenario: Scenario) -> MoeConfig:
    """The experts of a model that has them."""
    assert scenario.model.moe is not None
    return scenario.model.moe
