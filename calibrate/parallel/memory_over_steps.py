"""Measures a rank's allocated bytes over the first steps of a training.

The optimizer's states appear in the first step. Activations saved for the backward rise and fall in each step.

On a CPU every allocation and release counts (the profiler's events, without gloo's copies within a collective). On a
GPU the peak of each action counts.

Documentation: docs/memory.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from calibrate.parallel.memory import held_before, held_over_time, profiled_allocations
from calibrate.parallel.runner import Runner

STEPS = 4
MOST_POINTS = 120  # kept for each step: those with the most bytes among their neighbours
Points = list[tuple[float, int]]  # (steps done, with their fractions; bytes)


def first_steps(runner: Runner) -> Points:
    """Run the first `STEPS` steps of a training and return (steps done, bytes) over them. Collective."""
    batches = [runner.batch(i) for i in range(STEPS)]
    found = _on_cpu(runner, batches) if runner.device == "cpu" else _on_gpu(runner, batches)
    return [(round(at, 5), held) for at, held in found]


def _on_cpu(runner: Runner, batches: Sequence[Tensor]) -> Points:
    base = held_before(runner)
    spans, allocations = profiled_allocations(runner, [partial(runner.step, batch) for batch in batches])
    changes = [(at, base + held) for at, held in held_over_time(allocations)]
    out: Points = []
    for i, (begin, end) in enumerate(spans):
        mine = [(i + (at - begin) / (end - begin), held) for at, held in changes if begin <= at < end]
        out += thinned(mine, MOST_POINTS)
    return out


def thinned(points: Points, most: int) -> Points:
    """Thin out points to about `most`: the first and the highest of each group of neighbours.

    >>> thinned([(0.0, 1), (0.1, 5), (0.2, 2), (0.3, 3)], 2)
    [(0.0, 1), (0.1, 5)]
    """
    if len(points) <= most:
        return points
    each = -(-2 * len(points) // most)
    out: Points = []
    for first in range(0, len(points), each):
        run = points[first : first + each]
        out += sorted({run[0], max(run, key=lambda p: p[1])})
    return out


def _on_gpu(runner: Runner, batches: Sequence[Tensor]) -> Points:
    """Record the peak of every action when the host reaches its end, and one more at the step's end."""
    out: Points = []
    for i, batch in enumerate(batches):
        seen: list[tuple[int, int]] = []

        def note(_: object = None, seen: list[tuple[int, int]] = seen) -> None:
            seen.append((time.perf_counter_ns(), torch.cuda.max_memory_allocated()))
            torch.cuda.reset_peak_memory_stats()

        begin = time.perf_counter_ns()
        note()
        runner.pipeline.after_action = note
        try:
            runner.step(batch)
        finally:
            runner.pipeline.after_action = lambda action: None
        note()
        length = time.perf_counter_ns() - begin
        out += [(i + (at - begin) / length, held) for at, held in seen]
    return out
