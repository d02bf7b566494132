"""Measures ranks that share cores: how much slower they compute, and how long a message takes.

Gloo's ranks sleep while they wait, and a message wakes them. If all cores are busy, a rank that was woken waits for a
core, up to a time slice of the scheduler (3 ms on Linux), whatever the message's size. Meanwhile gloo's own thread
spins if another thread of its rank holds a connection's lock and has lost its core: `Pair::handleEvents`
(gloo/transport/tcp/pair.cc) tries that lock and returns, and epoll calls it again at once. So the time of a message
also depends on the computation between messages. Messages are timed between computations, on all ranks at once.

`calibrate.run` starts the ranks (group `sharing`). `python -m calibrate.shared_cores` is one rank.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from calibrate.launch import join
from calibrate.ranks import stream_ranks
from calibrate.records import Collective, Constant, Record, from_json, to_json
from calibrate.timings.collective_calls import MAX_CPU_RANKS, Call, Work, make, repeat
from calibrate.timings.timing import Bench
from sim.core.processes import python_module
from sim.prices.coefficients import BURST_S
from sim.studies.executors import available_cores

RANKS_PER_CORE = 2
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
SIZES = {True: (4_096, 65_536, 1_048_576), False: (1_024, 4_096, 16_384, 65_536, 262_144, 1_048_576, 4_194_304)}
TURNS = 24  # bursts in a sample: waits for a time slice are rare, so a single burst says little
SAMPLES = {True: 4, False: 10}
LEAST_S = 1e-6
COMPUTE = "sharing compute"


def ranks_sharing() -> int:
    """Return the number of ranks to start; 0 if the machine has too many cores for that."""
    ranks = RANKS_PER_CORE * available_cores()
    return ranks if ranks <= MAX_CPU_RANKS else 0


def keys(bench: Bench) -> list[str]:
    """Return the keys of all measurements; none where ranks do not share cores."""
    ranks = ranks_sharing()
    return [COMPUTE, *calls(ranks, bench.quick)] if bench.device == "cpu" and ranks >= 4 else []


def calls(ranks: int, quick: bool) -> dict[str, Call]:
    """Return the messages to measure, on groups of two ranks and on one group of all ranks, by key."""
    sizes = [(op, n, size) for op in OPS for n in sorted({2, ranks}) for size in SIZES[quick]]
    each = [Call(f"sharing {op} {n} {size}", op, n, size) for op, n, size in sizes]
    return {call.key: call for call in each}


def measure(bench: Bench, wanted: Sequence[str]) -> Iterator[tuple[str, list[Record]]]:
    """Start the ranks and yield what they measure, one key after the other.

    Raises:
        calibrate.launch.RankError: if a rank fails or they take many times longer than planned.
    """
    command = [*python_module("calibrate.shared_cores"), "--parent", str(os.getpid())]
    command += ["--quick"] * bench.quick + [x for key in wanted for x in ("--key", key)]
    for line in stream_ranks(command, ranks_sharing(), 120.0 + 20.0 * len(wanted)):
        key, rows = json.loads(line)
        records = [from_json(row) for row in rows]
        yield key, [_at_least_the_share(r) if isinstance(r, Constant) else r for r in records]


def _at_least_the_share(slowdown: Constant) -> Constant:
    """Return the slowdown, but at least 1: ranks that take turns are not faster than their share of a core."""
    if slowdown.value >= 1.0:
        return slowdown
    text = f"{slowdown.name}: measured {slowdown.value:.2f}, set to 1: other processes disturbed the measurement"
    print(f"warning: {text}", file=sys.stderr)
    return slowdown._replace(value=1.0)


@click.command()
@click.option("--parent", type=int, required=True)
@click.option("--quick", is_flag=True)
@click.option("--key", "wanted", multiple=True)
def main(parent: int, quick: bool, wanted: tuple[str, ...]) -> None:
    """Measure every key as one rank; rank 0 writes a line of JSON for each."""
    if os.getppid() != parent:
        return  # the parent died while this rank was starting
    rank, ranks = join("cpu")
    pairs: list[Any] = [dist.new_group([i, i + 1]) for i in range(0, ranks, 2)]  # collective for all ranks
    burst, planned = make_burst(rank), calls(ranks, quick)
    for key in wanted:
        if key == COMPUTE:
            records: list[Record] = [_slowdown(burst, rank, ranks, SAMPLES[quick])]
        else:
            _, op, members, size = planned[key]
            group = pairs[rank // 2] if members == 2 else None
            seconds, spread = message(burst, make(op, size, "cpu", group), quick)
            records = [Collective(op, members, float(size), seconds, spread, float(RANKS_PER_CORE))]
        if rank == 0:
            print(json.dumps([key, [to_json(r) for r in records]]), flush=True)
    dist.destroy_process_group()


def make_burst(rank: int) -> Work:
    """Return a burst: a narrow layer's operators, repeated so often that they take `BURST_S` on a core of their own."""
    x, w, wide = torch.randn(64, 128), torch.randn(128, 128), torch.randn(128, 512)
    once = partial(_operators, x, w, wide)
    times = torch.zeros(1)
    dist.barrier()
    if rank == 0:  # the other ranks wait in the broadcast
        once()
        start = time.perf_counter()
        repeat(once, 20)
        times[0] = max(1.0, round(BURST_S * 20 / (time.perf_counter() - start)))
    dist.broadcast(times, 0)
    return partial(repeat, once, int(times))


def _operators(x: Tensor, w: Tensor, wide: Tensor) -> Tensor:
    y = F.layer_norm(x @ w, (128,)) + x
    return F.gelu(y @ wide) @ wide.t()


def _slowdown(burst: Work, rank: int, ranks: int, samples: int) -> Constant:
    """Return the time of all ranks ÷ the time of as many ranks as there are cores ÷ the ranks on each core."""
    few = ranks // RANKS_PER_CORE
    alone, shared = [], []
    for _ in range(samples):
        alone.append(_mean(_elapsed(burst if rank < few else None), few))
        shared.append(_mean(_elapsed(burst), ranks))
    how = f"{TURNS} ms of a narrow layer's operators on {ranks} ranks, by the same on {few}, by {RANKS_PER_CORE}"
    slowdown = statistics.median(shared) / min(alone) / RANKS_PER_CORE  # least: other processes only slow
    return Constant("core_sharing_slowdown", slowdown, how)


def message(burst: Work, call: Work, quick: bool) -> tuple[float, float]:
    """Return the seconds by which a call after each burst lengthens it, as the mean over ranks, and their spread.

    It is a mean over many bursts: a median would drop the rare waits for a core, which are the cost of sharing.
    """
    ranks = dist.get_world_size()
    call()
    found = []
    for _ in range(SAMPLES[quick]):
        plain = _mean(_elapsed(burst), ranks)
        found.append(max(LEAST_S, (_mean(_elapsed(burst, call), ranks) - plain) / TURNS))
    seconds = statistics.fmean(found)
    return seconds, statistics.fmean(abs(x - seconds) for x in found) / seconds


def _elapsed(burst: Work | None, call: Work | None = None) -> float:
    """Return the seconds of this rank's bursts after a barrier; 0 without a burst."""
    dist.barrier()
    if burst is None:
        return 0.0
    start = time.perf_counter()
    for _ in range(TURNS):
        burst()
        if call is not None:
            call()
    return time.perf_counter() - start


def _mean(seconds: float, ranks: int) -> float:
    """Return the mean over `ranks` ranks, the same on all; further ranks contribute 0."""
    total = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / ranks


if __name__ == "__main__":
    main()
