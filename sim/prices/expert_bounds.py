"""Bound measured layers of experts whose kernel was not tuned, by layers that differ in tokens and `expert_tp` alone.

A rank with w times the width of each expert could run a finer split's layer w times; so it never needs more than w
times the finer split's time, and never more than a coarser split's time. And a layer never needs more than one of more
tokens, to which it could be padded. A point that exceeds these bounds by more than a factor of `DOUBT` gets the bound.
For example, Hopper's layers of 16 experts of width 8,192 (Llama 4 Scout) took up to ten times as long as reading them,
whole and in halves, while quarters ran at the memory's speed; and one layer of four tokens took eleven times as long as
that of eight. Without the bounds, interpolation would give this slowness to nearby shapes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

TOKENS, EXPERT_TP = 0, 5  # dimensions of a point's shape
DOUBT = 1.5  # neighbours differ by tile sizes and waves; nine in ten differ by less than this factor


def within_bounds(
    sizes: list[NDArray[np.float64]], codes: NDArray[Any], seconds: NDArray[np.floating[Any]]
) -> NDArray[np.float64]:
    """Return `seconds` of points with such outliers replaced; `sizes` and `codes`: as in `Shapes`."""
    rest = [d for d in range(len(sizes)) if d not in (TOKENS, EXPERT_TP)]
    # One key for all other dimensions: layers that differ only in tokens and split share a page of `table`.
    key = np.ravel_multi_index(tuple(codes[rest].astype(np.intp)), tuple(len(sizes[d]) for d in rest))
    _, layer = np.unique(key, return_inverse=True)
    tokens, split, width = codes[TOKENS].astype(np.intp), codes[EXPERT_TP].astype(np.intp), sizes[EXPERT_TP]
    # [layers, tokens, splits]. What was not measured is infinite and so bounds nothing.
    table = np.full((layer.max() + 1, len(sizes[TOKENS]), len(width)), np.inf)
    table[layer, tokens, split] = seconds
    table = np.minimum.accumulate(table[:, ::-1], axis=1)[:, ::-1]  # of as many tokens or more
    rounds = np.maximum(width / width[:, None], 1.0)  # [own split, other split] of a finer split's work
    bound = (table[layer, tokens] * rounds[split]).min(axis=1)
    # Only outliers change: bounding all points would bias the surface downwards.
    return np.where(seconds > DOUBT * bound, bound, seconds)
