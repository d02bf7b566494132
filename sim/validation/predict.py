"""Predict one row of a published table: every quantity that the row measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.core.errors import InputError
from sim.core.json_values import is_integer
from sim.inputs.units import BYTES, TIME, unit_of
from sim.results import figures
from sim.results.figures import unit_of_measured
from sim.results.fit import PEAK_UNCERTAINTY, RESERVED_UNCERTAINTY
from sim.validation.collective_rows import collective_predictions
from sim.validation.kernel_rows import kernel_predictions
from sim.validation.prediction import (
    NotSimulated,
    Predicted,
    Prediction,
    meant,
    profile_named,
    spread,
)
from sim.validation.records import Measurement
from sim.validation.serving_rows import serving_predictions

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario
    from sim.ranks.plan import Plan


def predict(row: Measurement, calibration: str | None = None, programs: Path | None = None) -> Predicted:
    """Predict what the row measured.

    `calibration` takes the place of the profile that the row names; `programs` holds captured programs, which take the
    place of the scenarios of rows that carry `program`.

    Raises:
        NotSimulated: an operator or quantity that is not modelled.
        InputError: a row that should be known and was refused.
    """
    if programs is not None and "program" in row.data:
        from sim.validation.program_rows import OF_PROGRAMS, program_predictions

        return Predicted(program_predictions(row, calibration, programs), {}, OF_PROGRAMS)
    if row.kind in ("kernel", "collective"):
        of_kind = kernel_predictions if row.kind == "kernel" else collective_predictions
        found = of_kind(row, calibration)
        return Predicted(found, {}, tuple(found))
    if row.kind == "training_step":
        return _training_step(row, calibration)
    return serving_predictions(row, _with(row, calibration))


def quantity(key: str) -> str:
    """The name under which a measured key is reported.

    >>> quantity("step_time_s"), quantity("peak_memory_bytes"), quantity("seconds")
    ('step_time', 'peak_memory', 'seconds')
    """
    unit = unit_of(key)
    return key.removesuffix(unit.ending) if unit in (BYTES, TIME) else key


def _training_step(row: Measurement, calibration: str | None) -> Predicted:
    from sim.inputs.scenario import parse_scenario
    from sim.simulation import simulate

    scenario = parse_scenario(_with(row, calibration), row.id, row.folder)
    if scenario.training is None:
        raise InputError(f"{row.id}: scenario: found no training; a row of kind training_step has one")
    if scenario.rl is not None:
        return _rl_step(row, scenario)
    step = simulate(scenario, profile_named(scenario.calibration), engine="static")
    result = dict(step.result) | dict.fromkeys(SAMPLES_PER_S, step.result["tokens_per_s"] / scenario.training.seq_len)
    rank = row.data.get("measured_rank")
    if rank is not None:
        result["peak_memory_bytes"] = result["memory"][_class_of(step.plan, rank, row.id)]["peak"]
    return _asked(row, result, "a training step")


def _rl_step(row: Measurement, scenario: Scenario) -> Predicted:
    """A row whose scenario has `rl`: the step, and the seconds of its phases by `RlResult.phase_seconds`."""
    from sim.rl.simulation import simulate_rl

    outcome = simulate_rl(scenario, profile_named(scenario.calibration)).outcome
    result = outcome.to_json() | outcome.phase_seconds
    return _asked(row, result, "an rl step")


def _asked(row: Measurement, result: Mapping[str, Any], workload: str) -> Predicted:
    """Return a result's values of what the row measured and answered.

    Raises:
        NotSimulated: if the result has none of them.
    """
    out = {key: _from_result(result, key) for key in row.measured if isinstance(result.get(_name(key)), float)}
    answers = {key: result[key] for key in row.answers if isinstance(result.get(key), bool)}
    known = tuple(key for key, value in result.items() if isinstance(value, float | bool))
    if not out and not answers:
        names = (*row.measured, *row.answers)
        like = next(filter(None, (meant(name, known) for name in names)), "")
        raise NotSimulated(f"{workload} has no {', '.join(names) or 'measured quantity'}{like}")
    return Predicted(out, answers, known, result.get("fits_in_memory", True))


def _class_of(plan: Plan, rank: object, row: str) -> int:
    """The class of ranks that `measured_rank`, whose memory alone was measured, is in."""
    ranks = plan.scenario.parallelism.ranks
    if not is_integer(rank) or not -ranks <= rank < ranks:
        raise InputError(f"{row}: measured_rank: found {str(rank)[:40]}; allowed: a rank, 0 to {ranks - 1}")
    return plan.class_of(rank % ranks)


def _from_result(result: Mapping[str, Any], key: str) -> Prediction:
    """A value of the result; whatever goes with the step time has the step time's relative interval.

    Published MFUs count attention in full, as PaLM's definition does (arXiv 2204.02311, appendix B), whether or not
    the mask halves the work: `mfu_full_attention` is what they are compared with.
    """
    value, (low, high) = result[_name(key)], result["step_time_interval_s"]
    down, up = low / result["step_time_s"], high / result["step_time_s"]
    unit = unit_of_measured(key)
    if unit is figures.BYTES:
        reserved = _name(key) == "peak_reserved_bytes"
        return spread(value, RESERVED_UNCERTAINTY if reserved else PEAK_UNCERTAINTY)
    if unit is figures.TIME:
        return Prediction(value, value * down, value * up)
    return Prediction(value, value / up, value / down)


_COUNTED_AS = {
    "mfu": "mfu_full_attention",
    "iteration_time_s": "step_time_s",
    "max_allocated_bytes": "peak_memory_bytes",
    "max_reserved_bytes": "peak_reserved_bytes",
}
SAMPLES_PER_S = ("samples_per_s", "sequences_per_s")


def _name(key: str) -> str:
    """The result's name of a measured key."""
    return _COUNTED_AS.get(key, key)


def _with(row: Measurement, calibration: str | None) -> dict[str, Any]:
    scenario = dict(row.scenario)
    scenario.setdefault("name", row.id)
    if calibration is not None:
        scenario["calibration"] = calibration
    return scenario
