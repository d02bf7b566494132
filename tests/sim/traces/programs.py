"""Small programs of a host thread and GPU streams, run by a model of their own and written as Kineto traces.

The model is the ground truth of the tests: host calls one after the other; a kernel starts when its stream is free,
LATENCY_NS after its launch call began, and after the events that its stream waits for; a collective moves data
once all ranks' kernels have started; cudaDeviceSynchronize ends after all launched kernels. Events have the form
that libkineto/src/output_json.cpp and CuptiActivity.cpp of pytorch/kineto give them (kernel, cuda_runtime and
cuda_sync with `correlation`, record_param_comms with the collective's args, ProfilerStep as user_annotation).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

LATENCY_NS = 5_000
BASE_NS = 1_790_000_000_000_000_000


class Kernel(NamedTuple):
    """A launch: host time before, in and after the call; the kernel's time; its stream; whether a collective."""

    host_ns: int
    call_ns: int
    kernel_ns: int
    stream: int
    collective: bool = False


class Wait(NamedTuple):
    """cudaEventRecord on one stream, cudaStreamWaitEvent on another."""

    host_ns: int
    source: int
    target: int


class Sync(NamedTuple):
    """cudaDeviceSynchronize, `tail_ns` of which come after the device is idle."""

    host_ns: int
    tail_ns: int


Item = Kernel | Wait | Sync


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
    at: int = 0
    correlation: int = 100

    def __post_init__(self) -> None:
        self.free: dict[int, float] = {}
        self.pending: dict[int, float] = {}
        self.events: list[dict[str, Any]] = []
        self.end = self.now


def run(ranks: list[list[Item]], change: Change | None = None, skew_ns: int = 0) -> tuple[float, list[dict[str, Any]]]:
    """The step's seconds, from first start to last end of all ranks, and the traces, one a rank.

    Every rank's list must hold the same number of collectives. `skew_ns`: how much later each next rank begins.
    """
    change = change or Change()
    states = [_Rank(r, float(r * skew_ns)) for r in range(len(ranks))]
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
    begin = min(float(r * skew_ns) for r in range(len(ranks)))
    return (max(s.end for s in states) - begin) * 1e-9, [
        _trace(s, len(ranks), r * skew_ns) for r, s in enumerate(states)
    ]


def _until_collective(s: _Rank, items: list[Item], change: Change) -> tuple[float, int] | None:
    while s.at < len(items):
        item = items[s.at]
        if isinstance(item, Kernel):
            start, call = _launch(s, item)
            if item.collective:
                return start, call
            scale = change.kernel * (change.slow if s.rank == 0 else 1.0)
            _kernel(s, item, start, start + item.kernel_ns * scale, call)
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
    s.events.append(_event(name, "cuda_runtime", s.rank + 1000, 7, s.now, call_ns, {"correlation": s.correlation}))
    s.now += call_ns
    s.end = max(s.end, s.now)
    return s.correlation


def _launch(s: _Rank, item: Kernel) -> tuple[float, int]:
    at = s.now + item.host_ns
    if item.collective:
        comm = _collective_args() | {"External id": s.correlation + 1}
        s.events.append(_event("record_param_comms", "cpu_op", s.rank + 1000, 7, at, item.call_ns, comm))
    call = _call(s, "cudaLaunchKernel", item.host_ns, item.call_ns)
    start = max(s.free.get(item.stream, 0.0), at + LATENCY_NS, s.pending.pop(item.stream, 0.0))
    return start, call


def _kernel(s: _Rank, item: Kernel, start: float, end: float, call: int) -> None:
    s.free[item.stream] = end
    s.end = max(s.end, end)
    name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL" if item.collective else "ampere_gemm_128x128"
    args: dict[str, Any] = {"stream": item.stream, "correlation": call, "device": 0}
    if item.collective:
        args |= {"External id": call} | _collective_args()
    s.events.append(_event(name, "kernel", 0, item.stream, start, end - start, args))


def _collective_args() -> dict[str, Any]:
    return {
        "Collective name": "allreduce",
        "In msg nelems": 1 << 20,
        "Out msg nelems": 1 << 20,
        "Group size": 2,
        "dtype": "BFloat16",
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": "[0, 1]",
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


def _trace(s: _Rank, world: int, begin: int) -> dict[str, Any]:
    step = _event("ProfilerStep#3", "user_annotation", s.rank + 1000, 7, begin, s.now - begin, {})
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
        "distributedInfo": {"backend": "nccl", "rank": s.rank, "world_size": world, "pg_count": 1},
        "host_name": "one",
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": [step, *s.events],
    }
