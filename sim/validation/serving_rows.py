"""Predictions for published rows of serving, with the intervals that a result has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sim.serve.results.records import STATISTICS
from sim.validation.prediction import NotSimulated, Predicted, Prediction, meant, profile_named
from sim.validation.records import Measurement

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario

_SERVED = {
    "first_token_s": "time_to_first_token_s",
    "ttft_s": "time_to_first_token_s",
    "tpot_s": "time_per_output_token_s",
    "itl_s": "inter_token_latency_s",
    "e2e_latency_s": "request_latency_s",
}


def serving_predictions(row: Measurement, data: Mapping[str, Any]) -> Predicted:
    """Predict what the row of a workload measured; `data`: the row's scenario.

    Raises:
        NotSimulated: for quantities that a workload does not have.
    """
    from sim.serve.results.other_servers import with_intervals
    from sim.serve.simulation import simulate_serving

    scenario = serving_scenario(row, data)
    result = with_intervals(simulate_serving(scenario, profile_named(scenario.calibration))).to_json()
    low, high = (s / result["duration_s"] if result["duration_s"] else 1.0 for s in result["duration_interval_s"])
    out = {}
    for key in row.measured:
        value = value_of(result, row, key)
        if isinstance(value, float):
            out[key] = Prediction(value, *(value_of(result["intervals"], row, key) or (value * low, value * high)))
    answers = {key: result[key] for key in row.answers if isinstance(result.get(key), bool)}
    known = tuple(key for key in (*result, *_SERVED) if isinstance(value_of(result, row, key), float | bool))
    if not out and not answers:
        like = next(filter(None, (meant(key, known) for key in row.measured)), "")
        raise NotSimulated(f"a serving workload has no {', '.join(row.measured) or 'measured quantity'}{like}")
    return Predicted(out, answers, known)


def serving_scenario(row: Measurement, data: Mapping[str, Any]) -> Scenario:
    """The scenario of a row, on the engine that the table names where the scenario names none."""
    from sim.inputs.scenario import parse_scenario
    from sim.variants.engines.names import engine_named

    section, engine = data.get("inference"), engine_named(row.served_by)
    if isinstance(section, Mapping) and "engine" not in section and engine is not None:
        data = {**data, "inference": {**section, "engine": engine.name}}
    return parse_scenario({"name": row.id, **data}, row.id, row.folder)


def value_of(result: Mapping[str, Any], row: Measurement, key: str) -> Any:
    """Return the value of a result, or of its intervals, at a key that a row measured; None where they have none."""
    name, which = _statistic(key, "mean" if row.data.get("statistic") == "mean" else "p50")
    value = result.get(_SERVED.get(name, name))
    return value.get(which) if isinstance(value, Mapping) else value


def _statistic(key: str, usual: str) -> tuple[str, str]:
    """A measured key without its statistic, and that statistic: `usual` where the key names none.

    >>> _statistic("time_to_first_token_p99_s", "p50"), _statistic("time_to_first_token_s", "mean")
    (('time_to_first_token_s', 'p99'), ('time_to_first_token_s', 'mean'))
    """
    for which in STATISTICS:
        if key.endswith(f"_{which}_s"):
            return key.removesuffix(f"{which}_s") + "s", which
    return key, usual
