"""Point-to-point messages between pipeline ranks: who needs which, and their tasks, shared by both ends."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from sim.actions import Kind, Schedule
from sim.graph.link_book import LinkBook
from sim.graph.stages import stage_input_bytes
from sim.graph.taskgraph import Row, Sorts
from sim.plan import Plan
from sim.prices.pricing import Pricing
from sim.timeline import Detail

Hop = tuple[int, int, bool]  # source stage, target stage, forward
FORWARD = {Kind.F: True, Kind.B: False, Kind.I: False, Kind.W: None}  # which way messages of an action go
Hops = dict[tuple[int, bool | None], Hop]  # by stage and forward


@dataclass(frozen=True, slots=True, eq=False)
class Wire:
    """The messages from `stage` to the next, in one lane; `first_key` + micro-batch numbers them."""

    stage: int
    first_key: int
    seconds: float
    sort: int
    queue: str


class _Way(NamedTuple):
    """From a pipeline rank to another, in one lane; `share`: kind, source and uncertainty of `total_s`, the seconds of
    all messages of a wire; `ends`: classes of ranks."""

    seconds: float
    bus_bandwidth_bytes_per_s: float
    share: tuple[str, str, float]
    total_s: float
    queue: str
    ends: tuple[int, int]
    rows: tuple[Row, ...]


class Messages:
    """All messages of a step. `count`: how many keys there are; `shares`: their seconds by (kind, source, uncertainty),
    over all ranks."""

    def __init__(
        self, plan: Plan, schedule: Schedule, pricing: Pricing, graph: Sorts, links: LinkBook | None = None
    ) -> None:
        self.plan, self.schedule, self.pricing, self.graph = plan, schedule, pricing, graph
        self.links = links
        self.shares: dict[tuple[str, str, float], float] = {}
        self.count = 0
        p = plan.scenario.parallelism
        self._bytes = stage_input_bytes(plan) / (p.tp if p.p2p_scatter and not p.sp else 1)
        self._needs, self._gives = _hops(schedule)
        self._ways: dict[tuple[int, int, int, bool], _Way] = {}
        self._wires: dict[tuple[int, Hop], Wire] = {}

    def needed_by(self, stage: int, kind: Kind) -> Hop | None:
        """The messages that a stage's actions of this kind need from another rank."""
        return self._needs.get((stage, FORWARD[kind]))

    def result_of(self, stage: int, kind: Kind) -> Hop | None:
        """The messages by which their results go to another rank."""
        return self._gives.get((stage, FORWARD[kind]))

    def wire(self, lane: int, hop: Hop) -> Wire:
        """The messages of a lane from one stage to another."""
        found = self._wires.get((lane, hop))
        if found is None:
            found = self._wires[lane, hop] = self._new_wire(lane, hop)
        return found

    def describe(self, key: int) -> str:
        """A message in words, for error messages."""
        wire = next(w for w in self._wires.values() if 0 <= key - w.first_key < self.schedule.micro_batches)
        return f"message {self.graph.sorts[wire.sort].detail.name} of micro-batch {key - wire.first_key}"

    def _new_wire(self, lane: int, hop: Hop) -> Wire:
        source, target, forward = hop
        rank_of = self.schedule.rank_of_stage
        key = (lane, rank_of[source], rank_of[target], forward)
        way = self._ways.get(key) or self._new_way(*key)
        self.shares[way.share] = self.shares.get(way.share, 0.0) + way.total_s
        detail = Detail(f"stage {source} to {target}", self._bytes, way.bus_bandwidth_bytes_per_s, way.share[1])
        sort = self.graph.new_sort(detail, way.rows)
        if self.links is not None:
            self.links.message(sort, *way.ends, self._bytes, way.seconds)
        first_key = self.count
        self.count += self.schedule.micro_batches
        return Wire(source, first_key, way.seconds, sort, way.queue)

    def _new_way(self, lane: int, source: int, target: int, forward: bool) -> _Way:
        """The way from a pipeline rank to another."""
        ends = [rank * self.plan.lanes + lane for rank in (source, target)]
        sender, receiver = (self.plan.classes[i] for i in ends)
        priced = self.pricing.send(sender.rank, receiver.rank, self._bytes)
        count = self.schedule.micro_batches // len(self.schedule.chains) * len(sender.ranks)
        queue, kind = _channel(source, target, forward, len(self.schedule.ranks)), "F" if forward else "B"
        names = (("send", f"SEND_{kind}"), ("recv", f"RECV_{kind}"))
        rows = [self.graph.row(i, end + queue, name) for i, (end, name) in zip(ends, names, strict=True)]
        way = self._ways[lane, source, target, forward] = _Way(
            priced.seconds,
            priced.bus_bandwidth_bytes_per_s,
            ("send_recv", priced.source, priced.uncertainty),
            priced.seconds * count,
            queue,
            (ends[0], ends[1]),
            tuple(sorted(rows)),
        )
        return way


def _channel(source: int, target: int, forward: bool, p: int) -> str:
    """The stream that a message between two pipeline ranks queues on; V-shaped schedules send both ways."""
    usual = target == (source + 1) % p if forward else target == (source - 1) % p
    return ("_f" if forward else "_b") + ("" if usual else "_back")


def _hops(schedule: Schedule) -> tuple[Hops, Hops]:
    """The messages that the forwards and backwards of every stage need and give."""
    needs, gives, rank_of = Hops(), Hops(), schedule.rank_of_stage
    for chain in schedule.chains:
        for a, b in pairwise(chain):
            if rank_of[a] != rank_of[b]:
                needs[b, True] = gives[a, True] = (a, b, True)
                needs[a, False] = gives[b, False] = (b, a, False)
    return needs, gives
