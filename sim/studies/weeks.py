"""One history of a job that fails, on SimPy's clock: the job trains, fails, waits for a spare node and restarts; every
node that failed is repaired by a process of its own and joins the spares, which are a container.

A stretch of training is one timeout, up to the next failure: how many checkpoints fit into it is arithmetic, so a week
costs as many events as it has failures, not checkpoints.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Generator
from enum import Enum, auto
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import simpy
from msgspec import Struct

if TYPE_CHECKING:
    import numpy as np
    from simpy.events import Event

Waiting = Generator["Event", Any, None]


class Job(Struct, frozen=True):
    """A job that fails. `kinds`: by kind of failure, the whole job's rate per second, its restart, whether it takes a
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


class TimeBreakdown(Struct, frozen=True):
    """Where the seconds of one run went; all but `failures` add up to the horizon."""

    useful_s: float
    checkpoint_s: float
    lost_s: float  # computed, and lost with a failure
    restart_s: float
    waiting_s: float  # for a spare node
    failures: int


def one_run(job: Job, random: np.random.Generator) -> TimeBreakdown:
    """One history of the job."""
    history = _History(job, random)
    history.env.process(history.train())
    history.env.run(until=job.horizon_s)
    return history.until_now()


class _Doing(Enum):
    """What a job does at a time."""

    TRAINING = auto()
    WAITING = auto()  # for a spare node
    RESTARTING = auto()


class _History:
    """A history under way: `doing` since `since_s`, and the seconds before that; `spent_s`: those beside training."""

    def __init__(self, job: Job, random: np.random.Generator) -> None:
        self.env = simpy.Environment()
        self.job, self.random = job, random
        self.rates = list(accumulate(rate for rate, _, _ in job.kinds))
        self.spares = None if job.spares is None else simpy.Container(self.env, init=job.spares)
        self.useful_s = self.saving_s = self.lost_s = 0.0
        self.spent_s = dict.fromkeys(_Doing, 0.0)
        self.failures = 0
        self.doing, self.since_s = _Doing.TRAINING, 0.0

    def train(self) -> Waiting:
        """The process of the job: it trains until a failure, restarts, and trains on."""
        env, exponential, mtbf_s = self.env, self.random.exponential, self.job.mtbf_s
        while True:
            self._begin(_Doing.TRAINING)
            yield env.timeout(float(exponential(mtbf_s)))
            self.lost_s += self._end()
            yield from self._restart()

    def _restart(self) -> Waiting:
        """From a failure on until the job runs again; a failure during the restart starts it anew."""
        env, kinds, random, mtbf_s = self.env, self.job.kinds, self.random, self.job.mtbf_s
        while True:
            self.failures += 1
            kind = bisect_right(self.rates, random.random() * self.rates[-1])
            _, restart_s, takes_node = kinds[min(kind, len(kinds) - 1)]
            if takes_node and self.spares is not None:
                self._begin(_Doing.WAITING)
                env.process(self._repair())
                yield self.spares.get(1)
                self._end()
            self._begin(_Doing.RESTARTING)
            next_s = float(random.exponential(mtbf_s))
            yield env.timeout(min(restart_s, next_s))
            self._end()
            if next_s >= restart_s:
                return

    def _repair(self) -> Waiting:
        """A node that failed comes back as a spare."""
        assert self.spares is not None
        yield self.env.timeout(self.job.repair_s)
        yield self.spares.put(1)

    def _begin(self, doing: _Doing) -> None:
        """Do something else from now on."""
        self.doing, self.since_s = doing, self.env.now

    def _end(self) -> float:
        """Count the seconds of what was done up to now; returns what training computed since its last checkpoint."""
        lasted_s, self.since_s = self.env.now - self.since_s, self.env.now
        if self.doing is _Doing.TRAINING:
            return self._trained(lasted_s)
        self.spent_s[self.doing] += lasted_s
        return 0.0

    def _trained(self, runs_s: float) -> float:
        """Count a stretch of training; returns what was computed since its last checkpoint."""
        job = self.job
        cycles = math.floor(runs_s / (job.interval_s + job.checkpoint_s))
        worked_s = min(runs_s - cycles * (job.interval_s + job.checkpoint_s), job.interval_s)
        self.useful_s += cycles * job.interval_s
        self.saving_s += runs_s - cycles * job.interval_s - worked_s
        return worked_s

    def until_now(self) -> TimeBreakdown:
        """The history so far; work under way counts as useful."""
        worked_s = self._end()
        self.useful_s += worked_s  # not in one line: `_end` adds to it, too
        restarting_s, waiting_s = self.spent_s[_Doing.RESTARTING], self.spent_s[_Doing.WAITING]
        return TimeBreakdown(self.useful_s, self.saving_s, self.lost_s, restarting_s, waiting_s, self.failures)
