"""Timing: the shortest of several runs, contenders taking turns so that a busy machine slows them alike."""

from __future__ import annotations

import resource
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

K = TypeVar("K")


def shortest_s(contenders: Mapping[K, Callable[[], object]], repeats: int) -> dict[K, float]:
    """CPU seconds of each contender's fastest run; every round runs each of them once."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(repeats):
        for name, run in contenders.items():
            begin = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - begin)
    return best


def child_seconds(command: Sequence[str]) -> float:
    """CPU seconds of a process, its output thrown away."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Exponent of growth: the slope of log seconds over log size.

    >>> round(slope([1, 2, 4], [3, 6, 12]), 6)
    1.0
    """
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
