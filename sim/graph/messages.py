"""Describe point-to-point messages between pipeline ranks: which action needs or sends which, and their tasks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from msgspec import Struct

from sim.core.actions import Kind, Schedule, Step
from sim.core.columns import Ints
from sim.core.timeline import Detail
from sim.graph.taskgraph import KindTable, Message
from sim.prices.rank_prices import Pricing
from sim.programs.stages import stage_input_bytes
from sim.programs.step_end import NORM_BYTES

Hop = tuple[int, int, bool]  # source stage, target stage, forward
BACKWARD, FORWARD, NEITHER = 0, 1, 2  # direction of an action's messages along the chain of stages
DIRECTION = {Kind.F: FORWARD, Kind.B: BACKWARD, Kind.I: BACKWARD, Kind.W: NEITHER}
NO_HOP = -1


class Route(Struct, frozen=True):
    """Hold a route between two pipeline ranks, in one pipeline, direction and size; all its messages take `seconds`.

    `total_s`: the seconds of all messages of a hop on it. `share`: kind, source and uncertainty of these seconds.
    `queue`: the stream on which messages follow each other.
    """

    number: int
    seconds: float
    share: tuple[str, str, float]
    total_s: float
    queue: str
    task_kind: int


class Messages:
    """Hold all messages of a step.

    `needs`, `gives`: by stage and direction the hop that brings an action's input, and the hop that takes its result;
    NO_HOP if no message is needed.
    """

    def __init__(self, schedule: Schedule, pricing: Pricing, table: KindTable) -> None:
        plan = self.plan = pricing.plan
        self.schedule, self.pricing, self.table = schedule, pricing, table
        p = plan.scenario.parallelism
        # All tensor-parallel ranks hold the same activations, so with Megatron's scatter_gather_tensors_in_pipeline
        # each sends 1/tp of them. With sequence parallelism each rank holds only its part.
        pieces = p.tp if p.p2p_scatter and not p.sp else 1
        self._bytes = [stage_input_bytes(plan, part) / pieces for part in range(len(plan.parts))]
        self.hops, self.needs, self.gives = _hops(schedule)
        self._routes: dict[tuple[int, int, int, bool, float], Route] = {}

    @property
    def routes(self) -> list[Route]:
        """Return the routes that were used so far, by number."""
        return list(self._routes.values())

    def route(self, pipeline: int, hop: int) -> Route:
        """Return the route that the messages of a hop take in a pipeline."""
        source, target, forward = self.hops[hop]
        rank_of = self.schedule.rank_of_stage
        # An activation and its gradient have one size: that of the later stage's input.
        size = self._bytes[self.schedule.part_of_stage[target if forward else source]]
        key = (pipeline, rank_of[source], rank_of[target], forward, size)
        return self._routes.get(key) or self._new_route(*key)

    def all_routes(self) -> list[Route]:
        """Return the routes of all hops in all pipelines, pipeline by pipeline."""
        # The order is that of `first_key`: a key divided by the micro-batches is an index of this list.
        return [self.route(pipeline, hop) for pipeline in range(self.plan.pipelines) for hop in range(len(self.hops))]

    def norm_s(self, sender: int, receiver: int) -> float:
        """Return the seconds of a gradient norm from one class of ranks to another."""
        ranks = (self.plan.classes[sender].rank, self.plan.classes[receiver].rank)
        return self.pricing.send(*ranks, NORM_BYTES).seconds

    def first_key(self, pipeline: Ints, hop: Ints) -> Ints:
        """Return the key of micro-batch 0 on a hop in a pipeline; the keys of other micro-batches follow."""
        return (pipeline * len(self.hops) + hop) * self.schedule.micro_batches

    def describe(self, key: int) -> str:
        """Describe a message in words, for error messages."""
        number, micro_batch = divmod(key, self.schedule.micro_batches)
        source, target, _ = self.hops[number % len(self.hops)]
        return f"message stage {source} to {target} of micro-batch {micro_batch}"

    def _name(self, step: Step) -> str:
        (stage, kind, _) = step[0]
        source, target, _ = self.hops[self.gives[stage, DIRECTION[kind]]]
        return f"stage {source} to {target}"

    def _new_route(self, pipeline: int, source: int, target: int, forward: bool, size: float) -> Route:
        pipelines, schedule, row = self.plan.pipelines, self.schedule, self.table.row
        a, b, kind = source * pipelines + pipeline, target * pipelines + pipeline, "F" if forward else "B"
        sender, receiver = self.plan.classes[a], self.plan.classes[b]
        seconds, origin, uncertainty, _, bus_bandwidth, *_ = self.pricing.send(
            sender.rank, receiver.rank, size, forward
        )
        queue = _channel(source, target, forward, len(schedule.ranks))
        sent, received = row(a, "send" + queue, "SEND_" + kind), row(b, "recv" + queue, "RECV_" + kind)
        # Rows are ordered by class, so that spans are listed rank by rank.
        rows = (sent, received) if sent < received else (received, sent)
        detail, work = Detail("", size, bus_bandwidth, origin), Message(a, b, size, seconds)
        task_kind = self.table.new_kind(detail, rows, named=self._name, work=work)
        # DualPipe's two chains carry half of the micro-batches each. Every rank of the class sends.
        total_s = seconds * (schedule.micro_batches // len(schedule.chains) * len(sender.ranks))
        found = Route(len(self._routes), seconds, ("send_recv", origin, uncertainty), total_s, queue, task_kind)
        self._routes[pipeline, source, target, forward, size] = found
        return found


def _channel(source: int, target: int, forward: bool, p: int) -> str:
    """Return the suffix of the stream on which a message between two pipeline ranks queues."""
    # There is one queue for each direction and side. With one queue for all, a V-shaped schedule, which sends both
    # ways, could let a message wait behind one whose receiver waits for the first: a deadlock.
    usual = target == (source + 1) % p if forward else target == (source - 1) % p
    return ("_f" if forward else "_b") + ("" if usual else "_back")


def _hops(schedule: Schedule) -> tuple[list[Hop], Ints, Ints]:
    """Return the hops between stages on different ranks, and by stage and direction the hop that brings its input, and
    the hop that takes its result."""
    hops, rank_of = list[Hop](), schedule.rank_of_stage
    # The column of NEITHER stays empty, because a weight gradient needs and sends no message.
    needs, gives = np.full((2, len(rank_of), len((BACKWARD, FORWARD, NEITHER))), NO_HOP)
    for chain in schedule.chains:
        for a, b in pairwise(chain):
            # Neighbouring stages on one rank (the turn of a V) pass tensors in memory.
            if rank_of[a] != rank_of[b]:
                needs[b, FORWARD] = gives[a, FORWARD] = len(hops)
                needs[a, BACKWARD] = gives[b, BACKWARD] = len(hops) + 1
                hops += [(a, b, True), (b, a, False)]
    return hops, needs, gives
