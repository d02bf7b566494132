"""The records of a map: the fastest layout of each model on each number of GPUs (format sim-map/1)."""

from __future__ import annotations

from collections.abc import Mapping

from sim.results.records import Record
from sim.search.found import BestLayout
from sim.validation.best_measured import MeasuredRuns


class MapCell(Record, frozen=True):
    """One search: the fastest layout that fits, if any does. The other fields are those of `SearchResult`."""

    model: str
    gpus: int
    best: BestLayout | None
    counts: Mapping[str, int]
    memory_limit_bytes: float
    not_measured: str = ""


class MapResult(Record, frozen=True, kw_only=True):
    """The cells of a map, and measured runs to draw beside it. `only`: the values of keys that are searched."""

    format: str = "sim-map/1"
    name: str
    models: tuple[str, ...]
    gpus: tuple[int, ...]
    not_measured: str = ""
    only: tuple[str, ...]
    memory_limit_bytes: float
    cells: tuple[MapCell, ...]
    measured: MeasuredRuns | None
    wall_s: float
    cores: int
