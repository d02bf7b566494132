"""Records of a calibration's measurements, the file from which it resumes, and the profile made of them."""

from __future__ import annotations

import datetime
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from calibrate.timings.timing import Timing
from sim.core.errors import InputError
from sim.core.files import read_json, write_json
from sim.prices.coefficients import Coefficient, coefficients_from
from sim.prices.profile import CollectiveTable, Facts, PointTable, Profile

FORMAT = "profile-partial/1"
STALE_S = 60.0


class Point(NamedTuple):
    """A measured kernel; `op` and `shape` as in `sim.prices.operator_prices`."""

    op: str
    dtype: str
    shape: tuple[int, ...]
    seconds: float
    spread: float
    samples: int


class Collective(NamedTuple):
    """A measured collective of `ranks` ranks on one node; `bytes` as nccl-tests counts them."""

    op: str
    ranks: int
    bytes: float
    seconds: float
    spread: float
    ranks_per_core: float = 1.0


class Constant(NamedTuple):
    """A coefficient of the profile and how it was measured."""

    name: str
    value: float
    source: str


Record = Point | Collective | Constant
_TYPES: dict[str, type[Point] | type[Collective] | type[Constant]] = {
    "point": Point,
    "collective": Collective,
    "constant": Constant,
}


def point(op: str, dtype: str, shape: tuple[int, ...], timing: Timing) -> Point:
    """Return the point of a timed kernel."""
    return Point(op, dtype, shape, timing.seconds, timing.spread, timing.samples)


def to_json(record: Record) -> list[object]:
    """Return a record as a list for JSON: its kind, then its fields."""
    return [type(record).__name__.lower(), *record]


def from_json(row: list[object]) -> Record:
    """Return the record that `to_json` wrote.

    Raises:
        TypeError, ValueError, KeyError: if it is no such record.
    """
    name, *fields = row
    if name == "point":
        fields[2] = tuple(fields[2])  # type: ignore[arg-type]
    return _TYPES[str(name)](*fields)  # type: ignore[arg-type]


class Partial:
    """`PROFILE.json.partial`: the records of every finished measurement by its key. The file is complete at any time.

    A file of another machine, other software or other settings is ignored.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, Facts]) -> None:
        self.path = path
        self._fingerprint = {k: dict(v) for k, v in fingerprint.items()}
        self._done: dict[str, list[Record]] = self._load()
        for left in path.parent.glob(f".{path.name}.*.tmp"):  # left by a killed run
            with suppress(FileNotFoundError):
                if left.stat().st_mtime < time.time() - STALE_S:  # another run may be writing a newer one
                    left.unlink()

    def __contains__(self, key: str) -> bool:
        return key in self._done

    def __len__(self) -> int:
        return len(self._done)

    def records(self, keys: Iterable[str]) -> Iterator[Record]:
        for key in keys:
            yield from self._done.get(key, ())

    def add(self, key: str, records: Iterable[Record]) -> None:
        """Add one measurement and write the file."""
        self._done[key] = list(records)
        done = {k: [to_json(r) for r in rows] for k, rows in self._done.items()}
        write_json(self.path, {"format": FORMAT, "fingerprint": self._fingerprint, "done": done})

    def _load(self) -> dict[str, list[Record]]:
        if not self.path.exists():
            return {}
        try:
            data = read_json(self.path)
            if not isinstance(data, dict) or data["format"] != FORMAT:
                return {}
            if data["fingerprint"] != self._fingerprint:
                return {}
            return {key: [from_json(row) for row in rows] for key, rows in data["done"].items()}
        except (InputError, KeyError, TypeError, ValueError, AttributeError):
            return {}  # not a file of this format: start over


def make_profile(name: str, facts: Mapping[str, Facts], records: Iterable[Record]) -> Profile:
    """Make a profile of all records: points by operator and dtype, collectives by operator and ranks.

    The highest matmul rate of each dtype becomes the roofline's peak on this machine.
    """
    points: dict[tuple[str, str], dict[tuple[int, ...], Point]] = defaultdict(dict)
    groups: dict[tuple[str, int, float], dict[float, Collective]] = defaultdict(dict)
    coefficients: dict[str, Coefficient] = {}
    for record in records:
        if isinstance(record, Point):
            points[record.op, record.dtype][record.shape] = record
        elif isinstance(record, Collective):
            groups[record.op, record.ranks, record.ranks_per_core][record.bytes] = record
        else:
            coefficients[record.name] = Coefficient(record.value, record.source)
    for dtype, rate in _peaks(points).items():
        coefficients[f"peak_{dtype}_flops_per_s"] = Coefficient(rate, "the fastest matmul measured")
    return Profile(
        name,
        "measured by calibrate.run",
        datetime.date.today().isoformat(),
        hardware=facts["hardware"],
        software=facts["software"],
        settings=facts["settings"],
        coefficients=coefficients_from(coefficients),
        points=tuple(_point_table(op, dtype, rows) for (op, dtype), rows in points.items()),
        collectives=tuple(_collective_table(*sort, rows) for sort, rows in groups.items()),
    )


def _peaks(points: Mapping[tuple[str, str], Mapping[tuple[int, ...], Point]]) -> dict[str, float]:
    peaks: dict[str, float] = {}
    for (op, dtype), rows in points.items():
        if op.startswith("gemm"):
            rates = [2.0 * s[0] * s[1] * s[2] * s[3] / p.seconds for s, p in rows.items()]
            peaks[dtype] = max(peaks.get(dtype, 0.0), *rates)
    return peaks


def _point_table(op: str, dtype: str, rows: Mapping[tuple[int, ...], Point]) -> PointTable:
    ordered = [rows[shape] for shape in sorted(rows)]
    return PointTable(
        op,
        dtype,
        np.array([p.shape for p in ordered], dtype=np.int64),
        np.array([p.seconds for p in ordered]),
        np.array([p.spread for p in ordered]),
        np.array([p.samples for p in ordered], dtype=np.int64),
    )


def _collective_table(op: str, ranks: int, ranks_per_core: float, rows: Mapping[float, Collective]) -> CollectiveTable:
    ordered = [rows[size] for size in sorted(rows)]
    return CollectiveTable(
        op,
        ranks,
        np.array([c.bytes for c in ordered], dtype=np.float64),
        np.array([c.seconds for c in ordered]),
        np.array([c.spread for c in ordered]),
        ranks_per_core,
    )
