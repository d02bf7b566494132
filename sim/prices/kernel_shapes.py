"""Hold the shapes of measured kernels, and the coordinates at which their efficiency is interpolated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.core.operator_kinds import ATTENTION, MATMULS, N

Columns = list[NDArray[np.float64]]  # sizes [points], dimension by dimension
# NumPy returns a view for a slice; an array of all indices would copy.
ALL = slice(None)


class Shapes:
    """Hold the shapes of points: the `sizes` that occur in each dimension, and `codes` [dimensions, points], the index
    of each point's size."""

    def __init__(self, sizes: list[NDArray[np.float64]], codes: NDArray[Any]) -> None:
        self.sizes, self.codes = sizes, codes
        # Dictionaries are fast for the thousands of shapes of a run, most of which are not among the points.
        self._known = [{size: code for code, size in enumerate(row.tolist())} for row in sizes]

    @staticmethod
    def of(shapes: NDArray[np.int64]) -> Shapes:
        """Make `Shapes` of `shapes` [points, dimensions]."""
        found = [np.unique(column, return_inverse=True) for column in shapes.T]
        return Shapes([sizes.astype(np.float64) for sizes, _ in found], np.array([codes for _, codes in found]))

    def columns(self, points: NDArray[np.intp] | slice = ALL) -> Columns:
        """Return the sizes of points, dimension by dimension."""
        return [sizes[codes] for sizes, codes in zip(self.sizes, self.codes[:, points], strict=True)]

    def coordinates(self, kind: str) -> NDArray[np.float64]:
        """Return the coordinates of all points [coordinates, points]; log2 of 0 counts as 0."""
        logs = [np.log2(np.maximum(sizes, 1.0)) for sizes in self.sizes]
        # Attention's coordinates combine dimensions, so each point's logarithms are needed first.
        if kind in ATTENTION:
            logs = [log[codes] for log, codes in zip(logs, self.codes, strict=True)]
            return np.array(coordinates(kind, logs))
        # For other kinds a dimension has few sizes, whose logarithms are taken once and spread by code.
        found = np.empty(self.codes.shape)
        for row, log, codes in zip(found, coordinates(kind, logs), self.codes, strict=True):
            np.take(log, codes, out=row, mode="clip")  # other modes copy
        return found

    def last(self, shape: tuple[int, ...]) -> int | None:
        """Return the last point with exactly this shape; None if there is none."""
        # If a shape is in two tables of a profile, the later one counts.
        same: NDArray[np.bool] | None = None
        for known, codes, size in zip(self._known, self.codes, shape, strict=True):
            if size not in known:
                return None
            # A dimension with a single size excludes no point.
            if len(known) > 1:
                here: NDArray[np.bool] = codes == known[size]
                same = here if same is None else np.logical_and(same, here, out=same)
        if same is None:
            return len(self.codes[0]) - 1
        found = np.flatnonzero(same)
        return int(found[-1]) if len(found) else None


def coordinates(kind: str, log2: Sequence[N]) -> list[N]:
    """Return the log2 of each dimension on which efficiency depends, weighted by how much it depends on it.

    Matmuls: batch, m, n, and half of k, which only lengthens the loop of a tile. Attention: batch, heads, KV heads,
    mean length and mean head size. The weights were found by leaving a fifth of the points out: for attention 2 for the
    head size, which decides the kernel, and 0.3 for KV heads.
    """
    if kind in MATMULS:
        batch, m, n, k = log2
        # With a lower weight points of another k are near.
        return [batch, m, n, 0.5 * k]
    if kind not in ATTENTION:
        return list(log2)
    batch, heads, kv_heads, q_len, kv_len, d, dv = log2[:7]
    # d + dv is twice the mean of both logarithms; the 2 is the weight of the head size.
    return [batch, heads, 0.3 * kv_heads, (q_len + kv_len) / 2, d + dv]
