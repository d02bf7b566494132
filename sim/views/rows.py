"""Where each span of a timeline is drawn: a row per class of ranks and stream."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from msgspec import Struct

from sim.core.columns import Floats, Ints
from sim.core.timeline import COMPUTE, TO_HOST, Timeline, row_stream
from sim.core.units import ranks_text
from sim.views.palette import in_order

NEXT_TO_NOTHING = 1e-3  # of the step, as in assets/rows.js
TALLEST = 6000.0  # pixels: canvases of 8192 and more fail on some machines
GROUPS = ("tp", "cp", "ep", "dp", "shard", "replica", "copies", "embedding", "model")  # of collectives
STREAM_ORDER = (COMPUTE, *GROUPS, "collectives", "send", "recv", "host", TO_HOST)


class StreamRow(Struct, frozen=True):
    """One stream of one class; `y` is its centre, counted in pixels from the top of the plot."""

    track: str  # "ranks 0–7", or "rank 0 measured"
    stream: str
    y: float
    height: float


class Track(Struct, frozen=True):
    """A class of one of the timelines, under the name that the page shows."""

    label: str
    timeline: int
    class_index: int


class Layout(Struct, frozen=True):
    """Rows from top to bottom, the bands that hold one track each, and the span → row map per timeline."""

    rows: tuple[StreamRow, ...]
    bands: tuple[tuple[str, float, float], ...]  # label, top, bottom
    height: float
    row_of: tuple[Ints, ...]  # per timeline, per span
    tracks: tuple[Track, ...]


def stream_place(stream: str) -> tuple[int, str]:
    """Sorts streams in the usual order: computation, groups, messages, host, then others by name."""
    row = row_stream(stream)
    return STREAM_ORDER.index(row) if row in STREAM_ORDER else len(STREAM_ORDER), stream


def kinds_of(timelines: Iterable[Timeline]) -> list[str]:
    """The kinds that have a span, as legends list them."""
    return in_order(tuple({t.kinds[k] for t in timelines for k in np.unique(t.kind).tolist()}))


def tracks_of(timeline: Timeline) -> list[Track]:
    """A track per class of ranks, in the order of pipeline ranks."""
    order = sorted(
        range(len(timeline.classes)), key=lambda i: (timeline.classes[i].pipeline_rank, timeline.classes[i].rank)
    )
    return [Track(ranks_text(timeline.classes[i].ranks), 0, i) for i in order]


def used_spans(timeline: Timeline, hidden: Collection[str] = ()) -> Ints:
    """Indices of the spans whose rows are worth drawing: not those that run for next to nothing of the step, nor rows
    of `hidden` streams."""
    stream_rows = [row_stream(stream) for stream in timeline.streams]
    names = list(dict.fromkeys(stream_rows))
    row = (
        timeline.class_index * len(names)
        + np.array([names.index(r) for r in stream_rows], dtype=np.int64)[timeline.stream]
    )
    busy_s = np.bincount(row, timeline.end_s - timeline.start_s, len(timeline.classes) * len(names))
    drawn = (busy_s >= NEXT_TO_NOTHING * timeline.step_time_s) & np.tile(
        [n not in hidden for n in names], len(timeline.classes)
    )
    return np.flatnonzero(drawn[row])


def lay_out(timelines: Sequence[Timeline], tracks: Sequence[Track], room: float = 1500.0) -> Layout:
    """Rows for `tracks`, computation tall, communication thin, shrunk to fit `room` (pixels).

    Where that would make them thinner than 45 %, the plot grows instead, up to what browsers can draw.
    """
    used = [_streams_used(t) for t in timelines]
    listed = [(track, stream) for track in tracks for stream in used[track.timeline][track.class_index]]
    wanted = sum(_height(stream) for _, stream in listed) + 8 * len(tracks)
    scale = min(1.0, max(room, min(0.45 * wanted, TALLEST)) / max(wanted, 1))
    rows: list[StreamRow] = []
    bands: list[tuple[str, float, float]] = []
    row_of = [np.zeros(len(t), dtype=np.int64) for t in timelines]
    y = 0.0
    for track in tracks:
        timeline, top = timelines[track.timeline], y
        y += 4 * scale
        for stream, members in used[track.timeline][track.class_index].items():
            step = _height(stream) * scale
            mine = timeline.class_index == track.class_index
            mine &= np.isin(timeline.stream, members)
            row_of[track.timeline][mine] = len(rows)
            rows.append(StreamRow(track.label, stream, y + step / 2, step * 0.86))
            y += step
        y += 4 * scale
        bands.append((track.label, top, y))
    return Layout(tuple(rows), tuple(bands), y, tuple(row_of), tuple(tracks))


def _height(stream: str) -> int:
    """Pixels of a row that nothing shrinks, with the space around it."""
    return 27 if stream == COMPUTE else 14


def _streams_used(timeline: Timeline) -> list[dict[str, list[int]]]:
    """Per class, its rows in the usual order, each with the indices of the streams drawn in it."""
    pairs = np.unique(timeline.class_index * len(timeline.streams) + timeline.stream).tolist()
    pairs.sort(key=lambda pair: stream_place(timeline.streams[pair % len(timeline.streams)]))
    used: list[dict[str, list[int]]] = [{} for _ in timeline.classes]
    for pair in pairs:
        stream = pair % len(timeline.streams)
        used[pair // len(timeline.streams)].setdefault(row_stream(timeline.streams[stream]), []).append(stream)
    return used


def lanes_of(row: Ints, start_s: Floats, end_s: Floats) -> tuple[Ints, Ints]:
    """For each span its lane within its row and the row's number of lanes, more than one where spans overlap.

    A stream runs one thing at a time, but the overlapped forward and backward of DualPipe share the compute
    stream, and messages in both directions may share the send stream.
    """
    lane = np.zeros(len(row), dtype=np.int64)
    lanes = np.ones(len(row), dtype=np.int64)
    order = np.lexsort((end_s, start_s, row))
    slack = 1e-9 * float(end_s.max(initial=0.0))
    clash = (row[order][1:] == row[order][:-1]) & (start_s[order][1:] < end_s[order][:-1] - slack)
    for r in np.unique(row[order][1:][clash]).tolist():
        mine = order[row[order] == r]
        free: list[float] = []
        for i in mine.tolist():
            k = next((k for k, end in enumerate(free) if end <= start_s[i] + slack), len(free))
            free[k : k + 1] = [float(end_s[i])]
            lane[i] = k
        lanes[mine] = len(free)
    return lane, lanes
