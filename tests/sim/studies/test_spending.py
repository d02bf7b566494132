"""Costs in money and energy, and a measured step as an anchor."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sim.commands.run import main
from sim.inputs.scenario import load_scenario
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate
from sim.studies.anchor import anchor
from sim.studies.spending import spending
from sim.views.headline import SET_IS_CHANGE, TO_CHECK
from sim.views.scenario_words import layout_line
from tests.processes import invoked
from tests.sim.cases import case


def test_a_trillion_tokens_cost_their_gpu_hours() -> None:
    result = simulate(case({"dp": 2}, {"tokens": 1e9})).outcome
    found = spending(result, 3.0)
    assert found.trillion_tokens is not None
    assert found.whole_training is not None
    hours = 1e12 / result.tokens_per_s * 2 / 3600
    assert found.trillion_tokens.gpu_hours == pytest.approx(hours)
    assert found.trillion_tokens.price == pytest.approx(3.0 * hours)
    watts = result.scenario.cluster.gpu.power_limit_w
    assert found.trillion_tokens.energy_kwh == pytest.approx(hours * watts / 1000)
    assert found.whole_training.price == pytest.approx(found.trillion_tokens.price / 1000, rel=1e-3)  # whole steps


def test_a_whole_training_uses_the_gpus_of_its_teacher() -> None:
    """8 GPUs of the student and 8 of the teacher, as tokens/s/GPU count them."""
    result = simulate(load_scenario("scenarios/distill_logits_apart.yaml", ["training.tokens=1e12"])).outcome
    found = spending(result, 1.0)
    assert found.whole_training is not None
    assert found.trillion_tokens is not None
    assert found.whole_training.gpu_hours == pytest.approx(found.trillion_tokens.gpu_hours, rel=1e-3)  # whole steps
    assert "16 GPUs (dgx-h200" in layout_line(result.scenario)


def test_a_training_with_failures_costs_their_hours() -> None:
    result = simulate(case({"dp": 2}, {"tokens": 1e9})).outcome
    without, half = spending(result, 1.0), spending(result, 1.0, useful_share=0.5)
    assert without.whole_training is not None
    assert half.whole_training is not None
    assert half.whole_training.price == pytest.approx(2 * without.whole_training.price)
    assert half.trillion_tokens == without.trillion_tokens
    assert spending(result, 1.0, useful_share=0.0).whole_training is None  # it never ends


def test_a_million_output_tokens_cost_what_serving_them_takes() -> None:
    result = simulate_serving(load_scenario("scenarios/serve_static_a100.yaml")).outcome
    cost = spending(result, 2.0).million_output_tokens
    assert cost is not None
    assert cost.price == pytest.approx(2.0 * 1e6 / result.output_tokens_per_s_per_gpu / 3600)


def test_a_step_of_reinforcement_learning_costs_all_its_gpus(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    ran = invoked(main, "scenarios/rl_grpo_llama8b.yaml", "--price", "2", "--json", str(out))
    found = json.loads(out.read_text())
    step, answers = found["spending"]["rl_step"], found["spending"]["million_answers"]
    assert step["price"] == pytest.approx(2 * 16 * found["step_time_s"] / 3600)
    assert step["tokens"] == found["tokens"]
    assert answers["price"] == pytest.approx(step["price"] * 1e6 / 1024)  # 64 prompts, 16 answers each
    assert "Cost of a step" in ran.output
    assert "Cost per million answers" in ran.output


@pytest.mark.parametrize(("measured", "outside"), [("0.82s", False), ("3.9s", True)])
def test_a_step_outside_the_interval_names_what_to_check(measured: str, outside: bool) -> None:
    ran = invoked(main, "scenarios/zero3_llama8b_dp64.yaml", "--measured", measured, "--no-advise")
    words = "".join(ran.output.split())  # without spaces, since a word that is longer than a line is cut
    assert (TO_CHECK.replace(" ", "") in words) is outside
    assert "without--set" not in words


def test_what_is_off_by_a_factor_is_scaled_by_it() -> None:
    as_measured, changed = simulate(case({"dp": 2})).outcome, simulate(case({"dp": 4})).outcome
    found = anchor(1.25 * as_measured.step_time_s, as_measured, changed)
    assert found.anchored_step_time_s == pytest.approx(1.25 * changed.step_time_s)
    assert found.anchored_tokens_per_s == pytest.approx(changed.tokens_per_s / 1.25)
    assert found.error == pytest.approx(1 / 1.25 - 1)
    for measured_s in (n / 7 for n in range(1, 100)):  # to the last bit: the summary says what --set changed alone
        assert anchor(measured_s, as_measured, as_measured).anchored_step_time_s == measured_s
    same = anchor(as_measured.step_time_s, as_measured, as_measured)
    assert same.inside_interval
    assert same.error == 0


def test_the_command_measures_against_the_scenario_without_set(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    command = [
        "scenarios/dp8.yaml",
        "--measured",
        "2000ms",
        "--set",
        "cluster=dgx-h200",
        "--json",
        str(out),
        "--price",
        "2",
    ]
    ran = invoked(main, *command)
    found = json.loads(out.read_text())
    assert found["measured"]["simulated_s"] == simulate(load_scenario("scenarios/dp8.yaml")).step_time_s
    scaled_s = found["step_time_s"] * 2 / found["measured"]["simulated_s"]
    assert found["measured"]["anchored_step_time_s"] == pytest.approx(scaled_s)
    assert found["spending"]["price_per_gpu_hour"] == 2
    assert "Cost per trillion tokens" in ran.output
    assert "at 2 a GPU hour: " in ran.output
    assert "With --set, scaled" in ran.output
    assert "without --set" in ran.output
    assert SET_IS_CHANGE.replace(" ", "") in "".join(ran.output.split())


@pytest.mark.parametrize(
    ("scenario", "options", "said"),
    [
        ("dp8", ("--measured", "2s"), ("Measured step", "Cost per trillion tokens")),
        ("serve_batch1", (), ("Cost per million output tokens",)),
        ("rl_grpo_llama8b", (), ("Cost of a step",)),
    ],
)
def test_a_page_says_what_the_terminal_says(
    scenario: str, options: tuple[str, ...], said: tuple[str, ...], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    ran = invoked(main, f"scenarios/{scenario}.yaml", "--price", "2", *options, "--html", str(page))
    for name in said:
        assert name in ran.output
        assert name in page.read_text()


def test_a_page_has_the_training_with_failures(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    asked = ("--days", "30", "--runs", "2", "--html", str(page), "--set", "faults.failures={}", "--tokens", "1T")
    ran = invoked(main, "scenarios/dp8.yaml", *asked, "--price", "1")
    hours = re.findall(r"([0-9,]+)\s+GPU\s+hours", ran.output)  # without failures, with them; a trillion, the whole
    assert hours[1] == hours[3] != hours[0]
    for words in ("Training with failures", "optimal interval (Young)"):
        assert words in ran.output
        assert words in page.read_text()


@pytest.mark.parametrize("said", ["0s", "4.1 weeks", "nan", "-1", "fast"])
def test_a_measured_step_is_a_time(said: str) -> None:
    ran = invoked(main, "scenarios/dp8.yaml", "--measured", said, code=2)
    assert "must be a time above 0 and below 1e+09 s, such as 4.1, 4.1s or 350ms" in ran.output


def test_serving_has_no_measured_step() -> None:
    ran = invoked(main, "scenarios/serve_static_a100.yaml", "--measured", "2", code=2)
    assert "--measured: is for training; this scenario serves requests" in ran.output


def test_tokens_of_a_training_have_units() -> None:
    for text in ("15T", "15e12", "15000B"):
        assert case({"dp": 2}, {"tokens": text}).for_training.tokens == 15e12
