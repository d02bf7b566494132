"""Point-to-point messages between pipeline ranks: who needs which, and their tasks, shared by both ends."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sim.actions import Kind, Schedule
from sim.graph.link_book import LinkBook
from sim.graph.sharing import Flow
from sim.graph.stages import stage_input_bytes
from sim.graph.taskgraph import Ints, Row, Sorts
from sim.plan import Plan
from sim.prices.pricing import Pricing
from sim.timeline import Detail

Hop = tuple[int, int, bool]  # source stage, target stage, forward
BACKWARD, FORWARD, NEITHER = 0, 1, 2  # which way messages of an action go
WAYS = {Kind.F: FORWARD, Kind.B: BACKWARD, Kind.I: BACKWARD, Kind.W: NEITHER}
NO_HOP = -1


class Wire(NamedTuple):
    """The messages from `stage` to the next, in one lane; `first_key` + micro-batch numbers them."""

    stage: int
    first_key: int
    seconds: float
    sort: int
    queue: str


class _Way(NamedTuple):
    """From a pipeline rank to another, in one lane; `share`: kind, source and uncertainty of `total_s`, the seconds of
    all messages of a wire; `flow`: what one does to shared links."""

    seconds: float
    bus_bandwidth_bytes_per_s: float
    share: tuple[str, str, float]
    total_s: float
    queue: str
    rows: tuple[Row, ...]
    flow: Flow | None


class Messages:
    """All messages of a step. `needs`, `gives`: numbers of the hops that bring what actions need and take what they
    give, by stage and way, NO_HOP where that stays on a rank; `shares`: seconds of the messages by (kind, source,
    uncertainty), over all ranks."""

    def __init__(
        self, plan: Plan, schedule: Schedule, pricing: Pricing, shown: Sorts, links: LinkBook | None = None
    ) -> None:
        self.plan, self.schedule, self.pricing, self.shown, self.links = plan, schedule, pricing, shown, links
        self.shares: dict[tuple[str, str, float], float] = {}
        p = plan.scenario.parallelism
        self._bytes = stage_input_bytes(plan) / (p.tp if p.p2p_scatter and not p.sp else 1)
        self.hops, self.needs, self.gives = _hops(schedule)
        self._ways: dict[tuple[int, int, int, bool], _Way] = {}
        self._wires: dict[tuple[int, int], Wire] = {}

    def wire(self, lane: int, hop: int) -> Wire:
        """The messages of a lane over the hop of this number."""
        found = self._wires.get((lane, hop))
        if found is None:
            found = self._wires[lane, hop] = self._new_wire(lane, hop)
        return found

    def wires(self) -> list[Wire]:
        """All, lane by lane; the n-th one's first key is n times the micro-batches."""
        return [self.wire(lane, hop) for lane in range(self.plan.lanes) for hop in range(len(self.hops))]

    def describe(self, key: int) -> str:
        """A message in words, for error messages."""
        number, micro_batch = divmod(key, self.schedule.micro_batches)
        source, target, _ = self.hops[number % len(self.hops)]
        return f"message stage {source} to {target} of micro-batch {micro_batch}"

    def _new_wire(self, lane: int, hop: int) -> Wire:
        source, target, forward = self.hops[hop]
        rank_of = self.schedule.rank_of_stage
        key = (lane, rank_of[source], rank_of[target], forward)
        seconds, bus_bandwidth, share, total_s, queue, rows, flow = self._ways.get(key) or self._new_way(*key)
        self.shares[share] = self.shares.get(share, 0.0) + total_s
        sort = self.shown.new_sort(Detail(f"stage {source} to {target}", self._bytes, bus_bandwidth, share[1]), rows)
        if flow is not None and self.links is not None:
            self.links.add(sort, flow)
        first_key = (lane * len(self.hops) + hop) * self.schedule.micro_batches
        return Wire(source, first_key, seconds, sort, queue)

    def _new_way(self, lane: int, source: int, target: int, forward: bool) -> _Way:
        """The way from a pipeline rank to another."""
        lanes, schedule, links, row = self.plan.lanes, self.schedule, self.links, self.shown.row
        a, b, kind = source * lanes + lane, target * lanes + lane, "F" if forward else "B"
        sender, receiver = self.plan.classes[a], self.plan.classes[b]
        priced = self.pricing.send(sender.rank, receiver.rank, self._bytes)
        count = schedule.micro_batches // len(schedule.chains) * len(sender.ranks)
        queue = _channel(source, target, forward, len(schedule.ranks))
        sent, received = row(a, "send" + queue, "SEND_" + kind), row(b, "recv" + queue, "RECV_" + kind)
        way = self._ways[lane, source, target, forward] = _Way(
            priced.seconds,
            priced.bus_bandwidth_bytes_per_s,
            ("send_recv", priced.source, priced.uncertainty),
            priced.seconds * count,
            queue,
            (sent, received) if sent < received else (received, sent),
            links.message(a, b, self._bytes, priced.seconds) if links is not None else None,
        )
        return way


def _channel(source: int, target: int, forward: bool, p: int) -> str:
    """The stream that a message between two pipeline ranks queues on; V-shaped schedules send both ways."""
    usual = target == (source + 1) % p if forward else target == (source - 1) % p
    return ("_f" if forward else "_b") + ("" if usual else "_back")


def _hops(schedule: Schedule) -> tuple[list[Hop], Ints, Ints]:
    """From stage to stage on another rank, both ways; the numbers of those that stages need and give."""
    hops, rank_of = list[Hop](), schedule.rank_of_stage
    needs, gives = np.full((2, len(rank_of), len((BACKWARD, FORWARD, NEITHER))), NO_HOP)
    for chain in schedule.chains:
        for a, b in pairwise(chain):
            if rank_of[a] != rank_of[b]:
                needs[b, FORWARD] = gives[a, FORWARD] = len(hops)
                needs[a, BACKWARD] = gives[b, BACKWARD] = len(hops) + 1
                hops += [(a, b, True), (b, a, False)]
    return hops, needs, gives
