"""Weeks of failures against Daly's closed form, and its optimum against the simulated curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario, load_scenario, parse_scenario
from sim.studies.goodput import DAY_S, daly_s, effective, goodput, job_of, many_runs, young_s
from sim.studies.weeks import Job, TimeBreakdown, one_run
from tests.modules import run_module
from tests.sim.cases import case

ROOT = Path(__file__).parents[3]


def job(mtbf_s: float, interval_s: float, checkpoint_s: float, restart_s: float, **more: Any) -> Job:
    made = Job(((1 / mtbf_s, restart_s, True),), interval_s, checkpoint_s, None, DAY_S, 2000 * mtbf_s)
    return replace(made, **more)


def useful(of: Job, runs: int = 8) -> float:
    return float(np.mean([w.useful_s for w in many_runs(of, list(range(runs)))])) / of.horizon_s


@settings(deadline=None, max_examples=30)
@given(st.floats(1e3, 1e6), st.floats(0.02, 1.0), st.floats(0.001, 0.3), st.floats(0.0, 0.5))
def test_simulated_time_is_dalys_closed_form(mtbf_s: float, interval: float, checkpoint: float, restart: float) -> None:
    """16,000 failures: the mean is known to about 1 %."""
    one = job(mtbf_s, interval * mtbf_s, checkpoint * mtbf_s, restart * mtbf_s)
    assert useful(one) == pytest.approx(effective(one, one.interval_s), rel=0.05)


@settings(deadline=None, max_examples=50)
@given(st.floats(1e3, 1e6), st.floats(1e-5, 0.05), st.floats(0.0, 0.5))
def test_dalys_interval_is_the_best_of_the_closed_form(mtbf_s: float, checkpoint: float, restart: float) -> None:
    one = job(mtbf_s, 1.0, checkpoint * mtbf_s, restart * mtbf_s)
    around = [effective(one, daly_s(one) * x) for x in (0.8, 1.0, 1.25)]
    assert around[1] == max(around)
    grid = max(effective(one, mtbf_s * x) for x in np.geomspace(1e-3, 3, 2000))
    assert around[1] == pytest.approx(grid, rel=1e-3)
    assert young_s(one) == pytest.approx(daly_s(one), rel=0.2)


@settings(deadline=None, max_examples=50)
@given(st.floats(10, 1e5), st.floats(0, 1e4), st.floats(0, 1e4), st.none() | st.integers(0, 3), st.integers(0, 99))
def test_all_seconds_are_somewhere(
    interval: float, checkpoint: float, restart: float, spares: int | None, seed: int
) -> None:
    one = job(2e4, interval, checkpoint, restart, spares=spares, repair_s=3e4, horizon_s=1e6)
    weeks = one_run(one, np.random.default_rng(seed))
    *seconds, failures = astuple(weeks)
    assert sum(seconds) == pytest.approx(one.horizon_s)
    assert min(seconds) >= 0
    assert failures > 0 or weeks.useful_s + weeks.checkpoint_s == pytest.approx(one.horizon_s)


def test_without_failures_only_checkpoints_cost() -> None:
    one = job(1e18, 900.0, 100.0, 600.0, horizon_s=1e6)
    assert useful(one, 1) == pytest.approx(0.9)


def test_no_spare_means_waiting_for_every_repair_and_many_mean_none() -> None:
    of = job(1e5, 1e3, 0.0, 0.0, repair_s=5e4)
    waits = {}
    for spares in (0, 1, 2, 8, None):
        weeks = many_runs(replace(of, spares=spares), [1, 2, 3])
        waits[spares] = sum(w.waiting_s for w in weeks) / sum(w.failures for w in weeks)
    assert waits[0] == pytest.approx(of.repair_s, rel=0.01)
    assert waits[0] > waits[1] > waits[2] > waits[8]
    assert waits[None] == 0.0


def with_failures(failures: dict[str, Any] | None, **parallelism: Any) -> Scenario:
    data = case(parallelism, {"global_batch_size": 64}).model_dump(mode="json")
    return parse_scenario({**data, "faults": {"failures": failures}})


def test_kinds_have_rates_and_restarts_of_their_own() -> None:
    kinds = [
        {"name": "GPU", "mtbf_s_per_gpu": 1e6, "restart_s": 900},
        {"name": "software", "mtbf_s_per_gpu": 3e6, "takes_node": False},
    ]
    one = job_of(with_failures({"kinds": kinds, "restart_s": 100}, dp=64), 30)
    assert one.mtbf_s == pytest.approx(1 / 64 / (1 / 1e6 + 1 / 3e6))
    assert one.restart_s == pytest.approx(0.75 * 900 + 0.25 * 100)
    assert useful(replace(one, horizon_s=1e8), 4) == pytest.approx(effective(one, one.interval_s), rel=0.03)


def test_a_teacher_on_gpus_of_its_own_fails_too() -> None:
    keys = ["faults={failures: {mtbf_s_per_gpu: 1.6e7}}"]
    names = ("distill_logits", "distill_logits_apart")
    same, apart = (job_of(load_scenario(ROOT / "scenarios" / f"{name}.yaml", keys), 30).mtbf_s for name in names)
    assert (same, apart) == (1.6e7 / 8, 1.6e7 / 16)


def test_the_same_seed_gives_the_same_distribution_in_any_number_of_processes() -> None:
    scenario = with_failures({"mtbf_s_per_gpu": 1e7, "seed": 5}, dp=64)
    one, two = (goodput(scenario, 1.0, 20, runs=40, jobs=n) for n in (1, 2))
    assert one == two
    other = goodput(with_failures({"mtbf_s_per_gpu": 1e7, "seed": 6}, dp=64), 1.0, 20, runs=40, jobs=1)
    assert other.effective_training_time != one.effective_training_time


def test_what_was_published_stands_beside_and_serving_has_no_days() -> None:
    command = ("sim.run", "scenarios/dp8.yaml", "--days", "5", "--runs", "4", "--set")
    failures = "faults.failures={published: {effective_training_time: 0.93, failures: 7}, mtbf_s_per_gpu: 1e6}"
    shown = run_module(*command, failures).stdout
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("  published")] == ["93.0", "7"]
    done = run_module("sim.run", "scenarios/serve_batch1.yaml", "--days", "5")
    assert done.returncode == 2
    assert "--days: is for training" in done.stderr


@pytest.mark.parametrize(
    ("failures", "days", "names"),
    [
        (None, 54, "faults.failures"),
        ({}, 0, "--days"),
        ({}, float("nan"), "--days"),
        ({"mtbf_s_per_gpu": 1}, 54, "at most 1,000,000"),
    ],
)
def test_what_cannot_be_simulated_is_refused(failures: dict[str, Any] | None, days: float, names: str) -> None:
    with pytest.raises(InputError, match=names):
        goodput(with_failures(failures), 1.0, days)


def test_llama3_405b_over_54_days() -> None:
    """466 interruptions in 54 days on 16,384 GPUs, effective training time above 90 % (Llama Team 2024, section 3.3.4).
    What a restart takes and how often checkpoints are written was not published; see the scenario's comments."""
    file = ROOT / "scenarios" / "goodput_llama3_405b.yaml"
    done = run_module("sim.run", file, "--days", "54", "--runs", "50", "--json", "-")
    found = json.loads(done.stdout)["goodput"]
    assert found["gpus"] == 16384
    assert found["published"] == {"effective_training_time": 0.9, "failures": 466}
    assert found["failures"]["p5"] < 466 < found["failures"]["p95"]
    assert found["effective_training_time"]["mean"] == pytest.approx(found["closed_form"], abs=0.01)
    assert found["effective_training_time"]["mean"] > 0.9
    assert sum(found["parts"].values()) == pytest.approx(1.0)
    assert "weeks of training" not in done.stdout


def by_sums(job: Job, random: np.random.Generator) -> TimeBreakdown:
    """A history without a clock: sums over failures, and a sorted list of when nodes return."""
    useful = saving = lost = restarting = waiting = now = 0.0
    failures, cycle_s = 0, job.interval_s + job.checkpoint_s
    rates, back = np.cumsum([rate for rate, _, _ in job.kinds]), list[float]()
    while True:
        runs_s = min(float(random.exponential(job.mtbf_s)), job.horizon_s - now)
        now += runs_s
        cycles = runs_s // cycle_s
        worked_s = min(runs_s - cycles * cycle_s, job.interval_s)
        useful += cycles * job.interval_s
        saving += runs_s - cycles * job.interval_s - worked_s
        if now >= job.horizon_s:
            return TimeBreakdown(useful + worked_s, saving, lost, restarting, waiting, failures)
        lost += worked_s
        again = True
        while again and now < job.horizon_s:
            failures += 1
            kind = int(np.searchsorted(rates, random.random() * rates[-1], side="right"))
            _, restart_s, takes_node = job.kinds[min(kind, len(rates) - 1)]
            if takes_node and job.spares is not None:
                back = sorted([*(t for t in back if t > now), now + job.repair_s])
                missing = len(back) - job.spares
                until = back[missing - 1] if missing > 0 else now
                waiting += min(until, job.horizon_s) - now
                now = until
            next_s = float(random.exponential(job.mtbf_s))
            restarting += max(0.0, min(now + min(restart_s, next_s), job.horizon_s) - now)
            now += min(restart_s, next_s)
            again = next_s < restart_s
        if now >= job.horizon_s:
            return TimeBreakdown(useful, saving, lost, restarting, waiting, failures)


@settings(deadline=None, max_examples=60)
@given(st.floats(100, 1e5), st.floats(0, 1e4), st.floats(0, 3e4), st.none() | st.integers(0, 3), st.integers(0, 99))
def test_processes_and_spares_as_a_container_are_the_sums(
    interval: float, checkpoint: float, restart: float, spares: int | None, seed: int
) -> None:
    kinds = ((3e-5, restart, True), (2e-5, restart / 2, False))
    one = Job(kinds, interval, checkpoint, spares, 3e4, 1e6)
    found, sums = (run(one, np.random.default_rng(seed)) for run in (one_run, by_sums))
    assert astuple(found) == pytest.approx(astuple(sums), rel=1e-9, abs=1e-9 * one.horizon_s)
