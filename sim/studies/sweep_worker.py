"""What a sweep's workers do: simulate one step with some keys changed, with its faults and without.

Plain functions of pickled data, as in `sim.search.evaluation`.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from sim.core.errors import InputError
from sim.inputs.input_source import Source
from sim.inputs.model_input import model_presets
from sim.inputs.overrides import with_overrides
from sim.inputs.scenario import Scenario, parse_scenario, resolve
from sim.prices.operator_prices import Costs
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from sim.ranks.faults import disturbs
from sim.simulation import Simulation, simulate
from topology.spec import GpuSpec

Change = tuple[tuple[str, Any], ...]  # keys and their values
HEALTHY_KEPT = 64  # steps without faults that a process remembers


class WhatIf(NamedTuple):
    """One step; where it cannot be simulated, why."""

    values: Mapping[str, Any]
    step_time_s: float
    healthy_s: float  # the same step without the section `faults`
    tokens_per_s_per_gpu: float
    peak_memory_bytes: float
    fits_in_memory: bool
    refused: str = ""

    def as_dict(self) -> dict[str, Any]:
        """A row of format sim-sweep/1; of a refused step the numbers are null."""
        numbers = {
            "step_time_s": self.step_time_s, "healthy_s": self.healthy_s, "lost_s": self.step_time_s - self.healthy_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu, "peak_memory_bytes": self.peak_memory_bytes,
            "fits_in_memory": self.fits_in_memory,
        }  # fmt: skip
        return {"values": dict(self.values), **(dict.fromkeys(numbers) if self.refused else numbers),
                "refused": self.refused}  # fmt: skip


def pack(source: Source, name: str, changes: Sequence[Change]) -> bytes:
    """A sweep's data for its workers, which need no files then. `name`: as in `sim.inputs.scenario.resolve`.

    Raises:
        InputError: if the scenario is wrong as it stands in its file and with any of the changes, or no training step.
    """
    base = _first_legal(source, name, changes)
    if base.training is None:
        raise InputError(f"{source.label}: training: is missing; a sweep simulates training steps")
    data = source.data
    if isinstance(data["model"], str) and data["model"] not in model_presets():
        data = {**data, "model": base.model.model_dump(mode="json")}
    keys = {key.partition(".")[0] for change in changes[:1] for key, _ in change}
    own = bool(keys & {"calibration", "cluster"})  # then each step has its own
    profile = None if own else load_profile(base.calibration)
    return pickle.dumps((replace(source, data=data), name, profile))


def _first_legal(source: Source, name: str, changes: Sequence[Change]) -> Scenario:
    """The scenario as it stands or, where a varied key is what makes it legal, with the first change that does."""
    try:
        return resolve(source, name)
    except InputError:
        for change in changes:
            with suppress(InputError):
                return _changed(source, name, change)
        raise


def _changed(source: Source, name: str, change: Change) -> Scenario:
    options = [f"{key}={json.dumps(value)}" for key, value in change]  # JSON is YAML
    return resolve(with_overrides(source, options), name)


@lru_cache(maxsize=2)
def _given(packed: bytes) -> tuple[Source, str, Profile | None]:
    found: tuple[Source, str, Profile | None] = pickle.loads(packed)  # what `pack` made, in this program
    return found


@lru_cache(maxsize=4)
def _costs(packed: bytes, calibration: str, gpu_json: str) -> Costs:
    return Costs(_given(packed)[2] or load_profile(calibration), GpuSpec.model_validate_json(gpu_json))


@lru_cache(maxsize=HEALTHY_KEPT)
def _healthy_s(packed: bytes, scenario_json: str) -> float:
    return _step(packed, parse_scenario(json.loads(scenario_json))).step_time_s


def _step(packed: bytes, scenario: Scenario) -> Simulation:
    costs = _costs(packed, scenario.calibration, scenario.cluster.gpu.model_dump_json())
    return simulate(scenario, engine="static", costs=costs)


def attempt(packed: bytes, change: Change) -> WhatIf:
    """One step with the change made."""
    try:
        return _simulated(packed, change)
    except InputError as error:
        why = str(error)
        for key, _ in change:
            why = why.replace(f"--set {key}:", f"--vary {key}:")  # which the user wrote
        return WhatIf(dict(change), 0.0, 0.0, 0.0, 0.0, False, why)


def _simulated(packed: bytes, change: Change) -> WhatIf:
    source, name, _ = _given(packed)
    scenario = _changed(source, name, change)
    simulation = _step(packed, scenario)
    step_s, t = simulation.step_time_s, scenario.for_training
    healthy = scenario.model_copy(update={"faults": None})
    healthy_s = _healthy_s(packed, healthy.model_dump_json()) if disturbs(scenario) else step_s
    tokens = t.global_batch_size * t.seq_len
    rate = tokens / step_s / scenario.parallelism.ranks if step_s else 0.0
    peaks = {curve.rank: float(curve.total.max()) for curve in simulation.memory}
    fits = all(peak <= scenario.cluster.gpu_of(rank).memory_bytes for rank, peak in peaks.items())
    return WhatIf(dict(change), step_s, healthy_s, rate, max(peaks.values()), fits)
