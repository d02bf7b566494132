"""Ranks that share cores: how much slower they compute, and what a message then takes.

Gloo's ranks sleep while they wait, and a message wakes them. Where all cores are taken a rank that was woken waits
for its turn, up to a slice of the scheduler (3 ms on Linux), whatever the message's size. Gloo's own thread spins
meanwhile wherever another thread of its rank, which may have lost its core, holds a connection's lock:
`Pair::handleEvents` (gloo/transport/tcp/pair.cc) tries that lock and returns, and epoll calls it at once again. So
a message between ranks that share cores costs what the computing between messages says too, and is timed between
computations, all ranks at once.

Run by `calibrate.run` (group `sharing`); as `python -m calibrate.shared_cores` it is one rank.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from calibrate.collectives import MAX_CPU_RANKS, make
from calibrate.launch import join
from calibrate.machine import cores
from calibrate.ranks import stream_ranks
from calibrate.records import Collective, Constant, Record, from_json, to_json
from calibrate.timing import Bench
from sim.core.processes import python_module

RANKS_PER_CORE = 2
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
SIZES = {True: (4_096, 65_536, 1_048_576), False: (1_024, 4_096, 16_384, 65_536, 262_144, 1_048_576, 4_194_304)}
BURST_S = 1e-3  # of computing between two messages: a layer's, in models that share cores at all
TURNS = 24  # bursts in a sample: a wait of a slice comes now and then, so single ones say nothing
SAMPLES = {True: 4, False: 10}
LEAST_S = 1e-6
COMPUTE = "sharing compute"
Work = Callable[[], object]


def ranks_sharing() -> int:
    """Ranks that are started; 0 where they would be too many to mean anything."""
    ranks = RANKS_PER_CORE * cores()
    return ranks if ranks <= MAX_CPU_RANKS else 0


def keys(bench: Bench) -> list[str]:
    """Keys of all measurements: groups of two ranks each, and all ranks as one."""
    ranks = ranks_sharing()
    if bench.device != "cpu" or ranks < 4:
        return []
    each = [f"sharing {op} {n} {size}" for op in OPS for n in sorted({2, ranks}) for size in SIZES[bench.quick]]
    return [COMPUTE, *each]


def measure(bench: Bench, wanted: Sequence[str]) -> Iterator[tuple[str, list[Record]]]:
    """Start the ranks and hand on what they measure, one key after the other.

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
    """The slowdown, 1 where it came out below: ranks that take turns are not faster than their share of a core."""
    if slowdown.value >= 1.0:
        return slowdown
    text = f"{slowdown.name} came out as {slowdown.value:.2f} and is taken as 1: other work ran beside the measurement"
    print(f"warning: {text}", file=sys.stderr)
    return slowdown._replace(value=1.0)


@click.command()
@click.option("--parent", type=int, required=True)
@click.option("--quick", is_flag=True)
@click.option("--key", "wanted", multiple=True)
def main(parent: int, quick: bool, wanted: tuple[str, ...]) -> None:
    """One rank: measures every key, rank 0 writes a line of JSON for each."""
    if os.getppid() != parent:
        return  # it died while this rank was starting
    rank, ranks = join("cpu")
    pairs: list[Any] = [dist.new_group([i, i + 1]) for i in range(0, ranks, 2)]  # every rank makes all of them
    burst = _burst(rank)
    for key in wanted:
        if key == COMPUTE:
            records: list[Record] = [_slowdown(burst, rank, ranks, SAMPLES[quick])]
        else:
            _, op, members, size = key.split()
            group = pairs[rank // 2] if int(members) == 2 else None
            seconds, spread = _message(burst, make(op, int(size), "cpu", group), SAMPLES[quick])
            records = [Collective(op, int(members), float(size), seconds, spread, float(RANKS_PER_CORE))]
        if rank == 0:
            print(json.dumps([key, [to_json(r) for r in records]]), flush=True)
    dist.destroy_process_group()


def _burst(rank: int) -> Work:
    """A narrow layer's operators, as often as take `BURST_S` of this rank's own core, the same number on all ranks."""
    x, w, wide = torch.randn(64, 128), torch.randn(128, 128), torch.randn(128, 512)
    once = partial(_operators, x, w, wide)
    times = torch.zeros(1)
    dist.barrier()
    if rank == 0:  # alone
        once()
        start = time.perf_counter()
        for _ in range(20):
            once()
        times[0] = max(1.0, round(BURST_S * 20 / (time.perf_counter() - start)))
    dist.broadcast(times, 0)
    return partial(_repeat, once, int(times))


def _operators(x: Tensor, w: Tensor, wide: Tensor) -> Tensor:
    y = F.layer_norm(x @ w, (128,)) + x
    return F.gelu(y @ wide) @ wide.t()


def _repeat(work: Work, times: int) -> None:
    for _ in range(times):
        work()


def _slowdown(burst: Work, rank: int, ranks: int, samples: int) -> Constant:
    """All ranks computing, by as many as there are cores, by the ranks on each core."""
    few = ranks // RANKS_PER_CORE
    alone, shared = [], []
    for _ in range(samples):
        alone.append(_mean(_elapsed(burst if rank < few else None), few))
        shared.append(_mean(_elapsed(burst), ranks))
    how = f"{TURNS} ms of a narrow layer's operators on {ranks} ranks, by the same on {few}, by {RANKS_PER_CORE}"
    slowdown = statistics.median(shared) / min(alone) / RANKS_PER_CORE  # other work makes no rank faster: the least
    return Constant("core_sharing_slowdown", slowdown, how)


def _message(burst: Work, call: Work, samples: int) -> tuple[float, float]:
    """What computations take longer with one call after each: seconds of the call, mean over ranks, and its spread.

    Means of many: the rare wait for a core is what sharing costs, and a median would drop it.
    """
    ranks = dist.get_world_size()
    call()
    found = []
    for _ in range(samples):
        plain = _mean(_elapsed(burst), ranks)
        found.append(max(LEAST_S, (_mean(_elapsed(burst, call), ranks) - plain) / TURNS))
    seconds = statistics.fmean(found)
    return seconds, statistics.fmean(abs(x - seconds) for x in found) / seconds


def _elapsed(burst: Work | None, call: Work | None = None) -> float:
    """Seconds of this rank's turns, from the moment all are there; 0 at once without a burst."""
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
    """Over so many ranks, the same on all; the others bring 0."""
    total = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / ranks


if __name__ == "__main__":
    main()
