"""How much of weeks of training is useful: failures, checkpoints, restarts, spare nodes.

Failures come at random (a Poisson process), at a rate per GPU that is the same all the time, while the job runs and
while it restarts. A failure costs what was computed since the last checkpoint, the wait for a spare node if none is
left, and a restart; a failure during the restart starts it anew. Checkpoints stop the computation for `checkpoint_s`
after every `checkpoint_interval_s` of it.

Closed form for exponential failures (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", FGCS 22, 2006, equation 20): W seconds of work take M·e^(R/M)·(e^((W+δ)/M) - 1) with mean time between
failures M, restart R, checkpoint δ. The best W is about √(2δM) (J. W. Young, CACM 17(9), 1974), or by Daly's
equation 37.

Left out: checkpoints fall anywhere, not between steps; failures that come in groups; slow steps before a failure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sim.errors import InputError
from sim.inputs.scenario import Scenario

DAY_S = 86400.0
CURVE = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # intervals of the curve, in multiples of Daly's
CHUNK = 16  # runs that a process is handed at once


@dataclass(frozen=True, slots=True)
class Job:
    """A job that fails. `kinds`: by sort of failure, the whole job's rate per second, its restart, whether it takes a
    node away; `spares`: None if there is always one."""

    kinds: tuple[tuple[float, float, bool], ...]
    interval_s: float
    checkpoint_s: float
    spares: int | None
    repair_s: float
    horizon_s: float

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the whole job."""
        return 1.0 / sum(rate for rate, _, _ in self.kinds)

    @property
    def restart_s(self) -> float:
        """Mean restart."""
        return sum(rate * restart_s for rate, restart_s, _ in self.kinds) * self.mtbf_s


@dataclass(frozen=True, slots=True)
class Weeks:
    """Where the seconds of one run went; all but `failures` add up to the horizon."""

    useful_s: float
    checkpoint_s: float
    lost_s: float  # computed, and lost with a failure
    restart_s: float
    waiting_s: float  # for a spare node
    failures: int


def job_of(scenario: Scenario, days: float) -> Job:
    """The job that a scenario's `faults.failures` describes, on all its GPUs.

    Raises:
        InputError: without that section, or for days that are none.
    """
    f = scenario.faults.failures if scenario.faults else None
    if f is None:
        raise InputError(
            f"{scenario.name}: faults.failures: is required by --days and missing (`failures: {{}}` for defaults)"
        )
    if not 0 < days <= 36500:
        raise InputError(f"--days: found {days:g}; must be above 0 and at most 36,500")
    gpus = _gpus(scenario)
    kinds = tuple(
        (gpus / k.mtbf_s_per_gpu, f.restart_s if k.restart_s is None else k.restart_s, k.takes_node) for k in f.kinds
    ) or ((gpus / f.mtbf_s_per_gpu, f.restart_s, True),)
    job = Job(kinds, f.checkpoint_interval_s, f.checkpoint_s, f.spare_nodes, f.repair_s, days * DAY_S)
    if job.horizon_s / job.mtbf_s > 1e6:
        raise InputError(
            f"{scenario.name}: faults.failures: {job.horizon_s / job.mtbf_s:,.0f} failures in {days:g} days; "
            "at most 1,000,000 are simulated"
        )
    return job


def _gpus(scenario: Scenario) -> int:
    """GPUs whose failures stop the job: its ranks, and a teacher's of its own."""
    d = scenario.distillation
    apart = d.teacher_parallelism.tp if d is not None and d.placement == "other" else 0
    return scenario.parallelism.ranks + apart


def young_s(job: Job) -> float:
    """Young's interval √(2δM), seconds of work between checkpoints."""
    return math.sqrt(2.0 * job.checkpoint_s * job.mtbf_s)


def daly_s(job: Job) -> float:
    """Daly's interval (2006, equation 37): √(2δM)·(1 + √(δ/2M)/3 + (δ/2M)/9) - δ for δ < 2M, else M."""
    ratio = job.checkpoint_s / (2.0 * job.mtbf_s)
    if ratio >= 1.0:
        return job.mtbf_s
    return young_s(job) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - job.checkpoint_s


def effective(job: Job, interval_s: float) -> float:
    """Useful part of the time with checkpoints after every `interval_s` of work, spares at hand (this file's head)."""
    m = job.mtbf_s
    if (interval_s + job.checkpoint_s + job.restart_s) / m > 700.0:
        return 0.0
    return interval_s / (m * math.exp(job.restart_s / m) * math.expm1((interval_s + job.checkpoint_s) / m))


def one_run(job: Job, random: np.random.Generator) -> Weeks:
    """One history of the job."""
    useful = saving = lost = restarting = waiting = now = 0.0
    failures, cycle_s = 0, job.interval_s + job.checkpoint_s
    back: list[float] = []  # when nodes that failed are repaired
    while True:
        runs_s = min(float(random.exponential(job.mtbf_s)), job.horizon_s - now)
        now += runs_s
        cycles = math.floor(runs_s / cycle_s)
        worked_s = min(runs_s - cycles * cycle_s, job.interval_s)
        useful += cycles * job.interval_s
        saving += runs_s - cycles * job.interval_s - worked_s
        if now >= job.horizon_s:
            return Weeks(useful + worked_s, saving, lost, restarting, waiting, failures)
        lost += worked_s
        waited_s, restarted_s, failed = _restart(job, random, now, back)
        failures += failed
        waiting += min(waited_s, job.horizon_s - now)
        restarting += min(restarted_s, max(0.0, job.horizon_s - now - waited_s))
        now += waited_s + restarted_s
        if now >= job.horizon_s:
            return Weeks(useful, saving, lost, restarting, waiting, failures)


def _restart(job: Job, random: np.random.Generator, now: float, back: list[float]) -> tuple[float, float, int]:
    """Seconds of waiting and of restarting until the job runs again, and the failures that this took, one and more."""
    waited_s = spent_s = 0.0
    failures, rates = 0, np.cumsum([rate for rate, _, _ in job.kinds])
    while True:
        failures += 1
        kind = int(np.searchsorted(rates, random.random() * rates[-1], side="right"))
        _, restart_s, takes_node = job.kinds[min(kind, len(rates) - 1)]
        waited_s += _wait_for_node(job, back, now + waited_s + spent_s) if takes_node else 0.0
        next_s = float(random.exponential(job.mtbf_s))
        spent_s += min(restart_s, next_s)
        if next_s >= restart_s or now + waited_s + spent_s >= job.horizon_s:
            return waited_s, spent_s, failures


def _wait_for_node(job: Job, back: list[float], now: float) -> float:
    """Take a spare, or wait for the first that is repaired in time; `back`: when each node that is away returns."""
    if job.spares is None:
        return 0.0
    back[:] = sorted([*(t for t in back if t > now), now + job.repair_s])
    missing = len(back) - job.spares
    return back[missing - 1] - now if missing > 0 else 0.0


def many_runs(job: Job, seeds: list[int]) -> list[Weeks]:
    """A run for each seed."""
    return [one_run(job, np.random.default_rng(seed)) for seed in seeds]


def goodput(
    scenario: Scenario,
    step_time_s: float,
    days: float,
    runs: int = 200,
    jobs: int | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """The key `goodput` of a result: useful time, its distribution over `runs` histories, where the rest goes, and the
    curve over the checkpoint interval beside Young's and Daly's optimum.

    Raises:
        InputError: as `job_of`.
    """
    job = job_of(scenario, days)
    assert scenario.faults is not None
    assert scenario.faults.failures is not None
    published = scenario.faults.failures.published
    best_s = max(daly_s(job), 1e-3)
    intervals = [job.interval_s, *(best_s * x for x in CURVE)]
    few = max(1, runs // 4)
    work = [(replace(job, interval_s=w), runs if i == 0 else few) for i, w in enumerate(intervals)]
    found = _run_all(work, scenario.faults.failures.seed, jobs, progress)
    return {
        "days": days, "runs": runs, "gpus": _gpus(scenario), "mtbf_s": job.mtbf_s,
        "checkpoint_interval_s": job.interval_s, "checkpoint_s": job.checkpoint_s, "restart_s": job.restart_s,
        **_summary(job, found[0], step_time_s, scenario),
        "closed_form": effective(job, job.interval_s),
        "published": published.model_dump(exclude_none=True) if published is not None else {},
        "optimum": {"young_s": young_s(job), "daly_s": daly_s(job), "closed_form": effective(job, best_s)},
        "curve": [{"interval_s": w, "closed_form": effective(job, w), **_useful(job, weeks)}
                  for w, weeks in zip(intervals[1:], found[1:], strict=True)],
    }  # fmt: skip


def _summary(job: Job, weeks: list[Weeks], step_time_s: float, scenario: Scenario) -> dict[str, Any]:
    t = scenario.training
    assert t is not None
    parts = {k: sum(getattr(x, f"{k}_s") for x in weeks) / len(weeks) / job.horizon_s
             for k in ("useful", "checkpoint", "lost", "restart", "waiting")}  # fmt: skip
    steps = parts["useful"] * job.horizon_s / step_time_s if step_time_s > 0 else 0.0
    return {
        "effective_training_time": _useful(job, weeks), "parts": parts,
        "failures": _spread([float(x.failures) for x in weeks]),
        "steps": steps, "tokens": steps * t.global_batch_size * t.seq_len,
    }  # fmt: skip


def _useful(job: Job, weeks: list[Weeks]) -> dict[str, float]:
    return _spread([x.useful_s / job.horizon_s for x in weeks])


def _spread(values: list[float]) -> dict[str, float]:
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95]).tolist()
    return {"mean": float(np.mean(values)), "p5": low, "p50": middle, "p95": high}


def _run_all(work: list[tuple[Job, int]], seed: int, jobs: int | None, progress: bool) -> list[list[Weeks]]:
    """All runs of all jobs, in `jobs` processes; the same numbers whatever their number."""
    from sim.layout.executors import available_cores, local_workers, results

    pieces = []
    for i, (job, runs) in enumerate(work):
        seeds = np.random.SeedSequence((seed, i)).generate_state(runs, np.uint64).tolist()
        pieces += [(i, job, seeds[at : at + CHUNK]) for at in range(0, runs, CHUNK)]
    expected = sum(runs * job.horizon_s / job.mtbf_s for job, runs in work)
    few = expected < 3e5  # failures, which are done before a process has started
    cores = jobs or (1 if few else min(8, available_cores()))
    out: list[list[Weeks]] = [[] for _ in work]
    with local_workers(cores) as workers:
        found = results(workers, many_runs, ((job, seeds) for _, job, seeds in pieces))
        for (i, _, _), weeks in zip(pieces, _shown(found, len(pieces), progress), strict=True):
            out[i] += weeks
    return out


def _shown(results: Iterator[list[Weeks]], count: int, progress: bool) -> Iterator[list[Weeks]]:
    if not progress:
        yield from results
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(results, "weeks of training", count, console=Console(stderr=True), transient=True)
