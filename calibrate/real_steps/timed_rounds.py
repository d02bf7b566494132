"""Times steps and the paired calibration in turns, within the same minutes, because machines drift.

A round is a step, a calibration and another step. A round is good if it is quiet and steady: other processes used
almost no cores meanwhile, and its two steps took equally long. Hosts also change speed without any counter that shows
it (clock rate, neighbours outside a virtual machine), by half and for minutes. A round with such a change would compare
two different machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from calibrate.machine_load import Window, wait_for_quiet
from calibrate.parallel.pipeline import Record
from calibrate.parallel.runner import Runner, sum_over_ranks
from calibrate.real_steps.block_cuts import Transfer
from calibrate.real_steps.blocks import Rehearsal, Samples, restore, restore_point, time_messages
from calibrate.real_steps.gradient_times import Beside, Timed, time_beside, time_collectives
from calibrate.real_steps.host_copy_times import time_copies
from sim.inputs.measured_run import QUIET_CORES

LEAST = 3  # rounds that a run has at least
PATIENCE = 3.0
STEADY = 0.1  # relative difference of a steady round's two steps, at most


@dataclass(frozen=True, slots=True)
class Step:
    """One timed step of one rank.

    `seconds`: until the end of the last rank. `foreign_cores`: cores that other processes used meanwhile.
    """

    start_ns: int
    seconds: float
    records: list[Record]
    loss: float
    foreign_cores: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """One calibration of one rank: blocks, messages, gradients' collectives, and the step's end.

    `transfers`: communications within blocks. `beside`: what collectives take from computation, see `time_beside`.
    `epilogue`: the records of clipping and optimizer. `walked_ns`: when this rank finished the blocks of its list,
    which all ranks begin at once.
    """

    blocks: Samples
    transfers: list[Transfer]
    messages: list[tuple[tuple[object, ...], int, int]]
    collectives: list[Timed]
    beside: Beside | None
    epilogue: list[Record]
    foreign_cores: float
    walked_ns: int = 0


@dataclass(slots=True)
class Log:
    """Hold the times of one rank; sent to rank 0 as a whole."""

    rank: int
    steps: list[Step] = field(default_factory=list)
    calibrations: list[Calibration] = field(default_factory=list)
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Hold how much to time: steps wanted in good rounds, seconds for the rounds, and whether to calibrate.

    If too few rounds were good within `budget_s`, more rounds follow for up to `PATIENCE` times as long.
    """

    steps: int
    budget_s: float
    calibrate: bool


class Steps(Protocol):
    """The steps that are timed: the bundled runner, a Transformers model, or a captured program's code."""

    def batch(self, number: int) -> Tensor: ...
    def zero_losses(self) -> None: ...
    def step(self, batch: Tensor) -> list[Record]: ...
    def loss(self) -> float: ...


def run_rounds(runner: Steps, calibrate: Callable[[], Calibration], limits: Limits) -> Log:
    """Run rounds until enough of them were good, or time is up. Collective."""
    log = Log(dist.get_rank())
    _warm_up(runner, calibrate if limits.calibrate else None)
    begin = time.perf_counter()
    number = 2
    while not _enough(log, limits, time.perf_counter() - begin):
        log.waited_s += wait_for_quiet(limits.budget_s / 6)
        log.steps.append(_timed_step(runner, number))
        if limits.calibrate:
            log.calibrations.append(calibrate())
        log.steps.append(_timed_step(runner, number + 1))
        number += 2
    return log


def good_rounds(log: Log) -> list[int]:
    """Return the numbers of the rounds that were quiet and steady."""
    return [r for r in range(len(log.steps) // 2) if foreign(log, r) <= QUIET_CORES and _steady(log, r)]


def foreign(log: Log, r: int) -> float:
    """Return the most cores that other processes used in any window of a round."""
    windows: list[Step | Calibration] = [*log.steps[2 * r : 2 * r + 2], *log.calibrations[r : r + 1]]
    return max(w.foreign_cores for w in windows)


def _steady(log: Log, r: int) -> bool:
    a, b = (s.seconds for s in log.steps[2 * r : 2 * r + 2])
    return max(a, b) <= (1 + STEADY) * min(a, b)


def _warm_up(runner: Steps, calibrate: Callable[[], Calibration] | None) -> None:
    for i in range(2):
        runner.step(runner.batch(i))
    if calibrate is not None:
        calibrate()
        runner.step(runner.batch(1))


def _enough(log: Log, limits: Limits, spent_s: float) -> bool:
    """Return whether the rounds suffice or time is up, by rank 0's clock. Collective."""
    good = len(good_rounds(log))
    done = 2 * good >= limits.steps and good >= LEAST
    done |= spent_s > limits.budget_s and good >= LEAST
    done |= spent_s > PATIENCE * limits.budget_s and len(log.steps) >= 2 * LEAST
    decision = torch.tensor([done])
    dist.broadcast(decision, 0)
    return bool(decision)


def _timed_step(runner: Steps, number: int) -> Step:
    batch = runner.batch(number)
    runner.zero_losses()
    window = Window.enter()
    records = runner.step(batch)
    others = window.leave()
    end = torch.tensor([max(r.end_ns for r in records)])
    dist.all_reduce(end, dist.ReduceOp.MAX)
    seconds = (int(end) - window.start_ns) * 1e-9
    return Step(window.start_ns, seconds, records, sum_over_ranks([runner.loss()])[0], others)


def calibrate(runner: Runner, rehearsal: Rehearsal) -> Calibration:
    """Time the blocks of the action list, then collectives, optimizer and messages; restore the training state."""
    saved = restore_point(runner)
    window = Window.enter()
    blocks = rehearsal.run(runner.batch(0))
    dist.barrier()
    alone, beside = time_beside(runner)
    collectives = [*time_collectives(runner), *alone, *time_copies(runner)]
    epilogue = runner.optimize()
    messages = time_messages(runner) if runner.scenario.parallelism.pp > 1 else []
    others = window.leave()
    restore(runner, saved)
    return Calibration(blocks, rehearsal.transfers, messages, collectives, beside, epilogue, others, rehearsal.ended_ns)
