"""The work of a sweep's workers: simulate a step, with its faults and without, or a serving workload, with keys
changed.

Plain functions of pickled data, as in `sim.search.evaluation`.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from msgspec.structs import replace

from sim.core.errors import InputError
from sim.inputs.calibration_input import not_measured
from sim.inputs.input_source import Source
from sim.inputs.model_input import model_presets
from sim.inputs.overrides import with_overrides
from sim.inputs.scenario import Scenario, parse_scenario, resolve
from sim.prices.operator_prices import Costs
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from sim.prices.shared_cores import costs_on, ranks_on_node, ranks_per_core
from sim.ranks.faults import disturbs
from sim.results.records import MemoryRow
from sim.rl.simulation import simulate_rl
from sim.serve.simulation import simulate_serving
from sim.simulation import Simulation, simulate
from sim.studies.promised_latencies import QUANTITIES
from sim.studies.sweep_found import SweepRow
from sim.studies.sweep_metrics import MEMORY, RATE, RESERVED, STEP, TOKENS
from topology.spec import GpuSpec

Change = tuple[tuple[str, Any], ...]  # keys and their values
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "kv_cache", "buffers")
HEALTHY_KEPT = 64  # steps without faults that a process remembers


def pack(source: Source, name: str, changes: Sequence[Change]) -> bytes:
    """A sweep's data for its workers, which need no files then. `name`: as in `sim.inputs.scenario.resolve`.

    Raises:
        InputError: if the scenario is wrong as it stands in its file and with any of the changes.
    """
    base = first_legal(source, name, changes)
    data = source.data
    if isinstance(data["model"], str) and data["model"] not in model_presets():
        data = {**data, "model": base.model.model_dump(mode="json")}
    keys = {key.partition(".")[0] for change in changes[:1] for key, _ in change}
    own = bool(keys & {"calibration", "cluster"})  # then each step has its own
    profile = None if own else load_profile(base.calibration)
    return pickle.dumps((replace(source, data=data), name, profile))


def first_legal(source: Source, name: str, changes: Sequence[Change]) -> Scenario:
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
def _profile(packed: bytes, calibration: str) -> Profile:
    return _given(packed)[2] or load_profile(calibration)


@lru_cache(maxsize=4)
def _costs(packed: bytes, calibration: str, gpu_json: str, sharing_ranks: int) -> Costs:
    return costs_on(GpuSpec.model_validate_json(gpu_json), _profile(packed, calibration), sharing_ranks)


@lru_cache(maxsize=HEALTHY_KEPT)
def _healthy_s(packed: bytes, scenario_json: str) -> float:
    return _step(packed, parse_scenario(json.loads(scenario_json))).step_time_s


def _step(packed: bytes, scenario: Scenario) -> Simulation:
    cluster = scenario.cluster
    ranks = ranks_on_node(cluster, scenario.ranks)
    # Prices depend on the number of ranks only where these share cores. Any other step uses what was priced before.
    sharing_ranks = ranks if ranks_per_core(_profile(packed, scenario.calibration), ranks) > 1 else 1
    costs = _costs(packed, scenario.calibration, cluster.gpu.model_dump_json(), sharing_ranks)
    return simulate(scenario, engine="static", costs=costs)


def attempt(packed: bytes, change: Change) -> SweepRow:
    """Simulate with `change` made; where that is not possible, the answer says why."""
    try:
        return _simulated(packed, change)
    except InputError as error:
        why = str(error)
        for key, _ in change:
            why = why.replace(f"--set {key}:", f"--vary {key}:")  # which the user wrote
        return SweepRow(dict(change), {}, refused=why)


def _simulated(packed: bytes, change: Change) -> SweepRow:
    source, name, _ = _given(packed)
    scenario = _changed(source, name, change)
    if scenario.training is None:
        return _served(packed, scenario, change)
    if scenario.rl is not None:
        return _rl_step(packed, scenario, change)
    simulation = _step(packed, scenario)
    step_s, t = simulation.step_time_s, scenario.for_training
    healthy = scenario.unchecked_copy(update={"faults": None})
    healthy_s = _healthy_s(packed, json.dumps(healthy.model_dump("json"))) if disturbs(scenario) else step_s
    tokens = t.global_batch_size * t.seq_len
    rate = tokens / step_s / scenario.parallelism.ranks if step_s else 0.0
    result = simulation.outcome
    of_step = {"exposed_comm_s": result.mean_rank.exposed_comm_s, "bubble_ratio": result.mean_rank.bubble_ratio}
    figures = _figures(step_s, healthy_s, rate, simulation.peak_memory_bytes, simulation.reserved_bytes) | of_step
    figures |= {key: getattr(result.utilization, key) for key in ("mfu", "mfu_full_attention")}
    fits, memory = simulation.fits_in_memory, _by_category(result.memory)
    return SweepRow(dict(change), figures, scenario.ranks, fits, "", not_measured(scenario.cluster), memory)


def _by_category(memory: Sequence[MemoryRow]) -> dict[str, float]:
    fullest = max(memory, key=lambda row: row.peak)
    return {name: size for name in CATEGORIES if (size := getattr(fullest, name))}


def _figures(
    step_s: float, healthy_s: float, rate: float, peak_bytes: float, reserved_bytes: float
) -> dict[str, float]:
    times = {STEP.key: step_s, "healthy_s": healthy_s, "lost_s": step_s - healthy_s}
    return {**times, RATE.key: rate, MEMORY.key: peak_bytes, RESERVED.key: reserved_bytes}


def _rl_step(packed: bytes, scenario: Scenario, change: Change) -> SweepRow:
    result = simulate_rl(scenario, _given(packed)[2]).outcome
    step_s, rate = result.step_time_s, result.tokens_per_s_per_gpu
    figures = _figures(step_s, step_s, rate, result.peak_memory_bytes, result.peak_reserved_bytes)
    return SweepRow(dict(change), figures, scenario.ranks, result.fits_in_memory, "", not_measured(scenario.cluster))


def _served(packed: bytes, scenario: Scenario, change: Change) -> SweepRow:
    served = simulate_serving(scenario, _profile(packed, scenario.calibration))
    result, latencies = served.outcome, served.latencies
    figures = {m.key: getattr(result, m.key) for m in (TOKENS, MEMORY, RESERVED)}
    for name, quantity in QUANTITIES.items():
        figures |= {f"{name}_{statistic}_s": getattr(latencies[quantity], statistic) for statistic in ("p50", "p99")}
    unmeasured, memory = not_measured(scenario.cluster), _by_category(result.memory)
    return SweepRow(dict(change), figures, scenario.ranks, result.fits_in_memory, "", unmeasured, memory)
