"""Where each span of a timeline is drawn: a row per class of ranks and stream, and what a far view may merge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.timeline import Timeline
from sim.views.units import ranks_text

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

STREAM_ORDER = ("compute", "tp", "cp", "ep", "dp", "send", "recv", "host")


class Row(NamedTuple):
    """One stream of one class; `y` is its centre, counted in pixels from the top of the plot."""

    track: str  # "ranks 0–7", or "rank 0 measured"
    stream: str
    y: float
    height: float


class Layout(NamedTuple):
    """Rows from top to bottom, the bands that hold one track each, and the span → row map per timeline."""

    rows: tuple[Row, ...]
    bands: tuple[tuple[str, float, float], ...]  # label, top, bottom
    height: float
    row_of: tuple[Ints, ...]  # per timeline, per span


class Track(NamedTuple):
    """A class of one of the timelines, under the name that the page shows."""

    label: str
    timeline: int
    class_index: int


class Merged(NamedTuple):
    """Spans of a far view: those shorter than a pixel or two stand together."""

    row: Ints
    kind: Ints
    start_s: Floats
    end_s: Floats
    lane: Ints
    lanes: Ints
    count: Ints


def tracks_of(timeline: Timeline) -> list[Track]:
    """A track per class of ranks, in the order of pipeline ranks."""
    order = sorted(range(len(timeline.classes)), key=lambda i: (timeline.classes[i].pipeline_rank,
                                                                timeline.classes[i].rank))
    return [Track(ranks_text(timeline.classes[i].ranks), 0, i) for i in order]


def lay_out(timelines: Sequence[Timeline], tracks: Sequence[Track], room: float = 1500.0) -> Layout:
    """Rows for `tracks`, computation tall and communication thin, shrunk when `room` (pixels) would not hold them."""
    used = [_streams_used(t) for t in timelines]
    listed = [(track, stream) for track in tracks for stream in used[track.timeline][track.class_index]]
    wanted = sum(27 if s == "compute" else 14 for _, s in listed) + 8 * len(tracks)
    scale = min(1.0, max(room / max(wanted, 1), 0.3))
    rows: list[Row] = []
    bands: list[tuple[str, float, float]] = []
    row_of = [np.zeros(len(t), dtype=np.int64) for t in timelines]
    y = 0.0
    for track in tracks:
        timeline, top = timelines[track.timeline], y
        y += 4 * scale
        for stream in used[track.timeline][track.class_index]:
            step = (27 if stream == "compute" else 14) * scale
            mine = timeline.class_index == track.class_index
            mine &= timeline.stream == timeline.streams.index(stream)
            row_of[track.timeline][mine] = len(rows)
            rows.append(Row(track.label, stream, y + step / 2, step * 0.86))
            y += step
        y += 4 * scale
        bands.append((track.label, top, y))
    return Layout(tuple(rows), tuple(bands), y, tuple(row_of))


def _streams_used(timeline: Timeline) -> list[list[str]]:
    """Per class, the streams that carry a span, in the usual order."""
    pairs = np.unique(timeline.class_index * len(timeline.streams) + timeline.stream).tolist()
    used: list[list[str]] = [[] for _ in timeline.classes]
    for pair in pairs:
        used[pair // len(timeline.streams)].append(timeline.streams[pair % len(timeline.streams)])
    rank = {s: i for i, s in enumerate(STREAM_ORDER)}
    return [sorted(streams, key=lambda s: (rank.get(s, len(rank)), s)) for streams in used]


def lanes_of(row: Ints, start_s: Floats, end_s: Floats) -> tuple[Ints, Ints]:
    """For each span its lane within its row and the row's number of lanes: more than one only where spans overlap.

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
            free[k:k + 1] = [float(end_s[i])]
            lane[i] = k
        lanes[mine] = len(free)
    return lane, lanes


def merge(row: Ints, timeline: Timeline, lane: Ints, lanes: Ints, resolution_s: float) -> Merged:
    """What a view of the whole step draws: of spans shorter than `resolution_s`, one for each row and cell of time.

    It covers all of them, first start to last end, and takes the kind that fills most of it.
    """
    duration = timeline.end_s - timeline.start_s
    middle = (timeline.start_s + timeline.end_s) / 2
    short = duration < resolution_s
    cells = int(middle.max(initial=0.0) / resolution_s) + 1
    cell = np.where(short, (middle / resolution_s).astype(np.int64), 0)
    key = np.where(short, (row * 16 + np.minimum(lane, 15)) * cells + cell, -1 - np.arange(len(row)))
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    n, kinds = len(first), len(timeline.kinds)
    time_of = np.bincount(group * kinds + timeline.kind, weights=duration + 1e-15, minlength=n * kinds)
    start, end = np.full(n, np.inf), np.zeros(n)
    np.minimum.at(start, group, timeline.start_s)
    np.maximum.at(end, group, timeline.end_s)
    return Merged(row[first], time_of.reshape(n, kinds).argmax(axis=1).astype(np.int64), start, end,
                  lane[first], lanes[first], np.bincount(group, minlength=n).astype(np.int64))
