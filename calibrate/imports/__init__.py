"""Readers of measurements that others made, for `stepsim calibrate import`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from calibrate.imports.measured import MeasuredTable
from sim.prices.profile import BlockPoint, CollectiveTable, Facts


class Imported(NamedTuple):
    """Hold what a source measured.

    `gpu`: the preset of the GPU, "" if the source does not say it. `covered`, `estimated`, `skipped`: sentences for the
    user: what was measured, what stays estimated, what was not taken and why.
    """

    source: str
    tables: tuple[MeasuredTable, ...] = ()
    collectives: tuple[CollectiveTable, ...] = ()
    blocks: tuple[BlockPoint, ...] = ()
    gpu: str = ""
    software: Facts = MappingProxyType({})
    covered: tuple[str, ...] = ()
    estimated: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


# Reads files or folders; `gpu`: the preset that the user named, "" if none.
Reader = Callable[[Sequence[Path], str], Imported]
_MODULES = {
    "aiconfigurator": "aiconfigurator",
    "aiter": "aiter",
    "llmservingsim": "llmservingsim",
    "nccl-tests": "nccl_tests",
    "rccl-tests": "nccl_tests",
}


def _read(module: str, paths: Sequence[Path], gpu: str) -> Imported:
    found: Imported = import_module(f"calibrate.imports.{module}").read(paths, gpu)
    return found


FORMATS: Mapping[str, Reader] = {name: partial(_read, module) for name, module in _MODULES.items()}
