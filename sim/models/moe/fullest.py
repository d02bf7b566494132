"""What the rank with most work has to do in an expert layer: all other ranks wait for it.

A token chooses k of E experts. Even if all experts are equally popular, some rank's experts are chosen more often than
others': its copies are the largest of `ranks` numbers that vary as those of draws without replacement do.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sim.models.dims import ceil_div
from sim.models.moe.chance import copies_beyond, largest_of
from sim.models.moe.eplb import BalancedExperts, received
from sim.models.moe.routing import expert_load

if TYPE_CHECKING:
    from sim.inputs.model_config import MoeConfig


def fullest_rank(moe: MoeConfig, tokens: int, ranks: int, eplb: BalancedExperts | None = None) -> tuple[float, int]:
    """Copies of tokens that the fullest of `ranks` ranks gets, and how many of its experts get any, as expected for
    `tokens` tokens of all ranks together. `eplb`: how experts are placed; None: in their order."""
    held = moe.experts + (eplb.redundant if eplb is not None else 0)
    local = ceil_div(held, ranks)
    rows = max(_in_order(moe, tokens, ranks) if eplb is None else received(moe, eplb, ranks, tokens))
    chance = min(1.0, moe.top_k / (held + moe.zero_experts))
    chosen = 1.0 - (1.0 - chance) ** tokens  # a single token reads the weights of its top-k experts alone
    groups = local * chosen
    alike = moe.imbalance == "balanced" or eplb is not None
    if ranks > 1 and alike and moe.capacity_factor is None:
        rows += copies_beyond(moe, tokens, ranks)
        groups += largest_of(ranks) * math.sqrt(groups * (1.0 - chosen))
        rows = min(rows, float(tokens * min(moe.top_k, local)))
    return max(1.0, rows), max(1, min(local, round(groups), math.floor(max(1.0, rows))))


def _in_order(moe: MoeConfig, tokens: int, ranks: int) -> list[float]:
    """Copies of tokens that each rank gets which holds its part of the experts in their order."""
    local, load = ceil_div(moe.experts, ranks), expert_load(moe, tokens, 0)
    return [sum(load[r * local : (r + 1) * local]) for r in range(ranks)]
