"""A step's time at the least, from the programs of its actions, without a graph of tasks.

All action lists are walked; each action takes what `program_times` makes of its rank's times. Everything that this walk
waits for the simulation waits for, too, and takes the same seconds, so its end is never later than the simulated one,
but for the rounding of sums. Left out: receivers of blocking messages that are late, ranks that wait for others in a
collective, links that are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sim.actions import Kind, Step
from sim.faults import has_jitter
from sim.graph.messages import NO_HOP, WAYS, Messages, Way
from sim.graph.stages import epilogue
from sim.graph.taskgraph import Ints, Sorts
from sim.graph.template import Price, Priced
from sim.graph.uses import Uses
from sim.layout.program_times import NONE, Timed, ends_s, timed, timed_template
from sim.program import Comm, Compute, Program
from sim.simulation import Prepared

Ends = tuple[tuple[int, int, Way], ...]  # messages: number of the action in its step, first key, way


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What is worked out already, by what decides it; the programs that it came from, and prices of their items."""

    times: dict[tuple[object, ...], Timed] = field(default_factory=dict)
    prices: dict[tuple[object, ...], Priced] = field(default_factory=dict)
    programs: dict[tuple[object, ...], list[tuple[Program, Timed]]] = field(default_factory=dict)


class _Rank:
    """Where a class of ranks stands: T and D of this file's head, messages of its own that hold it up, its channels."""

    __slots__ = ("channels_s", "done_s", "handles_s", "held_s", "index", "stream_s")

    def __init__(self, index: int) -> None:
        self.index = index
        self.done_s = self.stream_s = self.held_s = 0.0
        self.channels_s: dict[str, float] = {}
        self.handles_s: dict[int, dict[str, float]] = {}  # gathers of the prologue, by stage


def least_step_s(step: Prepared, known: Known) -> float:
    """Seconds that a step takes at the least; `known`: what steps share that differ in their schedule alone. 0 if its
    lists never end, or with jitter, which may be any."""
    if has_jitter(step.plan.scenario):
        return 0.0
    return _Walk(step, known).run()


class _Walk:
    """Walks all action lists; ranks of one pipeline rank stand for themselves, the first and the last of them."""

    def __init__(self, step: Prepared, known: Known) -> None:
        self.plan, self.stages, self.known = step.plan, step.stages, known
        self.pricing = step.pricing
        shown, ends = Sorts(), step.lists.first_and_last
        self.messages = Messages(step.plan, step.schedule, step.pricing, shown)
        self.uses = Uses(step.plan, ends, step.pricing, step.stages, shown, self.messages, False, None, step.kept)
        self.lists, self.blocking = step.lists, not step.plan.scenario.parallelism.p2p_overlap
        lanes = step.plan.lanes
        self.ranks = [_Rank(i) for i in range(len(step.plan.classes)) if i % lanes in (0, lanes - 1)]
        self.arrived_s: dict[int, float] = {}
        self.freed: list[int] = []  # messages that have come since a rank went on

    def run(self) -> float:
        ready = [self._go(rank) for rank in self.ranks]
        waiting: dict[int, Iterator[int]] = {}
        while ready:
            walk = ready.pop()
            key = next(walk, None)
            ready += [waiting.pop(k) for k in self.freed if k in waiting]
            self.freed.clear()
            if key is not None:
                waiting[key] = walk
        return 0.0 if waiting else max(max(r.done_s, r.stream_s, r.held_s) for r in self.ranks)

    def _go(self, rank: _Rank) -> Iterator[int]:
        """One class of ranks; gives the messages that it waits for."""
        held, pipeline_rank = self.stages[rank.index], self.plan.classes[rank.index].pipeline_rank
        for stage, what in held.items():
            early = self._timed(rank, ("prologue", id(what)), what.prologue)
            ends = ends_s(early.tasks, rank.done_s, rank.held_s, rank.stream_s, NONE) if early.tasks else []
            rank.handles_s[stage] = {handle: ends[i] for handle, i in early.open.items()}
            rank.stream_s = max([rank.stream_s, *ends])
        found: dict[tuple[object, ...], tuple[Timed, Ends, Ends]] = {}
        arrived_s, ends_of_stages = self.arrived_s, self.uses.ends
        for actions in self.lists.steps[slice(*self.lists.begin[pipeline_rank : pipeline_rank + 2])]:
            key = tuple([a if a in ends_of_stages else a[:2] for a in actions])
            if key not in found:
                found[key] = self._of(rank, actions)
            program, inputs, outputs = found[key]
            input_s = rank.held_s
            for i, first_key, _ in inputs:
                message = first_key + actions[i].micro_batch
                while message not in arrived_s:
                    yield message
                input_s = max(input_s, arrived_s[message])
            handles_s = rank.handles_s.get(actions[0].stage, NONE)
            rank.done_s, rank.stream_s = program.outcome(rank.done_s, input_s, rank.stream_s, handles_s)
            if outputs:
                self._send(rank, actions, outputs)
        rank.held_s = max(rank.held_s, rank.stream_s)
        rank.done_s, rank.stream_s = self._last(rank).outcome(rank.done_s, rank.held_s, rank.stream_s)

    def _send(self, rank: _Rank, actions: Step, outputs: Ends) -> None:
        """Send the results of an action; a channel carries one message after the other."""
        for i, first_key, way in outputs:
            key = first_key + actions[i].micro_batch
            sent_s = max(rank.done_s, rank.channels_s.get(way.queue, 0.0)) + way.seconds
            rank.channels_s[way.queue] = self.arrived_s[key] = sent_s
            self.freed.append(key)
            if self.blocking:
                rank.held_s = sent_s

    def _of(self, rank: _Rank, actions: Step) -> tuple[Timed, Ends, Ends]:
        """An action's program, and the messages before and after it."""
        needs, gives = (self._ends(rank, actions, hops) for hops in (self.messages.needs, self.messages.gives))
        if len(actions) > 1:
            return timed_template(self.uses.of(rank.index, actions).template), needs, gives
        action, stage = actions[0], self.stages[rank.index][actions[0].stage]
        reduces_alike = action.kind is not Kind.F and stage.dp.each_micro_batch  # the last backward as any other
        ends = action in self.uses.ends and not reduces_alike

        def program() -> Program:
            if action.kind is Kind.F:
                return stage.forward(ends, bool(needs))
            return stage.backward(action.kind, ends, bool(needs))

        made = self._timed(rank, (id(stage), action.kind, ends, not needs), program, (id(stage), action.kind))
        return made, needs, gives

    def _ends(self, rank: _Rank, actions: Step, hops: Ints) -> Ends:
        """The messages over these hops, by stage and way."""
        found = [int(hops[a.stage, WAYS[a.kind]]) for a in actions]
        lane, m = rank.index % self.plan.lanes, self.messages
        return tuple([(i, m.first_key(lane, hop), m.way(lane, hop)) for i, hop in enumerate(found) if hop != NO_HOP])

    def _last(self, rank: _Rank) -> Timed:
        """What a rank's step ends with."""
        stages, p = tuple(self.stages[rank.index].values()), self.plan.scenario.parallelism
        ends = self.plan.classes[rank.index].pipeline_rank in (0, p.pp - 1)
        tied = self.plan.scenario.model.tied_embeddings and p.pp > 1 and ends
        key = ("epilogue", tied, self.plan.group_size("copies"), *map(id, stages))
        return self._timed(rank, key, lambda: epilogue(stages, self.plan, tied))

    def _timed(
        self, rank: _Rank, key: tuple[object, ...], program: Callable[[], Program], like: tuple[object, ...] = ()
    ) -> Timed:
        """A program's times; those that are `like` it often are the same."""
        number = self.plan.classes[rank.index].rank
        context = self.pricing.context(number)
        if (context, *key) not in self.known.times:
            made, alike = program(), self.known.programs.setdefault((context, *like), [])
            found = next((times for before, times in alike if before == made), None)
            if found is None:
                found = timed(made, self._price(number))
                alike += [(made, found)] if like else []
            self.known.times[context, *key] = found
        return self.known.times[context, *key]

    def _price(self, number: int) -> Price:
        """The prices that hold on a rank."""
        price, known, context = self.pricing.on(number), self.known.prices, self.pricing.context(number)

        def kept(item: Compute | Comm) -> Priced:
            key = (context, item) if isinstance(item, Compute) else (context, item.kind, item.group, item.bytes)
            found = known.get(key)
            if found is None:
                found = known[key] = price(item)
            return found

        return kept
