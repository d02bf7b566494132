"""The Chrome traces that are written load in Perfetto: in its own trace processor where one can be had, else held to
the documented format.

The pip package `perfetto` (0.59.1, a py3-none-any wheel) holds no trace processor: on first use it downloads
trace_processor_shell from commondatastorage.googleapis.com. Where that host is out of reach the first test is
skipped, unless TRACE_PROCESSOR_SHELL names the binary. The second test holds the file to "Trace Event Format"
(Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU) and to what Perfetto's importer
drops: slices of a thread that overlap without nesting, flows that no slice encloses.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sim.core.timeline import Timeline
from sim.simulation import simulate
from sim.traces.replay import replay, timeline
from sim.views.trace import trace_events
from tests.sim.cases import scenario_with
from tests.sim.traces import programs as p
from tests.sim.traces.test_truth import recorded

HOST = "commondatastorage.googleapis.com"
Event = dict[str, Any]


def simulated() -> tuple[Timeline, Any]:
    """A step with pipeline messages, collectives and memory."""
    scenario = scenario_with(
        {"seq_len": 128, "global_batch_size": 8},
        {"pp": 2, "tp": 2, "dp": 2},
        model={"layers": 4, "hidden": 256, "heads": 4, "vocab": 1000},
    )
    step = simulate(scenario, expand=True)
    return step.timeline, step.memory


def replayed() -> tuple[Timeline, Any]:
    """Two ranks' replay, with host, device, waiting and a collective."""
    items: list[p.Item] = [
        p.Kernel(1000, 1000, 50_000, 7),
        p.Wait(0, 7, 20),
        p.Kernel(0, 900, 9_000, 20, True),
        p.Sync(0, 50),
    ]
    return timeline(replay(recorded(p.run([items, [items[0], *items]])[1]))), ()


def processor(path: Path) -> Any:
    """Perfetto's trace processor with a file loaded."""
    api = pytest.importorskip("perfetto.trace_processor")
    binary = os.environ.get("TRACE_PROCESSOR_SHELL")
    if binary is None:
        try:
            socket.create_connection((HOST, 443), timeout=3).close()
        except OSError as error:
            pytest.skip(f"no trace processor: TRACE_PROCESSOR_SHELL is not set and {HOST} is out of reach ({error})")
    return api.TraceProcessor(trace=str(path), config=api.TraceProcessorConfig(bin_path=binary))


@pytest.mark.parametrize("made", [simulated, replayed])
def test_perfettos_own_trace_processor_loads_it(made: Any, tmp_path: Path) -> None:
    spans, memory = made()
    file = tmp_path / "step.json"
    file.write_text(json.dumps(trace_events(spans, memory)))
    loaded = processor(file)
    count = "select count(*) as n from "
    assert next(iter(loaded.query(count + "slice"))).n == len(spans)
    assert next(iter(loaded.query(count + "flow"))).n == len({f for f in spans.flow.tolist() if f >= 0})
    assert next(iter(loaded.query("select sum(value) as n from stats where severity = 'error'"))).n == 0
    longest = next(iter(loaded.query("select max(ts + dur) - min(ts) as ns from slice"))).ns
    assert longest == pytest.approx((spans.end_s.max() - spans.start_s.min()) * 1e9, abs=2)
    loaded.close()


@pytest.mark.parametrize("made", [simulated, replayed])
def test_it_keeps_to_the_documented_format(made: Any) -> None:
    spans, memory = made()
    text = json.dumps(trace_events(spans, memory), allow_nan=False)
    content = json.loads(text)
    assert content["displayTimeUnit"] in ("ms", "ns")
    events = content["traceEvents"]
    for event in events:
        check_fields(event)
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(spans)
    threads = by_thread(slices)
    for listed in threads.values():
        check_nesting(listed)
    check_names(events, set(threads))
    check_flows(events, threads)
    counted = Counter(s.kind for s in spans.spans())
    assert Counter(e["args"]["kind"] for e in slices) == counted
    seconds = sum(e["dur"] for e in slices) * 1e-6
    assert seconds == pytest.approx(float((spans.end_s - spans.start_s).sum()), rel=1e-9)


def check_fields(event: Event) -> None:
    """The fields that each phase must have, of the right type."""
    assert event["ph"] in ("X", "M", "s", "f", "C")
    assert isinstance(event["name"], str)
    assert isinstance(event["pid"], int)
    if event["ph"] == "M":
        values = {"process_name": str, "thread_name": str, "process_sort_index": int, "thread_sort_index": int}
        (value,) = event["args"].values()
        assert isinstance(value, values[event["name"]])
        return
    assert isinstance(event["ts"], (int, float))
    assert event["ts"] >= 0
    if event["ph"] == "C":
        assert all(isinstance(v, (int, float)) for v in event["args"].values())
        return
    assert isinstance(event["tid"], int)
    if event["ph"] == "X":
        assert event["dur"] >= 0
    else:
        assert isinstance(event["id"], int)
        assert isinstance(event["cat"], str)
        assert event["ph"] == "s" or event["bp"] == "e"


def by_thread(slices: list[Event]) -> dict[tuple[int, int], list[Event]]:
    out: dict[tuple[int, int], list[Event]] = {}
    for event in slices:
        out.setdefault((event["pid"], event["tid"]), []).append(event)
    return out


def check_nesting(slices: list[Event]) -> None:
    """Slices of a thread follow each other or lie within each other, to the nanosecond."""
    open_: list[float] = []
    for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        end = event["ts"] + event["dur"]
        while open_ and open_[-1] <= event["ts"] + 1e-3:
            open_.pop()
        assert not open_ or end <= open_[-1] + 1e-3, event
        open_.append(end)


def check_names(events: list[Event], used: set[tuple[int, int]]) -> None:
    """Every process and thread that is drawn has one name."""
    processes = Counter(e["pid"] for e in events if e["name"] == "process_name")
    threads = Counter((e["pid"], e["tid"]) for e in events if e["name"] == "thread_name")
    assert set(threads) >= used
    assert set(processes) >= {pid for pid, _ in used}
    assert set(processes.values()) | set(threads.values()) == {1}


def check_flows(events: list[Event], threads: dict[tuple[int, int], list[Event]]) -> None:
    """Each flow has one start and one end, not before it, and slices enclose both."""
    ends: dict[int, dict[str, Event]] = {}
    for event in events:
        if event["ph"] in "sf":
            assert event["ph"] not in ends.setdefault(event["id"], {})
            ends[event["id"]][event["ph"]] = event
            around = threads[event["pid"], event["tid"]]
            assert any(s["ts"] - 1e-3 <= event["ts"] <= s["ts"] + s["dur"] + 1e-3 for s in around)
    for pair in ends.values():
        assert set(pair) == {"s", "f"}
        assert pair["s"]["ts"] <= pair["f"]["ts"]
