"""What the rank with most work has to do in an expert layer: all other ranks wait for it.

A token chooses k of E experts. Even if all experts are equally popular, some rank's experts are chosen more often than
others': its copies are the largest of `ranks` numbers that vary as those of draws without replacement do.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

from sim.models.dims import ceil_div
from sim.models.moe.routing import expert_load

if TYPE_CHECKING:
    from sim.inputs.model_config import MoeConfig

_MEDIAN_SHARE = (
    0.5264  # Chen and Tyler 1999, "Accurate approximation to the extreme order statistics of Gaussian samples"
)


def fullest_rank(moe: MoeConfig, tokens: int, ranks: int) -> tuple[float, int]:
    """Copies of tokens that the fullest of `ranks` ranks gets, and how many of its experts get any, as expected for
    `tokens` tokens of all ranks together."""
    local, load = ceil_div(moe.experts, ranks), expert_load(moe, tokens, 0)
    rows = max(sum(load[r * local : (r + 1) * local]) for r in range(ranks))
    chance, share = min(1.0, moe.top_k / moe.experts), local / moe.experts
    chosen = 1.0 - (1.0 - chance) ** tokens  # a single token reads the weights of its top-k experts alone
    groups = local * chosen
    if ranks > 1 and moe.imbalance == "balanced" and moe.capacity_factor is None:
        left = (moe.experts - moe.top_k) / max(1, moe.experts - 1)  # one token's choices are different experts
        beyond = largest_of(ranks)
        rows += beyond * math.sqrt(tokens * moe.top_k * share * (1.0 - share) * left)
        groups += beyond * math.sqrt(groups * (1.0 - chosen))
        rows = min(rows, float(tokens * min(moe.top_k, local)))
    return max(1.0, rows), max(1, min(local, round(groups), math.floor(max(1.0, rows))))


@lru_cache(maxsize=256)
def largest_of(n: int) -> float:
    """The largest of n normal numbers of variance 1 that together are 0, as expected.

    >>> round(largest_of(2), 2), round(largest_of(8), 2)
    (0.85, 1.52)
    """
    return NormalDist().inv_cdf(_MEDIAN_SHARE ** (1 / n)) * math.sqrt(n / (n - 1))
