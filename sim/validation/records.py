"""A table of published measurements, once it is read: format measurements/1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field


class Measurement(Struct, frozen=True):
    """One measurement: `data` is the row as it stands, `scenario` what was run, `measured` key → value, `answers`
    key → yes or no. `served_by`: what the table says of the software, the row's own `engine` first. `unreadable`: why
    the row cannot be read; then it has no values. `folder`: of the table's file, beside which lie the files that it
    names. `not_believed`: why the row is simulated without its batch limit. `one_process`: it is of a table of messages
    within one node, whose GPUs one process drives (nccl-tests' README: `-g 8` on a node, a process a GPU under MPI)."""

    table: str
    kind: str
    id: str
    group: str
    scenario: Mapping[str, Any]
    measured: Mapping[str, float]
    data: Mapping[str, Any]
    answers: Mapping[str, bool] = field(default_factory=dict)
    served_by: tuple[str, ...] = ()
    unreadable: str = ""
    folder: str = ""
    not_believed: str = ""
    one_process: bool = False


class Table(Struct, frozen=True):
    """A published table. `source` is its citation, where it was found, its licence."""

    name: str
    title: str
    kind: str
    source: Mapping[str, str]
    rows: tuple[Measurement, ...]
    path: str
