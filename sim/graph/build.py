"""Build a step's task graph from plan, schedule and prices.

A point-to-point message is one task on the streams of both ends. With `p2p_overlap: false` (Megatron's blocking
send_forward_recv_backward) a rank posts, after each action, the send of its result and the receive of its next input as
one batch, and goes on when both are done. A message then starts when its producer has ended and its receiver has
posted. Where a schedule says so (`Schedule.joint`), a forward and the backward after it have one such batch together.
With overlap a message starts when its producer has ended, and only the action that needs it waits. Messages
queue in the order in which a rank sends them.

Each class of ranks places its programs: a prologue, its actions, an epilogue. A program is one task if that gives equal
times (`StepBuilder._stand_alone`), else it is placed task by task. `assemble` numbers and joins the tasks.
`docs/graph.md` shows all tables of a small example.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from sim.core.actions import Action, Kind, Schedule
from sim.core.columns import Ints, ints
from sim.graph.assemble import AssembledGraph
from sim.graph.compiled import ActionPrograms, Fineness, PlacedProgram, ProgramCache
from sim.graph.messages import NO_HOP, Messages
from sim.graph.placements import Placements
from sim.graph.schedule_columns import RankList, ScheduleColumns
from sim.graph.shared_collectives import merge_collectives
from sim.graph.taskgraph import KindTable, TaskGraph
from sim.prices.rank_prices import Pricing
from sim.programs.compile import CompiledProgram
from sim.programs.priced_items import Shares, add_all
from sim.programs.stages import Stage
from sim.ranks.faults import has_jitter, jitter_of


class ActionTasks(NamedTuple):
    """Hold the actions of a class of ranks, with the first and the last task of each in the graph."""

    listed: RankList
    first: Ints
    last: Ints


class Built(Struct, frozen=True):
    """Hold a task graph and sums over its tasks.

    `shares`: seconds of all ranks by (kind, source, uncertainty). By class of ranks: `traffic`, bytes by (kind, group);
    `actions` in order; `programs` with the number of their runs.
    """

    graph: TaskGraph
    shares: Shares
    traffic: list[dict[tuple[str, str], float]]
    actions: list[ActionTasks]
    programs: list[dict[CompiledProgram, int]]


class StepBuilder:
    """Place the programs of all classes of ranks, and assemble the graph of the step."""

    def __init__(
        self,
        schedule: Schedule,
        pricing: Pricing,
        stages: list[dict[int, Stage]],
        lists: ScheduleColumns,
        fineness: Fineness,
        cache: ProgramCache,
    ) -> None:
        plan = self.plan = pricing.plan
        self.schedule, self.pricing, self.stages = schedule, pricing, stages
        self.blocking, self.lists, self.table = not plan.scenario.parallelism.p2p_overlap, lists, KindTable()
        self.messages = Messages(schedule, pricing, self.table)
        if has_jitter(plan.scenario):  # drawn for every computation, so each must be a task
            fineness = replace(fineness, expand=True)
        self.expanded = fineness.expanded
        # The first forward of a stage waits for its parameters, and the last backward launches the remaining gradient
        # reductions. These two actions therefore have their own programs.
        ends, early = lists.first_and_last, lists.until_first_backward
        self.programs = ActionPrograms(ends, pricing, stages, self.table, self.messages, cache, fineness, early)
        self.placements = Placements(lists, self.programs)
        # One lookup for all steps, in the shape of `direction`. W has direction NEITHER and so no hop.
        self._takes_input = self.messages.needs[self.lists.stage, self.lists.direction] != NO_HOP
        self._equal_steps = [self._steps_of_pipeline(pipeline) for pipeline in range(plan.pipelines)]

    def _steps_of_pipeline(self, pipeline: int) -> tuple[Ints, list[list[int]]]:
        """Number the steps of a pipeline that run the same; see `ScheduleColumns.equal_steps`."""
        numbers, number_of_stage = dict[Stage, int](), []
        for stage, rank in enumerate(self.schedule.rank_of_stage):
            own = self.stages[rank * self.plan.pipelines + pipeline][stage]
            number_of_stage.append(numbers.setdefault(own, len(numbers)))
        deferred = max((s.deferral.micro_batches for s in numbers if s.deferral is not None), default=0)
        return self.lists.equal_steps(ints(number_of_stage), self._takes_input, deferred)

    def run(self) -> Built:
        """Build the whole step.

        Raises:
            Deadlock: if an action waits for a message that nobody sends. A circle is found when the graph runs.
        """
        counts = [self._place_class(i) for i in range(len(self.plan.classes))]
        assembled, moved = AssembledGraph(self.placements, self.messages, self.blocking), None
        columns = assembled.columns
        if self.placements.collective_parts:
            columns, moved = merge_collectives(columns, self.placements.collective_parts, self.table)
        graph = TaskGraph(self.plan.classes, self.table, columns)
        shares, traffic = Shares(), list[dict[tuple[str, str], float]]()
        # Floats are summed in a fixed order, so that equal steps give equal sums to the last bit.
        for route in self.messages.all_routes():
            shares[route.share] = shares.get(route.share, 0.0) + route.total_s
        for c, programs in zip(self.plan.classes, counts, strict=True):
            traffic.append({})
            for program, count in programs.items():
                # Shares count every rank of the class, traffic counts one rank.
                add_all(shares, program.shares, count * len(c.ranks))
                add_all(traffic[-1], program.traffic, count)
        actions = []
        for c, (first, last) in zip(self.plan.classes, assembled.spans(moved), strict=True):
            listed = self.lists.of_rank(c.pipeline_rank)
            # An overlapped pair is one step of two actions, which both begin and end with the step.
            actions.append(ActionTasks(listed, first[listed.step], last[listed.step]))
        return Built(graph, shares, traffic, actions, counts)

    def _place_class(self, class_index: int) -> dict[CompiledProgram, int]:
        """Place all programs of one class of ranks; return them with the number of their runs."""
        pipeline_rank, stages = self.plan.classes[class_index].pipeline_rank, self.stages[class_index]
        self.placements.begin_class(class_index, jitter_of(self.plan.scenario, self.plan.classes[class_index].rank))
        before = self._place_once("ALL_GATHER", [(self.programs.prologue(class_index, s), s) for s in stages])
        counts = self._place_steps(class_index, pipeline_rank, before)
        deferring = [s for s, stage in stages.items() if stage.deferral is not None]
        put_off = self._place_once("W", [(self.programs.put_off(class_index, s), s) for s in deferring])
        after = self._place_once("OPTIMIZER", [(self.programs.epilogue(class_index), -1)])
        self.placements.end_class(bool(after))
        # Seconds by source are summed in this order: prologues, actions, what these put off, epilogue.
        programs = Counter(before)
        programs.update(counts)
        programs.update(put_off + after)
        return programs

    def _place_once(self, name: str, programs: Sequence[tuple[CompiledProgram, int]]) -> list[CompiledProgram]:
        """Place programs that run once a step, each given with its stage; return those that are not empty."""
        compiled, rows = list[CompiledProgram](), list[tuple[int, ...]]()
        for program, stage in programs:
            if program.tasks:
                compiled.append(program)
                # Every placement needs a step, which gives its stage. The schedule does not list this one, so a new
                # step without a micro-batch is appended. Its kind F is never shown.
                rows.append((*self.placements.one_by_one(program, name), len(self.placements.steps), 0))
                self.placements.steps.append((Action(stage, Kind.F, -1),))
        if rows:
            self.placements.add(ints(rows).T)
        return compiled

    def _place_steps(self, class_index: int, rank: int, before: list[CompiledProgram]) -> dict[CompiledProgram, int]:
        """Place a class's actions; return their programs in the order of first use, with the number of runs."""
        begin, end = self.lists.begin[rank : rank + 2]
        number_of_step, examples_of = self._equal_steps[class_index % self.plan.pipelines]
        # Equal steps differ only in their micro-batch, so one example of each is made; `pick` gives its index.
        examples = examples_of[rank]
        pick = number_of_step[begin:end] - number_of_step[examples[0]]  # a rank's numbers are consecutive
        placed = [self.programs.of(class_index, self.lists.steps[i]) for i in examples]
        counts, programs = np.bincount(pick).tolist(), dict[CompiledProgram, int]()
        # Programs are counted in the order of first use, for equal sums to the last bit. Two examples may have one
        # program, so their counts add up.
        for i in sorted(range(len(placed)), key=examples.__getitem__):
            programs[placed[i].program] = programs.get(placed[i].program, 0) + counts[i]
        alone = self._stand_alone(class_index, placed, pick, range(begin, end), before)
        # Equal steps mostly have equal placements, so each example is placed once. With jitter (a draw for every step,
        # in order) or with a mixture of whole and expanded steps, each step is placed by itself.
        if all(alone) or not (any(alone) or self.placements.jitter):
            pattern, kinds_at = ints([self.placements.step(p, alone[0]) for p in placed])[pick].T
        else:
            step_by_step = zip(pick.tolist(), alone, strict=True)
            pattern, kinds_at = ints([self.placements.step(placed[i], one) for i, one in step_by_step]).T
        steps = np.arange(begin, end)
        self.placements.add(np.stack([pattern, kinds_at, steps, np.ones(len(pick), dtype=np.int64)]))
        return programs

    def _stand_alone(
        self, class_index: int, placed: list[PlacedProgram], pick: Ints, steps: range, before: list[CompiledProgram]
    ) -> list[bool]:
        """Tell for each step whether one task can represent it; `before`: the prologue's programs.

        One task is exact if nothing outside the program can delay a part of it: then all its tasks start at fixed
        offsets from its first one, and its end is its start plus `makespan_s`. Three things may delay a part. The first
        is something that a later task waits for; `PlacedProgram.alone` excludes that. The second is communication that
        earlier actions left running on a stream that the program waits for (`running`): the program's own communication
        would queue behind it. The third is an input, if a part of the program starts without it (`early`): the two
        parts would not keep their offsets.
        """
        # `running` is overestimated, because the ends of communications are unknown before the run. A step that is
        # expanded without need costs time and changes no result.
        running = {stream for program in before for stream in _left_running(program)}
        ever_running = running.union(*(p.program.launch_streams for p in placed))
        unhindered = all(p.alone and not p.early and ever_running.isdisjoint(p.program.joined) for p in placed)
        # Without gradient buckets and prefetched parameters nothing is left running.
        if unhindered and not self.expanded:
            return [True] * len(pick)
        if not any(p.alone for p in placed):
            return [False] * len(pick)
        out, waits = list[bool](), bool(before and before[-1].tail)
        # The next step waits for a blocking send, as Megatron waits for its batch of requests. Such a wait delays a
        # part of an early program just as an input does.
        sends = self.messages.gives[self.lists.stage[steps], self.lists.direction[steps]] != NO_HOP
        takes, posts = self._takes_input[steps].any(axis=1), self.blocking & sends.any(axis=1)
        takes |= self.blocking and bool(self.schedule.joint)  # a batch has messages of other actions, too
        for i, step, takes_input, posts_send in zip(pick.tolist(), steps, takes.tolist(), posts.tolist(), strict=True):
            p, waits = placed[i], waits or takes_input
            alone = p.alone and not (p.early and waits) and running.isdisjoint(p.program.joined)
            alone = alone and (class_index, self.lists.steps[step][0]) not in self.expanded
            running.update(p.program.launch_streams if alone else _left_running(p.program))
            waits = posts_send or not (alone or not p.program.tail)  # whether the next step waits for these
            out.append(alone)
        return out


def _left_running(program: CompiledProgram) -> set[str]:
    """Return the streams on which a program placed task by task leaves communication running."""
    return {program.tasks[i].stream for _, i in program.open}
