"""A step's time at the least, from the compiled programs of its actions, without a graph of tasks.

Between two actions a rank is where three times are: T, when what it has done is done; A, when what its next action
waits for from elsewhere is there; D, when its data-parallel stream is free. What an action makes of them is linear over
(max, +): T' = max(T + a, A + b, D + c), and likewise D', with six numbers that are computed once for each program
(Baccelli et al. 1992, Synchronization and Linearity, chapter 2). So an action takes a few additions, whatever it
consists of.

Everything that this walk waits for the simulation waits for, too, and takes the same seconds, so its end is never later
than the simulated one, but for the rounding of sums. Left out: receivers of blocking messages that are late, ranks that
wait for others in a collective, links that are shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from sim.faults import jitter_of
from sim.graph.build import Build, steps_of
from sim.graph.data_parallel import DP
from sim.graph.stages import epilogue
from sim.graph.template import COMPUTE, Template
from sim.graph.uses import Step, Use
from sim.simulation import Prepared

NEVER = float("-inf")
NONE: Mapping[str, float] = {}


class Linear(NamedTuple):
    """What a program makes of T, A and D: a row of three for each of T' and D'."""

    done_after_done: float
    done_after_input: float
    done_after_stream: float
    stream_after_done: float
    stream_after_input: float
    stream_after_stream: float


class _Rank:
    """Where a class of ranks stands: T and D of this file's head, messages of its own that hold it up, its channels."""

    __slots__ = ("channels_s", "done_s", "handles_s", "held_s", "index", "stream_s")

    def __init__(self, index: int) -> None:
        self.index = index
        self.done_s = self.stream_s = self.held_s = 0.0
        self.channels_s: dict[str, float] = {}
        self.handles_s: dict[tuple[int, str], float] = {}  # gathers of the prologue, by stage


Known = dict[Template, Linear | None]  # None: it waits for gathers of the step's beginning


def least_step_s(step: Prepared, known: Known) -> float:
    """Seconds that a step takes at the least; `known`: programs worked out before. 0 if its lists never end, or with
    jitter, which may be any."""
    if jitter_of(step.plan.scenario, 0) is not None:
        return 0.0
    return _Walk(step, known).run()


class _Walk:
    """Walks all action lists; ranks of one pipeline rank stand for themselves, the first and the last of them."""

    def __init__(self, step: Prepared, known: Known) -> None:
        self.plan, self.schedule, self.stages, self.known = step.plan, step.schedule, step.stages, known
        self.uses = Build(step.plan, step.schedule, step.pricing, step.stages, False, None, step.kept).uses
        p = step.plan.scenario.parallelism
        self.blocking, self.pair = not p.p2p_overlap, p.ep_overlap
        lanes = step.plan.lanes
        self.ranks = [_Rank(i) for i in range(len(step.plan.classes)) if i % lanes in (0, lanes - 1)]
        self.arrived_s: dict[int, float] = {}

    def run(self) -> float:
        ready = [self._go(rank) for rank in self.ranks]
        waiting: dict[int, Iterator[int]] = {}
        self.freed: list[int] = []  # messages that have come since a rank went on
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
            template = self.uses.once(rank.index, ("prologue", id(what)), what.prologue)
            ends = _ends(template, rank.done_s, rank.held_s, rank.stream_s, {})
            rank.handles_s |= {(stage, handle): ends[i] for handle, i in template.open}
            rank.stream_s = max([rank.stream_s, *ends])
        steps = steps_of(self.schedule.ranks[pipeline_rank], self.pair)
        for actions, use in zip(steps, self.uses.of(rank.index, steps), strict=True):
            input_s = rank.held_s
            for i, wire in use.inputs:
                key = wire.first_key + actions[i].micro_batch
                while key not in self.arrived_s:
                    yield key
                input_s = max(input_s, self.arrived_s[key])
            self._act(rank, use.template, actions[0].stage, input_s)
            self._send(rank, use, actions)
        stages, p = tuple(held.values()), self.plan.scenario.parallelism
        tied = self.plan.scenario.model.tied_embeddings and p.pp > 1 and pipeline_rank in (0, p.pp - 1)
        last = ("epilogue", tied, self.plan.group_size("copies"), *map(id, stages))
        template = self.uses.once(rank.index, last, lambda: epilogue(stages, self.plan, tied))
        self._act(rank, template, -1, max(rank.held_s, rank.stream_s))

    def _act(self, rank: _Rank, template: Template, stage: int, input_s: float) -> None:
        """Put a program at the end of what the rank does."""
        t, d, known = rank.done_s, rank.stream_s, self.known
        if template not in known:
            known[template] = None if any(task.external for task in template.tasks) else linear(template)
        x = known[template]
        if x is None:
            here = {h: s for (number, h), s in rank.handles_s.items() if number == stage}
            rank.done_s, rank.stream_s = _outcome(template, t, input_s, d, here)
            return
        rank.done_s = max(t + x.done_after_done, input_s + x.done_after_input, d + x.done_after_stream)
        rank.stream_s = max(t + x.stream_after_done, input_s + x.stream_after_input, d + x.stream_after_stream)

    def _send(self, rank: _Rank, use: Use, actions: Step) -> None:
        """Send the results of an action; a channel carries one message after the other."""
        for i, wire in use.outputs:
            key = wire.first_key + actions[i].micro_batch
            sent_s = max(rank.done_s, rank.channels_s.get(wire.queue, 0.0)) + wire.seconds
            rank.channels_s[wire.queue] = self.arrived_s[key] = sent_s
            self.freed.append(key)
            if self.blocking:
                rank.held_s = sent_s


def linear(template: Template) -> Linear:
    """A program's numbers: what it makes of one of the three times, the others being long past."""
    alone = ((0.0, NEVER, NEVER), (NEVER, 0.0, NEVER), (NEVER, NEVER, 0.0))
    columns = [_outcome(template, *times) for times in alone]
    return Linear(*(done_s for done_s, _ in columns), *(stream_s for _, stream_s in columns))


def _outcome(
    template: Template, done_s: float, input_s: float, stream_s: float, handles_s: Mapping[str, float] = NONE
) -> tuple[float, float]:
    """T' and D'."""
    ends = _ends(template, done_s, input_s, stream_s, handles_s)
    last = {task.stream: end for task, end in zip(template.tasks, ends, strict=True)}
    before_s = done_s if ends else max(done_s, input_s)  # an empty stage passes its input on
    return max([last.get(COMPUTE, before_s), *(ends[i] for i in template.tail)]), last.get(DP, stream_s)


def _ends(
    template: Template, done_s: float, input_s: float, stream_s: float, handles_s: Mapping[str, float]
) -> list[float]:
    """Ends of a program's tasks, as `Build` places them one by one."""
    ends: list[float] = []
    free = {DP: stream_s}
    rooted: set[int] = set()
    for i, (stream, _, seconds, deps, external, _, _) in enumerate(template.tasks):
        begin = max([ends[d] for d in deps]) if deps else done_s
        for handle in external:
            begin = max(begin, handles_s.get(handle, NEVER))
        if stream != DP:
            if input_s > begin and rooted.isdisjoint(deps):
                begin = input_s
            rooted.add(i)
        queued_s = free.get(stream, NEVER)
        free[stream] = end = (queued_s if queued_s > begin else begin) + seconds
        ends.append(end)
    return ends
