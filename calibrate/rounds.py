"""Timed steps and the paired calibration, in turns, in the same minutes: machines drift."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from calibrate.blocks import Rehearsal, Samples, restore, restore_point, time_all_reduces, time_messages
from calibrate.parallel.pipeline import Record
from calibrate.parallel.runner import Runner, make_batch, sum_over_ranks
from calibrate.quiet import QUIET_CORES, Window, wait_for_quiet

LEAST = 3  # quiet steps and calibrations that are better than nothing
PATIENCE = 3.0


@dataclass(frozen=True, slots=True)
class Step:
    """One timed step of one rank. `foreign_cores`: what other processes used meanwhile."""

    start_ns: int
    records: list[Record]
    loss: float
    foreign_cores: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """One calibration of one rank: blocks, messages, all-reduces, and the step's end.

    `epilogue`: the records of clipping and optimizer.
    """

    blocks: Samples
    messages: list[tuple[tuple[object, ...], int, int]]
    all_reduces: list[tuple[int, int, int, int]]
    epilogue: list[Record]
    foreign_cores: float


@dataclass(slots=True)
class Log:
    """What one rank timed; sent to rank 0 as a whole."""

    rank: int
    steps: list[Step] = field(default_factory=list)
    calibrations: list[Calibration] = field(default_factory=list)
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """How much to time: quiet steps wanted, seconds for the rounds, and whether to calibrate.

    Where little was quiet by then, rounds go on for up to `PATIENCE` times as long.
    """

    steps: int
    budget_s: float
    calibrate: bool


def run_rounds(runner: Runner, keys: dict[int, Sequence[str]], limits: Limits) -> Log:
    """Rounds of two steps and one calibration until enough of both were quiet, or time is up. Collective."""
    log = Log(runner.place.rank)
    rehearsal = Rehearsal(runner, keys)
    _warm_up(runner, rehearsal, limits.calibrate)
    begin = time.perf_counter()
    number = 2
    while not _enough(log, limits, time.perf_counter() - begin):
        for _ in range(2):
            log.waited_s += wait_for_quiet(limits.budget_s / 12)
            log.steps.append(_timed_step(runner, number))
            number += 1
        if limits.calibrate:
            log.waited_s += wait_for_quiet(limits.budget_s / 12)
            log.calibrations.append(_calibrate(runner, rehearsal))
    return log


def _warm_up(runner: Runner, rehearsal: Rehearsal, calibrate: bool) -> None:
    for i in range(2):
        runner.step(make_batch(runner.scenario, i, runner.device))
    if calibrate:
        _calibrate(runner, rehearsal)
        runner.step(make_batch(runner.scenario, 1, runner.device))


def _enough(log: Log, limits: Limits, spent_s: float) -> bool:
    """Collective: rank 0's clock decides."""
    steps = sum(s.foreign_cores <= QUIET_CORES for s in log.steps)
    calibrations = sum(c.foreign_cores <= QUIET_CORES for c in log.calibrations)
    calibrated = calibrations >= LEAST or not limits.calibrate
    done = steps >= limits.steps and calibrated
    done |= spent_s > limits.budget_s and steps >= LEAST and calibrated
    done |= spent_s > PATIENCE * limits.budget_s and len(log.steps) >= LEAST
    decision = torch.tensor([done])
    dist.broadcast(decision, 0)
    return bool(decision)


def _timed_step(runner: Runner, number: int) -> Step:
    batch = make_batch(runner.scenario, number, runner.device)
    runner.zero_losses()
    window = Window.enter()
    records = runner.step(batch)
    foreign = window.leave()
    return Step(window.start_ns, records, sum_over_ranks([runner.loss()])[0], foreign)


def _calibrate(runner: Runner, rehearsal: Rehearsal) -> Calibration:
    """Walk the list block by block, then messages, all-reduces, optimizer; training state is put back."""
    saved = restore_point(runner)
    window = Window.enter()
    blocks = rehearsal.run(make_batch(runner.scenario, 0, runner.device))
    dist.barrier()
    all_reduces = time_all_reduces(runner) if runner.scenario.parallelism.dp > 1 else []
    epilogue = runner.optimize()
    messages = time_messages(runner) if runner.scenario.parallelism.pp > 1 else []
    foreign = window.leave()
    restore(runner, saved)
    return Calibration(blocks, messages, all_reduces, epilogue, foreign)

