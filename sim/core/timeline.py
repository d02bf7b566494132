"""Spans of time as columns: the timeline that metrics, memory, views, traces and comparisons read.

A simulated step and a real one both end as a Timeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

# Streams of a rank. Communication queues on a stream named after its group, unless `Comm.stream` names another one:
# all data-parallel traffic queues on DP, but for sums over replicas of shards (`sim.programs.data_parallel`). Copies of
# gradients to host memory have a stream of their own beside those of parameters to the GPU, which queue on HOST: the
# group of all copies between a GPU and its host's memory.
COMPUTE, DP, REPLICA, HOST, TO_HOST = "compute", "dp", "replica", "host", "to host"
# Kinds of the two ends of a message between pipeline stages: activations forward, their gradients backward.
SENDS, RECEIVES = ("SEND_F", "SEND_B"), ("RECV_F", "RECV_B")
MESSAGES = (*SENDS, *RECEIVES)
OFFLOAD, RELOAD = "OFFLOAD", "RELOAD"  # kinds of copies from a GPU to its host's memory and back
# Kinds of the schedule's actions: forward, backward (or its input-gradient half), its weight-gradient half.
ACTION_KINDS = ("F", "B", "W")
# Kinds of the work of a step itself: these, a forward and a backward at once, and the update.
COMPUTE_KINDS = (*ACTION_KINDS, "F+B", "OPTIMIZER")


def row_stream(stream: str) -> str:
    """The stream without its direction: messages forward and backward are one row of a page."""
    return stream.split("_")[0] if stream.startswith(("send_", "recv_")) else stream


class RankClass(Struct, frozen=True):
    """A simulated rank and the equal ranks that it stands for."""

    rank: int  # the lowest of them
    ranks: tuple[int, ...] | range
    pipeline_rank: int


class Detail(NamedTuple):
    """Hold what all spans of one kind share, for hovering and for shares of cost sources."""

    name: str  # an operator or "forward of stage 3"
    bytes: float = 0.0  # communication only
    bus_bandwidth_bytes_per_s: float = 0.0
    source: str = ""  # measured | interpolated | roofline | topology | recorded
    note: str = ""  # e.g. the parts: "attention 1.20 ms, mlp 2.31 ms, all-reduce 0.40 ms"
    operators: int = 1  # that a span stands for, one after the other


class Span(NamedTuple):
    """One row of a Timeline. `rank` is the class's lowest rank; -1 where stage or micro-batch have no meaning."""

    rank: int
    stream: str  # compute, tp, cp, ep, dp, send, recv, ...
    kind: str  # F, B, W, SEND_F, RECV_F, SEND_B, RECV_B, ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, OPTIMIZER, ...
    stage: int
    micro_batch: int
    start_s: float
    end_s: float
    detail: Detail


class Timeline(Struct, frozen=True, eq=False):
    """Columns of equal length, one entry a span, in order of issue.

    `class_index`, `stream`, `kind`, `detail` index `classes`, `streams`, `kinds`, `details`.
    `flow` pairs the two ends of a message: the same number >= 0 on its SEND and its RECV, else -1.
    """

    classes: tuple[RankClass, ...]
    streams: tuple[str, ...]
    kinds: tuple[str, ...]
    details: tuple[Detail, ...]
    class_index: NDArray[np.int64]
    stream: NDArray[np.int64]
    kind: NDArray[np.int64]
    detail: NDArray[np.int64]
    stage: NDArray[np.int64]
    micro_batch: NDArray[np.int64]
    flow: NDArray[np.int64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.start_s)

    def __repr__(self) -> str:
        return f"Timeline({len(self)} spans of {len(self.classes)} classes of equal ranks, {self.step_time_s:.6g} s)"

    @property
    def step_time_s(self) -> float:
        """From zero to the end of the last span."""
        return float(self.end_s.max()) if len(self) else 0.0

    def only(self, kept: NDArray[np.int64]) -> Timeline:
        """Return the spans of these indices alone."""
        columns = ("class_index", "stream", "kind", "detail", "stage", "micro_batch", "flow", "start_s", "end_s")
        return replace(self, **{name: getattr(self, name)[kept] for name in columns})

    def spans(self) -> Iterator[Span]:
        """Every span as a record, for views and traces."""
        shown = self.class_index, self.stream, self.kind, self.detail
        columns = (*shown, self.stage, self.micro_batch, self.start_s, self.end_s)
        for c, s, k, d, stage, mb, start, end in zip(*(x.tolist() for x in columns), strict=True):
            yield Span(self.classes[c].rank, self.streams[s], self.kinds[k], stage, mb, start, end, self.details[d])


def from_spans(spans: Iterable[Span], classes: Iterable[RankClass], flows: Iterable[int] | None = None) -> Timeline:
    """A Timeline of records, such as those of a measured run.

    Raises:
        ValueError: if a span's rank is the lowest of no class.
    """
    rows = list(spans)
    classes = tuple(classes)
    index = {c.rank: i for i, c in enumerate(classes)}
    unknown = {s.rank for s in rows} - index.keys()
    if unknown:
        raise ValueError(f"spans of ranks {sorted(unknown)} belong to no class of ranks")
    streams = tuple(dict.fromkeys(s.stream for s in rows))
    kinds = tuple(dict.fromkeys(s.kind for s in rows))
    details = tuple(dict.fromkeys(s.detail for s in rows))
    stream_of, kind_of, detail_of = ({v: i for i, v in enumerate(x)} for x in (streams, kinds, details))

    def ints(values: Iterable[int]) -> NDArray[np.int64]:
        return np.fromiter(values, dtype=np.int64)

    return Timeline(
        classes,
        streams,
        kinds,
        details,
        class_index=ints(index[s.rank] for s in rows),
        stream=ints(stream_of[s.stream] for s in rows),
        kind=ints(kind_of[s.kind] for s in rows),
        detail=ints(detail_of[s.detail] for s in rows),
        stage=ints(s.stage for s in rows),
        micro_batch=ints(s.micro_batch for s in rows),
        flow=ints(flows) if flows is not None else np.full(len(rows), -1, dtype=np.int64),
        start_s=np.array([s.start_s for s in rows], dtype=np.float64),
        end_s=np.array([s.end_s for s in rows], dtype=np.float64),
    )
