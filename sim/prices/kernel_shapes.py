"""The shapes of measured kernels, and the coordinates at which their efficiency is looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.prices.roofline import ATTENTION, MATMULS, N

Columns = list[NDArray[np.float64]]  # sizes [points], dimension by dimension
# Numpy gives a view for a slice, where an array of all indices would copy.
ALL = slice(None)


class Shapes:
    """The shapes of points: the `sizes` that occur in each dimension, and `codes` [dimensions, points], which of them
    each point has."""

    def __init__(self, sizes: list[NDArray[np.float64]], codes: NDArray[Any]) -> None:
        self.sizes, self.codes = sizes, codes
        # A dictionary a dimension, because a run asks for thousands of shapes, and most are not among the points.
        self._known = [{size: code for code, size in enumerate(row.tolist())} for row in sizes]

    @staticmethod
    def of(shapes: NDArray[np.int64]) -> Shapes:
        """Index `shapes` [points, dimensions]."""
        found = [np.unique(column, return_inverse=True) for column in shapes.T]
        return Shapes([sizes.astype(np.float64) for sizes, _ in found], np.array([codes for _, codes in found]))

    def columns(self, points: NDArray[np.intp] | slice = ALL) -> Columns:
        """Sizes of points, dimension by dimension."""
        return [sizes[codes] for sizes, codes in zip(self.sizes, self.codes[:, points], strict=True)]

    def coordinates(self, kind: str) -> NDArray[np.float64]:
        """`coordinates` of all points [dimensions of efficiency, points]; log2 of 0 as of 1."""
        logs = [np.log2(np.maximum(sizes, 1.0)) for sizes in self.sizes]
        # A mean of two dimensions needs both sizes of a point, so logarithms are dealt out to points first.
        if kind in ATTENTION:  # mixes dimensions
            logs = [log[codes] for log, codes in zip(logs, self.codes, strict=True)]
            return np.array(coordinates(kind, logs))
        # Elsewhere a dimension has a few sizes, whose logarithms are taken once and dealt out by code.
        found = np.empty(self.codes.shape)
        for row, log, codes in zip(found, coordinates(kind, logs), self.codes, strict=True):
            np.take(log, codes, out=row, mode="clip")  # the other modes copy
        return found

    def last(self, shape: tuple[int, ...]) -> int | None:
        """The last point of this very shape."""
        # Of a shape in two tables of a profile the later one counts.
        same: NDArray[np.bool] | None = None
        for known, codes, size in zip(self._known, self.codes, shape, strict=True):
            if size not in known:
                return None
            # A dimension of one size rules no point out, so no array is made for it.
            if len(known) > 1:
                here: NDArray[np.bool] = codes == known[size]
                same = here if same is None else np.logical_and(same, here, out=same)
        if same is None:
            return len(self.codes[0]) - 1
        found = np.flatnonzero(same)
        return int(found[-1]) if len(found) else None


def coordinates(kind: str, log2: Sequence[N]) -> list[N]:
    """log2 of every dimension that efficiency depends on, each weighted by how much.

    Matmuls: batch, m, n, and k at half, for it only lengthens the loop of a tile. Attention: batch, heads, groups of
    KV heads, mean length and mean head size. Weights from leaving a fifth of the points out: of attention 2 for the
    head size (it decides which kernel runs), 0.3 for KV heads.
    """
    if kind in MATMULS:
        batch, m, n, k = log2
        # A lower weight makes points of another k count as near.
        return [batch, m, n, 0.5 * k]
    if kind not in ATTENTION:
        return list(log2)
    batch, heads, kv_heads, q_len, kv_len, d, dv = log2[:7]
    # d + dv is twice the mean of both logarithms; the 2 is the weight of the head size.
    return [batch, heads, 0.3 * kv_heads, (q_len + kv_len) / 2, d + dv]
