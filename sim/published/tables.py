"""Tables of published measurements: format measurements/1, read and checked.

A row's scenario is the table's scenario with the row's merged over it, key by key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.errors import InputError
from sim.files import read_json
from sim.inputs.overrides import merge

FORMAT = "measurements/1"
KINDS = ("training_step", "kernel", "collective", "inference")


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: `data` is the row as it stands, `scenario` what was run, `measured` key → value."""

    table: str
    kind: str
    id: str
    group: str
    scenario: Mapping[str, Any]
    measured: Mapping[str, float]
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """A published table. `source` is its citation, where it was found, its licence."""

    name: str
    title: str
    kind: str
    source: Mapping[str, str]
    rows: tuple[Row, ...]
    path: str


def read_table(path: str | Path, limit: int | None = None) -> Table:
    """A table from a file; of its rows the first `limit`.

    Raises:
        InputError: naming the file, the key, what was found and what is allowed.
    """
    data = read_json(Path(path))
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise InputError(f"{path}: format: found {str(found)[:60]!r}; allowed: {FORMAT!r}")
    if data.get("kind") not in KINDS:
        raise InputError(f"{path}: kind: found {str(data.get('kind'))[:60]!r}; allowed: {', '.join(KINDS)}")
    rows = data.get("rows")
    if not isinstance(rows, list):
        raise InputError(f"{path}: rows: found {type(rows).__name__}; allowed: a list of rows")
    name = str(data.get("name") or Path(path).stem)
    shared = _mapping(data.get("scenario"), f"{path}: scenario")
    made = tuple(_row(r, f"{path}: rows[{i}]", name, data["kind"], shared) for i, r in enumerate(rows[:limit]))
    source = {str(k): str(v) for k, v in _mapping(data.get("source"), f"{path}: source").items()}
    return Table(name, str(data.get("title", name)), data["kind"], source, made, str(path))


def _row(data: object, where: str, table: str, kind: str, shared: dict[str, Any]) -> Row:
    row = _mapping(data, where)
    if not isinstance(row.get("id"), str):
        raise InputError(f"{where}.id: found {str(row.get('id'))[:60]!r}; allowed: text")
    measured = {}
    for key, value in _mapping(row.get("measured"), f"{where}.measured").items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise InputError(f"{where}.measured.{key}: found {str(value)[:40]}; allowed: a number above 0, below 1e30")
        measured[key] = float(value)
    scenario = merge(shared, _mapping(row.get("scenario"), f"{where}.scenario"))
    group = row.get("group") or _group(row)
    return Row(table, kind, row["id"], str(group), scenario, measured, row)


def _group(row: Mapping[str, Any]) -> str:
    """Rows of kernels and collectives without a group of their own: by operator, provider, GPU, ranks."""
    keys = ("op", "impl", "provider", "pass", "stage", "layout", "system", "gpu", "ranks")
    return " ".join(str(row[k]) for k in keys if k in row) or "rows"


def _mapping(data: object, where: str) -> dict[str, Any]:
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise InputError(f"{where}: found {type(data).__name__}; allowed: a mapping")
    return data
