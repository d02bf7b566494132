"""Point-to-point messages between pipeline ranks: who needs which, and their tasks, shared by both ends."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sim.actions import Kind, Schedule, Step
from sim.graph.link_book import LinkBook
from sim.graph.stages import stage_input_bytes
from sim.graph.taskgraph import Ints, Sorts
from sim.plan import Plan
from sim.prices.pricing import Pricing
from sim.timeline import Detail

Hop = tuple[int, int, bool]  # source stage, target stage, forward
BACKWARD, FORWARD, NEITHER = 0, 1, 2  # which way messages of an action go
WAYS = {Kind.F: FORWARD, Kind.B: BACKWARD, Kind.I: BACKWARD, Kind.W: NEITHER}
NO_HOP = -1


class Way(NamedTuple):
    """From a pipeline rank to another, in one lane, all messages of a sort; `share`: kind, source and uncertainty of
    `total_s`, the seconds of all messages of a hop on it."""

    number: int
    seconds: float
    share: tuple[str, str, float]
    total_s: float
    queue: str
    sort: int


class Messages:
    """All messages of a step. `needs`, `gives`: numbers of the hops that bring what actions need and take what they
    give, by stage and way, NO_HOP where that stays on a rank."""

    def __init__(
        self, plan: Plan, schedule: Schedule, pricing: Pricing, shown: Sorts, links: LinkBook | None = None
    ) -> None:
        self.plan, self.schedule, self.pricing, self.shown, self.links = plan, schedule, pricing, shown, links
        p = plan.scenario.parallelism
        self._bytes = stage_input_bytes(plan) / (p.tp if p.p2p_scatter and not p.sp else 1)
        self.hops, self.needs, self.gives = _hops(schedule)
        self._ways: dict[tuple[int, int, int, bool], Way] = {}

    @property
    def ways(self) -> list[Way]:
        """Those that were asked for, by number."""
        return list(self._ways.values())

    def way(self, lane: int, hop: int) -> Way:
        """The way that the messages of a hop take in a lane."""
        source, target, forward = self.hops[hop]
        rank_of = self.schedule.rank_of_stage
        key = (lane, rank_of[source], rank_of[target], forward)
        return self._ways.get(key) or self._new_way(*key)

    def all_ways(self) -> list[Way]:
        """Of all hops in all lanes, lane by lane."""
        return [self.way(lane, hop) for lane in range(self.plan.lanes) for hop in range(len(self.hops))]

    def first_key(self, lane: int, hop: int) -> int:
        """Messages of a hop in a lane are numbered from here on by their micro-batches."""
        return (lane * len(self.hops) + hop) * self.schedule.micro_batches

    def describe(self, key: int) -> str:
        """A message in words, for error messages."""
        number, micro_batch = divmod(key, self.schedule.micro_batches)
        source, target, _ = self.hops[number % len(self.hops)]
        return f"message stage {source} to {target} of micro-batch {micro_batch}"

    def _name(self, step: Step) -> str:
        (stage, kind, _) = step[0]
        source, target, _ = self.hops[self.gives[stage, WAYS[kind]]]
        return f"stage {source} to {target}"

    def _new_way(self, lane: int, source: int, target: int, forward: bool) -> Way:
        lanes, schedule, row = self.plan.lanes, self.schedule, self.shown.row
        a, b, kind = source * lanes + lane, target * lanes + lane, "F" if forward else "B"
        sender, receiver = self.plan.classes[a], self.plan.classes[b]
        seconds, origin, uncertainty, _, bus_bandwidth, *_ = self.pricing.send(sender.rank, receiver.rank, self._bytes)
        queue = _channel(source, target, forward, len(schedule.ranks))
        sent, received = row(a, "send" + queue, "SEND_" + kind), row(b, "recv" + queue, "RECV_" + kind)
        rows = (sent, received) if sent < received else (received, sent)
        sort = self.shown.new_sort(Detail("", self._bytes, bus_bandwidth, origin), rows, named=self._name)
        if self.links is not None:
            self.links.add(sort, self.links.message(a, b, self._bytes, seconds))
        total_s = seconds * (schedule.micro_batches // len(schedule.chains) * len(sender.ranks))
        found = Way(len(self._ways), seconds, ("send_recv", origin, uncertainty), total_s, queue, sort)
        self._ways[lane, source, target, forward] = found
        return found


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
