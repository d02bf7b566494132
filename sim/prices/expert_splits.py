"""Bound measured layers of experts whose kernel was not tuned, by layers that differ in `expert_tp` alone.

A rank with w times the width of each expert could run a finer split's layer w times; so it never needs more than w
times the finer split's time, and never more than a coarser split's time. A point that exceeds this bound by more than a
factor of `DOUBT` gets the bound. For example, Hopper's layers of 16 experts of width 8,192 (Llama 4 Scout) took up to
ten times as long as reading them, whole and in halves, while quarters ran at the memory's speed; without the bound,
interpolation would give this slowness to nearby shapes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

EXPERT_TP = 5  # the dimension of a point's shape that holds `expert_tp`
DOUBT = 1.5  # neighbours differ by tile sizes and waves; nine in ten differ by less than this factor


def within_splits(
    sizes: list[NDArray[np.float64]], codes: NDArray[Any], seconds: NDArray[np.floating[Any]]
) -> NDArray[np.float64]:
    """Return `seconds` of points with such outliers replaced; `sizes` and `codes`: as in `Shapes`."""
    rest = [d for d in range(len(sizes)) if d != EXPERT_TP]
    # One key for all other dimensions: layers that differ only in the split share a row of `table`.
    key = np.ravel_multi_index(tuple(codes[rest].astype(np.intp)), tuple(len(sizes[d]) for d in rest))
    _, layer = np.unique(key, return_inverse=True)
    split, width = codes[EXPERT_TP].astype(np.intp), sizes[EXPERT_TP]
    # [layers, splits]. A split that was not measured is infinite and so bounds nothing.
    table = np.full((layer.max() + 1, len(width)), np.inf)
    table[layer, split] = seconds
    least = np.full_like(table, np.inf)
    for i, own in enumerate(width):
        more = np.maximum(width / own, 1.0)  # rounds of a finer split's work
        # A point must not bound itself.
        more[i] = np.inf
        least[:, i] = (table * more).min(axis=1)
    bound = least[layer, split]
    # Only outliers change: bounding all points would bias the surface downwards.
    return np.where(seconds > DOUBT * bound, bound, seconds)
