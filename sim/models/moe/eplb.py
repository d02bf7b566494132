"""Experts of a served model placed on ranks by how popular they are, the most popular ones copied.

Source: DeepSeek's Expert Parallelism Load Balancer (github.com/deepseek-ai/EPLB), which vLLM
(distributed/eplb/rebalance_algo.py) and SGLang (srt/eplb/eplb_algorithms/deepseek.py) run on the number of tokens that
each expert has lately been given. A token that chooses a copied expert goes to any of its copies with the same
probability (SGLang: srt/eplb/expert_location_dispatch.py, `dynamic`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from msgspec import Struct

from sim.models.moe.routing import expert_load

if TYPE_CHECKING:
    from sim.inputs.model_config import MoeConfig

Copies = list[list[int]]  # for each pack (a rank, a node) the experts that it holds, one of them perhaps twice


class BalancedExperts(Struct, frozen=True):
    """`redundant`: copies beyond one of each expert, on all ranks together; `nodes`: that the ranks are on."""

    redundant: int
    nodes: int = 1


def received(moe: MoeConfig, balanced: BalancedExperts, ranks: int, tokens: int) -> list[float]:
    """Return how many of the copies of `tokens` tokens each rank gets, as expected."""
    load = expert_load(moe, tokens, 0)
    placed, copies = _placed(moe, balanced, ranks)
    return [sum(load[e] / copies[e] for e in rank) for rank in placed]


@lru_cache(maxsize=64)
def _placed(moe: MoeConfig, balanced: BalancedExperts, ranks: int) -> tuple[Copies, list[int]]:
    """Return the experts of each rank, and how many copies of each expert there are."""
    popularity = expert_load(moe, 1, 0)  # loads are in proportion to the number of tokens
    placed = place(popularity, moe.experts + balanced.redundant, moe.groups or 1, balanced.nodes, ranks)
    held = [e for rank in placed for e in rank]
    return placed, [held.count(e) for e in range(moe.experts)]


def place(weights: Sequence[float], slots: int, groups: int, nodes: int, ranks: int) -> Copies:
    """Return for each rank the experts that it holds, where there are `slots` places for experts on all ranks.

    Where `nodes` divides the groups of experts that tokens choose first, each group stays on one node (the balancer's
    hierarchical policy). Else a copy may lie on any rank.

    Args:
        weights: for each expert how many tokens choose it, in any unit.
    """
    if groups % nodes:
        groups = nodes = 1
    size = len(weights) // groups
    members = [range(g * size, (g + 1) * size) for g in range(groups)]
    out: Copies = []
    for node in pack([sum(weights[e] for e in group) for group in members], nodes):
        here = [e for group in node for e in members[group]]
        copied = copy([weights[e] for e in here], slots // nodes)
        count = [copied.count(i) for i in range(len(here))]
        parts = pack([weights[here[i]] / count[i] for i in copied], ranks // nodes)
        out += [[here[copied[part]] for part in rank] for rank in parts]
    return out


def copy(weights: Sequence[float], slots: int) -> list[int]:
    """Return the item in each of `slots` places: each once, then again and again the one whose copies weigh most."""
    out, count = list(range(len(weights))), [1] * len(weights)
    while len(out) < slots:
        heaviest = max(range(len(weights)), key=lambda i: weights[i] / count[i])
        out.append(heaviest)
        count[heaviest] += 1
    return out


def pack(weights: Sequence[float], packs: int) -> Copies:
    """Return equally many items for each pack: the heaviest first, each to the lightest pack that has room."""
    room = len(weights) // packs
    out: Copies = [[] for _ in range(packs)]
    sums = [0.0] * packs
    for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
        best = min((p for p in range(packs) if len(out[p]) < room), key=sums.__getitem__)
        out[best].append(i)
        sums[best] += weights[i]
    return out
