"""What the shipped serving scenarios come to: a change that moves a figure is seen, and accepted by recording anew."""

from __future__ import annotations

import json

import pytest

from tests.sim.serve.headlines import RECORDED, RENEW, SCENARIOS, figures, moved

EXPECTED = json.loads(RECORDED.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_figures_are_those_recorded(scenario: str) -> None:
    assert scenario in EXPECTED, f"not recorded; {RENEW}"
    found = moved(figures(scenario), EXPECTED[scenario])
    assert not found, f"{scenario}: {'; '.join(found)}. Where that is meant: {RENEW}"


def test_no_scenario_is_recorded_that_is_gone() -> None:
    assert EXPECTED.keys() <= {*SCENARIOS}, RENEW


def test_what_counts_as_moved() -> None:
    then = {"output_tokens_per_s": 100.0, "time_to_first_token_s p99": 0.5}
    assert moved(then, then) == []
    assert moved({**then, "output_tokens_per_s": 100.00001}, then) == []
    assert moved({**then, "output_tokens_per_s": 100.001}, then) == ["output_tokens_per_s: 100 recorded, 100.001 now"]
    assert moved({"output_tokens_per_s": float("nan")}, then) == [
        "output_tokens_per_s: 100 recorded, nan now",
        "time_to_first_token_s p99: 0.5 recorded, nan now",
    ]
