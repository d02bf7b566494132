"""Steps, days and GPU hours of a whole training."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import parse_scenario
from sim.simulation import simulate
from sim.studies.goodput import goodput
from sim.views.headline import goodput_numbers
from tests.sim.cases import case

SCHEDULE = [{"from_tokens": 0, "global_batch_size": 8}, {"from_tokens": 1e6, "global_batch_size": 32}]


def test_one_batch_size_takes_tokens_over_tokens_a_step() -> None:
    """Steps of 8 · 512 tokens; GPU hours are those of all ranks."""
    r = simulate(case({"dp": 2}, {"tokens": 1e9})).result
    run = r["training_run"]
    assert run["steps"] == -(-(10**9) // (8 * 512))
    assert run["days"] == pytest.approx(run["steps"] * r["step_time_s"] / 86_400)
    assert run["gpu_hours"] == pytest.approx(run["days"] * 24 * 2)
    assert len(run["batch_schedule"]) == 1


def test_every_phase_has_the_step_of_its_batch() -> None:
    run = simulate(case({"dp": 2}, {"tokens": 5e6, "batch_schedule": SCHEDULE})).result["training_run"]
    small, large = run["batch_schedule"]
    for phase, size, tokens in ((small, 8, 1e6), (large, 32, 4e6)):
        alone = simulate(case({"dp": 2}, {"global_batch_size": size})).result
        assert phase["step_time_s"] == alone["step_time_s"]
        assert phase["steps"] == -(-tokens // (size * 512))
    assert run["steps"] == small["steps"] + large["steps"]
    assert run["days"] == pytest.approx(small["days"] + large["days"])
    assert (small["to_tokens"], large["to_tokens"]) == (1e6, 5e6)


def test_failures_make_a_training_longer() -> None:
    """By the share of the time that is effective training."""
    failures = {"mtbf_s_per_gpu": 1e6, "restart_s": 3600, "checkpoint_interval_s": 3600}
    of_a_week = case({"dp": 2}, {"tokens": 1e12}).model_dump(mode="json") | {"faults": {"failures": failures}}
    step = simulate(parse_scenario(of_a_week))
    run, weeks = step.outcome.training_run, goodput(step.scenario, step.step_time_s, 30, 4)
    assert run is not None
    (number,) = goodput_numbers(run, weeks)
    useful = weeks.effective_training_time.mean
    assert 0.5 < useful < 1
    assert number.value == f"{run.days / useful:,.1f} days"
    assert goodput_numbers(run, None) == goodput_numbers(None, weeks) == []


def test_without_tokens_there_is_no_training_in_the_result() -> None:
    assert "training_run" not in simulate(case()).result


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"batch_schedule": SCHEDULE}, r"training\.batch_schedule: found phases without training\.tokens"),
        ({"tokens": 1e6, "batch_schedule": SCHEDULE}, r"training\.tokens: found 1e\+06; must be above 1e\+06"),
        ({"tokens": 1e9, "batch_schedule": SCHEDULE[1:]}, r"from_tokens: found 1e\+06; the first phase starts at 0"),
        ({"tokens": 1e9, "batch_schedule": [SCHEDULE[0], SCHEDULE[0]]}, r"\[1\]\.from_tokens: found 0; must be above"),
        (
            {"tokens": 1e9, "batch_schedule": [{"from_tokens": 0, "global_batch_size": 9}]},
            r"\[0\]\.global_batch_size: found 9; must be a multiple of",
        ),
    ],
)
def test_a_schedule_that_cannot_be_names_its_entry(training: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        case({"dp": 2}, training)
