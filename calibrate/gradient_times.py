"""How long data-parallel communications take, timed apart in the surroundings of the step: all ranks at once.

One that runs beside computation takes some of it on a CPU: gloo's threads want the same cores. So it is timed
once more under a layer's forwards, and what these take longer is its share.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrate.blocks import silence
from calibrate.model import Layer
from calibrate.parallel.runner import Runner
from calibrate.parallel.zero import all_gather, reduce_scatter

LEAST_ELEMENTS = 256  # smallest collective worth timing
REPEATS = 2


class Timed(NamedTuple):
    """One collective on one rank. `number` and `first` (rank of the group) tell it from others; nanoseconds."""

    op: str
    ranks: int
    first: int
    number: int
    bytes: int
    start_ns: int
    end_ns: int


class _Sort(NamedTuple):
    """A collective that a step makes: on how many elements at most, and how to start it on n from a place on."""

    op: str
    group: dist.ProcessGroup
    elements: int
    start: Callable[[int, int], dist.Work]


def _sorts(runner: Runner) -> Iterator[_Sort]:
    """The collectives of this rank's gradients and parameters, with all of them as the largest size."""
    place, zero = runner.place, runner.scenario.parallelism.zero
    parts = [part for d in runner.data.values() for part in getattr(d, "parts", [d])]
    sizes: dict[dist.ProcessGroup | None, int] = defaultdict(int)
    for part in parts:
        group = place.sharding.replicas if zero else part.group
        sizes[group] += sum(g.numel() for g in part.owned_gradients())
    own = sum(sizes.values())
    if place.copies is not None:
        sizes[place.copies] += own
    if runner.tied:
        sizes[place.tied] += runner.tied[0].numel()
    group, shards = place.sharding.group, place.sharding.shards
    x = torch.zeros(own * shards, dtype=runner.dtype, device=runner.device)
    for g, n in sizes.items():
        if g is not None and n:
            yield _Sort("all_reduce", g, n, partial(_all_reduce, x, g))
    if zero and group is not None:
        part = torch.zeros(own, dtype=runner.dtype, device=runner.device)
        yield _Sort("reduce_scatter", group, own * shards, partial(_reduce_scatter, part, x, group, shards))
        yield _Sort("all_gather", group, own * shards, partial(_all_gather, x, part, group, shards))


def _all_reduce(x: Tensor, group: dist.ProcessGroup, n: int, at: int = 0) -> dist.Work:
    return dist.all_reduce(x[at : at + n], group=group, async_op=True)


def _reduce_scatter(
    part: Tensor, x: Tensor, group: dist.ProcessGroup, shards: int, n: int, at: int = 0
) -> dist.Work:
    share = n // shards
    return reduce_scatter(part[:share], x[at : at + share * shards], group=group, async_op=True)


def _all_gather(
    x: Tensor, part: Tensor, group: dist.ProcessGroup, shards: int, n: int, at: int = 0
) -> dist.Work:
    share = n // shards
    return all_gather(x[at : at + share * shards], part[:share], group=group, async_op=True)


def time_collectives(runner: Runner) -> list[Timed]:
    """Every collective of the gradients, whole and in ever smaller pieces: from the latest start to the latest
    end it took.
    """
    found = []
    for kind, sort in enumerate(_sorts(runner)):
        ranks, first = dist.get_world_size(sort.group), dist.get_process_group_ranks(sort.group)[0]
        n, number = sort.elements, 0
        while n >= LEAST_ELEMENTS or number == 0:
            for again in range(REPEATS):
                start = time.perf_counter_ns()
                sort.start(n, 0).wait()
                end = runner.pipeline.now()
                size = n * torch.empty((), dtype=runner.dtype).element_size()
                found.append(Timed(sort.op, ranks, first, (kind * 100 + number) * REPEATS + again, size, start, end))
            n, number = n // 4, number + 1
    return found


def time_beside(runner: Runner) -> list[tuple[float, float]]:
    """What communications take from computations beside them: (seconds lost, seconds of these alone), one a sort.

    As in a step: forwards of one layer after the other, and beside each a layer's worth of another place in memory
    is reduced or gathered, which the next one waits for.
    """
    layers = [b for s in runner.stages.values() for b in s.blocks if isinstance(b, Layer)]
    if not layers or not is_async(runner):
        return []
    x = torch.zeros(runner.pipeline.shape, dtype=runner.dtype, device=runner.device)
    with silence(runner):
        return [_beside(runner, sort, layers, x) for sort in _sorts(runner)]


@torch.no_grad()
def _beside(runner: Runner, sort: _Sort, layers: Sequence[nn.Module], x: Tensor) -> tuple[float, float]:
    """Seconds lost, and seconds alone; ranks may have other numbers of layers, and all go round as often."""
    rounds = torch.tensor([len(layers)], device=runner.device)
    dist.all_reduce(rounds, dist.ReduceOp.MIN, group=sort.group)
    size = sum(p.numel() for p in layers[0].parameters())
    n = min(sort.elements, max(LEAST_ELEMENTS, size))

    def go(compute: bool, communicate: bool) -> None:
        for i in range(int(rounds)):
            work = sort.start(n, i * n % max(1, sort.elements - n + 1)) if communicate else None
            if compute:
                layers[i](x)
            if work is not None:
                work.wait()

    seconds = {}
    for what in ((True, False), (False, True), (True, True)):
        dist.barrier(sort.group)
        start = runner.pipeline.now()
        go(*what)
        seconds[what] = (runner.pipeline.now() - start) * 1e-9
    return max(0.0, seconds[True, True] - seconds[True, False]), seconds[False, True]


def is_async(runner: Runner) -> bool:
    """Whether the step sends gradients or gathers parameters beside computation."""
    p = runner.scenario.parallelism
    if p.zero == 0:
        return runner.place.data_group is not None and p.dp_sync != "after_backward"
    return p.zero >= 2 or p.dp_sync != "after_backward" or bool(p.param_gather_overlap)
