"""Read the shipped files of measured kernels, which hold hundreds of thousands of points.

A file has the safetensors layout: the length of a header, the header (JSON: type, shape and position of each column),
the columns. A table is named `OP|DTYPE`, or `OP|DTYPE|SOURCE` if it was measured in one release of an engine ("vLLM
0.24.0"); OP ends in `:FORMAT` where the dtype does not tell the operands' format (`sim.core.quantization`). Its columns
are `seconds` [points]; `sizes`, the sizes that occur in the first dimension, in the second, and so on; `counts`, their
number in each dimension; `codes` [dimensions, points], the index of each point's size in its dimension, compressed by
zlib; and `error`.
The header's `__metadata__` has what the source calls a table's kernels. Only tables that a run needs are read. The
package `safetensors` is not used: it reads no faster (0.15 ms for a table), takes 2 ms of a run's start, and would be
one more compiled package to install.

8- and 4-bit matmuls were measured through a serving framework's linear layer, which first quantizes its 16-bit input.
The column `input_s` has the time of the quantization: [seconds, seconds for each element of the input].
"""

from __future__ import annotations

import json
import math
import zlib
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.core.errors import InputError
from sim.prices.kernel_shapes import Shapes
from sim.prices.profile import PointTable

# Types by their names in the header, which are safetensors' own but for those of compressed columns.
TYPES = {"I32": np.int32, "F32": np.float32, "F64": np.float64}
COMPRESSED = {"ZU8": np.uint8, "ZU16": np.uint16}
SHIPPED_KERNELS = Path(__file__).parents[1] / "presets" / "kernels"


class TableName(NamedTuple):
    """Name a table: its operator, which ends in `:FORMAT` where its dtype does not tell the operands' format, the dtype
    in which it multiplies, and the engine and release that it was measured in."""

    op: str
    dtype: str
    source: str = ""


class KernelFile:
    """Read a shipped file of measured kernels, table by table."""

    def __init__(self, name: str) -> None:
        self._path = SHIPPED_KERNELS / f"{name}.safetensors"
        try:
            # A profile is user input: a name such as `../x` must not open other files.
            if self._path.parent != SHIPPED_KERNELS:
                raise FileNotFoundError(name)
            with self._path.open("rb") as file:
                # safetensors: eight bytes with the header's length, the header, the columns. Offsets count from its
                # end.
                self._start = 8 + int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(self._start - 8))
        except (OSError, ValueError):
            known = sorted(p.stem for p in SHIPPED_KERNELS.glob("*.safetensors"))
            raise InputError(f"profile: kernels: found {name[:60]!r}; allowed: {', '.join(known)}") from None
        self._kernels: dict[str, str] = header.pop("__metadata__", {})
        self._columns: dict[TableName, dict[str, Any]] = {}
        for key, place in header.items():
            table, _, column = key.rpartition("|")
            self._columns.setdefault(TableName(*table.split("|")), {})[column] = place
        self.tables = frozenset(self._columns)

    def kernels_of(self, name: TableName) -> str:
        """Return what the source calls a table's kernels; empty if it does not say."""
        return self._kernels.get("|".join(filter(None, name)), "")

    def points(self, op: str, dtype: str, source: str = "") -> tuple[Shapes, NDArray[np.float32], float]:
        """Return shapes and seconds of a table, and the relative error of predicting each point from the others."""
        found = self._read(TableName(op, dtype, source))
        sizes, ends = found["sizes"].astype(np.float64), accumulate(found["counts"].tolist(), initial=0)
        shapes = Shapes([sizes[start:end] for start, end in pairwise(ends)], found["codes"])
        return shapes, found["seconds"], float(found["error"][0])

    def table(self, op: str, dtype: str, source: str = "") -> tuple[PointTable, float]:
        """Return all points of a table, and the error as in `points`."""
        points, seconds, error = self.points(op, dtype, source)
        count, shapes = len(seconds), np.column_stack(points.columns()).astype(np.int64)
        # The shipped files hold only the median of each point.
        zeros, ones = np.zeros(count), np.ones(count, dtype=np.int64)
        return PointTable(op, dtype, shapes, seconds.astype(np.float64), zeros, ones), error

    def input_s(self, op: str, dtype: str, source: str = "") -> tuple[float, float]:
        """Return the time of quantizing the input in a table's points: seconds, and seconds for each element."""
        name = TableName(op, dtype, source)
        if "input_s" not in self._columns[name]:
            return 0.0, 0.0
        start_s, element_s = self._read(name)["input_s"].tolist()
        return start_s, element_s

    def _read(self, name: TableName) -> dict[str, NDArray[Any]]:
        """Return the columns of a table, which are contiguous in the file."""
        own = self._columns[name]
        start = min(c["data_offsets"][0] for c in own.values())
        # One read gets all columns of the table. A buffer would copy tens of megabytes again.
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._start + start)
            raw = file.read(max(c["data_offsets"][1] for c in own.values()) - start)
        return {key: _column(raw, c["dtype"], c["shape"], c["data_offsets"][0] - start) for key, c in own.items()}


def _column(raw: bytes, kind: str, shape: list[int], start: int) -> NDArray[Any]:
    if kind not in COMPRESSED:
        return np.frombuffer(raw, TYPES[kind], math.prod(shape), start).reshape(shape)
    return np.frombuffer(zlib.decompressobj().decompress(raw[start:]), COMPRESSED[kind]).reshape(shape)


@lru_cache(maxsize=16)
def kernel_file(name: str) -> KernelFile:
    """Return a shipped file, which is opened once in a process."""
    return KernelFile(name)
