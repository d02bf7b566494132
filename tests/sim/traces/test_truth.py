"""Replays of random programs against running the programs themselves, unchanged and changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.traces.changes import Change, kernel_scales
from sim.traces.kineto import RankTrace, read_kineto
from sim.traces.matching import join
from sim.traces.recording import Recording
from sim.traces.replay import rank_times, replay, timeline
from tests.sim.traces import programs as p

NS = st.integers(1_000, 300_000)
HOST = st.integers(100, 30_000)
LOCAL: st.SearchStrategy[p.Item] = st.one_of(
    st.builds(p.Kernel, HOST, HOST, NS, st.sampled_from([7, 13]), st.just(False)),
    st.builds(p.Wait, HOST, st.sampled_from([7, 20]), st.sampled_from([13])),
    st.builds(p.Wait, HOST, st.sampled_from([13, 20]), st.sampled_from([7])),
    st.builds(p.Wait, HOST, st.just(7), st.just(20)),
    st.builds(p.Sync, HOST, HOST),
)
REDUCE = st.builds(p.Kernel, HOST, HOST, NS, st.just(20), st.just(True))


@st.composite
def jobs(draw: st.DrawFn) -> list[list[p.Item]]:
    """Two ranks with different work between the same number of all-reduces; the first kernel finds its stream idle."""
    ranks: list[list[p.Item]] = []
    reduces = [draw(REDUCE) for _ in range(draw(st.integers(0, 3)))]
    for _ in range(2):
        items: list[p.Item] = [p.Kernel(1000, 1000, draw(NS), 7)]
        for reduce in reduces:
            items += [*draw(st.lists(LOCAL, max_size=6)), reduce]
        ranks.append([*items, *draw(st.lists(LOCAL, max_size=6))])
    return ranks


def recorded(traces: list[dict[str, Any]]) -> Recording:
    """The traces as a recording, through their bytes."""
    return join([read(t, i) for i, t in enumerate(traces)])


def read(trace: dict[str, Any], position: int = 0) -> RankTrace:
    return read_kineto(f"rank{position}.json", position, json.dumps(trace).encode())


@settings(max_examples=150, deadline=None)
@given(jobs(), st.integers(0, 100_000))
def test_unchanged_replay_is_the_recorded_step(ranks: list[list[p.Item]], skew: int) -> None:
    truth, traces = p.run(ranks, skew_ns=skew)
    recording = recorded(traces)
    times = replay(recording)
    assert recording.step_ns * 1e-9 == pytest.approx(truth, abs=3e-9)
    assert times.step_time_s == pytest.approx(truth, abs=3e-9)
    for node, end in zip(recording.nodes, times.end_s, strict=True):
        assert end == pytest.approx(node.end_ns * 1e-9, abs=1e-9), node


@settings(max_examples=150, deadline=None)
@given(jobs(), st.sampled_from([0.25, 0.5, 2.0, 3.0]), st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from([1.0, 1.5]))
def test_changed_replay_is_the_changed_program(
    ranks: list[list[p.Item]], kernel: float, network: float, slow: float
) -> None:
    _, traces = p.run(ranks)
    truth, _ = p.run(ranks, p.Change(kernel, network, slow))
    change = Change(kernels=kernel_scales([f"gemm={kernel}"]), network_scale=1 / network, stragglers={0: slow})
    assert replay(recorded(traces), change).step_time_s == pytest.approx(truth, abs=2e-8)


def test_the_later_rank_makes_the_other_wait() -> None:
    early = [
        p.Kernel(1000, 1000, 10_000, 7),
        p.Wait(100, 7, 20),
        p.Kernel(1000, 1000, 50_000, 20, True),
        p.Sync(0, 500),
    ]
    late = [p.Kernel(1000, 1000, 400_000, 7), *early[1:]]
    recording = recorded(p.run([early, late])[1])
    rows = rank_times(replay(recording))
    assert rows[0].exposed_wait_s == pytest.approx(390e-6, rel=0.01)
    assert rows[1].exposed_wait_s == 0
    assert rows[0].exposed_comm_s == pytest.approx(50e-6, rel=1e-6)
    kinds = {s.kind for s in timeline(replay(recording)).spans()}
    assert {"WAIT", "ALL_REDUCE", "F", "HOST"} <= kinds
    faster = replay(recording, Change(gpu_ratio=2.0))
    assert rank_times(faster)[0].exposed_wait_s == pytest.approx(195e-6, rel=0.02)


def test_without_cuda_sync_events_stream_waits_are_inferred_from_the_host_calls() -> None:
    items: list[p.Item] = [
        p.Kernel(1000, 1000, 200_000, 7),
        p.Wait(100, 7, 13),
        p.Kernel(100, 1000, 100_000, 13),
        p.Sync(0, 100),
    ]
    _, traces = p.run([items])
    traces[0]["traceEvents"] = [e for e in traces[0]["traceEvents"] if e["cat"] != "cuda_sync"]
    truth, _ = p.run([items], p.Change(kernel=3.0))
    change = Change(kernels=kernel_scales(["gemm=3"]))
    assert replay(recorded(traces), change).step_time_s == pytest.approx(truth, abs=2e-9)


def test_clocks_of_two_hosts_are_aligned_by_their_collectives(tmp_path: Path) -> None:
    items: list[p.Item] = [p.Kernel(1000, 1000, 10_000, 7), p.Kernel(1000, 1000, 50_000, 20, True), p.Sync(0, 500)]
    truth, traces = p.run([items, items])
    traces[1] |= {"host_name": "two", "baseTimeNanoseconds": p.BASE_NS + 12_345_678_000}
    recording = recorded(traces)
    assert replay(recording).step_time_s == pytest.approx(truth, abs=3e-9)
    assert "its clock differs; its times were moved by -12345.678 ms" in " ".join(recording.warnings)
