"""What the simulator says about one row of a published table: every quantity that the row measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sim.errors import InputError
from sim.published.collective_rows import collective_predictions
from sim.published.kernel_rows import kernel_predictions
from sim.published.prediction import (
    PEAK_UNCERTAINTY,
    RESERVED_UNCERTAINTY,
    NotSimulated,
    Prediction,
    Predictions,
    profile_named,
    spread,
)
from sim.published.tables import Row


def predict(row: Row, calibration: str | None = None) -> Predictions:
    """Predictions by measured key. `calibration` takes the place of the profile that the row names.

    Raises:
        NotSimulated: an operator or quantity that is not modelled.
        InputError: a row that should be known and was refused.
    """
    kinds: Mapping[str, Callable[[Row, str | None], Predictions]] = {
        "training_step": _training_step,
        "kernel": kernel_predictions,
        "collective": collective_predictions,
        "inference": _inference,
    }
    return kinds[row.kind](row, calibration)


def quantity(key: str) -> str:
    """The name under which a measured key is reported.

    >>> quantity("step_time_s"), quantity("peak_memory_bytes"), quantity("seconds")
    ('step_time', 'peak_memory', 'seconds')
    """
    if key.endswith("_per_s"):
        return key
    return key.removesuffix("_bytes").removesuffix("_s")


def _training_step(row: Row, calibration: str | None) -> Predictions:
    from sim.inputs.scenario import parse_scenario
    from sim.simulation import simulate

    scenario = parse_scenario(_with(row, calibration), row.id)
    if scenario.training is None:
        raise InputError(f"{row.id}: scenario: found no training; a row of kind training_step has one")
    result = simulate(scenario, profile_named(scenario.calibration)).result
    result = result | dict.fromkeys(SAMPLES_PER_S, result["tokens_per_s"] / scenario.training.seq_len)
    out = {key: _from_result(result, key) for key in row.measured if isinstance(result.get(_name(key)), float)}
    if not out:
        raise NotSimulated(f"a training step has no {', '.join(row.measured) or 'measured quantity'}")
    return out


def _from_result(result: Mapping[str, Any], key: str) -> Prediction:
    """A value of the result; whatever goes with the step time has the step time's relative interval.

    Published MFUs count attention in full, as PaLM's definition does (arXiv 2204.02311, appendix B), whether or not
    the mask halves the work: `mfu_full_attention` is what they are compared with.
    """
    value, (low, high) = result[_name(key)], result["step_time_interval_s"]
    down, up = low / result["step_time_s"], high / result["step_time_s"]
    if key.endswith("_bytes"):
        return spread(value, RESERVED_UNCERTAINTY if "reserved" in key else PEAK_UNCERTAINTY)
    if key.endswith("_s") and not key.endswith("_per_s"):
        return Prediction(value, value * down, value * up)
    return Prediction(value, value / up, value / down)


_COUNTED_AS = {
    "mfu": "mfu_full_attention", "iteration_time_s": "step_time_s", "max_allocated_bytes": "peak_memory_bytes",
    "max_reserved_bytes": "peak_reserved_bytes",
}  # fmt: skip
SAMPLES_PER_S = ("samples_per_s", "sequences_per_s")


def _name(key: str) -> str:
    """The result's name of a measured key."""
    return _COUNTED_AS.get(key, key)


def _inference(row: Row, calibration: str | None) -> Predictions:
    from sim.inputs.scenario import parse_scenario
    from sim.serve.serving import simulate_serving

    scenario = parse_scenario(_with(row, calibration), row.id)
    result = simulate_serving(scenario, profile_named(scenario.calibration)).result
    out = {}
    for key in row.measured:
        value = result.get(_SERVED.get(key, key))
        value = value.get("p50") if isinstance(value, dict) else value
        if isinstance(value, float):
            out[key] = spread(value, SERVING_UNCERTAINTY)
    if not out:
        raise NotSimulated(f"a serving workload has no {', '.join(row.measured) or 'measured quantity'}")
    return out


_SERVED = {
    "first_token_s": "time_to_first_token_s", "ttft_s": "time_to_first_token_s",
    "tpot_s": "time_per_output_token_s", "inter_token_latency_s": "time_per_output_token_s",
}  # fmt: skip
SERVING_UNCERTAINTY = 0.15  # kernels of another library, schedulers of another server


def _with(row: Row, calibration: str | None) -> dict[str, Any]:
    scenario = dict(row.scenario)
    scenario.setdefault("name", row.id)
    if calibration is not None:
        scenario["calibration"] = calibration
    return scenario
