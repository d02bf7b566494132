"""Plan + schedule + prices → task graph: what every class of ranks runs, joined by messages and collectives.

Point-to-point messages have one task on both ends' streams. With `p2p_overlap: false` (as Megatron's blocking
send_forward_recv_backward) a rank posts after each action, as one batch, the send of its result and the receive
that its next action needs, and goes on when both are done; so a message starts when its producer has ended and
the receiver has posted. With overlap a message starts when its producer has ended; only the action that needs it
waits. Messages queue in the order in which a rank sends them.

Each class of ranks places its programs: a prologue, its actions, an epilogue, each as one task where that gives equal
times (`StepBuilder._stand_alone`), else task by task. `assemble` numbers the tasks and joins them. All tables of a
small example: `docs/graph.md`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from sim.core.actions import Action, Kind, Schedule
from sim.graph.assemble import AssembledGraph
from sim.graph.compiled import ActionPrograms, Fineness, PlacedProgram, ProgramCache
from sim.graph.messages import NO_HOP, Messages
from sim.graph.placements import Placements
from sim.graph.schedule_columns import RankList, ScheduleColumns
from sim.graph.shared_collectives import merge_collectives
from sim.graph.taskgraph import Ints, KindTable, TaskGraph, ints
from sim.prices.rank_prices import Pricing
from sim.programs.compile import CompiledProgram
from sim.programs.stages import Stage
from sim.ranks.faults import has_jitter, jitter_of
from sim.ranks.plan import Plan

K = TypeVar("K")


class ActionTasks(NamedTuple):
    """The actions that a class of ranks runs, with the first and the last task of each in the graph."""

    listed: RankList
    first: Ints
    last: Ints


class Built(Struct, frozen=True):
    """A task graph and what it was built from: seconds by (kind, source, uncertainty), and of each class of ranks bytes
    by (kind, group), its actions in order, and its programs with how often each runs."""

    graph: TaskGraph
    shares: dict[tuple[str, str, float], float]
    traffic: list[dict[tuple[str, str], float]]
    actions: list[ActionTasks]
    programs: list[dict[CompiledProgram, int]]


class StepBuilder:
    """Places the programs of all classes of ranks and assembles the graph of the step."""

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        pricing: Pricing,
        stages: list[dict[int, Stage]],
        lists: ScheduleColumns,
        fineness: Fineness,
        cache: ProgramCache,
    ) -> None:
        self.plan, self.schedule, self.pricing, self.stages = plan, schedule, pricing, stages
        self.blocking, self.lists, self.table = not plan.scenario.parallelism.p2p_overlap, lists, KindTable()
        self.messages = Messages(plan, schedule, pricing, self.table)
        if has_jitter(plan.scenario):  # drawn for every computation, so each must be a task
            fineness = replace(fineness, expand=True)
        self.expanded = fineness.expanded
        # The first forward of a stage waits for its parameters, and the last backward launches what is left of its
        # gradients. These two actions therefore have programs of their own.
        ends = lists.first_and_last
        self.programs = ActionPrograms(plan, ends, pricing, stages, self.table, self.messages, cache, fineness)
        self.placements = Placements(lists, self.programs)
        # One lookup for all steps, in the shape of `direction`. W has direction NEITHER, which has no hop, so it takes
        # nothing.
        self._takes_input = self.messages.needs[self.lists.stage, self.lists.direction] != NO_HOP
        self._equal_steps = [self._steps_of_lane(lane) for lane in range(plan.lanes)]

    def _steps_of_lane(self, lane: int) -> tuple[Ints, list[list[int]]]:
        """Which steps of a lane run the same; see `ScheduleColumns.equal_steps`."""
        numbers, lanes = dict[tuple[int, int], int](), self.plan.lanes
        number_of_stage = []
        for stage, rank in enumerate(self.schedule.rank_of_stage):
            # The first lane sets the order of communications in an overlapped pair. Two stages are therefore alike only
            # if their leaders are too.
            own, leading = (self.stages[rank * lanes + i][stage] for i in (lane, 0))
            number_of_stage.append(numbers.setdefault((id(own), id(leading)), len(numbers)))
        return self.lists.equal_steps(ints(number_of_stage), self._takes_input)

    def run(self) -> Built:
        """The whole step.

        Raises:
            Deadlock: if an action waits for what never comes; names some. A circle is found when the graph runs.
        """
        counts = [self._place_class(i) for i in range(len(self.plan.classes))]
        assembled, moved = AssembledGraph(self.placements, self.messages, self.blocking), None
        columns = assembled.columns
        if self.placements.collective_parts:
            columns, moved = merge_collectives(columns, self.placements.collective_parts, self.table)
        graph = TaskGraph(self.plan.classes, self.table, columns)
        shares, traffic = dict[tuple[str, str, float], float](), list[dict[tuple[str, str], float]]()
        # Floats are summed in a fixed order, messages first, so that equal steps give equal sums to the last bit.
        for route in self.messages.all_routes():
            shares[route.share] = shares.get(route.share, 0.0) + route.total_s
        for c, programs in zip(self.plan.classes, counts, strict=True):
            traffic.append({})
            for program, count in programs.items():
                # Shares say what the whole cluster's time rests on, so they count every rank that was folded into the
                # class. Traffic is that of one rank.
                _add_times(shares, program.shares, count * len(c.ranks))
                _add_times(traffic[-1], program.traffic, count)
        actions = []
        for c, (first, last) in zip(self.plan.classes, assembled.spans(moved), strict=True):
            listed = self.lists.of_rank(c.pipeline_rank)
            # An overlapped pair is one step of two actions. Both actions then begin and end with that step.
            actions.append(ActionTasks(listed, first[listed.step], last[listed.step]))
        return Built(graph, shares, traffic, actions, counts)

    def _place_class(self, class_index: int) -> dict[CompiledProgram, int]:
        """Place all that one class of ranks runs; returns its programs, each with how often it runs."""
        pipeline_rank, stages = self.plan.classes[class_index].pipeline_rank, self.stages[class_index]
        self.placements.begin_class(class_index, jitter_of(self.plan.scenario, self.plan.classes[class_index].rank))
        before = self._place_once("ALL_GATHER", [(self.programs.prologue(class_index, s), s) for s in stages])
        counts = self._place_steps(class_index, pipeline_rank, before)
        after = self._place_once("OPTIMIZER", [(self.programs.epilogue(class_index), -1)])
        self.placements.end_class(bool(after))
        # The order of counting is that of summing seconds by source: prologues, actions, epilogue.
        programs = Counter(before)
        programs.update(counts)
        programs.update(after)
        return programs

    def _place_once(self, name: str, programs: Sequence[tuple[CompiledProgram, int]]) -> list[CompiledProgram]:
        """Place programs that run once a step, each given with its stage; returns those that are not empty."""
        compiled, rows = list[CompiledProgram](), list[tuple[int, ...]]()
        for program, stage in programs:
            if program.tasks:
                compiled.append(program)
                # Every placement needs a step, which says what stage it belongs to. No schedule lists this one, so a
                # new step without a micro-batch is appended. Its kind F is never shown.
                rows.append((*self.placements.one_by_one(program, name), len(self.placements.steps), 0))
                self.placements.steps.append((Action(stage, Kind.F, -1),))
        # `reshape` keeps four columns where nothing was placed.
        self.placements.add(ints(rows).reshape(-1, 4).T)
        return compiled

    def _place_steps(self, class_index: int, rank: int, before: list[CompiledProgram]) -> dict[CompiledProgram, int]:
        """Place a class's actions; returns their programs, in the order in which they come up, with their counts."""
        begin, end = self.lists.begin[rank : rank + 2]
        number_of_step, examples_of = self._equal_steps[class_index % self.plan.lanes]
        # Equal steps share all but their micro-batch: one example of each is fitted, `pick` says which it is.
        examples = examples_of[rank]
        pick = number_of_step[begin:end] - number_of_step[examples[0]]  # a rank's numbers follow each other
        placed = [self.programs.of(class_index, self.lists.steps[i]) for i in examples]
        counts, programs = np.bincount(pick).tolist(), dict[CompiledProgram, int]()
        # Programs are counted in the order in which the rank first runs them, for the same sums to the last bit. Two
        # examples may share one program, so their counts add up.
        for i in sorted(range(len(placed)), key=examples.__getitem__):
            programs[placed[i].program] = programs.get(placed[i].program, 0) + counts[i]
        alone = self._stand_alone(class_index, placed, pick, range(begin, end), before)
        # Equal steps mostly take equal placements, so each example is placed once. Jitter needs a draw for every step,
        # in the order of the rank's actions, and so does a mixture of whole and expanded steps.
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
        """Which steps stand as one task each; `before`: the prologue's programs.

        One task is correct where nothing outside can reach into the program: then all of its tasks start at fixed
        offsets from its first, so its end is its start plus `makespan_s` wherever it stands. Three things can reach in.
        Something that a later task waits for: `PlacedProgram.alone` excludes that. Communication that earlier actions
        left running on a stream that the program waits on (`running`): its own would queue behind. And an input that
        the program waits for, if part of it starts without (`early`): the two parts would not keep their offsets.
        """
        # What runs is overestimated on purpose: nobody knows before the run when a stream falls silent. A step that is
        # expanded without need costs time and changes no result.
        running = {stream for program in before for stream in _left_running(program)}
        ever_running = running.union(*(p.program.launch_streams for p in placed))
        unhindered = all(p.alone and not p.early and ever_running.isdisjoint(p.program.joined) for p in placed)
        # Without gradient buckets and prefetched parameters nothing is left running: one answer serves all steps.
        if unhindered and not self.expanded:
            return [True] * len(pick)
        if not any(p.alone for p in placed):
            return [False] * len(pick)
        out, waits = list[bool](), bool(before and before[-1].tail)
        # A blocking send is waited for by the next step, as Megatron waits for its batch of requests. Such a wait
        # reaches into an early program just as an input does.
        sends = self.messages.gives[self.lists.stage[steps], self.lists.direction[steps]] != NO_HOP
        takes, posts = self._takes_input[steps].any(axis=1), self.blocking & sends.any(axis=1)
        for i, step, takes_input, posts_send in zip(pick.tolist(), steps, takes.tolist(), posts.tolist(), strict=True):
            p, waits = placed[i], waits or takes_input
            alone = p.alone and not (p.early and waits) and running.isdisjoint(p.program.joined)
            alone = alone and (class_index, self.lists.steps[step][0]) not in self.expanded
            running.update(p.program.launch_streams if alone else _left_running(p.program))
            waits = posts_send or not (alone or not p.program.tail)  # the next step waits for these
            out.append(alone)
        return out


def _left_running(program: CompiledProgram) -> set[str]:
    """Streams on which a program placed task by task leaves something running."""
    return {program.tasks[i].stream for _, i in program.open}


def _add_times(total: dict[K, float], each: dict[K, float], count: int) -> None:
    for key, value in each.items():
        total[key] = total.get(key, 0.0) + value * count
