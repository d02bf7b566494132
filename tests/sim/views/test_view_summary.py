"""The printed summary: short, plain when piped, complete."""

from __future__ import annotations

import io
from typing import Any

import pytest
import synthetic
from msgspec.structs import replace
from rich.console import Console

from sim.inputs.scenario import load_scenario
from sim.results.result import StepResult
from sim.serve.records import Percentiles, ServingResult
from sim.serve.simulation import simulate_serving
from sim.views.summary import print_summary


def printed(result: StepResult | ServingResult, width: int = 100, **options: Any) -> str:
    out = io.StringIO()
    print_summary(result, Console(file=out, width=width, **options))
    return out.getvalue()


@pytest.fixture
def result() -> StepResult:
    timeline = synthetic.one_f_one_b()
    return synthetic.result_of(timeline, synthetic.memory_curves(timeline))


def test_it_fits_on_a_screen_and_says_what_matters(result: StepResult) -> None:
    text = printed(result)
    assert len(text.splitlines()) <= 40
    for words in (
        "815.8 ms",
        "90 % interval 775.0 ms – 864.7 ms",
        "45.0 %",
        "34.8 %",
        "26.30 GiB",
        "✓ fits",
        "ranks 56–63",
        "70.0 % from measured points",
        "warning: vocabulary padded",
        "static engine",
    ):
        assert words in text


def test_lines_keep_to_the_width(result: StepResult) -> None:
    for width in (80, 100, 160):
        assert max(map(len, printed(result, width).splitlines())) <= width


def test_no_escape_codes_when_piped_and_none_with_no_color(result: StepResult, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[" not in printed(result)
    assert "\x1b[" in printed(result, force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    text = printed(result, force_terminal=True)
    assert not any(f"\x1b[{code}m" in text for code in (31, 33, 34, 36, 90))


def test_names_are_not_markup(result: StepResult) -> None:
    scenario = result.scenario.model_copy(update={"name": "[bold red]x[/]"})
    text = printed(replace(result, scenario=scenario, warnings=("a [link=x] warning",)))
    assert "[bold red]x[/]" in text
    assert "a [link=x] warning" in text


def test_many_ranks_are_cut_in_the_middle() -> None:
    timeline = synthetic.one_f_one_b(p=64, m=64)
    text = printed(synthetic.result_of(timeline, synthetic.memory_curves(timeline)))
    assert len(text.splitlines()) <= 45
    assert "… 52 more" in text
    assert "ranks 504–511" in text


def test_what_does_not_fit_is_told(result: StepResult) -> None:
    assert "✗ does not fit" in printed(replace(result, fits_in_memory=False))


def test_serving_results_show_their_latencies() -> None:
    served = simulate_serving(load_scenario("scenarios/serve_preemption.yaml")).outcome
    text = printed(replace(served, request_latency_s=Percentiles(1.0, 2.0, 3.0, 1.5), output_tokens_per_s=1234.0))
    assert "median; p90 2.000 s, p99 3.000 s" in text
    assert "1,234" in text
