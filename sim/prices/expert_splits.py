"""Measured layers of experts that took longer than a split of them must: points of a kernel that was not tuned.

A rank that has w times the width of each expert could run what a rank with the w-th part runs, w times; it never has
less to do. So of layers that differ in `expert_tp` alone none takes longer than w of a finer split's, nor longer than a
coarser split's. Points that do, by more than `DOUBT`, are given that bound. Hopper's layers of 16 experts of 8,192
(Llama 4 Scout) took up to ten times as long as reading them does, whole and in halves, while quarters were at the
memory's speed; shapes without points of their own near them took over what those lost.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

EXPERT_TP = 5  # the dimension of a point's shape that is the split
DOUBT = 1.5  # neighbours differ by tile sizes and waves; nine of ten are within this


def within_splits(
    sizes: list[NDArray[np.float64]], codes: NDArray[Any], seconds: NDArray[np.floating[Any]]
) -> NDArray[np.float64]:
    """`seconds` of points with such outliers replaced; `sizes` and `codes` as in `Shapes`."""
    rest = [d for d in range(len(sizes)) if d != EXPERT_TP]
    # One number for all other dimensions, so that layers that differ in the split alone share a row of `table`.
    key = np.ravel_multi_index(tuple(codes[rest].astype(np.intp)), tuple(len(sizes[d]) for d in rest))
    _, layer = np.unique(key, return_inverse=True)
    split, width = codes[EXPERT_TP].astype(np.intp), sizes[EXPERT_TP]
    # [layers, splits]. A split that was not measured is infinite, so it bounds nothing.
    table = np.full((layer.max() + 1, len(width)), np.inf)
    table[layer, split] = seconds
    least = np.full_like(table, np.inf)
    for i, own in enumerate(width):
        more = np.maximum(width / own, 1.0)  # rounds of a finer split's work
        # A point must not bound itself, or no outlier would ever be found.
        more[i] = np.inf
        least[:, i] = (table * more).min(axis=1)
    bound = least[layer, split]
    # Points within the doubt stay as they are. Bounding all of them would bias the smooth surface downwards.
    return np.where(seconds > DOUBT * bound, bound, seconds)
