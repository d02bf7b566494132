"""Write a layout that a search found as a command, a scenario file and a trainer's flags."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from msgspec.structs import replace

from sim.emit import emit
from sim.inputs.absolute_paths import anchored
from sim.inputs.input_source import Source
from sim.inputs.overrides import with_overrides
from sim.inputs.parallelism import Parallelism
from sim.inputs.rules.without_effect import idle_keys
from sim.inputs.shipped import shipped_name
from sim.results.records import Record
from sim.schedules import FORMS
from sim.search.space import LAID_OUT, RECOMPUTE, Layout, Space, scenario_of

TRAINING = {"micro_batch_size": 1, "recompute": "none"}  # a layout's keys of this section, and their defaults


class Runnable(Record, frozen=True):
    """A layout as a command, as a scenario's text and, if the search is for a trainer, as its flags."""

    command: str
    yaml: str
    flags: str | None = None


def runnable(
    space: Space, layout: Layout, source: Source, path: Path, overrides: Sequence[str], unsaid: Sequence[str] = ()
) -> Runnable:
    """Return a found layout in the forms that run it.

    `source`: the scenario's data with `overrides` and `unsaid` (KEY=VALUE) applied; `path`: its file. `unsaid`: what
    the trainer does by itself, of which only keys that change the layout's step are written.
    """
    idle = idle_keys(scenario_of(space, layout))
    paths = {option: tuple(option.partition("=")[0].split(".")) for option in unsaid}
    kept = [option for option in unsaid if paths[option] not in idle]
    source = replace(source, data=_without(source.data, [paths[option] for option in unsaid if option not in kept]))
    sets = sets_of(space, layout, source.data)
    words = run_words(path, (*overrides, *kept, *sets))
    # The file may be saved in another folder than the scenario's, so its paths become absolute.
    data = with_overrides(replace(source, data=anchored(source)), sets).data
    flags = emit(scenario_of(space, layout), space.trainer) if space.trainer else None
    return Runnable(shlex.join(words), yaml.safe_dump(data, sort_keys=False, width=120), flags)


def run_words(path: Path, overrides: Sequence[str]) -> list[str]:
    """Return the words of the command that simulates a scenario with KEY=VALUE changes."""
    changes = [word for option in overrides for word in ("--set", option)]
    return ["stepsim", "run", shipped_name(path) or str(path), *changes]


def _without(data: Mapping[str, Any], paths: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """Return the data without these keys of its sections."""
    return {
        name: {k: v for k, v in section.items() if (name, k) not in paths} if isinstance(section, dict) else section
        for name, section in data.items()
    }


def sets_of(space: Space, layout: Layout, written: Mapping[str, Any]) -> list[str]:
    """Return KEY=VALUE for each key in which a layout differs from the written scenario."""
    # A command with all twenty keys would hide the three that matter.
    found: dict[tuple[str, str], Any] = {("parallelism", key): getattr(layout, key) for key in LAID_OUT}
    found |= {("training", key): getattr(layout, key) for key in TRAINING}
    # Here the key follows from the layout. The scenario's default would run another step.
    if space.sums_in_pipelines:
        found["parallelism", "accumulate_unsharded"] = space.accumulates(layout.pp, layout.zero)
    if layout.tp == 1:  # nor has the written overlap of tensor-parallel messages without any
        del found["parallelism", "tp_overlap"]
    if layout.pp == 1:  # without a pipeline the written schedule has no effect
        del found["parallelism", "schedule"], found["parallelism", "virtual_stages"]
        # A written number of virtual stages would be refused with pp 1.
        if (written.get("parallelism") or {}).get("virtual_stages") is not None:
            found["parallelism", "virtual_stages"] = None
    sets = []
    for (section, key), value in found.items():
        # A key that is written as null means its default, too.
        own = (written.get(section) or {}).get(key)
        if own is None:
            own = _default(key, layout)
        if isinstance(own, dict):
            own = None  # a mapping of layers or modules, which no searched mode equals
        if key == "recompute" and value not in RECOMPUTE:
            continue  # the layout has the scenario's own choice of layers or modules
        if own != value:
            sets.append(f"{section}.{key}={value if isinstance(value, str) else json.dumps(value)}")
    return sets


def _default(key: str, layout: Layout) -> Any:
    if key in TRAINING:
        return TRAINING[key]
    # The default of virtual stages is that of the found schedule, not of the written one.
    return FORMS[layout.schedule].stages_per_rank if key == "virtual_stages" else Parallelism.model_fields[key].default
