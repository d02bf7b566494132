"""What a serving page draws of its requests are the result's own numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from sim.commands.run import main
from sim.core.units import n_bytes, seconds
from sim.inputs.scenario import load_scenario
from sim.serve.results.distributions import distributions
from sim.serve.results.over_time import over_time
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from sim.studies.promised_latencies import parse_slo
from sim.views.serving_plots import LATENCIES, ServingPlots, serving_plots
from sim.views.serving_summary import cache_lines
from tests.processes import invoked

SCENARIOS = Path(__file__).parents[3] / "scenarios"


def served(name: str, *changes: str) -> ServingSimulation:
    return simulate_serving(load_scenario(SCENARIOS / f"{name}.yaml", changes))


@pytest.fixture(scope="module")
def crowded() -> ServingSimulation:
    """More requests than run at once, so that some wait long."""
    return served("serve_llama8b", "inference.requests.count=300", "inference.requests.rate_per_s=60")


def plots_of(sim: ServingSimulation, slo: str = "") -> ServingPlots:
    promises = parse_slo(slo) if slo else ()
    return serving_plots(sim.outcome, over_time(sim), distributions(sim), promises)


def data_of(figure: Any, name: str) -> dict[str, Any]:
    (renderer,) = (r for r in figure.renderers if r.name == name)
    return dict(renderer.data_source.data)


@pytest.mark.parametrize("key", LATENCIES)
def test_curves_and_marks_pass_through_the_results_percentiles(crowded: ServingSimulation, key: str) -> None:
    stated = getattr(crowded.outcome, key)
    figure = next(p.figure for p in plots_of(crowded).latencies if p.name == key.removesuffix("_s"))
    curve, marks = data_of(figure, f"cumulative:{key}"), data_of(figure, f"marks:{key}")
    at = dict(zip(curve["y"], curve["x"], strict=True))
    assert [at[0.5], at[0.9], at[0.99]] == marks["x"] == [stated.p50, stated.p90, stated.p99]
    assert list(curve["x"]) == sorted(curve["x"])


def test_levels_have_the_results_means_and_maxima(crowded: ServingSimulation) -> None:
    found, cache = over_time(crowded), crowded.outcome.kv_cache
    (running,) = found.running
    assert running.mean.mean() == pytest.approx(cache.running_mean)
    assert running.most.max() == cache.running_max == 256
    # Little's law: the queue's integral over time is the sum of what its requests wait.
    waited_s = found.waiting.mean @ np.diff(found.level_edges_s)
    assert waited_s == pytest.approx(crowded.times.queue_s.sum())
    width_s = np.diff(found.rate_edges_s)
    assert found.arriving_per_s @ width_s == pytest.approx(300)
    assert found.finishing_per_s @ width_s == pytest.approx(300)


@pytest.mark.parametrize("name", ["serve_preemption", "serve_disaggregated_llama70b", "serve_llama405b_pp2"])
def test_nobody_waits_and_runs_at_once(name: str) -> None:
    sim = served(name)
    found = over_time(sim)
    assert len(found.running) == len(sim.pools)
    assert found.waiting.mean.min() >= 0
    # Every request is in the system from its arrival to its last token, waiting or running.
    present = found.waiting.mean + sum(level.mean for level in found.running)
    inside_s = sum(s.finish_s - s.request.arrival_s for s in sim.sequences)
    assert present @ np.diff(found.level_edges_s) == pytest.approx(inside_s)


def test_plots_stay_small_however_many_requests(crowded: ServingSimulation) -> None:
    drawn = plots_of(crowded)
    for plot in (*drawn.over_time, *drawn.latencies):
        assert all(len(column) < 250 for r in plot.figure.renderers for column in r.data_source.data.values())


def test_limits_are_drawn_and_a_far_one_is_named_in_words(crowded: ServingSimulation) -> None:
    first = next(
        p for p in plots_of(crowded, "ttft_p99=0.1,ttft_mean=900s").latencies if p.title == "Time to first token"
    )
    assert data_of(first.figure, "limits:time_to_first_token_s")["x"] == [0.1]
    assert [words for _, words in first.keys] == ["p99 ≤ 100.0 ms ✗ broken", "mean ≤ 15.00 min ✓ kept"]


def test_the_command_marks_limits_on_the_page_and_in_json(tmp_path: Path) -> None:
    page, file = tmp_path / "x.html", tmp_path / "x.json"
    scenario = [str(SCENARIOS / "serve_llama8b.yaml"), "--set", "inference.requests.count=40"]
    slo = ["--slo", "ttft_p99=0.0001,latency_p50=60"]
    invoked(main, *scenario, *slo, "--html", str(page), "--json", str(file))
    html = page.read_text("utf-8")
    assert "p99 ≤ 100.0 µs ✗ broken" in html
    assert "0.0 % of requests keep every limit" in html
    result = json.loads(file.read_text("utf-8"))
    assert result["slo"] == [{"limit": "ttft_p99=0.0001", "kept": False}, {"limit": "latency_p50=60", "kept": True}]
    assert result["share_within_slo"] == 0.0


def test_limits_are_for_serving() -> None:
    done = CliRunner().invoke(main, [str(SCENARIOS / "tp8_sp.yaml"), "--slo", "ttft_p99=1"])
    assert done.exit_code != 0
    assert "--slo: is for serving; this scenario trains" in f"{done.output}{done.exception}"


def test_the_cache_in_the_memory_table_is_said_to_hold_kept_prefixes() -> None:
    """vLLM keeps prefixes that nobody reads; the table counts them, the blocks of running sequences do not."""
    changes = ["inference.requests.count=20", "inference.engine=vllm-v1"]
    served = simulate_serving(load_scenario("scenarios/serve_llama8b.yaml", changes)).outcome
    kept = max(row.kv_cache or 0.0 for row in served.memory)
    assert f"; {n_bytes(kept)} with prefixes kept" in dict(cache_lines(served))["in use"]
    served = simulate_serving(load_scenario("scenarios/serve_llama8b.yaml", [changes[0]])).outcome
    assert "kept" not in dict(cache_lines(served))["in use"]


def test_the_time_in_the_summary_is_that_of_its_rates() -> None:
    """From the first arrival on; `duration_s` is from 0."""
    sim = served("serve_llama8b", "inference.requests.count=2", "inference.requests.rate_per_s=0.1")
    since_first_s = sim.end_s - sim.start_s
    assert since_first_s < 0.9 * sim.outcome.duration_s
    line = dict(cache_lines(sim.outcome))["served"]
    assert line.startswith(f"2 requests, {sim.outcome.output_tokens} output tokens in {seconds(since_first_s)} (")
