"""Measures how many cores other processes used while something was timed.

One other busy process on two cores makes real steps vary by a factor of two. So each timed window records how many
cores other processes used, and windows with too many are dropped.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from calibrate.rank_messages import say

START_BELOW_CORES = 0.3  # a window starts once other processes use fewer cores
_STAT = Path("/proc/stat")
_BUSY_FIELDS = (1, 2, 3, 6, 7, 8)  # user nice system irq softirq steal; idle and iowait left out


def machine_busy_s() -> float:
    """Return the CPU seconds that all processes used since boot, summed over cores; 0 if /proc/stat is missing."""
    if not _STAT.exists():
        return 0.0
    with _STAT.open() as f:
        fields = f.readline().split()
    return sum(int(fields[i]) for i in _BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")


class Others:
    """Counts from its creation on how many cores other processes use; this process's ended children do not count."""

    def __init__(self) -> None:
        self.wall_s, self.busy_s, self.own_s = time.perf_counter(), machine_busy_s(), _own_s()

    def cores(self) -> float:
        """Return the mean number of cores until now; 0 if /proc/stat is missing."""
        wall = time.perf_counter() - self.wall_s
        return max(0.0, machine_busy_s() - self.busy_s - (_own_s() - self.own_s)) / wall


def _own_s() -> float:
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


@dataclass(slots=True)
class Window:
    """A timed interval that all ranks enter at the same instant."""

    start_ns: int
    wall_s: float
    busy_s: float
    own_s: float

    @staticmethod
    def enter() -> Window:
        """Start a window; returns on all ranks within microseconds of each other. Collective."""
        busy, wall, own = machine_busy_s(), time.perf_counter(), time.process_time()
        start = torch.tensor([time.perf_counter_ns() + 3_000_000])
        dist.broadcast(start, 0)
        start_ns = int(start)
        while time.perf_counter_ns() < start_ns:
            pass
        return Window(start_ns, wall, busy, own)

    def leave(self) -> float:
        """Return how many cores processes other than the ranks used since `enter`, the same on all ranks. Collective.

        One tick of /proc/stat for each core is subtracted, so a window of a few ticks shows only large noise.
        """
        first = dist.get_rank() == 0
        wall = time.perf_counter() - self.wall_s
        busy = machine_busy_s() - self.busy_s
        facts = torch.tensor(
            [time.process_time() - self.own_s, busy if first else 0.0, wall if first else 0.0],
            dtype=torch.float64,
        )
        dist.all_reduce(facts)
        own, busy, wall = facts.tolist()
        ticks_s = (os.cpu_count() or 1) / os.sysconf("SC_CLK_TCK")
        return float(max(0.0, busy - own - ticks_s) / wall)


def wait_for_quiet(patience_s: float) -> float:
    """Sleep on all ranks until other processes use few cores, at most `patience_s`; return seconds. Collective."""
    waited = torch.zeros(1, dtype=torch.float64)
    if dist.get_rank() == 0:
        start = time.perf_counter()
        while True:
            busy, begun = machine_busy_s(), time.perf_counter()
            time.sleep(0.1)
            foreign = (machine_busy_s() - busy) / (time.perf_counter() - begun)
            waited[0] = time.perf_counter() - start
            if foreign <= START_BELOW_CORES or float(waited) >= patience_s:
                break
            say(f"other processes keep this machine busy: waiting up to {patience_s:.3g} s before each round")
    dist.broadcast(waited, 0)
    return float(waited)
