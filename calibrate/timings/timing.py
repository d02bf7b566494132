"""Times one operator: after a warm-up, until the median's error is small, over buffers that are not in the cache."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from sim.core.normal import SIGMA_PER_MAD

SAMPLE_S = 0.5e-3  # shorter work is repeated within one sample, as reading the clock costs 0.1 us
STANDARD_ERROR = 0.01  # of the median, at which repeating stops
MIN_SAMPLES, MAX_SAMPLES = 5, 400
CACHE_BYTES = {"cpu": 32 << 20, "cuda": 128 << 20}
MAX_COPIES = 16
# What a small training step touches before it comes back to the same memory. On a server's core that shares a cache of
# 480 MB with other machines, AdamW over 50 MB ran at 36 GB/s, and over 100 to 400 MB at 20 GB/s.
STEP_BYTES = 192 << 20
FILLING_S = 0.1  # the longest that results are kept without timing


class Turn:
    """Calls the same work on different buffers in turn.

    On a CPU the last results are kept, `STEP_BYTES` of them. Freed at once, each result would take the memory of the
    one before, which is in the cache; a training step writes its results to memory that it used a step ago.
    """

    def __init__(self, calls: Sequence[Callable[[], object]], device: str) -> None:
        self.calls, self.device = itertools.cycle(calls), device
        self.results = deque[object](maxlen=0)

    def warm_up(self, times: int) -> None:
        """Run so often that later results take memory that was used before, and at least `times`."""
        next(self.calls)()
        start = time.perf_counter()
        result = next(self.calls)()
        once = time.perf_counter() - start
        if self.device == "cpu":
            size = sum(x.nbytes for x in tree_leaves(result) if isinstance(x, torch.Tensor))
            most = math.ceil(FILLING_S / once)  # what takes long computes more than it writes
            self.results = deque[object](maxlen=min(most, STEP_BYTES // max(size, 1)))
        self.run(max(times - 2, (self.results.maxlen or 0) + 1))

    def run(self, times: int) -> None:
        """Run the next calls."""
        calls, keep = self.calls, self.results.append
        for _ in range(times):
            keep(next(calls)())


class Timing(NamedTuple):
    """Median seconds of one call. `spread`: median absolute deviation ÷ median. `samples`: their number."""

    seconds: float
    spread: float
    samples: int


@dataclass(frozen=True, slots=True)
class Bench:
    """Where and how long to measure.

    `limit_s`: the longest that one measurement takes, without its warm-up. `cpu_seconds`: on a CPU count this process's
    CPU time, which other processes lengthen least.
    """

    device: str
    quick: bool
    limit_s: float
    cpu_seconds: bool = False

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def time(self, calls: Sequence[Callable[[], object]]) -> Timing:
        """Time one of `calls`, which do the same work on different buffers and are called in turn.

        CUDA events surround back-to-back launches, so a kernel that is shorter than its launch takes the launch's time.
        """
        return self.side_by_side([calls])[0]

    def side_by_side(self, ways: Sequence[Sequence[Callable[[], object]]]) -> list[Timing]:
        """Time several implementations sample by sample in turn, so that a slow machine slows all of them."""
        turns = [Turn(calls, self.device) for calls in ways]
        inner = [self._warmed(turn, len(calls)) for turn, calls in zip(turns, ways, strict=True)]
        samples: list[list[float]] = [[] for _ in ways]
        end = time.perf_counter() + self.limit_s * len(ways)
        while not all(map(_settled, samples)) and (len(samples[0]) < 3 or time.perf_counter() < end):
            for turn, n, found in zip(turns, inner, samples, strict=True):
                found.append(self._sample(turn, n) / n)
        return [summarize(found) for found in samples]

    def _warmed(self, turn: Turn, calls: int) -> int:
        """Warm up and return how many calls a sample takes."""
        turn.warm_up(min(calls, 4) + 1)
        once = max(self._sample(turn, 1), 1e-9)
        inner = max(1, math.ceil(SAMPLE_S / once))
        self._sample(turn, inner)
        return inner

    def copies(self, bytes_: float) -> int:
        """Return how many buffers of this size to use in turn, so that none is in the cache when used again."""
        wanted = math.ceil(2 * CACHE_BYTES[self.device] / max(bytes_, 1.0))
        return max(1, min(MAX_COPIES, wanted))

    def _sample(self, turn: Turn, inner: int) -> float:
        if self.device == "cpu":
            clock = time.process_time if self.cpu_seconds else time.perf_counter
            start = clock()
            turn.run(inner)
            return clock() - start
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        turn.run(inner)
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3


def summarize(samples: Sequence[float]) -> Timing:
    """Return median and spread of repeated times in seconds."""
    median = statistics.median(samples)
    deviation = statistics.median(abs(x - median) for x in samples)
    return Timing(median, deviation / median, len(samples))


def _settled(samples: list[float]) -> bool:
    """Return whether the median's standard error, 1.2533 sigma / sqrt(n), is small."""
    if len(samples) < MIN_SAMPLES:
        return False
    if len(samples) >= MAX_SAMPLES:
        return True
    spread = summarize(samples).spread
    return 1.2533 * SIGMA_PER_MAD * spread / math.sqrt(len(samples)) < STANDARD_ERROR
