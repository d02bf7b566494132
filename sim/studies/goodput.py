"""The useful part of weeks of training: failures, checkpoints, restarts, spare nodes.

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
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from msgspec.structs import replace

from sim.core.errors import InputError
from sim.core.units import DAY_S
from sim.inputs.scenario import Scenario
from sim.results.records import Record
from sim.studies.weeks import Job, TimeBreakdown, one_run

if TYPE_CHECKING:
    from sim.inputs.faults_config import Failures

CURVE = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # intervals of the curve, in multiples of Daly's
CHUNK = 16  # runs that a process is handed at once


class Spread(Record, frozen=True):
    """Mean and percentiles of a quantity over all runs."""

    mean: float
    p5: float
    p50: float
    p95: float


class Parts(Record, frozen=True):
    """Fractions of the time, means over all runs; they add up to 1."""

    useful: float
    checkpoint: float
    lost: float
    restart: float
    waiting: float


class Optimum(Record, frozen=True):
    """The best interval between checkpoints, by Young and by Daly, and the useful part of the time with Daly's."""

    young_s: float
    daly_s: float
    closed_form: float


class CurvePoint(Record, frozen=True):
    """Useful part of the time with checkpoints after every `interval_s`: by closed form, and simulated."""

    inlined: ClassVar = ("useful",)
    interval_s: float
    closed_form: float
    useful: Spread


class Goodput(Record, frozen=True, kw_only=True):
    """Weeks of training with failures: the key `goodput` of a result."""

    days: float
    runs: int
    gpus: int
    mtbf_s: float
    checkpoint_interval_s: float
    checkpoint_s: float
    restart_s: float
    effective_training_time: Spread
    parts: Parts
    failures: Spread
    steps: float
    tokens: float
    closed_form: float
    published: Mapping[str, float]  # as the scenario says
    optimum: Optimum
    curve: tuple[CurvePoint, ...]
    engine: Mapping[str, str]  # `path`: which engine ran the histories


def job_of(scenario: Scenario, days: float) -> Job:
    """The job that a scenario's `faults.failures` describes, on all its GPUs.

    Raises:
        InputError: without that section, or for days that are none.
    """
    f = _failures_of(scenario)
    if not 0 < days <= 36500:
        raise InputError(f"--days: found {days:g}; must be above 0 and at most 36,500")
    gpus = scenario.gpus
    kinds = tuple(
        (gpus / k.mtbf_s_per_gpu, f.restart_s if k.restart_s is None else k.restart_s, k.takes_node) for k in f.kinds
    ) or ((gpus / f.mtbf_s_per_gpu, f.restart_s, True),)
    job = Job(kinds, f.checkpoint_interval_s, f.checkpoint_s, f.spare_nodes, f.repair_s, days * DAY_S)
    if job.horizon_s / job.mtbf_s > 1e6:
        found = f"{job.horizon_s / job.mtbf_s:,.0f} failures in {days:g} days; at most 1,000,000 are simulated"
        raise scenario.error(("faults", "failures"), found)
    return job


def _failures_of(scenario: Scenario) -> Failures:
    f = scenario.faults.failures if scenario.faults else None
    if f is None:
        why = "is required by --days and missing (`failures: {}` for defaults)"
        raise scenario.error(("faults", "failures"), why)
    return f


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


def many_runs(job: Job, seeds: list[int]) -> list[TimeBreakdown]:
    """A run for each seed."""
    return [one_run(job, np.random.default_rng(seed)) for seed in seeds]


def goodput(scenario: Scenario, step_time_s: float, days: float, runs: int = 200, jobs: int | None = None) -> Goodput:
    """Useful time, its distribution over `runs` histories, where the rest goes, and the curve over the checkpoint
    interval beside Young's and Daly's optimum.

    Raises:
        InputError: as `job_of`.
    """
    job = job_of(scenario, days)
    t, failures = scenario.for_training, _failures_of(scenario)
    published = failures.published
    best_s = max(daly_s(job), 1e-3)
    intervals = [job.interval_s, *(best_s * x for x in CURVE)]
    few = max(1, runs // 4)
    work = [(replace(job, interval_s=w), runs if i == 0 else few) for i, w in enumerate(intervals)]
    found = _run_all(work, failures.seed, jobs)
    parts = _parts(job, found[0])
    steps = parts.useful * job.horizon_s / step_time_s if step_time_s > 0 else 0.0
    return Goodput(
        days=days,
        runs=runs,
        gpus=scenario.gpus,
        mtbf_s=job.mtbf_s,
        checkpoint_interval_s=job.interval_s,
        checkpoint_s=job.checkpoint_s,
        restart_s=job.restart_s,
        effective_training_time=_useful(job, found[0]),
        parts=parts,
        failures=_spread([float(x.failures) for x in found[0]]),
        steps=steps,
        tokens=steps * t.global_batch_size * t.seq_len,
        closed_form=effective(job, job.interval_s),
        published=published.model_dump(exclude_none=True) if published is not None else {},
        optimum=Optimum(young_s(job), daly_s(job), effective(job, best_s)),
        curve=tuple(
            CurvePoint(w, effective(job, w), _useful(job, weeks))
            for w, weeks in zip(intervals[1:], found[1:], strict=True)
        ),
        engine={"path": "simpy"},
    )


def _parts(job: Job, weeks: list[TimeBreakdown]) -> Parts:
    columns = zip(*((x.useful_s, x.checkpoint_s, x.lost_s, x.restart_s, x.waiting_s) for x in weeks), strict=True)
    return Parts(*(sum(column) / len(weeks) / job.horizon_s for column in columns))


def _useful(job: Job, weeks: list[TimeBreakdown]) -> Spread:
    return _spread([x.useful_s / job.horizon_s for x in weeks])


def _spread(values: list[float]) -> Spread:
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95]).tolist()
    return Spread(float(np.mean(values)), low, middle, high)


def _run_all(work: list[tuple[Job, int]], seed: int, jobs: int | None) -> list[list[TimeBreakdown]]:
    """All runs of all jobs, in `jobs` processes; the same numbers whatever their number."""
    from sim.core.executors import available_cores, local_workers, results, tracked

    pieces = []
    for i, (job, runs) in enumerate(work):
        seeds = np.random.SeedSequence((seed, i)).generate_state(runs, np.uint64).tolist()
        pieces += [(i, job, seeds[at : at + CHUNK]) for at in range(0, runs, CHUNK)]
    expected = sum(runs * job.horizon_s / job.mtbf_s for job, runs in work)
    few = expected < 3e5  # failures, which are done before a process has started
    cores = jobs or (1 if few else min(8, available_cores()))
    out: list[list[TimeBreakdown]] = [[] for _ in work]
    with local_workers(cores) as workers:
        found = results(workers, many_runs, ((job, seeds) for _, job, seeds in pieces))
        for (i, _, _), weeks in zip(pieces, tracked(found, "weeks of training", len(pieces)), strict=True):
            out[i] += weeks
    return out
