"""Times data-parallel communications by themselves, on all ranks of a real run at once.

A communication beside computation slows it on a CPU, as gloo's threads use the same cores. So a micro-batch is timed
with and without its communications, in turns, as caches and clocks drift. What it takes longer, less the waits that
remain even if communications take nothing from computation, is the share that they take. If other processes used the
machine meanwhile, the CPU time of all threads counts instead of wall time.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from calibrate.bundled_model.model import Embedding
from calibrate.parallel.comm import all_gather, reduce_scatter
from calibrate.parallel.data import Traffic
from calibrate.parallel.runner import Runner
from calibrate.parallel.zero import Sharding
from calibrate.real_steps.blocks import silence
from sim.inputs.parallelism import AT_THE_END

LEAST_ELEMENTS = 256  # of the smallest collective that is timed
REPEATS = 2
ALONE = 4  # how many times each of a micro-batch's collectives is timed alone
NUMBERS = 1000  # more than the timed collectives of any one sort


class Timed(NamedTuple):
    """One timed collective on one rank.

    `ranks` and `first`: size and first rank of its group. `number` tells collectives of one group apart.
    """

    op: str
    ranks: int
    first: int
    number: int
    bytes: int
    start_ns: int
    end_ns: int


class Beneath(NamedTuple):
    """A collective that ran beside computation: its kind, when it started, and from when to when it was waited for."""

    op: str
    ranks: int
    bytes: int
    start_ns: int
    from_ns: int
    until_ns: int


class Beside(NamedTuple):
    """Hold by how much a micro-batch took longer on one rank with its collectives than without.

    `wall_s`: wall seconds. `cpu_s`: CPU seconds of all threads. `sent`: (op, ranks, bytes) of each collective. `waits`:
    when each was waited for; empty on a GPU, whose host does not wait.
    """

    sent: tuple[tuple[str, int, int], ...]
    waits: tuple[Beneath, ...]
    wall_s: float
    cpu_s: float


def expected_waits_s(sent: Sequence[Beneath], alone_s: Callable[[Beneath], float]) -> float:
    """Return the seconds that a rank would wait in all if collectives took nothing from computation; see `waits_s`."""
    return sum(waits_s(sent, alone_s))


def waits_s(sent: Sequence[Beneath], alone_s: Callable[[Beneath], float]) -> list[float]:
    """Return the seconds that a rank would wait for each collective if each took as long as alone, one after another.

    A longer real wait (for a late rank, or a delayed collective) shifts everything after it, so it is subtracted there.
    """
    starts = [(s.start_ns, False, i) for i, s in enumerate(sent)]
    events = sorted(starts + [(s.from_ns, True, i) for i, s in enumerate(sent)])
    later_s = free_s = 0.0
    ends_s, due_s = [0.0] * len(sent), [0.0] * len(sent)
    for at_ns, waits, i in events:
        now_s = at_ns * 1e-9 - later_s
        if not waits:
            free_s = ends_s[i] = max(now_s, free_s) + alone_s(sent[i])
            continue
        due_s[i] = max(0.0, ends_s[i] - now_s)
        later_s += (sent[i].until_ns - at_ns) * 1e-9 - due_s[i]
    return due_s


class _Sort(NamedTuple):
    """A collective that a step makes: its largest number of elements, and a function that starts it on n elements.

    `number` tells it from the rank's other collectives.
    """

    op: str
    group: dist.ProcessGroup
    elements: int
    start: Callable[[int], dist.Work]
    number: int


def _parts(runner: Runner) -> Iterator[Any]:
    """Yield the data parallelism of every stage, that of experts and of dense parameters one by one."""
    for d in runner.data.values():
        yield from getattr(d, "parts", [d])


def _sorts(runner: Runner) -> Iterator[_Sort]:
    """Yield the collectives of this rank's gradients and parameters; the largest size is that of all of them."""
    place = runner.place
    sizes: dict[dist.ProcessGroup | None, int] = defaultdict(int)
    for part in _parts(runner):
        for group, n in part.reduced():
            sizes[group] += n
    if place.copies is not None:
        sizes[place.copies] += sum(sizes.values())
    if runner.tied:
        sizes[place.tied] += runner.copied_gradients()[0].numel()
    shares: dict[Sharding, int] = defaultdict(int)
    for unit in (u for part in _parts(runner) for u in getattr(part, "units", ())):
        shares[unit.sharding] += unit.share
    whole = max([n * s.shards for s, n in shares.items()], default=0)
    x = torch.zeros(max(whole, *sizes.values()), dtype=runner.dtype, device=runner.device)
    number = 0
    for g, n in sizes.items():
        if g is not None and n:
            yield _Sort("all_reduce", g, n, partial(_all_reduce, x, g), number)
        number += 1
    for sharding, n in shares.items():
        if sharding.group is not None and n:
            group, everything = sharding.group, x[: n * sharding.shards]
            own = torch.zeros(n, dtype=runner.dtype, device=runner.device)
            scatter = partial(_reduce_scatter, own, everything, group)
            yield _Sort("reduce_scatter", group, len(everything), scatter, number)
            gather = partial(_all_gather, everything, own, group)
            yield _Sort("all_gather", group, len(everything), gather, number + 1)
            number += 2


def _all_reduce(x: Tensor, group: dist.ProcessGroup, n: int) -> dist.Work:
    work: dist.Work = dist.all_reduce(x[:n], group=group, async_op=True)
    return work


def _reduce_scatter(part: Tensor, x: Tensor, group: dist.ProcessGroup, n: int) -> dist.Work:
    share = n // (x.numel() // part.numel())
    whole = share * (x.numel() // part.numel())
    work: dist.Work = reduce_scatter(part[:share], x[:whole], group=group, async_op=True)
    return work


def _all_gather(x: Tensor, part: Tensor, group: dist.ProcessGroup, n: int) -> dist.Work:
    share = n // (x.numel() // part.numel())
    whole = share * (x.numel() // part.numel())
    work: dist.Work = all_gather(x[:whole], part[:share], group=group, async_op=True)
    return work


def time_collectives(runner: Runner) -> list[Timed]:
    """Time every collective of gradients and parameters, on all elements and on ever fewer.

    The caller takes the seconds from the latest start to the latest end of all ranks.
    """
    found = []
    for sort in _sorts(runner):
        n, place = sort.elements, 0
        while n >= LEAST_ELEMENTS or place == 0:
            for again in range(REPEATS):
                found.append(_timed(runner, sort, n, place * REPEATS + again))
            n, place = n // 4, place + 1
    return found


def _timed(runner: Runner, sort: _Sort, n: int, number: int) -> Timed:
    start = time.perf_counter_ns()
    sort.start(n).wait()
    end = runner.pipeline.now()
    ranks, first = _members(sort.group)
    return Timed(sort.op, ranks, first, sort.number * NUMBERS + number, n * runner.dtype.itemsize, start, end)


def time_beside(runner: Runner) -> tuple[list[Timed], Beside | None]:
    """Time a step's last micro-batch with and without its communications in turns, and these communications alone.

    Returns the communications alone, and how much longer the micro-batch took with them (None if the step has no
    communication beside computation).
    """
    if not is_async(runner):
        return [], None
    _micro_batch(runner, talk=True)  # warm-up
    seconds = [(talk, _micro_batch(runner, talk)) for talk in (True, False, False, True)]
    wall_s, cpu_s = (sum(s[clock] if talk else -s[clock] for talk, s in seconds) / 2 for clock in (0, 1))
    data = list(_parts(runner))
    waits = [w for d in data for w in d.traffic.waits]
    for d in data:
        d.traffic = Traffic()
    sizes = sorted({(w.sent.op, *_members(w.sent.group), w.sent.bytes) for w in waits})
    sorts = {(sort.op, *_members(sort.group)): sort for sort in _sorts(runner)}
    alone = [(sorts[tuple(sort)], n // runner.dtype.itemsize) for *sort, n in sizes for _ in range(ALONE)]
    timed = [_timed(runner, sort, n, NUMBERS // 2 + i) for i, (sort, n) in enumerate(alone)]
    beneath = tuple(Beneath(w.sent.op, _members(w.sent.group)[0], w.sent.bytes, *w[1:]) for w in waits)
    sent = tuple(b[:3] for b in beneath)
    return timed, Beside(sent, beneath if runner.device == "cpu" else (), wall_s, cpu_s)


def _members(group: dist.ProcessGroup) -> tuple[int, int]:
    """Return the number of a group's ranks, and the first of them."""
    return dist.get_world_size(group), dist.get_process_group_ranks(group)[0]


def _micro_batch(runner: Runner, talk: bool) -> tuple[float, float]:
    """Return wall and CPU seconds of one micro-batch through this rank's stages; on a GPU both are wall seconds."""
    data = list(runner.data.values())
    with nullcontext() if talk else silence(runner):
        for part in _parts(runner):
            part.traffic = Traffic()
        dist.barrier()
        wall, cpu = runner.pipeline.now(), time.process_time()
        for d in data:
            d.begin()
            d.last()
        _compute(runner)
        for d in data:
            d.finish()
        wall_s, cpu_s = (runner.pipeline.now() - wall) * 1e-9, time.process_time() - cpu
    runner.place.model.tape.take()
    return wall_s, cpu_s if runner.device == "cpu" else wall_s


def _compute(runner: Runner) -> None:
    x = torch.zeros(runner.pipeline.shape, dtype=runner.dtype, device=runner.device)
    tokens, targets = runner.micro_batch_tokens(runner.batch(0))
    last = {}
    for s, stage in runner.stages.items():
        first = isinstance(stage.blocks[0], Embedding) if stage.blocks else False
        last[s] = stage.forward(0, tokens[0] if first else x.clone(), targets[0]).ndim == 0
    for s, stage in reversed(runner.stages.items()):
        stage.backward(0, None if last[s] else x)


def is_async(runner: Runner) -> bool:
    """Return whether the step sends gradients or gathers parameters beside computation."""
    p = runner.scenario.parallelism
    if p.zero == 0:
        return runner.place.data_group is not None and p.dp_sync not in AT_THE_END
    return p.zero >= 2 or p.dp_sync != "after_backward" or bool(p.param_gather_overlap)
