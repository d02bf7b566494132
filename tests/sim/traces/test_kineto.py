"""Reading profiler traces: what is not one, host threads, autograd's threads, gloo, groups, steps."""

from __future__ import annotations

import copy
import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.errors import InputError
from sim.traces.changes import Change, bus_factor_ratio, dp_change, gpu_pair, kernel_scales, network_of
from sim.traces.host import segments
from sim.traces.kineto import Event, read_kineto
from sim.traces.matching import join
from sim.traces.recording import Recording
from sim.traces.replay import replay
from tests.sim.traces import programs as p


def event(name: str, ts: float, dur: float, tid: int = 1, cat: str = "cpu_op", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, "ts": ts, "dur": dur, "args": args}


def trace(rank: int, events: list[dict[str, Any]], **head: Any) -> dict[str, Any]:
    info = {"backend": "gloo", "rank": rank, "world_size": 2, "pg_count": 1}
    return {"distributedInfo": info, "host_name": "h", "traceEvents": events} | head


def recorded(*traces: dict[str, Any], step: int | None = None) -> Recording:
    return join([read_kineto(f"rank{i}.json", i, json.dumps(t).encode()) for i, t in enumerate(traces)], step)


def c10d(name: str, ts: float, dur: float = 5, peer: int | None = None) -> dict[str, Any]:
    inputs = ["", "", str(peer), "0"] if peer is not None else ["", "", ""]
    return event(f"c10d::{name}", ts, dur, **{"Concrete Inputs": inputs, "Input Dims": [[[1000]]]})


def gloo(name: str, ts: float, dur: float, tid: int = 50) -> dict[str, Any]:
    args = {"Input Dims": [[1000]], "Input type": ["float"]}
    return event(f"gloo:{name}", ts, dur, tid, "user_annotation", **args)


# --- hostile


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "is not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"{}", "traceEvents: is missing"),
        (b'{"traceEvents": 3}', "traceEvents: is missing or no list"),
        (b'{"traceEvents": [1]}', r"traceEvents\[0\]: must be a mapping"),
        (b'{"traceEvents": []}', "no operators and no kernels"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": "x"}]}', r"traceEvents\[0\].ts: found 'x'"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": NaN}]}', r"\.ts: found 'nan'"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": 1, "dur": 1e300}]}', r"\.dur"),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": 1' + b"0" * 5000 + b"}]}",
            "Exceeds the limit",
        ),
        (b'{"baseTimeNanoseconds": -1, "traceEvents": []}', "baseTimeNanoseconds"),
        (b'{"distributedInfo": {"rank": -5}, "traceEvents": []}', "found rank -5"),
    ],
)
def test_what_is_no_trace_gets_one_message(text: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_kineto("t.json", 0, text)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_kineto(tmp_path / "none.json")
    whole = gzip.compress(json.dumps(trace(0, [event("aten::mm", 0, 5)])).encode())
    (tmp_path / "a.json.gz").write_bytes(whole)
    assert read_kineto(tmp_path / "a.json.gz").rank == 0
    (tmp_path / "a.json.gz").write_bytes(whole[:-4])
    with pytest.raises(InputError, match="gzip"):
        read_kineto(tmp_path / "a.json.gz")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_, [WHOLE] = p.run(
    [[p.Kernel(1000, 1000, 10_000, 7), p.Wait(100, 7, 20), p.Kernel(100, 900, 9_000, 20, True), p.Sync(0, 50)]]
)
FIELDS = ["ph", "cat", "name", "pid", "tid", "ts", "dur", "args"]
ARGS = [
    "stream",
    "correlation",
    "External id",
    "Process Group Ranks",
    "In msg nelems",
    "dtype",
    "wait_on_stream",
    "Collective name",
]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_trace_with_anything_in_it_is_replayed_or_refused(data: st.DataObject) -> None:
    broken = copy.deepcopy(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        chosen = data.draw(st.sampled_from(broken["traceEvents"]))
        if data.draw(st.booleans()):
            chosen[data.draw(st.sampled_from(FIELDS))] = data.draw(JSON)
        elif isinstance(chosen.get("args"), dict):
            chosen["args"][data.draw(st.sampled_from(ARGS))] = data.draw(JSON)
    broken[data.draw(st.sampled_from(["host_name", "distributedInfo", "deviceProperties", "schemaVersion"]))] = (
        data.draw(JSON)
    )
    try:
        recording = recorded(broken)
        assert replay(recording).step_time_s == pytest.approx(recording.step_ns * 1e-9, rel=1e-9, abs=1e-9)
    except InputError:
        return


# --- threads of the host


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), max_size=12))
def test_segments_cover_the_window_without_hole_or_overlap(spans: list[tuple[int, int]]) -> None:
    events = sorted(
        (Event(f"e{i}", "cpu_op", ("1", "1"), a, a + n, {}) for i, (a, n) in enumerate(spans)),
        key=lambda e: (e.start_ns, -e.end_ns),
    )
    cut = segments(events, 10, 60)
    assert [cut[0].start_ns, cut[-1].end_ns] == [10, 60]
    assert all(a.end_ns == b.start_ns and a.end_ns > a.start_ns for a, b in itertools.pairwise(cut))
    assert all(s.owner is None or s.owner.start_ns <= s.start_ns for s in cut)
    borders = {s.start_ns for s in cut} | {60}
    assert all(e.start_ns in borders for e in events if 10 <= e.start_ns < 60)


def test_kinds_follow_autograd_and_the_optimizer() -> None:
    events = [
        event("aten::mm", 0, 10),
        event("autograd::engine::evaluate_function: MmBackward0", 20, 20),
        event("aten::mm", 25, 5),
        event("Optimizer.step#SGD.step", 50, 20, cat="user_annotation"),
        event("aten::add_", 55, 5),
    ]
    nodes = [n for n in recorded(trace(0, events)).nodes if n.compute]
    assert [(n.name[:9], n.kind) for n in nodes] == [
        ("aten::mm", "F"),
        ("autograd:", "B"),
        ("aten::mm", "B"),
        ("autograd:", "B"),
        ("aten::add", "OPTIMIZER"),
    ]


def test_autograds_own_thread_holds_up_the_one_that_called_backward() -> None:
    events = [
        event("aten::mm", 0, 100, tid=1),
        event("autograd::engine::evaluate_function: A", 110, 200, tid=2),
        event("aten::add", 320, 10, tid=1),
        event("aten::mm", 330, 60, tid=1),
        event("autograd::engine::evaluate_function: B", 400, 200, tid=2),
        event("aten::add", 605, 10, tid=1),
    ]
    recording = recorded(trace(0, events))
    assert replay(recording).step_time_s == pytest.approx(615e-6, abs=2e-9)
    twice = Change(kernels=kernel_scales(["autograd=2"]))
    assert replay(recording, twice).step_time_s == pytest.approx(1015e-6, abs=2e-9)
    slower = Change(kernels=kernel_scales(["aten::mm=2"]))
    assert replay(recording, slower).step_time_s == pytest.approx(775e-6, abs=2e-9)


# --- gloo


def reduction(work: float, begin: float = 0.0) -> list[dict[str, Any]]:
    """Work, an all-reduce on gloo's thread beside more work, a gap until it is done, and an end."""
    late = begin + work
    return [
        event("aten::mm", begin, work),
        c10d("allreduce_", late),
        gloo("all_reduce", late + 2, 1200 - late),
        event("aten::mm", late + 5, 50),
        event("aten::add", 1224, 10),
    ]


def test_gloos_collectives_meet_and_the_gap_waits_for_them() -> None:
    recording = recorded(trace(0, reduction(100)), trace(1, reduction(1000)))
    assert replay(recording).step_time_s == pytest.approx(1234e-6, abs=2e-9)
    (key, members) = next(iter(recording.members().items()))
    assert len(members) == 2
    assert key[:4] == ("collective", "", (0, 1), "all_reduce")
    # Without rank 1's lateness rank 0 is done when rank 1 is: 900 µs earlier.
    faster = Change(stragglers={1: 0.1})
    times = replay(recording, faster)
    assert times.step_time_s == pytest.approx((1234 - 900) * 1e-6, abs=2e-9)
    tenth = Change(network_scale=0.1)  # 200 µs after the last arrival become 2,000
    assert replay(recording, tenth).step_time_s == pytest.approx((1234 + 1800) * 1e-6, abs=2e-9)


def test_a_collective_whose_event_ends_just_after_the_gap_was_awaited_in_it() -> None:
    late = [
        event("aten::mm", 0, 100),
        c10d("allreduce_", 100),
        gloo("all_reduce", 105, 1000),
        event("aten::add", 1050, 10),
    ]
    recording = recorded(trace(0, late) | {"distributedInfo": {"rank": 0, "world_size": 1, "pg_count": 1}})
    slower = replay(recording, Change(network_scale=0.5))  # 945 µs until the gap's end
    assert slower.step_time_s == pytest.approx((1105 + 945) * 1e-6, abs=2e-9)


@pytest.mark.parametrize("waited", [True, False])
def test_a_collective_whose_event_outlasts_its_step(waited: bool) -> None:
    """gloo's thread was off its core: the step's own length counts, and its longest gap waited for the collective."""
    more = [] if waited else [event("aten::mm", 105, 895)]
    step = event("ProfilerStep#1", 0, 1100, cat="user_annotation")
    late = [
        step,
        event("aten::mm", 0, 100),
        c10d("allreduce_", 100),
        gloo("all_reduce", 105, 2000),
        *more,
        event("aten::add", 1000, 100),
    ]
    alone = {"distributedInfo": {"rank": 0, "world_size": 1, "pg_count": 1}}
    recording = recorded(trace(0, late) | alone, step=1)
    assert recording.step_ns == 1_100_000
    assert replay(recording).step_time_s == pytest.approx(1100e-6, abs=2e-9)
    slower = replay(recording, Change(network_scale=0.5))  # 895 µs until the gap's end, or 995 to the step's
    longer = 1100 + 895 if waited else 105 + 2 * 995
    assert slower.step_time_s == pytest.approx(longer * 1e-6, abs=2e-9)


def test_a_send_that_was_done_before_the_receiver_came_did_not_wait() -> None:
    sender = [
        event("aten::mm", 0, 100),
        c10d("send", 100, 5, peer=1),
        gloo("send", 101, 9, tid=1),
        event("aten::mm", 150, 50),
    ]
    receiver = [
        event("aten::mm", 0, 400),
        c10d("recv_", 400, 5, peer=0),
        gloo("recv", 402, 100, tid=1),
        event("aten::mm", 540, 60),
    ]
    recording = recorded(trace(0, sender), trace(1, receiver))
    slow = replay(recording, Change(stragglers={1: 2.0}))
    ends = {r: max(e for n, e in zip(recording.nodes, slow.end_s, strict=True) if n.rank == r) for r in (0, 1)}
    assert ends[0] == pytest.approx(200e-6, abs=2e-9)
    assert ends[1] == pytest.approx(1065e-6, abs=20e-6)
    late = replay(recording, Change(stragglers={0: 10.0}))  # 900 µs later, and the receiver waits from 402 on
    assert late.step_time_s > 1300e-6


def test_several_groups_on_gloo_cannot_be_told_apart_and_stay_as_recorded() -> None:
    head = {"distributedInfo": {"rank": 0, "world_size": 1, "pg_count": 3}}
    recording = recorded(trace(0, reduction(100)) | head)
    assert not recording.members()
    assert "do not name their process group" in recording.warnings[0]


# --- ranks, steps, what-ifs


def test_ranks_steps_and_missing_members() -> None:
    steps = [event(f"ProfilerStep#{i}", 1000 * i, 300 + 100 * (i % 3), cat="user_annotation") for i in range(4)]
    work = [event("aten::mm", 1000 * i + 10, 200) for i in range(4)]
    assert recorded(trace(0, [*steps, *work])).step == 3  # of 300, 300, 400 and 500 µs the second
    assert recorded(trace(0, [*steps, *work]), step=2).step_ns == 500_000
    with pytest.raises(InputError, match=r"--step: found 9; every trace has 0, 1, 2, 3"):
        recorded(trace(0, [*steps, *work]), step=9)
    with pytest.raises(InputError, match="is of rank 0, and so are others"):
        recorded(trace(0, work), trace(0, work))
    _, traces = p.run([[p.Kernel(1000, 1000, 50_000, 20, True)]] * 2)
    assert "members without a trace" in recorded(traces[1]).warnings[0]


def test_steps_of_two_runs_are_no_silent_wait() -> None:
    work = [trace(rank, [event("aten::mm", begin_us, 200)]) for rank, begin_us in ((0, 10), (1, 2_000_210))]
    assert recorded(*work).warnings == [
        "rank 1: its step begins 2 s after rank 0's has ended; are these traces of one run?"
    ]


@pytest.mark.parametrize(
    ("name", "inputs", "outputs"), [("_allgather_base", 100, 800), ("_reduce_scatter_base", 800, 100)]
)
def test_the_bytes_of_a_collective_are_those_of_its_larger_buffer(name: str, inputs: int, outputs: int) -> None:
    args = {"Collective name": name, "In msg nelems": inputs, "Out msg nelems": outputs, "dtype": "BFloat16"}
    recording = recorded(trace(0, [event("ncclDevKernel", 0, 10, cat="kernel", **args)]))
    (message,) = (node.message for node in recording.nodes if node.message)
    assert message.bytes == 1600.0


def test_what_ifs_of_network_device_and_replicas() -> None:
    items: list[p.Item] = [
        p.Kernel(1000, 1000, 500_000, 7),
        p.Wait(100, 7, 20),
        p.Kernel(100, 1000, 100_000, 20, True),
        p.Sync(0, 100),
    ]
    recording = recorded(*p.run([items] * 2)[1])
    base = replay(recording).step_time_s
    more = Change(dp=dp_change(recording, 8, None))
    assert replay(recording, more).step_time_s - base == pytest.approx(100e-6 * (1.75 - 1), rel=1e-6)
    alone = Change(dp=dp_change(recording, 1, "0"))
    assert base - replay(recording, alone).step_time_s == pytest.approx(100e-6, rel=1e-6)
    network = network_of("dgx-h100", 8)
    priced = Change(network=network, dp=more.dp)
    cost = network.collective("all_reduce", range(8), 2 << 20).seconds
    assert replay(recording, priced).step_time_s - base == pytest.approx(cost - 100e-6, rel=1e-6)
    old, new = gpu_pair("b200-sxm", recording.gpu_name)
    assert old.name == "h100-sxm"
    ratio = old.peak_flops_per_s["bf16"] / new.peak_flops_per_s["bf16"]
    faster = Change(gpus=(old, new))
    assert base - replay(recording, faster).step_time_s == pytest.approx(500e-6 * (1 - ratio), rel=1e-6)
    with pytest.raises(InputError, match="groups that reduce are: '0'"):
        dp_change(recording, 2, "tp")


def test_bus_factors() -> None:
    assert bus_factor_ratio("all_reduce", 2, 4) == 1.5
    assert bus_factor_ratio("all_gather", 2, 4) == 1.5
    assert bus_factor_ratio("all_reduce", 4, 1) == 0.0
    assert bus_factor_ratio("send", 2, 4) == 1.0
