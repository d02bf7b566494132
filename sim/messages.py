"""Point-to-point messages between pipeline ranks: who needs which, and their tasks, shared by both ends."""

from __future__ import annotations

from typing import NamedTuple

from sim.actions import Action, Kind, Schedule
from sim.plan import Plan
from sim.pricing import Pricing
from sim.stages import stage_input_bytes
from sim.taskgraph import TaskGraph
from sim.timeline import Detail

Row = tuple[int, int, int]  # of the timeline: class of ranks, stream, kind
Hop = tuple[int, int, bool]  # source stage, target stage, forward


class Wire(NamedTuple):
    """One end of the messages from a stage to the next; `first_key` + micro-batch numbers them."""

    first_key: int
    source: int
    seconds: float
    sort: int
    queue: str
    row: Row


class Messages:
    """All messages of a step. `shares`: their seconds by (kind, source, uncertainty), over all ranks."""

    def __init__(self, plan: Plan, schedule: Schedule, pricing: Pricing, graph: TaskGraph) -> None:
        self.plan, self.schedule, self.pricing, self.graph = plan, schedule, pricing, graph
        self.shares: dict[tuple[str, str, float], float] = {}
        p = plan.scenario.parallelism
        self._bytes = stage_input_bytes(plan) / (p.tp if p.p2p_scatter and not p.sp else 1)
        self._neighbour = _neighbours(schedule)
        self._tasks: dict[int, int] = {}  # by `Wire.first_key` + micro-batch
        self._sorts: dict[tuple[int, int, int], tuple[int, float]] = {}

    def needed_by(self, action: Action) -> Hop | None:
        """The message that an action needs from another rank."""
        forward = action.kind is Kind.F
        source = self._neighbour[action.stage][0 if forward else 1]
        rank_of = self.schedule.rank_of_stage
        if action.kind is Kind.W or source is None or rank_of[source] == rank_of[action.stage]:
            return None
        return source, action.stage, forward

    def result_of(self, action: Action) -> Hop | None:
        """The message by which an action's result goes to another rank."""
        forward = action.kind is Kind.F
        target = self._neighbour[action.stage][1 if forward else 0]
        rank_of = self.schedule.rank_of_stage
        if action.kind is Kind.W or target is None or rank_of[target] == rank_of[action.stage]:
            return None
        return action.stage, target, forward

    def end(self, class_index: int, hop: Hop | None, sends: bool) -> Wire | None:
        """A class's end of the messages from one stage to another."""
        if hop is None:
            return None
        source, target, forward = hop
        lane, rank_of = class_index % self.plan.lanes, self.schedule.rank_of_stage
        number = (lane * len(rank_of) + source) * 2 + forward
        sort, seconds = self._sort(lane, source, target)
        queue = _channel(rank_of[source], rank_of[target], forward, len(self.schedule.ranks))
        way = "F" if forward else "B"
        row = self.graph.row(class_index, ("send" if sends else "recv") + queue, ("SEND_" if sends else "RECV_") + way)
        return Wire(number * self.schedule.micro_batches, source, seconds, sort, queue, row)

    def task(self, wire: Wire, micro_batch: int, waits: list[int]) -> int:
        """The task of a message, made by whichever end comes first; adds this end's waits and row to it."""
        graph, key = self.graph, wire.first_key + micro_batch
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = graph.add(wire.seconds, waits, wire.sort, wire.source, micro_batch)
        else:
            graph.waits[task] += waits
        graph.slots.extend((task, *wire.row))
        return task

    def _sort(self, lane: int, source: int, target: int) -> tuple[int, float]:
        """What messages from one stage to another have in common: their sort and their seconds."""
        key = (lane, source, target)
        if key not in self._sorts:
            rank_of, lanes = self.schedule.rank_of_stage, self.plan.lanes
            ends = [self.plan.classes[rank_of[s] * lanes + lane] for s in (source, target)]
            priced = self.pricing.send(ends[0].rank, ends[1].rank, self._bytes)
            share = ("send_recv", priced.source, priced.uncertainty)
            count = self.schedule.micro_batches // len(self.schedule.chains) * len(ends[0].ranks)
            self.shares[share] = self.shares.get(share, 0.0) + priced.seconds * count
            detail = Detail(f"stage {source} to {target}", self._bytes, priced.bus_bandwidth_bytes_per_s, priced.source)
            self._sorts[key] = (self.graph.new_sort(detail), priced.seconds)
        return self._sorts[key]


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
