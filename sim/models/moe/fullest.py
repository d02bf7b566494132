"""What the rank with most work has to do in an expert layer: all other ranks wait for it.

A token chooses k of E experts. Even if all experts are equally popular, some rank's experts are chosen more often than
others': its copies are the largest of `ranks` numbers that vary as those of draws without replacement do.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sim.models.dims import ceil_div
from sim.models.moe.chance import copies_beyond, largest_of
from sim.models.moe.routing import expert_load

if TYPE_CHECKING:
    from sim.inputs.model_config import MoeConfig


def fullest_rank(moe: MoeConfig, tokens: int, ranks: int) -> tuple[float, int]:
    """Copies of tokens that the fullest of `ranks` ranks gets, and how many of its experts get any, as expected for
    `tokens` tokens of all ranks together."""
    local, load = ceil_div(moe.experts, ranks), expert_load(moe, tokens, 0)
    rows = max(sum(load[r * local : (r + 1) * local]) for r in range(ranks))
    chance = min(1.0, moe.top_k / moe.experts)
    chosen = 1.0 - (1.0 - chance) ** tokens  # a single token reads the weights of its top-k experts alone
    groups = local * chosen
    if ranks > 1 and moe.imbalance == "balanced" and moe.capacity_factor is None:
        rows += copies_beyond(moe, tokens, ranks)
        groups += largest_of(ranks) * math.sqrt(groups * (1.0 - chosen))
        rows = min(rows, float(tokens * min(moe.top_k, local)))
    return max(1.0, rows), max(1, min(local, round(groups), math.floor(max(1.0, rows))))
