"""Measured kernels as efficiency surfaces, and the shipped files that hold hundreds of thousands of them.

A shipped file is an npz of plain columns, `OP|DTYPE|shapes` [points, dimensions] and `OP|DTYPE|seconds`; only the
operators that a run asks for are read. What is interpolated is the efficiency

    (roofline seconds + floor) / measured seconds,

`floor` being what the least kernel takes: so a small kernel's efficiency is as smooth as a large one's.

The 8- and 4-bit matmuls were measured through a serving framework's linear layer, which first quantizes its 16-bit
input. What that takes, `OP|DTYPE|input_s` [seconds, seconds an element of the input], is taken off: a training step and
a served one have that conversion as an operator of their own. Their result has 16 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sim.dtypes import dtype_bytes
from sim.errors import InputError
from sim.prices.interpolation import Surface
from sim.prices.profile import PointTable
from sim.prices.roofline import ATTENTION, ATTENTION_DECODE, MATMULS, Device

BEST = 0.8  # what large matmuls reach of the peak, in 16 bits
READ = 0.86  # what the longest decodes reach of an A100's bandwidth where each query head has keys of its own
SHIPPED_KERNELS = Path(__file__).parents[1] / "presets" / "kernels"


class KernelFile:
    """A shipped file of measured kernels, read operator by operator."""

    def __init__(self, name: str) -> None:
        known = sorted(p.stem for p in SHIPPED_KERNELS.glob("*.npz"))
        if name not in known:
            raise InputError(f"profile: kernels: found {name[:60]!r}; allowed: {', '.join(known)}")
        self._file = np.load(SHIPPED_KERNELS / f"{name}.npz", allow_pickle=False)
        self.tables = frozenset(tuple(key.split("|")[:2]) for key in self._file.files)

    def table(self, op: str, dtype: str) -> tuple[PointTable, float]:
        """All points of an operator, and the relative error of predicting each from the others."""
        shapes = self._file[f"{op}|{dtype}|shapes"].astype(np.int64)
        seconds = self._file[f"{op}|{dtype}|seconds"].astype(np.float64)
        error = float(self._file[f"{op}|{dtype}|error"].item())
        count = len(seconds)
        return PointTable(op, dtype, shapes, seconds, np.zeros(count), np.ones(count, dtype=np.int64)), error

    def input_s(self, op: str, dtype: str) -> tuple[float, float]:
        """What quantizing the input takes in an operator's points: seconds, and seconds an element; mostly zeros."""
        key = f"{op}|{dtype}|input_s"
        start_s, element_s = self._file[key].tolist() if key in self._file.files else (0.0, 0.0)
        return start_s, element_s


@lru_cache(maxsize=16)
def kernel_file(name: str) -> KernelFile:
    """A shipped file, opened once a process."""
    return KernelFile(name)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """An operator's points, ready to be asked.

    `surfaces`: log efficiency by causal flag (0 where that has no meaning). `single`: no matmul of a batch was
    measured. `floor_s`: what is added to the roofline before efficiency is taken. `in_waves`: efficiency depends on how
    full the waves of tiles are. `input_s`: of quantizing the input, taken off `seconds`; see `KernelFile.input_s`.
    """

    shapes: NDArray[np.int64]
    seconds: NDArray[np.float64]
    spread: NDArray[np.float64]
    surfaces: dict[int, Surface]
    single: bool
    floor_s: float
    in_waves: bool
    input_s: tuple[float, float] = (0.0, 0.0)

    def quantizing_s(self, shape: tuple[int, ...]) -> float:
        """Seconds in which a matmul's [m, k] input was quantized where its points were measured."""
        batch, m, _, k = shape
        return self.input_s[0] + self.input_s[1] * batch * m * k

    def exact(self, shape: tuple[int, ...]) -> tuple[float, float] | None:
        """Measured seconds and spread of this very shape."""
        if len(shape) != self.shapes.shape[1]:
            return None
        columns = zip(self.shapes.T, shape, strict=True)  # rows of a few numbers are slow to compare
        found = np.flatnonzero(np.logical_and.reduce([column == size for column, size in columns]))
        return (float(self.seconds[found[-1]]), float(self.spread[found[-1]])) if len(found) else None


def make_table(
    kind: str, dtype: str, points: list[PointTable], device: Device, floored: bool = False, error: float | None = None,
    input_s: tuple[float, float] = (0.0, 0.0),
) -> Table:  # fmt: skip
    """Index points measured on `device`; `floored`: the least of them is a floor under all; `input_s` as in `Table`."""
    shapes = np.concatenate([t.shapes for t in points])
    seconds = np.concatenate([t.seconds for t in points])
    spread = np.concatenate([t.spread for t in points])
    if any(input_s):
        seconds = without_input(kind, shapes, seconds, dtype, device, input_s)
    if floored and kind == ATTENTION_DECODE:
        seconds = read_from_memory(shapes, seconds, dtype, device)
    floor_s = float(seconds.min()) if floored else 0.0
    log_efficiency = np.log((bounds(kind, shapes, dtype, device) + floor_s) / seconds)
    where, beside = coordinates(kind, shapes), waves(kind, shapes, device.sm_count)
    surfaces = {0: Surface(where, log_efficiency, error, beside)}
    if kind in ATTENTION:
        of_flag = {int(flag): shapes[:, -1] == flag for flag in set(shapes[:, -1].tolist())}
        surfaces = {flag: Surface(where[rows], log_efficiency[rows], error) for flag, rows in of_flag.items()}
    single = kind in MATMULS and bool((shapes[:, 0] == 1).all())
    return Table(shapes, seconds, spread, surfaces, single, floor_s, beside is not None, input_s)


def without_input(
    kind: str, shapes: NDArray[np.int64], seconds: NDArray[np.float64], dtype: str, device: Device,
    input_s: tuple[float, float],
) -> NDArray[np.float64]:  # fmt: skip
    """What is left of measured matmuls without quantizing their inputs; of short ones that is a small difference, so no
    less than the roofline at `BEST` of its speed, nor a tenth.
    """
    elements = (shapes[:, 0] * shapes[:, 1] * shapes[:, 3]).astype(np.float64)
    left = seconds - input_s[0] - input_s[1] * elements
    return np.maximum(left, np.maximum(bounds(kind, shapes, dtype, device) / BEST, 0.1 * seconds))


def read_from_memory(
    shapes: NDArray[np.int64], seconds: NDArray[np.float64], dtype: str, device: Device
) -> NDArray[np.float64]:
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
    return batch * (size * (m * k + k * n) + max(size, 2.0) * m * n)


def bounds(kind: str, shapes: NDArray[np.int64], dtype: str, device: Device) -> NDArray[np.float64]:
    """What efficiency is relative to: the roofline's seconds."""
    if kind not in MATMULS:
        return np.array([device.shape_seconds(kind, tuple(row), dtype) for row in shapes.tolist()])
    batch, m, n, k = (column.astype(np.float64) for column in shapes.T)
    moved = dtype_bytes(dtype) * batch * (m * k + k * n + m * n) / device.bandwidth_bytes_per_s
    return np.asarray(np.maximum(2 * batch * m * n * k / device.peak(dtype), moved), dtype=np.float64)


TILES = ((128, 128), (256, 128), (64, 64))  # of results, by a thread block


def waves(kind: str, shapes: NDArray[np.int64], sm_count: int) -> NDArray[np.float64] | None:
    """log of what is computed over what is asked for, where matmuls take whole tiles, in waves of one a multiprocessor.

    A column for each of `TILES`: which of them the library took is not known. None where there are no multiprocessors.
    """
    if kind not in MATMULS or not sm_count:
        return None
    batch, m, n, _ = (column.astype(np.float64) for column in shapes.T)
    columns = []
    for rows, width in TILES:
        tiles = batch * np.ceil(m / rows) * np.ceil(n / width)
        columns.append(np.log(np.ceil(tiles / sm_count) * sm_count * rows * width / (batch * m * n)))
    return np.column_stack(columns)


def coordinates(kind: str, shapes: NDArray[np.int64]) -> NDArray[np.float64]:
    """log2 of every dimension that efficiency depends on, each weighted by how much.

    Matmuls: batch, m, n, and k at half, for it only lengthens the loop of a tile. Attention: batch, heads, groups of
    key heads, mean length and mean head size. Weights from leaving a fifth of the points out: of attention 2 for the
    head size (it decides which kernel runs), 0.3 for key heads.
    """
    sizes = np.log2(np.maximum(shapes.T, 1), order="C")  # dimension by dimension, as distances are summed
    if kind in MATMULS:
        sizes[3] *= 0.5
    if kind not in ATTENTION:
        return sizes.T
    batch, heads, kv_heads, q_len, kv_len, d, dv = sizes[:7]
    return np.column_stack((batch, heads, 0.3 * kv_heads, (q_len + kv_len) / 2, d + dv))


def lookup(table: Table, kind: str, shape: tuple[int, ...], sm_count: int) -> tuple[float, float, float] | None:
    """Efficiency at a shape on `sm_count` multiprocessors, octaves outside the measured range, and the error of such
    predictions.

    Full attention where only causal was measured: its efficiency at the same sizes, and a little doubt.
    """
    causal, doubt = (shape[-1], 0.0) if kind in ATTENTION else (0, 0.0)
    surface = table.surfaces.get(causal)
    if surface is None and len(table.surfaces) == 1:
        (surface,), doubt = table.surfaces.values(), 0.1
    if surface is None:
        return None
    row = np.array([shape], dtype=np.int64)
    beside = waves(kind, row, sm_count) if table.in_waves else None
    found = surface.at(coordinates(kind, row)[0], None if beside is None else beside[0])
    if found is None:
        return None
    return math.exp(found[0]), found[1], math.hypot(surface.leave_one_out_error(), doubt)
