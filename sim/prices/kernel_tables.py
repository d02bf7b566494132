"""Turn measured kernels into efficiency surfaces.

The interpolated quantity is the efficiency

    (roofline seconds + floor) / measured seconds.

`floor` is the time of the smallest kernel; with it the efficiency of small kernels is as smooth as that of large ones.
Of hundreds of thousands of points only those nearest to a query are computed.

If kernels were measured with the quantization of their input (`sim.prices.kernel_file`), its time is subtracted,
because a program has this conversion as a separate operator. The result of such kernels has 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from sim.core.dtypes import dtype_bytes
from sim.core.operator_kinds import ATTENTION, ATTENTION_DECODE, COUNTED, MATMULS, MOE_LAYER, shape_flops
from sim.prices.expert_bounds import within_bounds
from sim.prices.interpolation import Surface
from sim.prices.kernel_shapes import Columns, Shapes, coordinates
from sim.prices.profile import PointTable
from sim.prices.roofline import Device, shape_bytes

# The part of the peak that no 8- or 4-bit matmul exceeds without its quantization. Large 16-bit matmuls reach about as
# much. The value was chosen by judgement: the history records no measurement and no fit for it.
BEST = 0.8
# The largest part of an A100's bandwidth that its longest measured decodes reach with one KV head for each query head:
# 0.862 among the ten largest caches of the A100's kernels (AIConfigurator). It is read off these kernels alone.
READ = 0.86


HEADS = (1, 2, 4)  # attention's coordinates of heads, KV heads and head size


class Table(Struct, frozen=True, eq=False, dict=True):
    """Hold an operator's points on a device.

    `floor_s`: added to the roofline in the efficiency. `error`: as in `Surface`, None if unknown. `input_s`: time of
    quantizing the input, which `adjusted` subtracts from `seconds`; see `KernelFile.input_s`. `weight_bytes`: of a
    weight in a format of its own (`sim.core.quantization.TABLE_FORMATS`). `source`, `kernels`: who measured it in which
    engine, and what that source calls the kernels.
    """

    kind: str
    dtype: str
    device: Device
    shapes: Shapes
    seconds: NDArray[np.floating[Any]]
    spread: NDArray[np.float64]
    error: float | None
    input_s: tuple[float, float] = (0.0, 0.0)
    floor_s: float = 0.0
    weight_bytes: float | None = None
    source: str = ""
    kernels: str = ""

    @property
    def in_waves(self) -> bool:
        """Tell whether efficiency depends on how full the waves of tiles are."""
        # Attention has tiles too, but under a causal mask their rows differ in length, so waves make no steps.
        return self.kind in MATMULS and self.device.sm_count > 0

    @cached_property
    def weights(self) -> frozenset[tuple[float, ...]]:
        """Return the sizes of the weights of matmuls or experts that were measured (`weights_of`)."""
        return frozenset(weights_of(self.kind, shape) for shape in zip(*self.shapes.columns(), strict=True))

    @cached_property
    def single(self) -> bool:
        """Tell whether only matmuls without a batch were measured."""
        return self.kind in MATMULS and self.shapes.sizes[0].max() == 1

    @cached_property
    def surfaces(self) -> dict[int, Surface]:
        """Return surfaces of the log efficiency by causal flag (0 for operators without one)."""
        where = self.shapes.coordinates(self.kind).T
        if self.kind not in ATTENTION:
            beside = _Waves(self.shapes, self.device.sm_count) if self.in_waves else None
            besides = len(TILES) if self.in_waves else 0
            steady = (2, 3) if self.kind in MATMULS else HEADS if self.kind == ATTENTION_DECODE else ()
            return {0: Surface(where, _LogEfficiency(self), self.error, beside, besides, steady)}
        # Causal kernels skip half of the tiles, so the two flags have separate surfaces.
        flags = self.shapes.sizes[-1].astype(int).tolist()
        if len(flags) == 1:
            return {flags[0]: Surface(where, _LogEfficiency(self), self.error, steady=HEADS)}
        of_flag = {flag: np.flatnonzero(self.shapes.codes[-1] == code) for code, flag in enumerate(flags)}
        return {
            f: Surface(where[rows], _LogEfficiency(self)[rows], self.error, steady=HEADS) for f, rows in of_flag.items()
        }

    def quantizing_s(self, shape: tuple[int, ...]) -> float:
        """Return the seconds of quantizing a matmul's [m, k] input in the measurement of its points."""
        batch, m, _, k = shape
        return self.input_s[0] + self.input_s[1] * batch * m * k

    def exact(self, shape: tuple[int, ...]) -> tuple[float, float] | None:
        """Return the measured seconds and spread of exactly this shape; None if it was not measured."""
        found = self.shapes.last(shape) if len(shape) == len(self.shapes.codes) else None
        return None if found is None else (float(self.seconds[found]), float(self.spread[found]))


def weights_of(kind: str, shape: Sequence[float]) -> tuple[float, ...]:
    """Return the sizes of a matmul's or a rank's experts' weights: n and k, or hidden, width, choices and experts."""
    if kind == MOE_LAYER:
        _, hidden, ffn, top_k, experts, expert_tp, ep = shape
        return hidden, ffn / expert_tp, top_k, experts / ep
    return tuple(shape[2:])


KEEP_ALL_FROM = 64  # number of queries after which all logarithms of a table are kept
MOST_LOGARITHMS_KEPT = 40_000  # the most points of a table whose logarithms are kept


class _LogEfficiency:
    """Compute log(efficiency) of selected points of a table."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._asked = 0
        self._all: NDArray[np.float64] | None = None

    def __getitem__(self, points: NDArray[np.intp]) -> NDArray[np.float64]:
        if self._all is not None:
            found: NDArray[np.float64] = self._all[points]
            return found
        self._asked += 1
        # A few queries of a dozen points are faster than the logarithms of a hundred thousand points.
        if self._asked > KEEP_ALL_FROM and len(self._table.seconds) <= MOST_LOGARITHMS_KEPT:
            self._all = self._of(slice(None))
        return self._of(points)

    def _of(self, points: NDArray[np.intp] | slice) -> NDArray[np.float64]:
        table = self._table
        roofline_s = bounds(table.kind, table.shapes.columns(points), table.dtype, table.device, table.weight_bytes)
        return np.log((roofline_s + table.floor_s) / table.seconds[points])


class _Waves:
    """Compute `waves` of points, once for the few sizes that occur."""

    def __init__(self, shapes: Shapes, sm_count: int) -> None:
        batch, m, n = shapes.sizes[:3]
        # Waves do not depend on k, so a table over the few batches, m and n is far smaller than one over all points.
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
    weight_bytes: float | None = None,
) -> Table:
    """Make a table of points measured on `device`; `floored`: as for `adjusted`, others as in `Table`."""
    shapes = Shapes.of(np.concatenate([t.shapes for t in points]))
    seconds = np.concatenate([t.seconds for t in points])
    spread = np.concatenate([t.spread for t in points])
    table = Table(kind, dtype, device, shapes, seconds, spread, error, input_s, weight_bytes=weight_bytes)
    return adjusted(table, floored)


def adjusted(table: Table, floored: bool) -> Table:
    """Return the table with seconds of the kernels alone; `floored`: the fastest point is the floor."""
    # The input's time is subtracted first, because the floor and the split's bound are about the matmul or layer alone.
    seconds = _without_input(table) if any(table.input_s) else table.seconds
    if table.kind == MOE_LAYER:
        seconds = within_bounds(table.shapes.sizes, table.shapes.codes, seconds)
    if floored and table.kind == ATTENTION_DECODE and table.weight_bytes is None:
        seconds = _read_from_memory(table, seconds)
    # The fastest of thousands of points is hardly more than a launch. A profile's few points may all be large.
    return replace(table, seconds=seconds, floor_s=float(seconds.min()) if floored else 0.0)


def _without_input(table: Table) -> NDArray[np.float64]:
    """Return the seconds of measured matmuls without the quantization of their inputs.

    For short matmuls this is a small difference of two measurements; therefore the result is at least the roofline at
    `BEST` of its speed, and at least a tenth of the measured time.
    """
    shapes, seconds = table.shapes.columns(), table.seconds.astype(np.float64)
    # [batch, m, k]: only activations are quantized, because weights are stored quantized.
    left = seconds - table.input_s[0] - table.input_s[1] * (shapes[0] * shapes[1] * shapes[3])
    bound = bounds(table.kind, shapes, table.dtype, table.device, table.weight_bytes)
    least: NDArray[np.float64] = np.maximum(bound / BEST, 0.1 * seconds)
    return np.maximum(left, least)


def _read_from_memory(table: Table, seconds: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """Return measured decodes; if some are faster than memory, limit all to `READ` of its bandwidth.

    An A100's decodes with 4 GB of keys and values reach 1.7 times the bandwidth: they had few pages, which they read
    again from the L2 cache. On other GPUs the fastest decode reaches 0.96, so nothing is changed.
    """
    least = bounds(ATTENTION_DECODE, table.shapes.columns(), table.dtype, table.device)
    return np.maximum(seconds, least / READ) if (seconds < least).any() else seconds


def measured_bytes(shape: tuple[int, ...], dtype: str) -> float:
    """Return the bytes that a measured matmul moved: operands in `dtype`, the result in at least 16 bits."""
    batch, m, n, k = shape
    size = dtype_bytes(dtype)
    # fp8 operands also have a 16-bit result, because the next operator of a measured layer takes bf16.
    return batch * (size * (m * k + k * n) + max(size, 2.0) * m * n)


def bounds(
    kind: str, shapes: Columns, dtype: str, device: Device, weight_bytes: float | None = None
) -> NDArray[np.float64]:
    """Return the seconds of the roofline, to which efficiency is relative."""
    # A kind without FLOPs is bound by memory, and the device may have no peak for its dtype.
    moved_s = shape_bytes(kind, shapes, dtype, weight_bytes) / device.bandwidth_bytes_per_s
    return np.maximum(shape_flops(kind, shapes) / device.peak(dtype), moved_s) if kind in COUNTED else moved_s


# Three sizes span cuBLAS's choices. The surface has a slope for each, and the fit decides which one matters.
TILES = ((128, 128), (256, 128), (64, 64))  # rows and columns of the result that a thread block computes
_TILE_ROWS, _TILE_WIDTHS = np.array(TILES, dtype=np.float64).T


def waves(
    batch: NDArray[np.float64] | float, m: NDArray[np.float64] | float, n: NDArray[np.float64] | float, sm_count: int
) -> NDArray[np.float64]:
    """Return log(computed elements ÷ result elements) of matmuls that run whole waves of one tile per multiprocessor.

    The last dimension is `TILES`, because it is not known which of them the library chose.
    """
    tiles = batch * np.ceil(m / _TILE_ROWS) * np.ceil(n / _TILE_WIDTHS)
    # A partial last wave takes as long as a full one, and tiles at the edges are computed whole.
    computed = np.ceil(tiles / sm_count) * sm_count * _TILE_ROWS * _TILE_WIDTHS
    return np.asarray(np.log(computed / (batch * m * n)), dtype=np.float64)


def least_waves(batch: int, m: int, n: int, sm_count: int) -> float:
    """Return computed elements ÷ result elements with the best of `TILES`; 1 if the multiprocessors are unknown."""
    return math.exp(float(waves(batch, m, n, sm_count).min())) if sm_count > 1 else 1.0


def lookup(table: Table, kind: str, shape: tuple[float, ...], sm_count: int) -> tuple[float, float, float] | None:
    """Return the efficiency at a shape on `sm_count` multiprocessors, the octaves outside the measured range, and the
    relative error.

    If only the other causal flag was measured, its efficiency at the same sizes is taken, with more error.
    """
    causal, doubt = (int(shape[-1]), 0.0) if kind in ATTENTION else (0, 0.0)
    surface = table.surfaces.get(causal)
    # The roofline counts causal FLOPs half, so efficiencies of both flags can replace each other.
    if surface is None and len(table.surfaces) == 1:
        (surface,), doubt = table.surfaces.values(), 0.1
    if surface is None:
        return None
    log2: list[float] = np.log2(np.maximum(shape, 1)).tolist()
    # Waves are those of the simulated GPU, which may have other multiprocessors than the measured one.
    beside = waves(float(shape[0]), float(shape[1]), float(shape[2]), sm_count) if table.in_waves else None
    found = surface.at(coordinates(kind, log2), beside)
    if found is None:
        return None
    return math.exp(found[0]), found[1], math.hypot(surface.leave_one_out_error(), doubt)
