"""Replay a recording: build its task graph and compute the times of its nodes, unchanged or with a change.

A member of a collective arrives when its own waits are over. It waits for the members that began before it ended; after
the last arrival it takes as long as recorded. If a node started later than the ends of all nodes that it is known to
wait for, the difference is kept as a delay after the last of them. Therefore an unchanged replay gives the recorded
times, and a change moves only what depends on it.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from sim.core.engines import Engine
from sim.core.errors import InputError
from sim.core.timeline import OFFLOAD, RELOAD, Detail, RankClass, Span, Timeline, from_spans
from sim.engine.link_rates import Flows
from sim.engine.shared_links import run_graph
from sim.graph.taskgraph import GraphBuilder, TaskGraph
from sim.results.metrics import Intervals, uncovered_s
from sim.traces.changes import Change
from sim.traces.recording import START, Node, Recording

WAIT = "WAIT"


class Replay(Struct, frozen=True):
    """Hold the times of a recording's nodes in seconds.

    `arrive_s`: when a node's own waits are over. `begin_s`: for a message, when its last member arrived, else as
    `arrive_s`. `end_s`: when the node ends. `path`: the engine that ran, or "recorded".
    """

    recording: Recording
    arrive_s: list[float]
    begin_s: list[float]
    end_s: list[float]
    path: str = "recorded"

    @property
    def step_time_s(self) -> float:
        """Return how long the step takes."""
        begin_s, end_s = self.recording.window(self.end_s)
        return max(end_s - begin_s, min(self.recording.host_ns, self.recording.step_ns) * 1e-9)


class _Builder:
    def __init__(self, recording: Recording, change: Change) -> None:
        self.nodes, self.change = recording.nodes, change
        classes = tuple(RankClass(r, (r,), i) for i, r in enumerate(recording.ranks))
        self.draft = GraphBuilder(classes)
        self.members = recording.members()
        self.first: list[int] = []
        self.last: list[int] = []
        self.task_kinds: dict[str, int] = {}
        self.delay = self.draft.table.new_kind(Detail("delay"))

    def build(self) -> TaskGraph:
        for node in self.nodes:
            self._add(node)
        for i, node in enumerate(self.nodes):
            self._wait(i, node)
        return self.draft.graph()

    def _add(self, node: Node) -> None:
        if node.message is None:
            seconds = (node.end_ns - node.start_ns) * 1e-9
            self.first.append(self._task(node, seconds * self.change.compute(node)))
            self.last.append(self.first[-1])
            return
        begun = self._begun(node)
        seconds = self.change.transfer_s(node, (node.end_ns - max(self.nodes[m].start_ns for m in begun)) * 1e-9)
        self.first.append(self._task(node, 0.0))
        self.last.append(self._task(node, seconds))

    def _task(self, node: Node, seconds: float) -> int:
        task_kind = self.task_kinds.get(node.name)
        if task_kind is None:
            detail = Detail(f"{node.name[:60]} on rank {node.rank}")
            task_kind = self.task_kinds[node.name] = self.draft.table.new_kind(detail)
        return self.draft.add(seconds, [], task_kind)

    def _begun(self, node: Node) -> list[int]:
        """Return the members that this one may have waited for: itself, and those that began before it ended."""
        assert node.message is not None
        everyone = self.members[node.message.key]
        return [m for m in everyone if self.nodes[m] is node or self.nodes[m].start_ns <= node.end_ns]

    def _wait(self, i: int, node: Node) -> None:
        if node.message is not None:
            self.draft.waits[self.last[i]] += [self.first[m] for m in self._begun(node)]
        edges = [(w, lag, node.start_ns - self.nodes[w].end_ns) for w, lag in node.waits]
        edges = [(w, min(lag, room), room) for w, lag, room in edges if room >= 0]
        if not edges:
            if node.start_ns:
                self.draft.waits[self.first[i]].append(self._delay(node.start_ns, []))
            return
        binding = min(range(len(edges)), key=lambda k: edges[k][2] - edges[k][1])
        for k, (w, lag, room) in enumerate(edges):
            ns = room if k == binding else lag
            after = self.last[w]
            self.draft.waits[self.first[i]].append(self._delay(ns, [after]) if ns else after)

    def _delay(self, ns: int, waits: list[int]) -> int:
        return self.draft.add(ns * 1e-9, waits, self.delay)


def replay(recording: Recording, change: Change | None = None, engine: Engine = "auto") -> Replay:
    """Return the times of a recording's nodes; without a change the recorded ones, unless waits contradict the clock.

    `engine`: simpy, static or auto (SimPy for small recordings); all give the same times.

    Raises:
        InputError: if nodes wait for each other in a circle.
    """
    builder = _Builder(recording, change or Change())
    graph = builder.build()
    try:
        times = run_graph(graph, Flows(), engine)
    except ValueError as error:
        raise InputError(f"{recording.name}: {error}") from None
    columns = (times.start_s[builder.first], times.start_s[builder.last], times.end_s[builder.last])
    arrive, begin, end = (column.tolist() for column in columns)
    return Replay(recording, arrive, begin, end, times.path)


def recorded_times(recording: Recording) -> Replay:
    """Return the recorded times as a `Replay`."""
    members = recording.members()
    begin = []
    for node in recording.nodes:
        start = node.start_ns
        if node.message is not None:
            others = [recording.nodes[m].start_ns for m in members[node.message.key]]
            start = max([start, *(s for s in others if s <= node.end_ns)])
        begin.append(start * 1e-9)
    return Replay(
        recording,
        [n.start_ns * 1e-9 for n in recording.nodes],
        begin,
        [n.end_ns * 1e-9 for n in recording.nodes],
    )


def timeline(times: Replay) -> Timeline:
    """Return a replay's spans within its step; a message has one for the wait for other members and one for the
    transfer."""
    recording = times.recording
    classes = [RankClass(r, (r,), i) for i, r in enumerate(recording.ranks)]
    spans, (from_s, until_s) = list[Span](), recording.window(times.end_s)

    def cut(start_s: float, stop_s: float) -> tuple[float, float]:
        return max(start_s, from_s) - from_s, min(stop_s, until_s) - from_s

    for node, arrive, begin, end in zip(recording.nodes, times.arrive_s, times.begin_s, times.end_s, strict=True):
        if node.kind == START:
            continue
        size = node.message.bytes if node.message else 0.0
        if end < from_s or min(arrive, begin) > until_s:
            continue
        if begin > max(arrive, from_s):
            late = Detail(f"{node.name}: waiting for other ranks", source="recorded")
            spans.append(Span(node.rank, node.stream, WAIT, -1, -1, *cut(arrive, begin), late))
        spans.append(
            Span(
                node.rank,
                node.stream,
                node.kind,
                -1,
                -1,
                *cut(begin, end),
                Detail(node.name, size, source="recorded"),
            )
        )
    spans.sort(key=lambda s: (s.start_s, s.rank))
    return from_spans(spans, classes)


class RankTimes(Struct, frozen=True):
    """Hold one rank's seconds: end of the step, computation, exposed transfers, exposed waits, host working alone."""

    rank: int
    end_s: float
    compute_s: float
    exposed_comm_s: float
    exposed_wait_s: float
    host_s: float


TIMES = RankTimes.__struct_fields__[1:]  # of a rank, in seconds


def rank_times(times: Replay) -> list[RankTimes]:
    """Return each rank's seconds by kind; a later field counts only time that no earlier one covers."""
    spent: dict[int, list[list[tuple[float, float]]]] = {r: [[], [], [], []] for r in times.recording.ranks}
    ends, (from_s, until_s) = dict.fromkeys(times.recording.ranks, 0.0), times.recording.window(times.end_s)
    for node, arrive, begin, end in zip(times.recording.nodes, times.arrive_s, times.begin_s, times.end_s, strict=True):
        rows = spent[node.rank]
        if node.message is not None:
            rows[1].append((begin, end))
            rows[2].append((arrive, begin))
        elif node.kind != START:
            rows[0 if node.compute else 1 if node.kind in (OFFLOAD, RELOAD) else 3].append((arrive, end))
        ends[node.rank] = max(ends[node.rank], min(end, until_s) - from_s)
    out = []
    for rank, rows in spent.items():
        covered = np.zeros((0, 2))
        columns = []
        for row in rows:
            own: Intervals = np.array(row, dtype=np.float64).reshape(-1, 2).clip(from_s, until_s)
            columns.append(uncovered_s(own, covered) if len(own) else 0.0)
            covered = np.concatenate([covered, own])
        out.append(RankTimes(rank, ends[rank], *columns))
    return out
