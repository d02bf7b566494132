"""Small programs of a host thread and GPU streams, run by a model of their own and written as Kineto traces.

The model is the ground truth of the tests: host calls one after the other; a kernel starts when its stream is free,
LATENCY_NS after its launch call began, and after the events that its stream waits for; a collective moves data
once all ranks' kernels have started; cudaDeviceSynchronize ends after all launched kernels. A launch waits while as
many kernels as the queue holds have not ended. Events have the form
that libkineto/src/output_json.cpp and CuptiActivity.cpp of pytorch/kineto give them (kernel, cuda_runtime and
cuda_sync with `correlation`, record_param_comms with the collective's args, ProfilerStep as user_annotation).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

LATENCY_NS = 5_000
BASE_NS = 1_790_000_000_000_000_000


class Kernel(NamedTuple):
    """A launch: host time before, in and after the call; the kernel's time; its stream; whether a collective; the rows
    of the inputs of the operator that launches it."""

    host_ns: int
    call_ns: int
    kernel_ns: int
    stream: int
    collective: bool = False
    rows: int = 0


class Mark(NamedTuple):
    """Where a step of the training begins on the host."""

    number: int


class Gpu(NamedTuple):
    """How a machine's traces name the GPU, the runtime's calls and a matmul's kernel."""

    name: str = "NVIDIA H100 80GB HBM3"
    runtime: str = "cuda"
    gemm: str = "ampere_gemm_128x128"
    queue: int = 1024


V100 = Gpu("Tesla V100-SXM2-16GB", gemm="volta_sgemm_128x64_nn")
A100 = Gpu("NVIDIA A100-SXM4-80GB")
H100 = Gpu()
MI250 = Gpu("AMD Instinct MI250X/MI250", "hip", "Cijk_Alik_Bljk_HB_MT128x128x32_MI32x32x8x1")


class Wait(NamedTuple):
    """cudaEventRecord on one stream, cudaStreamWaitEvent on another."""

    host_ns: int
    source: int
    target: int


class Sync(NamedTuple):
    """cudaDeviceSynchronize, `tail_ns` of which come after the device is idle."""

    host_ns: int
    tail_ns: int


Item = Kernel | Wait | Sync | Mark


@dataclass
class Change:
    """What the truth is run with."""

    kernel: float = 1.0
    network: float = 1.0
    slow: float = 1.0  # kernels of rank 0


@dataclass
class _Rank:
    """Where a rank stands: host clock, streams, what streams wait for, the events written so far."""

    rank: int
    now: float
    gpu: Gpu
    world: int
    at: int = 0
    correlation: int = 100

    def __post_init__(self) -> None:
        self.free: dict[int, float] = {}
        self.pending: dict[int, float] = {}
        self.events: list[dict[str, Any]] = []
        self.marks: list[tuple[int, float]] = []
        self.ends: list[float] = []  # of all kernels so far, by launch
        self.last: dict[int, float] = {}  # ends of steps' last kernels
        self.end = self.now


def run(ranks: list[list[Item]], change: Change | None = None, skew_ns: int = 0) -> tuple[float, list[dict[str, Any]]]:
    """The step's seconds, from first start to last end of all ranks, and the traces, one a rank.

    Every rank's list must hold the same number of collectives. `skew_ns`: how much later each next rank begins.
    """
    states = _run([[Mark(3), *items] for items in ranks], change or Change(), skew_ns, H100)
    begin = min(float(r * skew_ns) for r in range(len(ranks)))
    return (max(s.end for s in states) - begin) * 1e-9, [_trace(s, len(ranks)) for s in states]


def train(
    ranks: list[list[Item]], steps: int, gpu: Gpu = H100, change: Change | None = None
) -> tuple[dict[int, float], list[dict[str, Any]]]:
    """Repeat the ranks' lists for so many steps, numbered from 1: the seconds of each from the second on, from the end
    of the last kernel of the step before to that of its own, and the traces."""
    listed = [[x for n in range(1, steps + 1) for x in (Mark(n), *items)] for items in ranks]
    states = _run(listed, change or Change(), 0, gpu)
    ends = {n: max(s.last[n] for s in states) for n in range(1, steps + 1)}
    return {n: (ends[n] - ends[n - 1]) * 1e-9 for n in range(2, steps + 1)}, [_trace(s, len(ranks)) for s in states]


def _run(ranks: list[list[Item]], change: Change, skew_ns: int, gpu: Gpu) -> list[_Rank]:
    states = [_Rank(r, float(r * skew_ns), gpu, len(ranks)) for r in range(len(ranks))]
    while True:
        arrivals = [_until_collective(s, items, change) for s, items in zip(states, ranks, strict=True)]
        if any(a is None for a in arrivals):
            break
        present = [a for a in arrivals if a is not None]
        last = max(start for start, _ in present)
        for state, items, (start, call) in zip(states, ranks, present, strict=True):
            item = items[state.at]
            assert isinstance(item, Kernel)
            _kernel(state, item, start, last + item.kernel_ns * change.network, call)
            state.at += 1
    return states


def _until_collective(s: _Rank, items: list[Item], change: Change) -> tuple[float, int] | None:
    while s.at < len(items):
        item = items[s.at]
        if isinstance(item, Kernel):
            start, call = _launch(s, item)
            if item.collective:
                return start, call
            scale = change.kernel * (change.slow if s.rank == 0 else 1.0)
            _kernel(s, item, start, start + item.kernel_ns * scale, call)
        elif isinstance(item, Mark):
            s.marks.append((item.number, s.now))
        elif isinstance(item, Wait):
            _stream_wait(s, item)
        else:
            _sync(s, item)
        s.at += 1
    return None


def _call(s: _Rank, name: str, host_ns: int, call_ns: float) -> int:
    """A runtime call after some host time; returns its correlation."""
    s.now += host_ns
    s.correlation += 1
    name = name.replace("cuda", s.gpu.runtime, 1)
    s.events.append(_event(name, "cuda_runtime", s.rank + 1000, 7, s.now, call_ns, {"correlation": s.correlation}))
    s.now += call_ns
    s.end = max(s.end, s.now)
    return s.correlation


def _launch(s: _Rank, item: Kernel) -> tuple[float, int]:
    at = s.now + item.host_ns
    room = s.ends[-s.gpu.queue] if len(s.ends) >= s.gpu.queue else at  # when the queue takes one more
    call_ns = item.call_ns + max(0.0, room - at)
    if item.rows:
        inputs = {"Input Dims": [[item.rows, 1024], [1024, 1024]], "External id": s.correlation + 1}
        s.events.append(_event("aten::mm", "cpu_op", s.rank + 1000, 7, at, item.call_ns, inputs))
    if item.collective:
        comm = _collective_args(s.world) | {"External id": s.correlation + 1}
        s.events.append(_event("record_param_comms", "cpu_op", s.rank + 1000, 7, at, item.call_ns, comm))
    call = _call(s, "cudaLaunchKernel", item.host_ns, call_ns)
    start = max(s.free.get(item.stream, 0.0), max(at, room) + LATENCY_NS, s.pending.pop(item.stream, 0.0))
    return start, call


def _kernel(s: _Rank, item: Kernel, start: float, end: float, call: int) -> None:
    s.free[item.stream] = end
    s.end = max(s.end, end)
    s.ends.append(end)
    if s.marks:
        s.last[s.marks[-1][0]] = max(s.last.get(s.marks[-1][0], 0.0), end)
    name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL" if item.collective else s.gpu.gemm
    args: dict[str, Any] = {"stream": item.stream, "correlation": call, "device": 0, "External id": call}
    if item.collective:
        args |= _collective_args(s.world)
    s.events.append(_event(name, "kernel", 0, item.stream, start, end - start, args))


def _collective_args(world: int) -> dict[str, Any]:
    return {
        "Collective name": "allreduce",
        "In msg nelems": 1 << 20,
        "Out msg nelems": 1 << 20,
        "Group size": world,
        "dtype": "BFloat16",
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": str(list(range(world))),
    }


def _stream_wait(s: _Rank, item: Wait) -> None:
    record = _call(s, "cudaEventRecord", item.host_ns, 1000)
    fires = s.free.get(item.source, 0.0)
    call = _call(s, "cudaStreamWaitEvent", 0, 1000)
    s.pending[item.target] = max(s.pending.get(item.target, 0.0), fires)
    args = {
        "cuda_sync_kind": "Stream Wait Event",
        "stream": item.target,
        "correlation": call,
        "wait_on_stream": item.source,
        "wait_on_cuda_event_record_corr_id": record,
    }
    s.events.append(_event("Stream Wait Event", "cuda_sync", 0, item.target, s.now, 0, args))


def _sync(s: _Rank, item: Sync) -> None:
    begin = s.now + item.host_ns
    end = max([begin, *s.free.values()]) + item.tail_ns
    _call(s, "cudaDeviceSynchronize", item.host_ns, end - begin)


def _event(name: str, cat: str, pid: int, tid: int, ts: float, dur: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": ts / 1000,
        "dur": dur / 1000,
        "args": args,
    }


def _trace(s: _Rank, world: int) -> dict[str, Any]:
    ends = [*(begin for _, begin in s.marks[1:]), s.now]
    steps = [
        _event(f"ProfilerStep#{n}", "user_annotation", s.rank + 1000, 7, begin, end - begin, {})
        for (n, begin), end in zip(s.marks, ends, strict=True)
    ]
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": s.gpu.name}],
        "distributedInfo": {"backend": "nccl", "rank": s.rank, "world_size": world, "pg_count": 1},
        "host_name": "one",
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": [*steps, *s.events],
    }
