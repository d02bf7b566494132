"""Times one operator: warmed up, repeated until the median is sure, over buffers out of the cache."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

SAMPLE_S = 0.5e-3  # shorter work is repeated within one sample: the clock and its reading cost 0.1 us
STANDARD_ERROR = 0.01  # of the median, at which repeating stops
MIN_SAMPLES, MAX_SAMPLES = 5, 400
CACHE_BYTES = {"cpu": 32 << 20, "cuda": 128 << 20}
MAX_COPIES = 16
GRAPHED_BELOW_S = 1e-3  # of one call on CUDA: the host cannot be sure to issue shorter work as fast as it is done
GRAPH_CALLS, MAX_GRAPH_CALLS = 50, 400


class Timing(NamedTuple):
    """Median seconds of one call; `spread`: median absolute deviation / median, of `samples`."""

    seconds: float
    spread: float
    samples: int


@dataclass(frozen=True, slots=True)
class Bench:
    """Where and how long to measure. `limit_s`: the most that one measurement takes, its warm-up apart. `cpu_seconds`:
    on a CPU count this process's own time, which others' load stretches least."""

    device: str
    quick: bool
    limit_s: float
    cpu_seconds: bool = False

    def time(self, calls: Sequence[Callable[[], object]], host: bool = False) -> Timing:
        """Time of one of `calls`: the same work on different buffers, taken in turn.

        On CUDA the device's: short calls are replayed from a CUDA graph, one kernel after the other without the host;
        with `host` as the host issues them, whichever of the two takes longer.
        """
        return self.side_by_side([calls], host)[0]

    def side_by_side(self, ways: Sequence[Sequence[Callable[[], object]]], host: bool = False) -> list[Timing]:
        """`time` of several ways of one thing, sample by sample in turn: what slows the machine slows all of them."""
        ready = [self._ready(calls, host) for calls in ways]
        samples: list[list[float]] = [[] for _ in ways]
        end = time.perf_counter() + self.limit_s * len(ways)
        while not all(map(_settled, samples)) and (len(samples[0]) < 3 or time.perf_counter() < end):
            for (run, calls), found in zip(ready, samples, strict=True):
                found.append(self._sample(run) / calls)
        return [summarize(found) for found in samples]

    def _ready(self, calls: Sequence[Callable[[], object]], host: bool) -> tuple[Callable[[], object], int]:
        """Warmed up: what makes one sample, and how many calls that is."""
        turn = itertools.cycle(calls)
        for _ in range(min(len(calls), 4) + 1):
            next(turn)()
        once = max(self._sample(_repeated(turn, 1)), 1e-9)
        if self.device == "cuda" and not host and once < GRAPHED_BELOW_S:
            replay = graph(turn, GRAPH_CALLS)
            if replay is not None:
                each = self._sample(replay) / GRAPH_CALLS
                wanted = min(MAX_GRAPH_CALLS, math.ceil(SAMPLE_S / each))
                longer = graph(turn, wanted) if wanted > GRAPH_CALLS else None
                return (replay, GRAPH_CALLS) if longer is None else (longer, wanted)
        inner = max(1, math.ceil(SAMPLE_S / once))
        run = _repeated(turn, inner)
        self._sample(run)
        return run, inner

    def copies(self, bytes_: float) -> int:
        """Buffers of this size to take turns with, so that each is out of the cache when used again."""
        wanted = math.ceil(2 * CACHE_BYTES[self.device] / max(bytes_, 1.0))
        return max(1, min(MAX_COPIES, wanted))

    def _sample(self, run: Callable[[], object]) -> float:
        if self.device == "cpu":
            clock = time.process_time if self.cpu_seconds else time.perf_counter
            start = clock()
            run()
            return clock() - start
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3


def _repeated(turn: Iterator[Callable[[], object]], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            next(turn)()

    return run


@cache
def _pool() -> object:
    """Memory that all graphs share, as only one is replayed at a time."""
    return torch.cuda.graph_pool_handle()


def graph(turn: Iterator[Callable[[], object]], calls: int) -> Callable[[], object] | None:
    """Replays `calls` calls captured in a CUDA graph; None where they cannot be (they wait for the device, or run on
    the default stream, which nothing is captured from).
    """
    if torch.cuda.current_stream() == torch.cuda.default_stream():
        return None
    found = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    found.capture_begin(pool=_pool(), capture_error_mode="relaxed")
    try:
        _repeated(turn, calls)()
        found.capture_end()
        found.replay()
        torch.cuda.synchronize()
    except Exception:  # whatever an operator raises that must not be captured
        with suppress(RuntimeError):
            found.capture_end()
        return None
    return found.replay


def summarize(samples: Sequence[float]) -> Timing:
    """Median and spread of repeated times."""
    median = statistics.median(samples)
    deviation = statistics.median(abs(x - median) for x in samples)
    return Timing(median, deviation / median, len(samples))


def _settled(samples: list[float]) -> bool:
    """Whether the median's standard error, 1.2533 sigma / sqrt(n) with sigma = 1.4826 MAD, is small."""
    if len(samples) < MIN_SAMPLES:
        return False
    if len(samples) >= MAX_SAMPLES:
        return True
    spread = summarize(samples).spread
    return 1.2533 * 1.4826 * spread / math.sqrt(len(samples)) < STANDARD_ERROR
