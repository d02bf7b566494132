"""Interpolate efficiency between measured shapes by local linear regression in log space."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sim.core.normal import SIGMA_PER_MAD

SUPPORT_OCTAVES = 3.0  # a shape farther than this from every measured shape is not interpolated
# A median over so many points varies by a few percent; all of ten thousand points would take a second.
_LOO_POINTS = 64
ALIKE = 1 + 1e-9  # squared distances whose ratio is smaller are equal but for rounding
SAMPLED_POINTS = 1000  # points of a large table whose distances bound those of its nearest points from above


MOST_DISTANCES_KEPT = 32  # queries whose distances are kept in each steady dimension


class OfPoints(Protocol):
    """Give the numbers of selected points: an array, or an object that computes them on demand."""

    def __getitem__(self, points: NDArray[np.intp], /) -> NDArray[np.float64]: ...


class Surface:
    """Interpolate log(efficiency) over log2(shape) between points.

    `at(q)` fits a plane to the nearest points, two for each of its coefficients, weighted by inverse squared distance
    (Cleveland 1979: LOESS of degree one, here with lightly damped slopes), and limits the result to the range of these
    points. `beside`: further numbers on which efficiency depends, but distance does not (how full the last wave of
    tiles is); the plane has a slope for each. With a fifth of 10,800 measured H100 matmuls left out, half of the
    results are within 2 %, 95 % within 11 %.
    """

    def __init__(
        self,
        coordinates: NDArray[np.float64],
        log_efficiency: OfPoints,
        error: float | None = None,
        beside: OfPoints | None = None,
        besides: int = 0,
        steady: tuple[int, ...] = (),
    ) -> None:
        """Make a surface.

        `coordinates`: [points, dimensions]. `beside`: `besides` numbers for each point. `error`: the result of
        `leave_one_out_error`, if it is known. `steady`: dimensions in which most queries of a run are equal, as a
        weight's sizes are; this only makes queries faster.
        """
        # [dimensions, points]: distances are summed dimension by dimension, along contiguous memory.
        self._columns = np.ascontiguousarray(coordinates.T)
        self._y = log_efficiency
        self._beside = beside
        self._low: list[float] = self._columns.min(axis=1).tolist()
        self._high: list[float] = self._columns.max(axis=1).tolist()
        self._slopes = len(self._columns) + besides
        # Points on a line leave a slope undetermined and the matrix singular. A little damping sets that slope to 0.
        # The constant is not damped, which would pull results towards an efficiency of 1.
        self._damping = np.diag([0.0, *[1e-3] * self._slopes])
        self._error = error
        self._steady = dict[int, dict[float, NDArray[np.float64]]]({dimension: {} for dimension in steady})

    def at(self, query: Iterable[float], beside: NDArray[np.float64] | None = None) -> tuple[float, float] | None:
        """Return the log efficiency, and by how many octaves `query` lies outside the measured range.

        Outside the range the edge's efficiency is returned, because efficiency saturates with size. None if no point is
        near.
        """
        limits = zip(query, self._low, self._high, strict=True)
        # The query is moved to the nearest place within the box of points, because a plane is unreliable beyond it.
        ways = [(float(q), min(max(float(q), low), high)) for q, low, high in limits]
        inside = np.array([edge for _, edge in ways])
        distance2 = self._distances2(inside)
        near = self._near(distance2, len(distance2))
        near2 = distance2[near]
        # The box may be sparse inside. With None the caller tries another table or the roofline.
        if min(near2.tolist()) > SUPPORT_OCTAVES**2:
            return None
        return self._fit(inside, beside, near, near2), max([abs(q - edge) for q, edge in ways], default=0.0)

    def _distances2(self, query: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the squared distances of all points from `query`."""
        total, own = np.zeros(0), False
        for dimension, (q, low, high) in enumerate(zip(query.tolist(), self._low, self._high, strict=True)):
            if low == high:  # equal for all points and for every query
                continue
            apart = self._apart2(dimension, q)
            if not len(total):
                total, own = apart, dimension not in self._steady
            elif own:
                total += apart
            else:  # a kept array must not be changed
                total, own = total + apart, True
        if not len(total):
            return np.zeros(self._columns.shape[1])
        return total if own else total.copy()

    def _apart2(self, dimension: int, q: float) -> NDArray[np.float64]:
        """Return the squared distances of all points in one dimension."""
        known = self._steady.get(dimension)
        if known is not None and q in known:
            return known[q]
        apart: NDArray[np.float64] = self._columns[dimension] - q
        apart *= apart
        if known is not None:
            if len(known) >= MOST_DISTANCES_KEPT:
                known.clear()
            known[q] = apart
        return apart

    def leave_one_out_error(self) -> float:
        """Return the relative standard deviation of predictions at up to 64 measured points, each left out in turn."""
        if self._error is None:
            self._error = self._leave_one_out() if self._columns.shape[1] > 2 else 0.3
        return self._error

    def _leave_one_out(self) -> float:
        count = self._columns.shape[1]
        picks = np.unique(np.linspace(0, count - 1, _LOO_POINTS).astype(int))
        errors = np.empty(len(picks))
        for i in range(len(picks)):
            pick = picks[i : i + 1]
            query, beside = self._columns[:, pick[0]], None if self._beside is None else self._beside[pick][0]
            distance2 = self._distances2(query)
            # The point itself must not be among its neighbours, or the error would be zero.
            distance2[pick] = np.inf
            near = self._near(distance2, count - 1)
            # A difference of logarithms is a ratio; expm1 turns it into a relative error.
            errors[i] = abs(math.expm1(self._fit(query, beside, near, distance2[near]) - float(self._y[pick][0])))
        # The median ignores the few points for which the library chose a bad kernel.
        return float(SIGMA_PER_MAD * np.median(errors))

    def _near(self, distance2: NDArray[np.float64], usable: int) -> NDArray[np.intp]:
        """Return the points of the fit: the nearest ones, of at most `usable`.

        Sizes are powers of two, so points often are equally far. Of such the table's first are taken: which of them
        numpy's partition puts first, and the last digit of a logarithm, depend on the processor.
        """
        # As many points as unknowns would fit the noise. Twice as many average it and are still near the query.
        count = min(usable, 2 * (self._slopes + 1))
        # The nearest `count` points of a sample are at least as far as those of the whole table, so points beyond them
        # are left out.
        sample = distance2[:: 1 + len(distance2) // SAMPLED_POINTS]
        # Arrays' methods are called, because numpy's functions of these names cost more than the work on a few points.
        ordered = (sample if len(sample) > count else distance2).copy()
        ordered.partition(count - 1)
        near: NDArray[np.intp] = (distance2 <= ordered[count - 1] * ALIKE).nonzero()[0]
        if len(near) == count:
            return near
        ordered = distance2[near]
        ordered.partition(count - 1)
        last = ordered[count - 1]
        among = distance2[near]
        nearer = among < last / ALIKE
        alike = near[(among <= last * ALIKE) & ~nearer]
        return np.concatenate((near[nearer], alike[: count - np.count_nonzero(nearer)]))

    def _fit(
        self,
        query: NDArray[np.float64],
        beside: NDArray[np.float64] | None,
        near: NDArray[np.intp],
        distance2: NDArray[np.float64],
    ) -> float:
        # A point at the query itself gets nearly all the weight; 1e-9 keeps the division finite.
        weight = 1.0 / (distance2 + 1e-9)
        weight /= np.add.reduce(weight)
        dimensions, values = len(query), self._y[near]
        rows = np.ones((len(near), 1 + self._slopes))
        # With coordinates relative to the query the plane's constant is the result.
        np.subtract(self._columns[:, near].T, query, out=rows[:, 1 : 1 + dimensions])
        if self._beside is not None and beside is not None:
            np.subtract(self._beside[near], beside, out=rows[:, 1 + dimensions :])
        weighted = rows * weight[:, None]
        solution = np.linalg.solve(rows.T @ weighted + self._damping, weighted.T @ values)
        known: list[float] = values.tolist()
        # A plane through neighbours on one side may extrapolate beyond the roofline.
        return min(max(float(solution[0]), min(known)), max(known))
