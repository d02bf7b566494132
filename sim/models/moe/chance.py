"""How much more than the mean the fullest of some ranks gets by chance, although all experts are equally popular."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

from sim.models.dims import ceil_div

if TYPE_CHECKING:
    from sim.inputs.model_config import MoeConfig

_MEDIAN_SHARE = (
    0.5264  # Chen and Tyler 1999, "Accurate approximation to the extreme order statistics of Gaussian samples"
)


def copies_beyond(moe: MoeConfig, tokens: int, ranks: int) -> float:
    """Copies that the fullest of `ranks` ranks gets beyond the mean, as expected for `tokens` tokens of all together.

    A rank's copies vary as a sum of draws without replacement: a token's `top_k` experts are different.
    """
    share = ceil_div(moe.experts, ranks) / moe.choices
    left = (moe.choices - moe.top_k) / max(1, moe.choices - 1)
    return largest_of(ranks) * math.sqrt(tokens * moe.top_k * share * (1.0 - share) * left)


@lru_cache(maxsize=256)
def largest_of(n: int) -> float:
    """The largest of n normal numbers of variance 1 that together are 0, as expected.

    >>> round(largest_of(2), 2), round(largest_of(8), 2)
    (0.85, 1.52)
    """
    return NormalDist().inv_cdf(_MEDIAN_SHARE ** (1 / n)) * math.sqrt(n / (n - 1))
