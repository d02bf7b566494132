"""Intervals of published rows of serving: how uncertain a latency is depends on the load."""

from __future__ import annotations

import pytest

from sim.validation.predict import predict
from sim.validation.prediction import Predictions
from sim.validation.records import Measurement

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
    assert busy[key] > 3 * at_once[key]


def test_throughput_below_saturation_is_no_more_uncertain_than_the_server() -> None:
    key = "output_tokens_per_s"
    assert widths(predicted(count=200, rate_per_s=0.5))[key] == pytest.approx(widths(predicted(count=8))[key])
