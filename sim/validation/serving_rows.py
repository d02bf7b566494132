"""Predictions for published rows of serving, with intervals that widen where requests queue."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sim.core.normal import NINETY_PERCENT
from sim.validation.prediction import NotSimulated, Prediction, Predictions, profile_named, spread
from sim.validation.records import Measurement

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario
    from sim.serve.requests import Request

SERVING_UNCERTAINTY = 0.15  # kernels of another library, schedulers of another server
_SERVED = {
    "first_token_s": "time_to_first_token_s",
    "ttft_s": "time_to_first_token_s",
    "tpot_s": "time_per_output_token_s",
}


def serving_predictions(row: Measurement, data: dict[str, Any]) -> tuple[Predictions, dict[str, bool]]:
    """Predictions by measured key and answers of a workload; `data`: the row's scenario.

    Where requests arrive over time, latencies do not grow in proportion to the server's time: close to saturation a
    tenth more of it may multiply what requests wait. So two more servers are simulated, the slowest and the fastest
    that the uncertainty of its time allows, and the interval also holds what these give.

    Raises:
        NotSimulated: for quantities that a workload does not have.
    """
    from sim.inputs.scenario import parse_scenario
    from sim.serve.requests import make_requests
    from sim.serve.simulation import simulate_serving

    scenario = parse_scenario(_served_by(row, data), row.id)
    requests = make_requests(scenario.for_serving.requests)
    served = simulate_serving(scenario, profile_named(scenario.calibration), requests)
    result, sigma = served.result, math.hypot(SERVING_UNCERTAINTY, served.host_uncertainty)
    others: list[tuple[float, Mapping[str, Any]]] = []
    if requests[-1].arrival_s > requests[0].arrival_s:
        most = math.exp(NINETY_PERCENT * sigma)
        others = [(times, _slower(scenario, requests, times)) for times in (1 / most, most)]
    usual = "mean" if row.data.get("statistic") == "mean" else "p50"
    out = {}
    for key in row.measured:
        value = _value(result, key, usual)
        if value is not None:
            out[key] = _widened(spread(value, sigma), key, [(t, _value(other, key, usual)) for t, other in others])
    answers = {key: result[key] for key in row.answers if isinstance(result.get(key), bool)}
    if not out and not answers:
        raise NotSimulated(f"a serving workload has no {', '.join(row.measured) or 'measured quantity'}")
    return out, answers


def _slower(scenario: Scenario, requests: tuple[Request, ...], times: float) -> Mapping[str, Any]:
    """The result of a server that takes `times` as long for all it does, in units of as many seconds: counted in these,
    it computes as quickly as the usual one, and the requests come `times` as quickly."""
    from sim.serve.simulation import simulate_serving

    quicker = tuple([r._replace(arrival_s=r.arrival_s / times) for r in requests])
    return simulate_serving(scenario, profile_named(scenario.calibration), quicker).result


def _widened(usual: Prediction, key: str, others: list[tuple[float, float | None]]) -> Prediction:
    """The interval with the values of servers that take so many times as long."""
    low, high = usual.low, usual.high
    for times, value in others:
        if value is not None and ("_per_s" in key or key.endswith("_s")):
            real = value / times if "_per_s" in key else value * times
            low, high = min(low, real), max(high, real)
    return Prediction(usual.value, low, high)


def _value(result: Mapping[str, Any], key: str, usual: str) -> float | None:
    """A result's value of a measured key; None where it has none."""
    name, which = _statistic(key, usual)
    value = result.get(_SERVED.get(name, name))
    value = value.get(which) if isinstance(value, Mapping) else value
    return value if isinstance(value, float) else None


def _statistic(key: str, usual: str) -> tuple[str, str]:
    """A measured key without its statistic, and that statistic: `usual` where the key names none.

    >>> _statistic("time_to_first_token_p99_s", "p50"), _statistic("time_to_first_token_s", "mean")
    (('time_to_first_token_s', 'p99'), ('time_to_first_token_s', 'mean'))
    """
    for which in ("mean", "p50", "p90", "p99"):
        if key.endswith(f"_{which}_s"):
            return key.removesuffix(f"{which}_s") + "s", which
    return key, usual


def _served_by(row: Measurement, scenario: dict[str, Any]) -> dict[str, Any]:
    """The scenario on the engine that the table names, where the row's own scenario names none."""
    from sim.serve.engines import engine_named

    section, engine = scenario.get("inference"), engine_named(row.served_by)
    if not isinstance(section, Mapping) or "engine" in section or engine is None:
        return scenario
    return {**scenario, "inference": {**section, "engine": engine.name}}
