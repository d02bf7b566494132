"""The shipped files of measured kernels, hundreds of thousands of them.

A file is in the safetensors layout: the length of a header, the header (JSON: each column's type, shape and place), the
columns. Of an operator these are `OP|DTYPE|seconds` [points]; `OP|DTYPE|sizes`, the few that occur in the first
dimension, in the second, ..., `OP|DTYPE|counts` of each; `OP|DTYPE|codes` [dimensions, points], which of its
dimension's sizes a point has; `OP|DTYPE|error`. Only the operators that a run asks for are read. (The `safetensors`
package reads no faster, 0.15 ms an operator; it would be one more compiled package that everybody must install, and
2 ms of a run's start.)

The 8- and 4-bit matmuls were measured through a serving framework's linear layer, which first quantizes its 16-bit
input. What that takes is `OP|DTYPE|input_s` [seconds, seconds an element of the input].
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

TYPES = {"U8": np.uint8, "I32": np.int32, "F32": np.float32, "F64": np.float64}  # in a file's header
SHIPPED_KERNELS = Path(__file__).parents[1] / "presets" / "kernels"


class KernelFile:
    """A shipped file of measured kernels, read operator by operator."""

    def __init__(self, name: str) -> None:
        self._path = SHIPPED_KERNELS / f"{name}.safetensors"
        try:
            # A profile is user input. A name such as `../x` must not lead to other files.
            if self._path.parent != SHIPPED_KERNELS:
                raise FileNotFoundError(name)
            with self._path.open("rb") as file:
                # safetensors: eight bytes of header length, then the header, then the columns, counted from its end.
                self._start = 8 + int.from_bytes(file.read(8), "little")
                self._columns = json.loads(file.read(self._start - 8))
        except (OSError, ValueError):
            known = sorted(p.stem for p in SHIPPED_KERNELS.glob("*.safetensors"))
            raise InputError(f"profile: kernels: found {name[:60]!r}; allowed: {', '.join(known)}") from None
        self.tables = frozenset(tuple(key.split("|")[:2]) for key in self._columns)

    def points(self, op: str, dtype: str) -> tuple[Shapes, NDArray[np.float32], float]:
        """Shapes and seconds of an operator, and the relative error of predicting each point from the others."""
        found = self._read(op, dtype)
        sizes, ends = found["sizes"].astype(np.float64), accumulate(found["counts"].tolist(), initial=0)
        shapes = Shapes([sizes[start:end] for start, end in pairwise(ends)], found["codes"])
        return shapes, found["seconds"], float(found["error"][0])

    def table(self, op: str, dtype: str) -> tuple[PointTable, float]:
        """All points of an operator, and the error as in `points`."""
        points, seconds, error = self.points(op, dtype)
        count, shapes = len(seconds), np.column_stack(points.columns()).astype(np.int64)
        # The shipped files hold one median a point, without its spread or its number of samples.
        zeros, ones = np.zeros(count), np.ones(count, dtype=np.int64)
        return PointTable(op, dtype, shapes, seconds.astype(np.float64), zeros, ones), error

    def input_s(self, op: str, dtype: str) -> tuple[float, float]:
        """Time of quantizing the input in an operator's points: seconds, and seconds an element; mostly zeros."""
        if f"{op}|{dtype}|input_s" not in self._columns:
            return 0.0, 0.0
        start_s, element_s = self._read(op, dtype)["input_s"].tolist()
        return start_s, element_s

    def _read(self, op: str, dtype: str) -> dict[str, NDArray[Any]]:
        """The columns of an operator, which lie side by side."""
        own = {key.split("|")[2]: c for key, c in self._columns.items() if key.startswith(f"{op}|{dtype}|")}
        start = min(c["data_offsets"][0] for c in own.values())
        # One seek and one read bring all columns of the operator. A buffer would copy tens of megabytes again.
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
    """A shipped file, opened once a process."""
    return KernelFile(name)
