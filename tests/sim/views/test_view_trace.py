"""The Perfetto trace: processes, threads, slices in microseconds, arrows that bind, counters."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import synthetic

from sim.core.timeline import Detail, RankClass, Span, from_spans
from sim.views.trace import trace_events


@pytest.fixture(scope="module")
def events() -> list[dict[str, Any]]:
    timeline = synthetic.one_f_one_b()
    trace = trace_events(timeline, synthetic.memory_curves(timeline))
    return json.loads(json.dumps(trace, allow_nan=False))["traceEvents"]


def test_a_process_per_class_says_which_ranks_it_stands_for(events: list[dict[str, Any]]) -> None:
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names) == [8 * i for i in range(8)]
    assert names[8] == "rank 8, for ranks 8–15 (8 alike)"


def test_slices_are_the_spans_in_microseconds(events: list[dict[str, Any]]) -> None:
    timeline = synthetic.one_f_one_b()
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(timeline)
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(timeline.step_time_s * 1e6)
    kinds = Counter(e["args"]["kind"] for e in slices)
    assert kinds["F"] == kinds["B"] == 8 * 16
    forward = next(e for e in slices if e["args"]["kind"] == "F" and e["pid"] == 0)
    assert forward["name"] == "F 0"
    assert forward["args"]["cost_source"] == "measured"


def test_every_slice_has_a_named_thread_and_nests(events: list[dict[str, Any]]) -> None:
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    by_thread: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X":
            by_thread.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert by_thread.keys() == threads.keys()
    assert {threads[0, tid] for _, tid in threads} >= {"compute", "send", "recv", "dp"}
    for spans in by_thread.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(spans))


def test_each_message_is_an_arrow_between_slices(events: list[dict[str, Any]]) -> None:
    slices = [e for e in events if e["ph"] == "X"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 2 * 7 * 16
    for flow, start in starts.items():
        end = ends[flow]
        assert start["ts"] <= end["ts"]
        for e, side in ((start, "SEND"), (end, "RECV")):
            around = [
                s
                for s in slices
                if (s["pid"], s["tid"]) == (e["pid"], e["tid"]) and s["ts"] <= e["ts"] <= s["ts"] + s["dur"]
            ]
            assert any(s["args"]["kind"].startswith(side) for s in around)


def test_memory_counters_carry_every_category(events: list[dict[str, Any]]) -> None:
    counters = [e for e in events if e["ph"] == "C"]
    assert {e["pid"] for e in counters} == {8 * i for i in range(8)}
    assert set(counters[0]["args"]) == {"parameters", "gradients", "optimizer", "activations", "buffers"}


def test_overlapping_spans_of_a_stream_get_a_lane_each() -> None:
    detail = Detail("pass")
    spans = [
        Span(0, "compute", "F", 0, 0, 0.0, 2.0, detail),
        Span(0, "compute", "B", 0, 1, 1.0, 3.0, detail),
        Span(0, "compute", "F", 0, 2, 3.0, 4.0, detail),
    ]
    trace = trace_events(from_spans(spans, [RankClass(0, (0,), 0)]))["traceEvents"]
    names = [e["args"]["name"] for e in trace if e["name"] == "thread_name"]
    assert names == ["compute", "compute (2)"]
    assert [e["tid"] for e in trace if e["ph"] == "X"] == [1, 2, 1]
