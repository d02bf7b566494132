"""Read the shipped files of measured kernels, which hold hundreds of thousands of points.

A file has the safetensors layout: the length of a header, the header (JSON: type, shape and position of each column),
the columns. The columns of an operator are `OP|DTYPE|seconds` [points]; `OP|DTYPE|sizes`, the sizes that occur in the
first dimension, in the second, and so on; `OP|DTYPE|counts`, their number in each dimension; `OP|DTYPE|codes`
[dimensions, points], the index of each point's size in its dimension; and `OP|DTYPE|error`. Only operators that a run
needs are read. The package `safetensors` is not used: it reads no faster (0.15 ms for an operator), takes 2 ms of a
run's start, and would be one more compiled package to install.

8- and 4-bit matmuls were measured through a serving framework's linear layer, which first quantizes its 16-bit input.
`OP|DTYPE|input_s` has the time of the quantization: [seconds, seconds for each element of the input].
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.core.errors import InputError
from sim.prices.kernel_shapes import Shapes
from sim.prices.profile import PointTable

TYPES = {"U8": np.uint8, "I32": np.int32, "F32": np.float32, "F64": np.float64}  # types by their names in the header
SHIPPED_KERNELS = Path(__file__).parents[1] / "presets" / "kernels"


class KernelFile:
    """Read a shipped file of measured kernels, operator by operator."""

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
                self._columns = json.loads(file.read(self._start - 8))
        except (OSError, ValueError):
            known = sorted(p.stem for p in SHIPPED_KERNELS.glob("*.safetensors"))
            raise InputError(f"profile: kernels: found {name[:60]!r}; allowed: {', '.join(known)}") from None
        self.tables = frozenset(tuple(key.split("|")[:2]) for key in self._columns)

    def points(self, op: str, dtype: str) -> tuple[Shapes, NDArray[np.float32], float]:
        """Return shapes and seconds of an operator, and the relative error of predicting each point from the others."""
        found = self._read(op, dtype)
        sizes, ends = found["sizes"].astype(np.float64), accumulate(found["counts"].tolist(), initial=0)
        shapes = Shapes([sizes[start:end] for start, end in pairwise(ends)], found["codes"])
        return shapes, found["seconds"], float(found["error"][0])

    def table(self, op: str, dtype: str) -> tuple[PointTable, float]:
        """Return all points of an operator, and the error as in `points`."""
        points, seconds, error = self.points(op, dtype)
        count, shapes = len(seconds), np.column_stack(points.columns()).astype(np.int64)
        # The shipped files hold only the median of each point.
        zeros, ones = np.zeros(count), np.ones(count, dtype=np.int64)
        return PointTable(op, dtype, shapes, seconds.astype(np.float64), zeros, ones), error

    def input_s(self, op: str, dtype: str) -> tuple[float, float]:
        """Return the time of quantizing the input in an operator's points: seconds, and seconds for each element."""
        if f"{op}|{dtype}|input_s" not in self._columns:
            return 0.0, 0.0
        start_s, element_s = self._read(op, dtype)["input_s"].tolist()
        return start_s, element_s

    def _read(self, op: str, dtype: str) -> dict[str, NDArray[Any]]:
        """Return the columns of an operator, which are contiguous in the file."""
        own = {key.split("|")[2]: c for key, c in self._columns.items() if key.startswith(f"{op}|{dtype}|")}
        start = min(c["data_offsets"][0] for c in own.values())
        # One read gets all columns of the operator. A buffer would copy tens of megabytes again.
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._start + start)
            raw = file.read(max(c["data_offsets"][1] for c in own.values()) - start)
        return {
            key: np.frombuffer(raw, TYPES[c["dtype"]], math.prod(c["shape"]), c["data_offsets"][0] - start).reshape(
                c["shape"]
            )
            for key, c in own.items()
        }


@lru_cache(maxsize=16)
def kernel_file(name: str) -> KernelFile:
    """Return a shipped file, which is opened once in a process."""
    return KernelFile(name)
