"""Which step of a recorded training is replayed, and how long it takes: the period of the GPUs, whatever the host does.

Trainings have the shapes of public profiler traces: one to eight ranks of V100, A100, H100 or MI250, several steps.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.traces.changes import Change, kernel_scales
from sim.traces.diagnosis import diagnose, verdict
from sim.traces.kineto import read_kineto
from sim.traces.matching import join
from sim.traces.recording import Recording
from sim.traces.replay import rank_times, replay, timeline
from tests.sim.traces import programs as p

US, MS = 1_000, 1_000_000


def recorded(traces: list[dict[str, Any]], step: int | None = None) -> Recording:
    return join([read_kineto(f"rank{i}.json", i, json.dumps(t).encode()) for i, t in enumerate(traces)], step)


def layers(host_ns: int, kernel_ns: int, n: int = 10, reduces: int = 0, rows: int = 0) -> list[p.Item]:
    """A step of so many kernels, of which the last `reduces` are each followed by an all-reduce on its own stream."""
    out: list[p.Item] = []
    for i in range(n):
        out.append(p.Kernel(host_ns, 10 * US, kernel_ns, 7, rows=rows))
        if i >= n - reduces:
            out += [p.Wait(US, 7, 20), p.Kernel(US, 10 * US, kernel_ns // 5, 20, collective=True)]
    return out


SHAPES = [(p.V100, 1, 0), (p.V100, 2, 3), (p.A100, 4, 3), (p.H100, 8, 2), (p.MI250, 1, 0), (p.MI250, 2, 3)]


@pytest.mark.parametrize(("gpu", "ranks", "reduces"), SHAPES)
@pytest.mark.parametrize("host_us", [40, 400, 4000])
def test_a_step_takes_its_period_and_replays_so(gpu: p.Gpu, ranks: int, reduces: int, host_us: int) -> None:
    """The host is ten times as quick as the GPU, less than half as quick, or slower than it."""
    periods, traces = p.train([layers(host_us * US, MS, reduces=reduces)] * ranks, 5, gpu)
    for step, period_s in periods.items():
        recording = recorded(traces, step)
        assert recording.step_ns * 1e-9 == pytest.approx(period_s, abs=1e-8)
        assert replay(recording).step_time_s == pytest.approx(period_s, abs=1e-8)
    chosen = recorded(traces)
    assert chosen.step in periods
    assert chosen.step_ns * 1e-9 == pytest.approx(periods[chosen.step or 0], abs=1e-8)


def test_a_busy_gpu_leaves_its_host_no_time_alone() -> None:
    _, traces = p.train([layers(40 * US, MS)], 5)
    times = replay(recorded(traces))
    (row,) = rank_times(times)
    assert (row.compute_s, row.host_s) == (pytest.approx(10e-3), pytest.approx(0.0, abs=1e-9))
    shown = timeline(times)
    assert float(shown.start_s.min()) >= 0
    assert float(shown.end_s.max()) <= times.step_time_s + 1e-9


@pytest.mark.parametrize("queue", [4, 16, 1024])
@pytest.mark.parametrize(("faster", "period_ms"), [(0.5, 50.0), (0.1, 40.0)])
def test_a_faster_gpu_shortens_the_step_down_to_the_hosts_own_time(queue: int, faster: float, period_ms: float) -> None:
    """Ten kernels of 10 ms a step, launched in 4 ms each; the host waits where the queue is full."""
    items = layers(3990 * US, 10 * MS)
    _, traces = p.train([items], 6, p.A100._replace(queue=queue))
    recording = recorded(traces)
    assert recording.step_ns == 100 * MS
    found_ms = replay(recording, Change(kernels=kernel_scales([f"gemm={faster}"]))).step_time_s * 1e3
    assert found_ms == pytest.approx(period_ms, rel=0.06)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stub_that_the_profiler_leaves_is_no_step(ranks: int) -> None:
    _, traces = p.train([layers(400 * US, MS)] * ranks, 1, p.MI250)
    for trace in traces:
        (mark,) = (e for e in trace["traceEvents"] if e["name"] == "ProfilerStep#1")
        trace["traceEvents"].append(mark | {"name": "ProfilerStep#2", "ts": mark["ts"] + mark["dur"], "dur": 49.0})
    assert recorded(traces).step == 1
    with pytest.raises(InputError, match=r"--step: step 2 launches nothing on the GPU; steps that do: 1$"):
        recorded(traces, 2)


def two_runs(**other: Any) -> list[dict[str, Any]]:
    items = layers(400 * US, MS, reduces=1)
    _, traces = p.train([items] * 2, 2, p.A100)
    traces[1] |= {key: value for key, value in other.items() if key != "group"}
    for event in traces[1]["traceEvents"]:
        if "Process Group Name" in event["args"] and "group" in other:
            event["args"] |= {"Process Group Name": other["group"], "Process Group Ranks": "[1, 2]"}
    return traces


DAYS = {"baseTimeNanoseconds": p.BASE_NS + 3 * 86_400 * 10**9, "host_name": "two"}
INFO = {"backend": "nccl", "rank": 1, "world_size": 8, "pg_count": 1}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"distributedInfo": INFO}, "world_size 2 and 8"),
        (DAYS, "clocks 3.0 days apart"),
        (
            {"deviceProperties": [{"name": "Tesla V100-SXM2-16GB"}], "group": "7"},
            "NVIDIA A100-SXM4-80GB and Tesla V100-SXM2-16GB, no collective in common",
        ),
    ],
)
def test_traces_of_two_runs_are_refused(other: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=rf"rank1\.json: is of another run than rank0\.json: {words}; give traces of"):
        recorded(two_runs(**other))


@pytest.mark.parametrize("other", [{"deviceProperties": [{"name": "NVIDIA H100 80GB HBM3"}]}, {"group": "7"}])
def test_ranks_on_other_gpus_or_in_other_groups_may_be_of_one_run(other: dict[str, Any]) -> None:
    assert recorded(two_runs(**other)).ranks == (0, 1)


@pytest.mark.parametrize(("gpu", "ranks"), [(p.A100, 4), (p.MI250, 2)])
def test_a_rank_with_more_rows_has_more_data_and_is_not_slow(gpu: p.Gpu, ranks: int) -> None:
    jobs = [layers(40 * US, MS, reduces=2, rows=64) for _ in range(ranks)]
    jobs[-1] = layers(40 * US, 3 * MS // 2, reduces=2, rows=96)
    found = diagnose(recorded(p.train(jobs, 4, gpu)[1]))
    assert found.slow_ranks == ()
    assert [row.rank for row in found.uneven_data] == [ranks - 1]
    assert verdict(found) == f"rank {ranks - 1} has more data: its kernels' inputs are 1.03 times those of its peers"
    assert all(0 < w.seconds <= found.step_s and w.for_rank == ranks - 1 for w in found.waits)


def test_a_slow_rank_is_found_where_the_host_runs_ahead() -> None:
    jobs = [layers(40 * US, MS, reduces=2, rows=64) for _ in range(4)]
    jobs[2] = layers(40 * US, 3 * MS // 2, reduces=2, rows=64)
    found = diagnose(recorded(p.train(jobs, 4)[1]))
    assert verdict(found) == "rank 2 is slow"
    assert found.uneven_data == ()
    assert found.slow_ranks[0].gain_s / found.step_s == pytest.approx(1 / 3, rel=0.1)
    assert all(w.seconds <= found.step_s for w in found.waits)
