"""Point-to-point messages between pipeline ranks: who needs which, and their tasks, shared by both ends."""

from __future__ import annotations

from typing import NamedTuple

from sim.actions import Kind, Schedule
from sim.graph.link_book import LinkBook
from sim.graph.stages import stage_input_bytes
from sim.graph.taskgraph import TaskGraph
from sim.plan import Plan
from sim.prices.pricing import Pricing
from sim.timeline import Detail

Hop = tuple[int, int, bool]  # source stage, target stage, forward


class Wire(NamedTuple):
    """The messages from a stage to the next, in one lane; `first_key` + micro-batch numbers them."""

    first_key: int
    seconds: float
    sort: int
    queue: str


class Messages:
    """All messages of a step. `tasks`: by key, -1 where it is not under way; `shares`: their seconds by (kind, source,
    uncertainty), over all ranks."""

    def __init__(
        self, plan: Plan, schedule: Schedule, pricing: Pricing, graph: TaskGraph, links: LinkBook | None = None
    ) -> None:
        self.plan, self.schedule, self.pricing, self.graph = plan, schedule, pricing, graph
        self.links = links
        self.shares: dict[tuple[str, str, float], float] = {}
        self.tasks: list[int] = []
        p = plan.scenario.parallelism
        self._bytes = stage_input_bytes(plan) / (p.tp if p.p2p_scatter and not p.sp else 1)
        self._neighbour = _neighbours(schedule)
        self._wires: dict[tuple[int, Hop], Wire] = {}

    def needed_by(self, stage: int, kind: Kind) -> Hop | None:
        """The messages that a stage's actions of this kind need from another rank."""
        forward = kind is Kind.F
        source = self._neighbour[stage][0 if forward else 1]
        rank_of = self.schedule.rank_of_stage
        if kind is Kind.W or source is None or rank_of[source] == rank_of[stage]:
            return None
        return source, stage, forward

    def result_of(self, stage: int, kind: Kind) -> Hop | None:
        """The messages by which their results go to another rank."""
        forward = kind is Kind.F
        target = self._neighbour[stage][1 if forward else 0]
        rank_of = self.schedule.rank_of_stage
        if kind is Kind.W or target is None or rank_of[target] == rank_of[stage]:
            return None
        return stage, target, forward

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
        rank_of, lanes = self.schedule.rank_of_stage, self.plan.lanes
        places = [rank_of[s] * lanes + lane for s in (source, target)]
        ends = [self.plan.classes[i] for i in places]
        priced = self.pricing.send(ends[0].rank, ends[1].rank, self._bytes)
        share = ("send_recv", priced.source, priced.uncertainty)
        count = self.schedule.micro_batches // len(self.schedule.chains) * len(ends[0].ranks)
        self.shares[share] = self.shares.get(share, 0.0) + priced.seconds * count
        detail = Detail(f"stage {source} to {target}", self._bytes, priced.bus_bandwidth_bytes_per_s, priced.source)
        queue = _channel(rank_of[source], rank_of[target], forward, len(self.schedule.ranks))
        way = "F" if forward else "B"
        rows = [
            self.graph.row(i, end + queue, f"{end.upper()}_{way}")
            for i, end in zip(places, ("send", "recv"), strict=True)
        ]
        sort = self.graph.new_sort(detail, tuple(sorted(rows)), source)
        if self.links is not None:
            self.links.message(sort, places[0], places[1], self._bytes, priced.seconds)
        first_key = len(self.tasks)
        self.tasks += [-1] * self.schedule.micro_batches
        return Wire(first_key, priced.seconds, sort, queue)


def _channel(source: int, target: int, forward: bool, p: int) -> str:
    """The stream that a message between two pipeline ranks queues on; V-shaped schedules send both ways."""
    usual = target == (source + 1) % p if forward else target == (source - 1) % p
    return ("_f" if forward else "_b") + ("" if usual else "_back")


def _neighbours(schedule: Schedule) -> dict[int, tuple[int | None, int | None]]:
    """Stage before and after each stage on its chain."""
    out: dict[int, tuple[int | None, int | None]] = {}
    for chain in schedule.chains:
        for before, stage, after in zip((None, *chain[:-1]), chain, (*chain[1:], None), strict=True):
            out[stage] = (before, after)
    return out
