"""A step's time at the least in the order of its schedule: one task for each action, run by the simulator's engine.

Actions take what their compiled programs take alone, which is all that the engine's full graph of the same step is
made of, so this time is never above the simulated one but for the rounding of sums. Left out, because it makes a step
slower only: messages that queue, receivers that are late, ranks that wait for others in a collective, links that are
shared, and what the first and last micro-batches do besides.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim.core.actions import Kind
from sim.core.timeline import Detail
from sim.engine.run import run_static
from sim.graph.compiled import ActionPrograms
from sim.graph.messages import NEITHER, NO_HOP, Messages
from sim.graph.schedule_columns import NUMBER, ScheduleColumns
from sim.graph.taskgraph import Columns, Floats, Ints, KindTable, Launches, TaskGraph, Waits, ints
from sim.programs.compile import CompiledProgram
from sim.ranks.faults import has_jitter
from sim.simulation import Prepared


class _Seconds(NamedTuple):
    """Seconds of each step of the lists once its input is there, and by how much longer it takes after the step before
    it on its rank; from a rank's start to the end of each stage's first gathers; of what follows its last action."""

    after_input: Floats
    ahead: Floats
    gathered: Floats
    end: Floats


def least_time_s(step: Prepared) -> float:
    """Seconds that a step takes at the least; 0 with jitter, which may be any."""
    # Jitter makes actions shorter as well as longer, so priced seconds are no bound.
    if has_jitter(step.plan.scenario):
        return 0.0
    messages = Messages(step.plan, step.schedule, step.pricing, KindTable())
    programs = ActionPrograms(
        step.plan, step.lists.first_and_last, step.pricing, step.stages, KindTable(), messages, step.cache
    )
    # Any set of lanes gives a bound. The first and the last catch uneven context splits.
    lanes = {0, step.plan.lanes - 1}  # those whose work differs the most
    return max(_lane_s(step, programs, messages, lane) for lane in lanes)


def _lane_s(step: Prepared, programs: ActionPrograms, messages: Messages, lane: int) -> float:
    """The least time by one rank of each pipeline rank, as if the others kept pace."""
    lists, graph = step.lists, _Graph()
    s = _seconds(step, programs, lane)
    # Rank r has steps begin[r] to begin[r + 1] - 1. They are the graph's first tasks, with the same numbers.
    begin = ints(lists.begin)
    first = np.zeros(len(lists.steps), dtype=bool)
    first[begin[:-1]] = True
    steps = graph.add(s.after_input)
    later = steps[~first]
    # A rank runs its list in order, one step after the other.
    graph.wait(later - 1, later)

    # A rank that waits for its input gathers parameters meanwhile: these wait for the step before alone.
    gathers = np.flatnonzero(s.ahead > 0)
    # A step takes `after_input` from its input on, and `ahead` more from the step before it on.
    gathering = graph.add(s.ahead[gathers])
    graph.wait(gathering, gathers)
    follows = ~first[gathers]
    graph.wait(gathers[follows] - 1, gathering[follows])

    producer, consumer, seconds = _sent(step, messages, lane)
    # Each message is a task of its own on no stream: messages that queue on one link would only end later.
    message = graph.add(seconds)
    graph.wait(producer, message)
    graph.wait(message, consumer)
    if not step.plan.scenario.parallelism.p2p_overlap:  # a rank goes on when its message has gone
        # True where the next step is on the same rank; the message of a rank's last step holds nothing up.
        goes_on = np.append(~first[1:], False)[producer]
        graph.wait(message[goes_on], producer[goes_on] + 1)

    # A first forward cannot end before its parameters are gathered. The task before it takes what is missing.
    forwards = _first_forwards(step)
    graph.wait(graph.add(np.maximum(0.0, s.gathered - s.after_input[forwards])), forwards)
    # After the last step of each rank: what its communication still takes, and the optimizer.
    graph.wait(begin[1:] - 1, graph.add(s.end))
    return graph.run()


class _Graph:
    """Tasks and waits by column, until they are run."""

    def __init__(self) -> None:
        self.seconds: list[Floats] = []
        self.waits: list[tuple[Ints, Ints]] = []
        self.count = 0

    def add(self, seconds: Floats) -> Ints:
        """Numbers of new tasks that take so long each."""
        self.seconds.append(seconds)
        self.count += len(seconds)
        return np.arange(self.count - len(seconds), self.count)

    def wait(self, before: Ints, after: Ints) -> None:
        """Task after[i] waits for before[i]."""
        self.waits.append((before, after))

    def run(self) -> float:
        """When the last task ends."""
        # All tasks are of one kind and on no stream. Waits alone order them, so one pass finds all times.
        shown, none = KindTable(), np.full(self.count, -1)
        kind = np.full(self.count, shown.new_kind(Detail("")))
        waits = Waits(*(np.concatenate(side) for side in zip(*self.waits, strict=True)))
        columns = Columns(np.concatenate(self.seconds), kind, none, [], waits, Launches())
        return run_static(TaskGraph((), shown, columns)).step_s


def _seconds(step: Prepared, programs: ActionPrograms, lane: int) -> _Seconds:
    """Of the programs that the ranks of a lane run."""
    lists, lanes = step.lists, step.plan.lanes
    after_input, ahead, end = list[Floats](), list[Floats](), list[float]()
    gathered = np.zeros(len(step.schedule.rank_of_stage))
    for rank in range(len(step.schedule.ranks)):
        # Classes are numbered rank by rank of the pipeline, and lane by lane within.
        class_index, begin, end_ = rank * lanes + lane, *lists.begin[rank : rank + 2]
        # Thousands of steps have a dozen programs; each is compiled once and dealt out by number.
        examples, number = _alike(lists, begin, end_)
        templates = [programs.compiled(class_index, lists.steps[i]) for i in examples]
        after_s = np.array([t.after_input_s for t in templates])
        after_input.append(after_s[number])
        ahead.append((np.array([t.done_s for t in templates]) - after_s)[number])
        for stage in step.stages[class_index]:
            gathered[stage] = max(programs.prologue(class_index, stage).ends_s, default=0.0)
        left_s = _left_s(programs.compiled(class_index, lists.steps[end_ - 1]))
        end.append(left_s + programs.epilogue(class_index).done_s)
    return _Seconds(np.concatenate(after_input), np.concatenate(ahead), gathered, np.array(end))


def _alike(lists: ScheduleColumns, begin: int, end: int) -> tuple[list[int], Ints]:
    """Examples of the steps from `begin` to `end`, and by step the number of its own: steps that differ in their
    micro-batch alone have one, from the middle of a list if there is any, as those at its ends do more."""
    mine = slice(begin, end)
    work = lists.stage[mine] * len(NUMBER) + lists.kind[mine]
    number = work[:, 0]
    if work.shape[1] > 1:
        paired = lists.direction[mine, 1] != NEITHER
        # A pair's number has both actions in it, and lies above all single numbers.
        number = number + np.where(paired, work[:, 1] + 1, 0) * (int(work.max(initial=0)) + 1)
    # `ends` marks the first forward and the last gradients of a stage, which gather and reduce more. A stable sort puts
    # them last, so np.unique finds a steady step first.
    middle_first = np.argsort(lists.ends[mine].max(axis=1), kind="stable")
    _, first, of_ordered = np.unique(number[middle_first], return_index=True, return_inverse=True)
    of_step = np.empty(len(number), dtype=np.int64)
    of_step[middle_first] = of_ordered
    return (begin + middle_first[first]).tolist(), of_step


def _left_s(template: CompiledProgram) -> float:
    """For how long communication goes on after an action."""
    return max(0.0, max(template.ends_s, default=0.0) - template.done_s)


def _sent(step: Prepared, messages: Messages, lane: int) -> tuple[Ints, Ints, Floats]:
    """Of all messages the steps that give and that take them, and their seconds."""
    lists = step.lists
    needs, gives = (hops[lists.stage, lists.direction] for hops in (messages.needs, messages.gives))
    # [hops, micro-batches]: the step that takes a message.
    taker = np.full((len(messages.hops) + 1, step.schedule.micro_batches), -1)  # the last row is of NO_HOP
    taker[needs, lists.micro_batch] = np.arange(len(lists.steps))[:, None]
    # Weight gradients and a chain's ends send nothing.
    sent = (lists.direction != NEITHER) & (gives != NO_HOP)
    hop, (producer, _) = gives[sent], np.nonzero(sent)
    # By hop: all micro-batches' messages on a hop have one size and one route.
    seconds = np.array([messages.route(lane, i).seconds for i in range(len(messages.hops))])
    return producer, taker[hop, lists.micro_batch[sent]], seconds[hop]


def _first_forwards(step: Prepared) -> Ints:
    """The step of each stage's first forward."""
    index, column = np.nonzero((step.lists.kind == NUMBER[Kind.F]) & (step.lists.ends > 0))
    found = np.zeros(len(step.schedule.rank_of_stage), dtype=np.int64)
    found[step.lists.stage[index, column]] = index
    return found
