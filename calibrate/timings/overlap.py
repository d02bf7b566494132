"""Measures how much communication and computation slow each other down when both run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from calibrate import shared_cores
from calibrate.records import Constant, Record
from calibrate.timings.collective_calls import Work, make, repeat
from calibrate.timings.timing import Bench

REPEATS = 7
COVER = 3.0  # how many times longer the disturbing work lasts than the measured work, so that it covers all of it
MATMULS = 32
SKEW_BYTES, SKEW_BURSTS = 4096, 8


def interference(bench: Bench) -> list[Record]:
    """Measure the slowdowns of matmuls beside all-reduces and of all-reduces beside matmuls: medians over repeats.

    On a CPU gloo's threads use cores that compute; on a GPU NCCL's kernels use multiprocessors and memory bandwidth.
    Collective.
    """
    matmul, reduce = _matmul(bench), _reduce(bench)
    compute_s = _agree(bench, _median(partial(_alone, bench, partial(repeat, matmul, MATMULS))))
    reduce_s = _agree(bench, _median(partial(_alone, bench, lambda: reduce().wait())))
    reduces = max(1, math.ceil(COVER * compute_s / reduce_s))
    slow_compute = _median(partial(_compute_under, bench, matmul, reduce, reduces)) / compute_s
    matmuls = math.ceil(COVER * MATMULS * reduce_s / compute_s)
    slow_reduce = _median(partial(_reduce_under, bench, matmul, reduce, matmuls)) / reduce_s
    where = f"all-reduce of {dist.get_world_size()} ranks and matmuls at once, relative to alone"
    skew = [] if bench.device == "cuda" else [_skew(bench)]
    return [
        *skew,
        Constant("overlap_compute_slowdown", _agree(bench, slow_compute), where),
        Constant("overlap_comm_slowdown", _agree(bench, slow_reduce), where),
    ]


def _skew(bench: Bench) -> Constant:
    """Measure how long ranks of a CPU wait at an all-reduce after a burst, because they do not end it at once.

    The wait grows with the square root of the time computed (`ProgramPrices.rank_skew_s`), so an all-reduce after n
    bursts takes (√n − 1) times this wait longer than after one.
    """
    burst, call = shared_cores.make_burst(dist.get_rank()), make("all_reduce", SKEW_BYTES, bench.device)
    short, _ = shared_cores.message(burst, call, quick=False)  # few samples vary by half
    long, _ = shared_cores.message(partial(repeat, burst, SKEW_BURSTS), call, quick=False)
    skew = (long - short) / (math.sqrt(SKEW_BURSTS) - 1)
    how = f"all-reduce of {dist.get_world_size()} ranks after {SKEW_BURSTS} ms of computation, less one after 1 ms"
    return Constant("rank_skew_s", max(0.0, skew), how)


def _matmul(bench: Bench) -> Work:
    """Return a matmul; a short one on a CPU, as `_reduce_under` asks after each whether the all-reduce has ended."""
    n, dtype = (256, torch.float32) if bench.device == "cpu" else (8192, torch.bfloat16)
    a, b = (torch.randn(n, n, device=bench.device, dtype=dtype) for _ in range(2))
    return partial(torch.mm, a, b)


def _reduce(bench: Bench) -> Callable[[], dist.Work]:
    elements = 1 << 22 if bench.device == "cpu" else 1 << 26
    buffer = torch.zeros(elements, device=bench.device)
    return lambda: dist.all_reduce(buffer, async_op=True)


def _alone(bench: Bench, work: Work) -> float:
    _together(bench)
    start = time.perf_counter()
    work()
    bench.synchronize()
    return time.perf_counter() - start


def _compute_under(bench: Bench, matmul: Work, reduce: Callable[[], dist.Work], reduces: int) -> float:
    """Time the matmuls while all-reduces run from before the first matmul until after the last."""
    _together(bench)
    works = [reduce() for _ in range(reduces)]
    if bench.device == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        repeat(matmul, MATMULS)
        last.record()
        bench.synchronize()
        return float(first.elapsed_time(last)) * 1e-3
    start = time.perf_counter()
    repeat(matmul, MATMULS)
    seconds = time.perf_counter() - start
    for work in works:
        work.wait()
    return seconds


def _reduce_under(bench: Bench, matmul: Work, reduce: Callable[[], dist.Work], matmuls: int) -> float:
    """Time an all-reduce from its call to its end while matmuls run."""
    _together(bench)
    if bench.device == "cuda":
        side = torch.cuda.Stream()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(side)
        work = reduce()
        repeat(matmul, matmuls)
        with torch.cuda.stream(side):
            work.wait()
            last.record(side)
        bench.synchronize()
        return float(first.elapsed_time(last)) * 1e-3
    start = time.perf_counter()
    work = reduce()
    while not work.is_completed():
        matmul()
    work.wait()
    return time.perf_counter() - start


def _median(measure: Callable[[], float]) -> float:
    measure()
    return statistics.median(measure() for _ in range(REPEATS))


def _agree(bench: Bench, value: float) -> float:
    """Return the mean over all ranks, so that they take the same decisions."""
    mean = torch.tensor([value], dtype=torch.float64, device=bench.device)
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def _together(bench: Bench) -> None:
    dist.barrier()
    bench.synchronize()
