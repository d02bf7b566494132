"""Measured kernels as efficiency surfaces.

What is interpolated is the efficiency

    (roofline seconds + floor) / measured seconds,

`floor` being what the least kernel takes: so a small kernel's efficiency is as smooth as a large one's. Of hundreds of
thousands of points only those nearest to what is asked are worked out.

What quantizing an input took, where kernels were measured with it (`sim.prices.kernel_file`), is taken off: a training
step and a served one have that conversion as an operator of their own. Their result has 16 bits.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sim.core.dtypes import dtype_bytes
from sim.prices.expert_splits import within_splits
from sim.prices.interpolation import Surface
from sim.prices.kernel_shapes import Columns, Shapes, coordinates
from sim.prices.profile import PointTable
from sim.prices.roofline import (
    ATTENTION,
    ATTENTION_DECODE,
    COUNTED,
    MATMULS,
    MOE_LAYER,
    Device,
    shape_bytes,
    shape_flops,
)

BEST = 0.8  # what large matmuls reach of the peak, in 16 bits
READ = 0.86  # what the longest decodes reach of an A100's bandwidth where each query head has keys of its own


HEADS = (1, 2, 4)  # of attention's coordinates: heads, groups of KV heads, head size


class Table(Struct, frozen=True, eq=False, dict=True):
    """An operator's points on a device, ready to be asked.

    `floor_s`: what is added to the roofline before efficiency is taken. `error`: as in `Surface`, where it is known.
    `in_waves`: efficiency depends on how full the waves of tiles are. `input_s`: of quantizing the input, taken off
    `seconds`; see `KernelFile.input_s`.
    """

    kind: str
    dtype: str
    device: Device
    shapes: Shapes
    seconds: NDArray[np.floating[Any]]
    spread: NDArray[np.float64]
    floor_s: float
    error: float | None
    in_waves: bool
    input_s: tuple[float, float] = (0.0, 0.0)

    @cached_property
    def single(self) -> bool:
        """No matmul of a batch was measured."""
        return self.kind in MATMULS and self.shapes.sizes[0].max() == 1

    @cached_property
    def surfaces(self) -> dict[int, Surface]:
        """Log efficiency by causal flag (0 where that has no meaning)."""
        where = self.shapes.coordinates(self.kind).T
        if self.kind not in ATTENTION:
            beside = _Waves(self.shapes, self.device.sm_count) if self.in_waves else None
            besides = len(TILES) if self.in_waves else 0
            steady = (2, 3) if self.kind in MATMULS else HEADS if self.kind == ATTENTION_DECODE else ()
            return {0: Surface(where, _LogEfficiency(self), self.error, beside, besides, steady)}
        # Causal kernels skip half of the tiles, and nothing lies between the two flags to interpolate.
        flags = self.shapes.sizes[-1].astype(int).tolist()
        if len(flags) == 1:
            return {flags[0]: Surface(where, _LogEfficiency(self), self.error, steady=HEADS)}
        of_flag = {flag: np.flatnonzero(self.shapes.codes[-1] == code) for code, flag in enumerate(flags)}
        return {
            f: Surface(where[rows], _LogEfficiency(self)[rows], self.error, steady=HEADS) for f, rows in of_flag.items()
        }

    def quantizing_s(self, shape: tuple[int, ...]) -> float:
        """Seconds in which a matmul's [m, k] input was quantized where its points were measured."""
        batch, m, _, k = shape
        return self.input_s[0] + self.input_s[1] * batch * m * k

    def exact(self, shape: tuple[int, ...]) -> tuple[float, float] | None:
        """Measured seconds and spread of this very shape."""
        found = self.shapes.last(shape) if len(shape) == len(self.shapes.codes) else None
        return None if found is None else (float(self.seconds[found]), float(self.spread[found]))


KEEP_ALL_FROM = 64  # queries of a table, from which on all its logarithms are kept
MOST_LOGARITHMS_KEPT = 40_000  # of a table with as many points


class _LogEfficiency:
    """log(efficiency) of a table's points, worked out for those that are asked for."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._asked = 0
        self._all: NDArray[np.float64] | None = None

    def __getitem__(self, points: NDArray[np.intp]) -> NDArray[np.float64]:
        if self._all is not None:
            found: NDArray[np.float64] = self._all[points]
            return found
        self._asked += 1
        # For a few queries of a dozen points this is quicker than the logarithm of a hundred thousand.
        if self._asked > KEEP_ALL_FROM and len(self._table.seconds) <= MOST_LOGARITHMS_KEPT:
            self._all = self._of(slice(None))
        return self._of(points)

    def _of(self, points: NDArray[np.intp] | slice) -> NDArray[np.float64]:
        table = self._table
        roofline_s = bounds(table.kind, table.shapes.columns(points), table.dtype, table.device)
        return np.log((roofline_s + table.floor_s) / table.seconds[points])


class _Waves:
    """`waves` of points, worked out for the few sizes that occur."""

    def __init__(self, shapes: Shapes, sm_count: int) -> None:
        batch, m, n = shapes.sizes[:3]
        # Waves do not depend on k. A table over the few batches, m and n is far smaller than one over all points.
        self._of_sizes = waves(batch[:, None, None, None], m[:, None, None], n[:, None], sm_count)
        self._codes = shapes.codes[:3]

    def __getitem__(self, points: NDArray[np.intp]) -> NDArray[np.float64]:
        batch, m, n = self._codes[:, points]
        found: NDArray[np.float64] = self._of_sizes[batch, m, n]
        return found


def make_table(
    kind: str,
    dtype: str,
    points: list[PointTable],
    device: Device,
    floored: bool = False,
    error: float | None = None,
    input_s: tuple[float, float] = (0.0, 0.0),
) -> Table:
    """Index points measured on `device`; arguments as of `table_of`."""
    shapes = Shapes.of(np.concatenate([t.shapes for t in points]))
    seconds = np.concatenate([t.seconds for t in points])
    spread = np.concatenate([t.spread for t in points])
    return table_of(kind, dtype, shapes, seconds, spread, device, floored, error, input_s)


def table_of(
    kind: str,
    dtype: str,
    shapes: Shapes,
    seconds: NDArray[np.floating[Any]],
    spread: NDArray[np.float64],
    device: Device,
    floored: bool,
    error: float | None,
    input_s: tuple[float, float],
) -> Table:
    """Points measured on `device`; `floored`: the least of them is a floor under all; the others as in `Table`."""
    # The order matters: the floor and the split's bound compare seconds of the matmul or layer alone.
    if any(input_s):
        seconds = without_input(kind, shapes.columns(), seconds, dtype, device, input_s)
    if kind == MOE_LAYER:
        seconds = within_splits(shapes.sizes, shapes.codes, seconds)
    if floored and kind == ATTENTION_DECODE:
        seconds = read_from_memory(shapes.columns(), seconds, dtype, device)
    # The quickest of thousands of points is little but a launch. A profile's few points may all be large.
    floor_s = float(seconds.min()) if floored else 0.0
    # Attention has tiles too, but its rows differ in length under a causal mask, so waves are no steps there.
    in_waves = kind in MATMULS and device.sm_count > 0
    return Table(kind, dtype, device, shapes, seconds, spread, floor_s, error, in_waves, input_s)


def without_input(
    kind: str,
    shapes: Columns,
    seconds: NDArray[np.floating[Any]],
    dtype: str,
    device: Device,
    input_s: tuple[float, float],
) -> NDArray[np.float64]:
    """Seconds of measured matmuls without the quantizing of their inputs.

    Of short ones that is a small difference of two measurements, so what is left is no less than the roofline at `BEST`
    of its speed, nor a tenth of what was measured.
    """
    # [batch, m, k]: only the activations are quantized, since weights are so once and for all.
    elements = shapes[0] * shapes[1] * shapes[3]
    seconds = seconds.astype(np.float64)
    left = seconds - input_s[0] - input_s[1] * elements
    least: NDArray[np.float64] = np.maximum(bounds(kind, shapes, dtype, device) / BEST, 0.1 * seconds)
    return np.maximum(left, least)


def read_from_memory(
    shapes: Columns, seconds: NDArray[np.floating[Any]], dtype: str, device: Device
) -> NDArray[np.floating[Any]]:
    """Measured decodes, no faster than memory, at `READ` of its bandwidth, where some are.

    An A100's reach 1.7 of it, with 4 GB of keys and values: their pages were a few, read again from the L2 cache. On
    other GPUs the fastest has 0.96, and all stand.
    """
    least = bounds(ATTENTION_DECODE, shapes, dtype, device)
    return np.maximum(seconds, least / READ) if (seconds < least).any() else seconds


def measured_bytes(shape: tuple[int, ...], dtype: str) -> float:
    """Bytes that a measured matmul moved: operands in `dtype`, the result in 16 bits at least."""
    batch, m, n, k = shape
    size = dtype_bytes(dtype)
    # A 16-bit result even of fp8 operands: the points come from layers whose next operator takes bf16.
    return batch * (size * (m * k + k * n) + max(size, 2.0) * m * n)


def bounds(kind: str, shapes: Columns, dtype: str, device: Device) -> NDArray[np.float64]:
    """Seconds of the roofline, which efficiency is relative to."""
    # A kind that has no flops is bound by memory, and its dtype need not have a peak on the device.
    moved_s = shape_bytes(kind, shapes, dtype) / device.bandwidth_bytes_per_s
    return np.maximum(shape_flops(kind, shapes) / device.peak(dtype), moved_s) if kind in COUNTED else moved_s


# Three sizes span what cuBLAS picks. The surface has a slope for each and finds by itself which of them explains.
TILES = ((128, 128), (256, 128), (64, 64))  # of results, by a thread block
_TILE_ROWS, _TILE_WIDTHS = np.array(TILES, dtype=np.float64).T


def waves(
    batch: NDArray[np.float64] | float, m: NDArray[np.float64] | float, n: NDArray[np.float64] | float, sm_count: int
) -> NDArray[np.float64]:
    """log of what is computed over what is asked for, where matmuls take whole tiles, in waves of one a multiprocessor.

    For each of `TILES`, the last dimension: which of them the library took is not known.
    """
    tiles = batch * np.ceil(m / _TILE_ROWS) * np.ceil(n / _TILE_WIDTHS)
    # A last wave that is not full takes as long as a full one. Tiles at the edges are computed whole.
    computed = np.ceil(tiles / sm_count) * sm_count * _TILE_ROWS * _TILE_WIDTHS
    return np.asarray(np.log(computed / (batch * m * n)), dtype=np.float64)


def lookup(table: Table, kind: str, shape: tuple[int, ...], sm_count: int) -> tuple[float, float, float] | None:
    """Efficiency at a shape on `sm_count` multiprocessors, octaves outside the measured range, and the error of such
    predictions.

    Full attention where only causal was measured: its efficiency at the same sizes, and a little doubt.
    """
    causal, doubt = (shape[-1], 0.0) if kind in ATTENTION else (0, 0.0)
    surface = table.surfaces.get(causal)
    # Table of the other flag alone: the roofline beneath already halves causal flops, so efficiencies compare.
    if surface is None and len(table.surfaces) == 1:
        (surface,), doubt = table.surfaces.values(), 0.1
    if surface is None:
        return None
    log2: list[float] = np.log2(np.maximum(shape, 1)).tolist()
    # Waves of the simulated GPU: a matmul that fills the measured one's last wave may not fill this one's.
    beside = waves(float(shape[0]), float(shape[1]), float(shape[2]), sm_count) if table.in_waves else None
    found = surface.at(coordinates(kind, log2), beside)
    if found is None:
        return None
    return math.exp(found[0]), found[1], math.hypot(surface.leave_one_out_error(), doubt)
