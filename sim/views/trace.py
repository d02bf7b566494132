"""A timeline in the Chrome trace event format, for https://ui.perfetto.dev and chrome://tracing.

A process is a simulated rank (its class), a thread one of its streams; messages are flows from a send to its
receive; memory by category is a counter. Times are microseconds.
Format: "Trace Event Format", Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sim.core.timeline import RECEIVES, SENDS, Span, Timeline
from sim.core.units import finite, ranks_text
from sim.views.palette import MEMORY, style_of
from sim.views.rows import lanes_of, stream_place

if TYPE_CHECKING:
    from sim.results.memory import MemoryCurve

Event = dict[str, Any]


def trace_events(timeline: Timeline, memory: Sequence[MemoryCurve] = ()) -> dict[str, Any]:
    """The whole trace as the JSON object that viewers load."""
    row = timeline.class_index * len(timeline.streams) + timeline.stream
    lane = lanes_of(row, timeline.start_s, timeline.end_s)[0].tolist()
    threads = _threads(timeline, row.tolist(), lane)
    events = [*_process_names(timeline), *_thread_names(timeline, threads)]
    tids = [threads[key] for key in zip(row.tolist(), lane, strict=True)]
    spans = list(timeline.spans())
    events += [_slice(span, tid) for span, tid in zip(spans, tids, strict=True)]
    events += _flows(timeline, spans, tids)
    events += [event for curve in memory for event in _counters(curve)]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _threads(timeline: Timeline, row: list[int], lane: list[int]) -> dict[tuple[int, int], int]:
    """A thread number for each stream of each class; a second lane of one where its spans overlap."""

    def place(key: tuple[int, int]) -> tuple[int, str, int]:
        return *stream_place(timeline.streams[key[0] % len(timeline.streams)]), key[1]

    number: dict[int, int] = {}
    threads = {}
    for key in sorted(set(zip(row, lane, strict=True)), key=place):
        process = key[0] // len(timeline.streams)
        number[process] = number.get(process, 0) + 1
        threads[key] = number[process]
    return threads


def _process_names(timeline: Timeline) -> Iterator[Event]:
    for c in timeline.classes:
        name = ranks_text(c.ranks)
        if len(c.ranks) > 1:
            name = f"rank {c.rank}, for {name} ({len(c.ranks)} alike)"
        yield {"ph": "M", "name": "process_name", "pid": c.rank, "args": {"name": name}}
        yield {
            "ph": "M",
            "name": "process_sort_index",
            "pid": c.rank,
            "args": {"sort_index": c.pipeline_rank * 1_000_000 + min(c.rank, 999_999)},
        }


def _thread_names(timeline: Timeline, threads: dict[tuple[int, int], int]) -> Iterator[Event]:
    for (row, lane), tid in threads.items():
        pid = timeline.classes[row // len(timeline.streams)].rank
        name = timeline.streams[row % len(timeline.streams)] + (f" ({lane + 1})" if lane else "")
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _slice(span: Span, tid: int) -> Event:
    args: dict[str, Any] = {"kind": span.kind}
    if span.stage >= 0:
        args["stage"] = span.stage
    if span.micro_batch >= 0:
        args["micro_batch"] = span.micro_batch
    detail = span.detail
    for key, value in (
        ("name", detail.name),
        ("bytes", detail.bytes),
        ("cost_source", detail.source),
        ("bus_bandwidth_bytes_per_s", detail.bus_bandwidth_bytes_per_s),
        ("note", detail.note),
    ):
        if finite(value):
            args[key] = value
    name = span.kind + (f" {span.micro_batch}" if span.micro_batch >= 0 else "")
    return {
        "ph": "X",
        "name": name,
        "cat": style_of(span.kind).label,
        "pid": span.rank,
        "tid": tid,
        "ts": span.start_s * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": args,
    }


def _flows(timeline: Timeline, spans: Sequence[Span], tids: Sequence[int]) -> Iterator[Event]:
    """An arrow per message, from inside the send's slice to inside the receive's, never back in time."""
    ends: dict[int, list[int]] = {}
    for i, flow in enumerate(timeline.flow.tolist()):
        if flow >= 0:
            ends.setdefault(flow, []).append(i)
    for flow, pair in ends.items():
        sends = [i for i in pair if spans[i].kind in SENDS]
        receives = [i for i in pair if spans[i].kind in RECEIVES]
        if len(sends) != 1 or len(receives) != 1:
            continue
        send, receive = spans[sends[0]], spans[receives[0]]
        arrival_s = (max(receive.start_s, min(send.start_s, receive.end_s)) + receive.end_s) / 2
        common = {"name": "message", "cat": "message", "id": flow}
        yield {**common, "ph": "s", "pid": send.rank, "tid": tids[sends[0]], "ts": send.start_s * 1e6}
        yield {**common, "ph": "f", "bp": "e", "pid": receive.rank, "tid": tids[receives[0]], "ts": arrival_s * 1e6}


def _counters(curve: MemoryCurve) -> Iterator[Event]:
    columns = [[float(v) for v in getattr(curve, category)] for category in MEMORY]
    for i, time_s in enumerate(curve.time_s):
        yield {
            "ph": "C",
            "name": "memory (bytes)",
            "pid": int(curve.rank),
            "ts": float(time_s) * 1e6,
            "args": {category: column[i] for category, column in zip(MEMORY, columns, strict=True)},
        }
