"""Whether other processes used this machine's CPU while something was timed.

With one busy stranger on two cores real steps spread by a factor of two, so timed windows carry how many
cores others kept busy, and busy ones are dropped.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from calibrate.words import say

START_BELOW_CORES = 0.3  # windows start once others use less
_STAT = Path("/proc/stat")
_BUSY_FIELDS = (1, 2, 3, 6, 7, 8)  # user nice system irq softirq steal; idle and iowait left out


def machine_busy_s() -> float:
    """CPU seconds that all processes used since boot, summed over cores; 0 where /proc/stat is missing."""
    if not _STAT.exists():
        return 0.0
    with _STAT.open() as f:
        fields = f.readline().split()
    return sum(int(fields[i]) for i in _BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")


class Others:
    """How many cores others than this process, and than children it has waited for, keep busy from now on."""

    def __init__(self) -> None:
        self.wall_s, self.busy_s, self.own_s = time.perf_counter(), machine_busy_s(), _own_s()

    def cores(self) -> float:
        """On average until now; 0 where /proc/stat is missing."""
        wall = time.perf_counter() - self.wall_s
        return max(0.0, machine_busy_s() - self.busy_s - (_own_s() - self.own_s)) / wall


def _own_s() -> float:
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


@dataclass(slots=True)
class Window:
    """A stretch of time that all ranks time together, entered at the same instant."""

    start_ns: int
    wall_s: float
    busy_s: float
    own_s: float

    @staticmethod
    def enter() -> Window:
        """Collective: returns on all ranks within microseconds of each other."""
        busy, wall, own = machine_busy_s(), time.perf_counter(), time.process_time()
        start = torch.tensor([time.perf_counter_ns() + 3_000_000])
        dist.broadcast(start, 0)
        start_ns = int(start)
        while time.perf_counter_ns() < start_ns:
            pass
        return Window(start_ns, wall, busy, own)

    def leave(self) -> float:
        """Collective: cores that others than the ranks kept busy since `enter`, the same on all ranks.

        A tick of /proc/stat for each core is allowed for, so in windows of a few ticks only much noise shows.
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
    """Collective: all ranks sleep until others use few cores, or patience ends. Returns seconds waited."""
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
            say(f"others keep this machine busy: waiting for quiet, up to {patience_s:.3g} s before each round")
    dist.broadcast(waited, 0)
    return float(waited)
