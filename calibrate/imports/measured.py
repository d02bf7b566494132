"""Tables of measured kernels on their way into a profile or a shipped file, which `sim.prices.kernel_file` reads."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.core.dtypes import peak_flops_per_s
from sim.core.operator_kinds import COUNTED
from sim.core.quantization import TABLE_FORMATS
from sim.prices.kernel_file import COMPRESSED, TYPES, TableName
from sim.prices.kernel_shapes import Shapes
from sim.prices.kernel_tables import Table, make_table
from sim.prices.profile import PointTable
from sim.prices.roofline import Device

THIN = 0.02


class MeasuredTable(NamedTuple):
    """Hold measured kernels: `shapes` [points, dimensions], `seconds` [points]. `kernels`: what the source calls them;
    `error` and `input_s` as in a file."""

    name: TableName
    shapes: NDArray[np.integer[Any]]
    seconds: NDArray[np.floating[Any]]
    kernels: str = ""
    error: float = 0.1
    input_s: tuple[float, float] = (0.0, 0.0)


def thinned(table: MeasuredTable, runs: int) -> MeasuredTable:
    """Leave out points within `THIN` of the line, in logarithms, between those that stay on both sides of them along
    dimension `runs` (Douglas and Peucker 1973)."""
    shapes, order = table.shapes, np.arange(len(table.seconds))
    rest = [d for d in range(shapes.shape[1]) if not (shapes[:, d] == shapes[:, runs]).all()]
    order = np.lexsort((shapes[:, runs], *(shapes[:, d] for d in rest)))
    lines = np.flatnonzero((np.diff(shapes[order][:, rest], axis=0) != 0).any(axis=1)) + 1
    x, y = np.log(shapes[order, runs]), np.log(table.seconds[order])
    keep = np.zeros(len(order), dtype=bool)
    for start, end in zip([0, *lines.tolist()], [*lines.tolist(), len(order)], strict=True):
        parts = [(start, end - 1)]
        while parts:
            a, b = parts.pop()
            keep[[a, b]] = True
            if b - a < 2:
                continue
            line = np.interp(x[a + 1 : b], x[[a, b]], y[[a, b]])
            off = np.abs(y[a + 1 : b] - line)
            worst = int(off.argmax())
            if off[worst] > THIN:
                parts += [(a, a + 1 + worst), (a + 1 + worst, b)]
    chosen = np.sort(order[keep])
    return table._replace(shapes=shapes[chosen], seconds=table.seconds[chosen])


def as_table(measured: MeasuredTable, device: Device) -> Table:
    """Return the table as the simulator makes it of points measured on `device`."""
    op, dtype, _ = measured.name
    kind, _, form = op.partition(":")
    count = len(measured.seconds)
    shapes, seconds = measured.shapes.astype(np.int64), measured.seconds.astype(np.float64)
    points = PointTable(op, dtype, shapes, seconds, np.zeros(count), np.ones(count, dtype=np.int64))
    return make_table(kind, dtype, [points], device, True, None, measured.input_s, TABLE_FORMATS.get(form))


def left_out_error(measured: MeasuredTable, device: Device) -> float:
    """Compute `Surface.leave_one_out_error` of a table, so that no simulation needs to compute it again."""
    op, dtype, _ = measured.name
    if op.partition(":")[0] not in COUNTED or peak_flops_per_s(device.peak_flops_per_s, dtype) is None:
        return 0.1
    surfaces = as_table(measured, device).surfaces.values()
    return round(max(surface.leave_one_out_error() for surface in surfaces), 4)


def write_kernels(path: Path, tables: Iterable[MeasuredTable]) -> None:
    """Write a file that `KernelFile` reads."""
    columns, codes, named = dict[str, NDArray[Any]](), dict[str, NDArray[Any]](), dict[str, str]()
    for table in tables:
        key, shapes = "|".join(filter(None, table.name)), Shapes.of(table.shapes.astype(np.int64))
        small = max(map(len, shapes.sizes)) <= 256
        codes[f"{key}|codes"] = shapes.codes.astype(np.uint8 if small else np.uint16)
        columns |= {
            f"{key}|seconds": table.seconds.astype(np.float32),
            f"{key}|sizes": np.concatenate(shapes.sizes),
            f"{key}|counts": np.array([len(sizes) for sizes in shapes.sizes], dtype=np.int32),
            f"{key}|error": np.array([table.error]),
        }
        if any(table.input_s):
            columns[f"{key}|input_s"] = np.array(table.input_s)
        if table.kernels:
            named[key] = table.kernels
    names = {np.dtype(kind): name for name, kind in (*TYPES.items(), *COMPRESSED.items())}
    header: dict[str, object] = {"__metadata__": named} if named else {}
    parts, end = list[bytes](), 0
    for key, array in sorted((columns | codes).items()):
        raw = np.ascontiguousarray(array).tobytes()
        if key in codes:
            raw = zlib.compress(raw, 9)
            raw += b" " * (-len(raw) % 4)  # what follows is read in place
        parts.append(raw)
        start, end = end, end + len(raw)
        header[key] = {"dtype": names[array.dtype], "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the columns to 8 bytes where their sizes allow it
    path.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *parts]))
