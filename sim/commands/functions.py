"""What `stepsim search`, `sweep`, `convert` and `diff` find, for programs and notebooks. `sim` has them by these names,
for packages and modules have the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.commands.convert import ConvertOptions, read_file
from sim.commands.options import Narrowing, Study
from sim.commands.search import Asked, search_one
from sim.commands.sweep import run_sweep
from sim.inputs.scenario import Overrides, as_value, listed
from sim.inputs.shipped import scenario_file
from sim.studies.difference import difference

if TYPE_CHECKING:
    from sim.convert.settings import Converted
    from sim.search.found import SearchResult
    from sim.serve.results.result import ServingSimulation
    from sim.simulation import Simulation
    from sim.studies.sweep_found import SweepResult


def search_layouts(
    path: str | Path, overrides: Overrides = (), *, gpus: int | None = None, only: Sequence[str] = (), top: int = 10
) -> SearchResult:
    """The best layouts of a training step, as `stepsim search` finds them."""
    study = Study(overrides=tuple(listed(overrides)))
    return search_one(scenario_file(Path(path)), study, Asked(gpus, Narrowing(tuple(only)), top))


def sweep_values(path: str | Path, vary: Mapping[str, Sequence[Any]], overrides: Overrides = ()) -> SweepResult:
    """A scenario with every combination of values of some keys, as `stepsim sweep` simulates them."""
    options = [f"{key}={','.join(map(as_value, values))}" for key, values in vary.items()]
    return run_sweep(scenario_file(Path(path)), options, Study(overrides=tuple(listed(overrides))))


def convert_file(
    path: str | Path, cluster: str | dict[str, Any], *, gpus: int | None = None, model: str | None = None
) -> Converted:
    """Another program's configuration as a scenario's mapping, with notes, as `stepsim convert` reads it."""
    return read_file(Path(path), cluster, ConvertOptions("", gpus, model))


def difference_of(a: Simulation | ServingSimulation, b: Simulation | ServingSimulation) -> dict[str, Any]:
    """What differs between two simulations of one kind, as `stepsim diff --json` has it."""
    return difference(a.result, b.result)
