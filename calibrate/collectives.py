"""Times collectives on groups of 2, 4, 8, … local ranks: gloo on a CPU, NCCL with one rank for each GPU.

`calibrate.run` starts the ranks, once for each number of ranks. `python -m calibrate.collectives` is one of them.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Sequence

import click
import torch
import torch.distributed as dist

from calibrate import shared_cores
from calibrate.launch import join
from calibrate.machine import gpu_ranks
from calibrate.ranks import stream_ranks
from calibrate.records import Collective, Record, from_json, to_json
from calibrate.timings import overlap
from calibrate.timings.collective_calls import MAX_CPU_RANKS, Call, Work, make, repeat
from calibrate.timings.timing import MAX_SAMPLES, MIN_SAMPLES, SAMPLE_S, Bench, Timing, summarize
from sim.core.collectives import COLLECTIVES
from sim.core.processes import python_module
from sim.studies.executors import available_cores

OPS = (*COLLECTIVES, "send_recv")


def group_sizes(device: str) -> list[int]:
    """Return the numbers of ranks to measure: powers of two, and all. A CPU has one rank for each core, at most 8."""
    most = gpu_ranks() if device == "cuda" else min(available_cores(), MAX_CPU_RANKS)
    return sorted({n for n in (2, 4, 8, 16, 32, 64, most) if 2 <= n <= most})


def sizes(bench: Bench) -> list[int]:
    """Return the sizes to measure, in bytes of the full buffer as nccl-tests counts them."""
    if bench.device == "cpu":
        step, last = (2, 25) if bench.quick else (1, 26)
    else:
        step, last = (3, 28) if bench.quick else (1, 32)
    return [1 << i for i in range(10, last, step)]


def calls(bench: Bench, ranks: int) -> dict[str, Call]:
    """Return the collectives to measure on this number of ranks, by key."""
    each = [Call(f"collective {op} {ranks} {size}", op, ranks, size) for op in OPS for size in sizes(bench)]
    return {call.key: call for call in each}


def overlap_key(ranks: int) -> str:
    """Return the key of the measurement of communication beside computation."""
    return f"overlap {ranks}"


def measure(bench: Bench, ranks: int, wanted: Sequence[str]) -> Iterator[tuple[str, list[Record]]]:
    """Start the ranks and yield what they measure, one key after the other.

    Raises:
        calibrate.launch.RankError: if a rank fails or they take many times longer than planned.
    """
    timeout_s = 120.0 + 20.0 * bench.limit_s * len(wanted)
    command = [*python_module("calibrate.collectives"), bench.device, "--parent", str(os.getpid())]
    command += ["--limit-s", str(bench.limit_s)]
    command += ["--quick"] * bench.quick + [x for key in wanted for x in ("--key", key)]
    for line in stream_ranks(command, ranks, timeout_s):
        key, rows = json.loads(line)
        yield key, [from_json(row) for row in rows]


@click.command()
@click.argument("device", type=click.Choice(("cpu", "cuda")))
@click.option("--parent", type=int, required=True)
@click.option("--limit-s", type=float, required=True)
@click.option("--quick", is_flag=True)
@click.option("--key", "keys", multiple=True)
def main(device: str, parent: int, limit_s: float, quick: bool, keys: tuple[str, ...]) -> None:
    """Measure every key as one rank; rank 0 writes a line of JSON for each."""
    if os.getppid() != parent:
        return  # the parent died while this rank was starting
    bench = Bench(device, quick, limit_s)
    rank, ranks = join(device)
    burst = shared_cores.make_burst(rank) if device == "cpu" else None
    planned = calls(bench, ranks)
    for key in keys:
        beside = key == overlap_key(ranks)
        records = overlap.interference(bench) if beside else [_collective(bench, planned[key], burst)]
        if rank == 0:
            print(json.dumps([key, [to_json(r) for r in records]]), flush=True)
    dist.destroy_process_group()


def _collective(bench: Bench, planned: Call, burst: Work | None) -> Record:
    """Time a collective; on a CPU after computations, because ranks that compute do not arrive at once, and sleep."""
    _, op, ranks, size = planned
    call = make(op, size, bench.device)
    if burst is not None:
        return Collective(op, ranks, float(size), *shared_cores.message(burst, call, bench.quick))
    timing = together(bench, call)
    return Collective(op, ranks, float(size), timing.seconds, timing.spread)


def together(bench: Bench, call: Work) -> Timing:
    """Time one call while all ranks call at once, back to back; each sample is the slowest rank's."""
    repeat(call, 3)
    plan = torch.tensor([_elapsed(bench, call, 2) / 2], dtype=torch.float64, device=bench.device)
    dist.broadcast(plan, 0)  # all ranks must agree on how often to call
    once = max(float(plan), 1e-7)
    inner = max(1, math.ceil(4 * SAMPLE_S / once))
    count = max(MIN_SAMPLES, min(MAX_SAMPLES, int(bench.limit_s / (inner * once))))
    samples = torch.empty(count, dtype=torch.float64, device=bench.device)
    for i in range(count):
        samples[i] = _elapsed(bench, call, inner) / inner
    dist.all_reduce(samples, dist.ReduceOp.MAX)
    return summarize(samples.tolist())


def _elapsed(bench: Bench, call: Work, times: int) -> float:
    dist.barrier()
    bench.synchronize()
    start = time.perf_counter()
    repeat(call, times)
    bench.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
