"""Times the Python that DTensor and FSDP2 run besides operators, for each kind of `sim.core.host_work`.

Two gloo ranks run tiny tensors on the CPU, also where the profile is a GPU's. The clock is the CPU time of the thread
that calls, which leaves out waits for the other rank. From each time that of the same work without DTensor or FSDP2 is
subtracted, and that of starting the same collectives, which replays charge by themselves.

A matmul runs before each call, as in a step: it takes the core's caches, and Python is then several times slower than
in a loop (a DTensor's operator took 4 us in a loop and 26 us after a matmul). An optimizer's operators are timed one
after the other, on tensors of `SIDE` rows and columns.

`calibrate.run` starts the ranks (group `python`). `python -m calibrate.host_work` is one rank.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from calibrate.launch import join
from calibrate.ranks import stream_ranks
from calibrate.records import Constant, Record, from_json, to_json
from calibrate.timings.collective_calls import make
from calibrate.timings.timing import Bench
from sim.core.host_work import coefficient_of
from sim.core.processes import python_module

KEY = "python of DTensor and FSDP2"
RANKS = 2
SAMPLES = {True: 60, False: 200}
WARM_UP = 5
WIDTH = 8  # of tensors whose operators take no time
SIDE = 256  # of an optimizer's tensors, and of the matmul between two calls
GROUPS, PARAMETERS = (4, 12), (2, 10)  # of the timed FSDP2 models
TINY_BYTES = 4 * WIDTH * WIDTH
Call = Callable[[], object]
Pair = tuple[float, float]  # seconds of forward and backward


def measure(bench: Bench, wanted: Sequence[str]) -> Iterator[tuple[str, list[Record]]]:
    """Start the ranks and yield what they measure.

    Raises:
        calibrate.launch.RankError: if a rank fails or they take many times longer than planned.
    """
    command = [*python_module("calibrate.host_work"), "--parent", str(os.getpid())] + ["--quick"] * bench.quick
    for line in stream_ranks(command, RANKS, 300.0):
        yield KEY, [from_json(row) for row in json.loads(line)]


@click.command()
@click.option("--parent", type=int, required=True)
@click.option("--quick", is_flag=True)
def main(parent: int, quick: bool) -> None:
    """Measure all kinds as one rank; rank 0 writes a line of JSON."""
    if os.getppid() != parent:
        return  # the parent died while this rank was starting
    rank, ranks = join("cpu")
    records = host_work(init_device_mesh("cpu", (ranks,)), SAMPLES[quick])
    if rank == 0:
        print(json.dumps([to_json(r) for r in records]), flush=True)
    dist.destroy_process_group()


def host_work(mesh: DeviceMesh, samples: int) -> list[Constant]:
    """Return the host seconds of every kind: medians over samples. Collective."""
    between = partial(torch.mm, torch.rand(2 * SIDE, SIDE), torch.rand(SIDE, SIDE))
    times = {
        **_optimizer_operators(mesh, samples),
        **_layer_operators(mesh, samples, between),
        **_conversions(mesh, samples, between),
        **_fsdp2(mesh, samples, between),
    }
    how = f"CPU seconds of the calling thread on {mesh.size()} gloo ranks, less the same work without"
    return [Constant(coefficient_of(kind), max(0.0, seconds), how) for kind, seconds in times.items()]


def _optimizer_operators(mesh: DeviceMesh, samples: int) -> dict[str, float]:
    """Time an optimizer's operators one after the other, of DTensors and plain; a kind's time is their mean."""
    plain = [torch.rand(SIDE, SIDE) for _ in range(3)]
    split = [DTensor.from_local(x, mesh, [Shard(0)], run_check=False) for x in plain]

    def step(a: Tensor, b: Tensor, c: Tensor) -> list[tuple[str, Call]]:
        return [
            ("dtensor_mixed_operator", partial(a.mul_, 1.0)),
            ("dtensor_operator_optimizer", partial(a.lerp_, b, 0.0)),
            ("dtensor_mixed_operator", partial(b.mul_, 1.0)),
            ("dtensor_operator_optimizer", partial(b.addcmul_, c, c, value=0.0)),
            ("dtensor_operator_optimizer", b.sqrt),
            ("dtensor_mixed_operator", partial(torch.div, b, 2.0)),
            ("dtensor_mixed_operator", partial(c.add_, 0.0)),
            ("dtensor_operator_optimizer", partial(c.addcdiv_, a, b, value=0.0)),
        ]

    found: dict[str, list[float]] = {}
    with torch.no_grad():
        seconds = [_in_turn([call for _, call in step(*tensors)], samples) for tensors in (split, plain)]
    for (kind, _), ours, theirs in zip(step(*plain), *seconds, strict=True):
        found.setdefault(kind, []).append(ours - theirs)
    return {kind: statistics.fmean(each) for kind, each in found.items()}


def _layer_operators(mesh: DeviceMesh, samples: int, between: Call) -> dict[str, float]:
    """Time a linear layer of DTensors and a plain one; divide by the operators of DTensors that run."""
    plain = [torch.rand(1, WIDTH, WIDTH), torch.rand(WIDTH, WIDTH), torch.rand(WIDTH)]
    placements = (Replicate(), Shard(0), Shard(0))
    split = [DTensor.from_local(x, mesh, [p], run_check=False) for x, p in zip(plain, placements, strict=True)]
    ours, theirs = ([x.requires_grad_() for x in tensors] for tensors in (split, plain))
    with _Counting() as counting:
        out = F.linear(*ours)
        forward = counting.calls
        out.backward(torch.ones_like(out))
        backward = counting.calls - forward
    slow, fast = (_both_ways(partial(F.linear, *tensors), samples, between) for tensors in (ours, theirs))
    return {
        "dtensor_operator": (slow[0] - fast[0]) / forward,
        "dtensor_operator_backward": (slow[1] - fast[1]) / backward,
    }


def _conversions(mesh: DeviceMesh, samples: int, between: Call) -> dict[str, float]:
    """Time `from_local` and `to_local` against two views, and a sum over ranks against `all_reduce`."""
    x = torch.rand(WIDTH, WIDTH, requires_grad=True)

    def through() -> Tensor:
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local()

    ours = _both_ways(through, samples, between)
    theirs = _both_ways(lambda: x.view_as(x).view_as(x), samples, between)
    forward, backward = ((a - b) / 2 for a, b in zip(ours, theirs, strict=True))
    with torch.no_grad():
        parts = DTensor.from_local(x.detach(), mesh, [Partial()], run_check=False)
        moved_s = _seconds(partial(parts.redistribute, mesh, [Replicate()]), samples, between)
        reduced_s = _seconds(make("all_reduce", TINY_BYTES, "cpu"), samples, between)
    return {
        "dtensor_conversion": forward,
        "dtensor_conversion_backward": backward,
        "dtensor_redistribute": moved_s - reduced_s - forward,
    }


def _fsdp2(mesh: DeviceMesh, samples: int, between: Call) -> dict[str, float]:
    """Time chains of few and many groups, with few and many parameters in each."""
    calls = (make(op, TINY_BYTES, "cpu") for op in ("all_gather", "reduce_scatter"))
    gather_s, reduce_s = (_seconds(call, samples, between) for call in calls)
    started = (gather_s, gather_s + reduce_s)
    group = {p: _group(mesh, p, samples, between) for p in PARAMETERS}
    few, many = PARAMETERS
    found = {}
    for i, end in enumerate(("", "_backward")):
        each = max(0.0, group[many][i] - group[few][i]) / (many - few)
        found[f"fsdp2_group{end}"] = group[few][i] - few * each - started[i]
        found[f"fsdp2_parameter{end}"] = each
    return found


def _group(mesh: DeviceMesh, parameters: int, samples: int, between: Call) -> Pair:
    """Return the seconds that FSDP2 adds for one more group of `parameters` parameters."""
    few, many = (_chain(mesh, groups, parameters, samples, between) for groups in GROUPS)
    forward, backward = ((b - a) / (GROUPS[1] - GROUPS[0]) for a, b in zip(few, many, strict=True))
    return forward, backward


class _Computes(nn.Module):
    """Runs `between` in its forward, and in its backward."""

    def __init__(self, between: Call) -> None:
        super().__init__()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        self.between()
        out = x * 1.0
        out.register_hook(self._computes)
        return out

    def _computes(self, _: Tensor) -> None:
        self.between()


def _chain(mesh: DeviceMesh, groups: int, parameters: int, samples: int, between: Call) -> Pair:
    """Return the seconds that FSDP2 adds to a chain of linear layers, each group of them sharded by itself."""
    x = torch.rand(WIDTH, WIDTH, requires_grad=True)

    def linear() -> nn.Linear:
        return nn.Linear(WIDTH, WIDTH, bias=False)

    def model() -> nn.Sequential:
        layers = [nn.Sequential(_Computes(between), *(linear() for _ in range(parameters))) for _ in range(groups)]
        return nn.Sequential(*layers, linear())

    plain, sharded = model(), model()
    for layer in list(sharded)[:groups]:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    ours, theirs = (_both_ways(partial(m, x), samples, between, m) for m in (sharded, plain))
    return ours[0] - theirs[0], ours[1] - theirs[1]


class _Counting(TorchDispatchMode):
    """Counts operators of DTensors."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            self.calls += 1
            return NotImplemented
        return func(*args, **(kwargs or {}))


def _both_ways(forward: Callable[[], Tensor], samples: int, between: Call, model: nn.Module | None = None) -> Pair:
    """Return the CPU seconds of this thread in a forward and in its backward."""
    found: list[Pair] = []
    for _ in range(WARM_UP + samples):
        between()
        start = time.thread_time()
        out = forward()
        middle = time.thread_time()
        grad = torch.ones_like(out)
        between()
        begun = time.thread_time()
        out.backward(grad)
        found.append((middle - start, time.thread_time() - begun))
        if model is not None:
            model.zero_grad()
    forwards, backwards = zip(*found[WARM_UP:], strict=True)
    return statistics.median(forwards), statistics.median(backwards)


def _seconds(call: Call, samples: int, between: Call) -> float:
    """Return the CPU seconds of this thread in one call."""
    return _in_turn([call, between], samples)[0]


def _in_turn(calls: Sequence[Call], samples: int) -> list[float]:
    """Return the CPU seconds of this thread in each of the calls, which run one after the other."""
    found: list[list[float]] = []
    for _ in range(WARM_UP + samples):
        marks = [time.thread_time()]
        for call in calls:
            call()
            marks.append(time.thread_time())
        found.append([b - a for a, b in pairwise(marks)])
    return [statistics.median(column) for column in zip(*found[WARM_UP:], strict=True)]


if __name__ == "__main__":
    main()
