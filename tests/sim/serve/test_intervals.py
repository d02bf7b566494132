"""Intervals of published rows of serving: how uncertain a latency is depends on the load."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sim.core.units import count
from sim.inputs.scenario import load_scenario, parse_scenario
from sim.results.evidence import interval_factor
from sim.serve.requests import Request
from sim.serve.results.certainty import serving_features
from sim.serve.results.other_servers import other_server, with_intervals
from sim.serve.results.records import ServingResult
from sim.serve.simulation import simulate_serving
from sim.validation.predict import predict
from sim.validation.prediction import Predictions
from sim.validation.records import Measurement
from sim.views.explore_panel import Panel
from tests.sim.serve.serving_cases import ONE

KEYS = ("time_to_first_token_s", "time_per_output_token_s", "output_tokens_per_s", "request_latency_p99_s")


def predicted(**requests: float) -> Predictions:
    """Llama 3 8B on one H100, which serves about 18 requests of 2,000 + 100 tokens a second."""
    scenario = {
        "model": "llama3-8b",
        "cluster": "dgx-h100",
        "inference": {"requests": {"prompt_len": 2000, "output_len": 100, **requests}, "engine": "vllm-0.14"},
    }
    row = Measurement("own", "inference", "row", "all", scenario, dict.fromkeys(KEYS, 1.0), {})
    return predict(row)[0]


def served(**inference: Any) -> ServingResult:
    """The same server's result with its intervals."""
    scenario = {"model": "llama3-8b", "cluster": "dgx-h100", "inference": inference}
    return with_intervals(simulate_serving(parse_scenario({"name": "served", **scenario})))


@pytest.mark.parametrize("requests", [{"count": 8}, {"count": 200, "rate_per_s": 14}])
def test_a_published_row_has_the_interval_that_a_run_shows(requests: dict[str, float]) -> None:
    found = predicted(**requests)
    own = served(requests={"prompt_len": 2000, "output_len": 100, **requests}, engine="vllm-0.14").intervals
    assert own is not None
    assert found["time_to_first_token_s"][1:] == own.time_to_first_token_s.p50
    assert found["request_latency_p99_s"][1:] == own.request_latency_s.p99
    assert found["output_tokens_per_s"][1:] == own.output_tokens_per_s


def test_the_width_is_that_of_published_errors_and_of_the_host() -> None:
    """The bundled engine has no host and so the errors alone; the host of vLLM 0.5, which was quoted, adds its own."""
    requests = {"prompt_len": 256, "output_len": 32, "count": 4}
    for engine in ("bundled", "vllm-0.5"):
        scenario = {"model": "llama3-8b", "cluster": "dgx-h100", "inference": {"requests": requests, "engine": engine}}
        sim = simulate_serving(parse_scenario({"name": "served", **scenario}))
        width = interval_factor(serving_features(sim.scenario))
        assert width is not None
        half = math.hypot(math.log(width.factor), 1.645 * sim.host_uncertainty)
        low_s, high_s = sim.outcome.duration_interval_s
        assert math.log(high_s / sim.end_s) == pytest.approx(half) == pytest.approx(math.log(sim.end_s / low_s))
        assert sim.outcome.interval_from.startswith(width.why)
        assert ("host" in sim.outcome.interval_from) == (engine == "vllm-0.5")


def test_of_many_requests_the_first_thousand_tell_the_width() -> None:
    """Those of a rate far below saturation are no more uncertain than the server, however many they are."""
    few, many = (
        served(requests={"prompt_len": 64, "output_len": 4, "count": count, "rate_per_s": 5}, engine="bundled")
        for count in (900, 1200)
    )
    assert few.intervals is not None
    assert many.intervals is not None
    one, other = (r.intervals.request_latency_s.p50 for r in (few, many) if r.intervals is not None)
    assert one[1] / one[0] == pytest.approx(other[1] / other[0], rel=0.02)


def widths(found: Predictions) -> dict[str, float]:
    """How many times its lower bound an interval's upper bound is, by key."""
    return {key: p.high / p.low for key, p in found.items()}


@pytest.mark.parametrize("requests", [{"count": 8}, {"count": 60, "rate_per_s": 1}, {"count": 200, "rate_per_s": 14}])
def test_intervals_hold_their_prediction(requests: dict[str, float]) -> None:
    found = predicted(**requests)
    assert found.keys() == set(KEYS)
    assert all(p.low < p.value < p.high for p in found.values())


def test_requests_at_once_are_as_uncertain_as_the_server() -> None:
    """Nothing arrives while others are served: a server twice as slow takes twice as long."""
    first, *others = widths(predicted(count=8)).values()
    assert others == pytest.approx([first] * 3)


def test_first_tokens_are_most_uncertain_close_to_saturation() -> None:
    idle, busy = (widths(predicted(count=200, rate_per_s=rate)) for rate in (0.5, 20))
    at_once = widths(predicted(count=8))
    key = "time_to_first_token_s"
    assert idle[key] < 1.3 * at_once[key]
    assert busy[key] > 2.5 * at_once[key]


def test_throughput_is_that_of_the_arrivals_below_saturation_and_of_the_server_above() -> None:
    """A server that waits for requests gives as many tokens a second however fast it is."""
    key = "output_tokens_per_s"
    at_once, idle, flooded = (
        widths(predicted(**requests))[key]
        for requests in ({"count": 8}, {"count": 200, "rate_per_s": 0.5}, {"count": 200, "rate_per_s": 1000})
    )
    assert idle < 1.01
    assert flooded == pytest.approx(at_once, rel=0.02)


def test_the_workloads_seconds_are_its_tokens_at_the_rates_bounds() -> None:
    """From 0, though a trace may begin late."""
    requests = [Request(1e4 + n, 2000, 100) for n in range(40)]
    scenario = {"model": "llama3-8b", "cluster": "dgx-h100", "inference": {"requests": ONE}}
    found = with_intervals(simulate_serving(parse_scenario(scenario), requests=tuple(requests)))
    assert found.intervals is not None
    tokens_per_s = [4000 / (s - 1e4) for s in found.duration_interval_s]
    assert tokens_per_s == pytest.approx(found.intervals.output_tokens_per_s[::-1])
    assert 1e4 + 39 < found.duration_interval_s[0] < found.duration_s < found.duration_interval_s[1] < 1e4 + 45


def test_a_slower_server_is_scaled_by_the_same_seconds() -> None:
    """A rule that looks every five seconds does so however long the server takes."""
    rule = {"min_replicas": 1, "metric": "ongoing", "target": 1, "interval_s": 5.0, "upscale_delay_s": 5.0}
    scenario = {"model": "llama3-8b", "cluster": "dgx-h100", "parallelism": {"dp": 2}}
    inference = {"requests": ONE, "router": "least_loaded", "autoscaling": rule}
    requests = tuple(Request(10.0 * n, 2000, 2000) for n in range(30))
    sim = simulate_serving(parse_scenario({**scenario, "inference": inference}), requests=requests)
    for times in (0.7, 1.0, 1.7):
        other = other_server(sim, times)
        assert other.autoscaling is not None
        on_s = [times * start_s for start_s, _ in other.autoscaling.replicas]
        assert all(s == pytest.approx(5 * round(s / 5)) for s in on_s if s < 250)


def test_the_explorer_tells_what_a_run_does() -> None:
    sim = simulate_serving(load_scenario("serve_llama8b", ("inference.requests.count=20",)))
    intervals = with_intervals(sim).intervals
    assert intervals is not None
    low, high = intervals.output_tokens_per_s
    assert f"90 % interval {count(low)} – {count(high)}" in Panel._words(sim, None)
