"""Profile: what was measured about a machine. `calibrate` writes it, `sim.prices.costs` reads it.

One JSON file, `"format": "profile/1"`. Points are kept in columns, one table for an operator and dtype, so
that ten thousand of them stay a small file that loads in milliseconds::

    {"format": "profile/1", "name": "my-node", "source": "calibrate.run", "date": "2026-01-31",
     "reference": "", "hardware": {"device": "cpu", ...}, "software": {"torch": "2.13.0"},
     "settings": {"threads": 1},
     "coefficients": {"launch_overhead_s": {"value": 5e-6, "source": "..."}},
     "points": [{"op": "gemm", "dtype": "fp32", "shape": [[1, 256, 768, 256]],
                 "seconds": [1.1e-3], "spread": [0.02], "samples": [40]}],
     "blocks": [{"key": "layer b=1 ...", "phase": "forward", "run": 0, "seconds": 0.002, "spread": 0.01}],
     "collectives": [{"op": "all_reduce", "ranks": 2, "bytes": [1024], "seconds": [1e-4], "spread": [0.1]}]}

`spread` is the median absolute deviation divided by the median, of `samples` repetitions. In a points table
both may be one number for the whole table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.files import write_text

FORMAT = "profile/1"
MAX_FILE_BYTES = 64 * 1024 * 1024
PHASES = ("forward", "backward", "input_grad", "weight_grad", "recompute", "optimizer", "inference")
SHIPPED = Path(__file__).parents[1] / "presets" / "profiles"

Facts = Mapping[str, str | int | float | bool]
T = TypeVar("T")


class Coefficient(NamedTuple):
    """One physical constant, in base units (the name ends with them), and where it comes from."""

    value: float
    source: str


class BlockPoint(NamedTuple):
    """Measured seconds of piece `run` (between two blocking communications) of a block's phase."""

    key: str
    phase: str
    run: int
    seconds: float
    spread: float


@dataclass(frozen=True, slots=True, eq=False)
class PointTable:
    """Measured kernels of one operator and dtype; `shapes` [points, dimensions] is read as in `sim.prices.costs`."""

    op: str
    dtype: str
    shapes: NDArray[np.int64]
    seconds: NDArray[np.float64]
    spread: NDArray[np.float64]
    samples: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class CollectiveTable:
    """Measured collectives of one sort and group size within a node, by bytes as nccl-tests counts."""

    op: str
    ranks: int
    bytes: NDArray[np.float64]
    seconds: NDArray[np.float64]
    spread: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """Everything known about a machine's speed.

    `reference` names the GPU preset that the points belong to; for a different or an overridden GPU they are
    scaled by the ratio of the two rooflines. Empty: measured on the simulated machine itself, so points stand
    as they are and the coefficients `memory_bandwidth_bytes_per_s` and `peak_DTYPE_flops_per_s` replace the
    data sheet's. `kernels` names a shipped file of measured kernels (see `sim.prices.kernels`), which belong to the
    `reference` too and are read as they are needed.
    """

    name: str
    source: str
    date: str = ""
    reference: str = ""
    hardware: Facts = field(default_factory=dict)
    software: Facts = field(default_factory=dict)
    settings: Facts = field(default_factory=dict)
    coefficients: Mapping[str, Coefficient] = field(default_factory=dict)
    points: tuple[PointTable, ...] = ()
    blocks: tuple[BlockPoint, ...] = ()
    collectives: tuple[CollectiveTable, ...] = ()
    kernels: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`; `from_json` reads it back unchanged."""
        return {
            "format": FORMAT,
            "name": self.name,
            "source": self.source,
            "date": self.date,
            "reference": self.reference,
            "hardware": dict(self.hardware),
            "software": dict(self.software),
            "settings": dict(self.settings),
            "coefficients": {k: c._asdict() for k, c in self.coefficients.items()},
            "points": [
                {
                    "op": t.op,
                    "dtype": t.dtype,
                    "shape": t.shapes.tolist(),
                    "seconds": t.seconds.tolist(),
                    "spread": t.spread.tolist(),
                    "samples": t.samples.tolist(),
                }
                for t in self.points
            ],
            "blocks": [b._asdict() for b in self.blocks],
            "collectives": [
                {
                    "op": t.op,
                    "ranks": t.ranks,
                    "bytes": t.bytes.tolist(),
                    "seconds": t.seconds.tolist(),
                    "spread": t.spread.tolist(),
                }
                for t in self.collectives
            ],
            "kernels": self.kernels,
        }

    @staticmethod
    def from_json(data: object, where: str = "profile") -> Profile:
        """Checks and reads plain data.

        Raises:
            InputError: naming `where`, the key, what was found and what is allowed.
        """
        return _profile(data, where)

    def save(self, path: str | Path) -> None:
        """Writes the file whole: beside it first, then renamed over it."""
        write_json(Path(path), self.to_json())


def write_json(path: Path, data: object) -> None:
    """Replaces `path` with `data` as JSON at once, so that a reader, or a kill, never meets half a file."""
    write_text(path, json.dumps(data, allow_nan=False))


def shipped_profiles() -> tuple[str, ...]:
    """Names that `load_profile` knows, `roofline` first."""
    return ("roofline", *sorted(p.stem for p in SHIPPED.glob("*.json")))


def load_profile(name_or_path: str | Path, where: str = "calibration") -> Profile:
    """A shipped profile's name, `roofline` (no measurement at all), or a file.

    Raises:
        InputError: unknown name, unreadable or invalid file. `where` names the key it came from.
    """
    text = str(name_or_path)
    if len(text) > 4096 or "\0" in text or len(Path(text).name) > 240:
        raise InputError(f"{where}: found {text[:60]!r}…; allowed: a path or a profile's name")
    if text == "roofline":
        return Profile("roofline", "data-sheet roofline: nothing measured")
    shipped = SHIPPED / f"{text}.json"
    if "/" not in text and shipped.is_file():
        return read_profile(shipped)
    path = Path(name_or_path)
    if not path.is_file() and "/" not in text and not text.endswith(".json"):
        names = ", ".join(shipped_profiles())
        raise InputError(f"{where}: no profile {text!r}; allowed: a path or one of {names}")
    return read_profile(path)


def read_profile(path: Path) -> Profile:
    """A profile from a file of at most 64 MiB.

    Raises:
        InputError: as `Profile.from_json`, and where the file cannot be read.
    """
    return Profile.from_json(read_json(path), str(path))


def read_json(path: Path) -> object:
    """JSON from a file a user names, without NaN, infinities or more than 64 MiB."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{path}: {path.stat().st_size} bytes; a profile has at most {MAX_FILE_BYTES}")
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file in UTF-8") from None
    except RecursionError:
        raise InputError(f"{path}: nested too deeply") from None
    except InputError:
        raise
    except ValueError as error:  # NaN, and integers of thousands of digits
        raise InputError(f"{path}: {error}") from None


def _no_constant(text: str) -> float:
    raise ValueError(f"found {text}; only finite numbers are allowed")


def _profile(data: object, where: str) -> Profile:
    top = _mapping(data, where)
    if top.get("format") != FORMAT:
        raise InputError(f"{where}: format: found {_show(top.get('format'))}; allowed: {FORMAT!r}")
    known = (
        "format",
        "name",
        "source",
        "date",
        "reference",
        "hardware",
        "software",
        "settings",
        "coefficients",
        "points",
        "blocks",
        "collectives",
        "kernels",
    )
    _keys(top, where, known, required=("name",))
    if top.get("kernels") and not top.get("reference"):
        raise InputError(f"{where}: reference: is missing; kernels are those of a GPU, which it names")
    return Profile(
        name=_text(top["name"], f"{where}: name"),
        source=_text(top.get("source", ""), f"{where}: source"),
        date=_text(top.get("date", ""), f"{where}: date"),
        reference=_text(top.get("reference", ""), f"{where}: reference"),
        hardware=_facts(top.get("hardware", {}), f"{where}: hardware"),
        software=_facts(top.get("software", {}), f"{where}: software"),
        settings=_facts(top.get("settings", {}), f"{where}: settings"),
        coefficients={
            key: _coefficient(value, f"{where}: coefficients.{key}")
            for key, value in _mapping(top.get("coefficients", {}), f"{where}: coefficients").items()
        },
        points=_each(top.get("points", []), f"{where}: points", _points),
        blocks=_each(top.get("blocks", []), f"{where}: blocks", _block),
        collectives=_each(top.get("collectives", []), f"{where}: collectives", _collective),
        kernels=_text(top.get("kernels", ""), f"{where}: kernels"),
    )


def _coefficient(data: object, where: str) -> Coefficient:
    item = _mapping(data, where)
    _keys(item, where, ("value", "source"), required=("value",))
    source = _text(item.get("source", ""), f"{where}.source")
    return Coefficient(_number(item["value"], f"{where}.value"), source)


def _points(data: object, where: str) -> PointTable:
    item = _mapping(data, where)
    needed = ("op", "dtype", "shape", "seconds")
    _keys(item, where, (*needed, "spread", "samples"), needed)
    seconds = _column(item["seconds"], f"{where}.seconds", positive=True)
    rows = _list(item["shape"], f"{where}.shape")
    width = len(rows[0]) if rows and isinstance(rows[0], list) else 0
    for i, row in enumerate(rows):
        _shape(row, f"{where}.shape[{i}]", width)
    if len(rows) != len(seconds):
        raise InputError(f"{where}.shape: found {len(rows)} rows; allowed: {len(seconds)}, as in seconds")
    n = len(seconds)
    return PointTable(
        _text(item["op"], f"{where}.op"),
        _text(item["dtype"], f"{where}.dtype"),
        np.array(rows, dtype=np.int64).reshape(n, width),
        seconds,
        _column(item.get("spread", 0.0), f"{where}.spread", count=n),
        _column(item.get("samples", 1), f"{where}.samples", count=n).clip(max=2**53).astype(np.int64),
    )


def _shape(row: object, where: str, width: int) -> None:
    ok = isinstance(row, list) and 0 < len(row) == width
    ok = ok and all(type(x) is int and 0 <= x < 2**62 for x in row)  # type: ignore[attr-defined]
    if not ok:
        rule = "a list of whole numbers, as long as the first row"
        raise InputError(f"{where}: found {_show(row)}; allowed: {rule}")


def _block(data: object, where: str) -> BlockPoint:
    item = _mapping(data, where)
    _keys(item, where, ("key", "phase", "run", "seconds", "spread"), ("key", "phase", "seconds"))
    phase = _text(item["phase"], f"{where}.phase")
    if phase not in PHASES:
        raise InputError(f"{where}.phase: found {phase!r}; allowed: {', '.join(PHASES)}")
    return BlockPoint(
        _text(item["key"], f"{where}.key"),
        phase,
        _count(item.get("run", 0), f"{where}.run", 0),
        _number(item["seconds"], f"{where}.seconds", positive=True),
        _number(item.get("spread", 0.0), f"{where}.spread"),
    )


def _collective(data: object, where: str) -> CollectiveTable:
    item = _mapping(data, where)
    _keys(item, where, ("op", "ranks", "bytes", "seconds", "spread"), ("op", "ranks", "bytes", "seconds"))
    size = _column(item["bytes"], f"{where}.bytes")
    if not len(size) or np.any(np.diff(size) <= 0):
        raise InputError(f"{where}.bytes: allowed: at least one size, each larger than the one before")
    return CollectiveTable(
        _text(item["op"], f"{where}.op"),
        _count(item["ranks"], f"{where}.ranks", 2),
        size,
        _column(item["seconds"], f"{where}.seconds", count=len(size), positive=True),
        _column(item.get("spread", 0.0), f"{where}.spread", count=len(size)),
    )


def _mapping(data: object, where: str) -> Mapping[str, object]:
    if not isinstance(data, dict):
        raise InputError(f"{where}: found {_show(data)}; allowed: a mapping")
    return data


def _list(data: object, where: str) -> list[object]:
    if not isinstance(data, list):
        raise InputError(f"{where}: found {_show(data)}; allowed: a list")
    return data


def _each(data: object, where: str, read: Callable[[object, str], T]) -> tuple[T, ...]:
    return tuple(read(item, f"{where}[{i}]") for i, item in enumerate(_list(data, where)))


def _keys(item: Mapping[str, object], where: str, known: tuple[str, ...], required: tuple[str, ...]) -> None:
    for key in item.keys() - set(known):
        from difflib import get_close_matches

        near = get_close_matches(key, known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(f"{where}: unknown key {_show(key)}; {hint}allowed: {', '.join(known)}")
    for key in required:
        if key not in item:
            raise InputError(f"{where}: {key} is missing")


def _text(data: object, where: str) -> str:
    if not isinstance(data, str):
        raise InputError(f"{where}: found {_show(data)}; allowed: text")
    return data


def _facts(data: object, where: str) -> Facts:
    item = _mapping(data, where)
    for key, value in item.items():
        finite = not isinstance(value, float) or math.isfinite(value)
        if not finite or not isinstance(value, str | int | float):
            rule = "text, a finite number, true or false"
            raise InputError(f"{where}.{key}: found {_show(value)}; allowed: {rule}")
    return dict(item)  # type: ignore[arg-type]


def _number(data: object, where: str, positive: bool = False) -> float:
    return float(_column([data], where, positive=positive, indexed=False)[0])


def _count(data: object, where: str, least: int) -> int:
    if type(data) is not int or not least <= data <= 10_000_000:
        raise InputError(f"{where}: found {_show(data)}; allowed: a whole number from {least} to 10000000")
    return data


def _column(
    data: object, where: str, count: int | None = None, positive: bool = False, indexed: bool = True
) -> NDArray[np.float64]:
    """Finite numbers, none negative; one number stands for `count` equal ones."""
    if count is not None and not isinstance(data, list):
        return np.full(count, _number(data, where))
    rows = _list(data, where)
    rule = "a finite number above 0" if positive else "a finite number, 0 or more"
    for i, value in enumerate(rows):
        ok = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
        if not ok or value < 0 or (positive and value <= 0):  # type: ignore[operator]
            raise InputError(f"{where}{f'[{i}]' if indexed else ''}: found {_show(value)}; allowed: {rule}")
    if count is not None and len(rows) != count:
        raise InputError(f"{where}: found {len(rows)} numbers; {count} are needed, one a point")
    return np.array(rows, dtype=np.float64)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
