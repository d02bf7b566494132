"""Compute a step's least time in the order of its schedule: the engine runs a graph with one task for each action.

Each action takes as long as its compiled program takes alone. The full graph consists of the same programs, so the
least time is never above the simulated time, except for the rounding of sums. This graph leaves out effects that only
make a step slower: messages that queue, late receivers, ranks that wait for others in a collective, shared links, and
the additional work of first and last micro-batches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim.core.actions import Kind
from sim.core.columns import Floats, Ints, ints
from sim.core.timeline import Detail
from sim.engine.run import run_static
from sim.graph.compiled import ActionPrograms
from sim.graph.messages import NEITHER, NO_HOP, Messages
from sim.graph.schedule_columns import NUMBER, ScheduleColumns
from sim.graph.taskgraph import Columns, KindTable, Launches, TaskGraph, Waits
from sim.ranks.faults import has_jitter
from sim.simulation import Prepared


class _Seconds(NamedTuple):
    """Hold seconds of the steps of one pipeline's schedule.

    `after_input`: of each step, after its input arrived. `ahead`: by how much each step takes longer, counted from the
    end of the step before it on its rank. `gathered`: from the rank's start to the end of each stage's first gathers.
    `end`: of each rank, after its last action.
    """

    after_input: Floats
    ahead: Floats
    gathered: Floats
    end: Floats


def least_time_s(step: Prepared) -> float:
    """Return the least time of a step in seconds; 0 with jitter, which may shorten actions."""
    # Jitter may make actions shorter, so priced seconds are no bound.
    if has_jitter(step.plan.scenario):
        return 0.0
    messages = Messages(step.schedule, step.pricing, KindTable())
    ends, early = step.lists.first_and_last, step.lists.until_first_backward
    programs = ActionPrograms(ends, step.pricing, step.stages, KindTable(), messages, step.cache, early=early)
    # Any set of pipelines gives a bound. With uneven context splits the first and the last pipeline differ most.
    pipelines = {0, step.plan.pipelines - 1}
    return max(_pipeline_s(step, programs, messages, pipeline) for pipeline in pipelines)


def _pipeline_s(step: Prepared, programs: ActionPrograms, messages: Messages, pipeline: int) -> float:
    """Return the least time in seconds by one pipeline alone, as if the other pipelines never delayed it."""
    lists, graph = step.lists, _Graph()
    s = _seconds(step, programs, pipeline)
    # Rank r has steps begin[r] to begin[r + 1] - 1. They are the graph's first tasks and keep their numbers.
    begin = ints(lists.begin)
    first = np.zeros(len(lists.steps), dtype=bool)
    first[begin[:-1]] = True
    steps = graph.add(s.after_input)
    later = steps[~first]
    # A rank runs the steps of its list one after the other.
    graph.wait(later - 1, later)

    # A rank gathers parameters while it waits for its input: gathers wait only for the step before.
    gathers = np.flatnonzero(s.ahead > 0)
    # A step takes `after_input` from its input on, and `ahead` + `after_input` from the end of the step before on.
    gathering = graph.add(s.ahead[gathers])
    graph.wait(gathering, gathers)
    follows = ~first[gathers]
    graph.wait(gathers[follows] - 1, gathering[follows])

    producer, consumer, seconds = _sent(step, messages, pipeline)
    # Each message is a task on no stream: messages that queue would only end later.
    message = graph.add(seconds)
    graph.wait(producer, message)
    graph.wait(message, consumer)
    if not step.plan.scenario.parallelism.p2p_overlap:  # a rank goes on when its message is sent
        # True if the next step is on the same rank; the message of a rank's last step delays nothing.
        goes_on = np.append(~first[1:], False)[producer]
        if not step.schedule.joint:  # else it may run a backward first
            graph.wait(message[goes_on], producer[goes_on] + 1)

    # A first forward cannot end before its parameters are gathered. A task before it takes the missing time.
    forwards = _first_forwards(step)
    graph.wait(graph.add(np.maximum(0.0, s.gathered - s.after_input[forwards])), forwards)
    # After the last step of each rank: what its communication still takes, and the optimizer.
    graph.wait(begin[1:] - 1, graph.add(s.end))
    return graph.run()


class _Graph:
    """Collect tasks and waits as columns, and run them."""

    def __init__(self) -> None:
        self.seconds: list[Floats] = []
        self.waits: list[tuple[Ints, Ints]] = []
        self.count = 0

    def add(self, seconds: Floats) -> Ints:
        """Add tasks that take these seconds, and return their numbers."""
        self.seconds.append(seconds)
        self.count += len(seconds)
        return np.arange(self.count - len(seconds), self.count)

    def wait(self, before: Ints, after: Ints) -> None:
        """Make task after[i] wait for task before[i]."""
        self.waits.append((before, after))

    def run(self) -> float:
        """Return the time in seconds at which the last task ends."""
        # All tasks are of one kind and on no stream: only waits order them.
        shown, none = KindTable(), np.full(self.count, -1)
        kind = np.full(self.count, shown.new_kind(Detail("")))
        waits = Waits(*(np.concatenate(side) for side in zip(*self.waits, strict=True)))
        columns = Columns(np.concatenate(self.seconds), kind, none, [], waits, Launches())
        return run_static(TaskGraph((), shown, columns)).step_s


def _seconds(step: Prepared, programs: ActionPrograms, pipeline: int) -> _Seconds:
    """Return the seconds of the programs that the ranks of a pipeline run."""
    lists, pipelines = step.lists, step.plan.pipelines
    after_input, ahead, end = list[Floats](), list[Floats](), list[float]()
    gathered = np.zeros(len(step.schedule.rank_of_stage))
    for rank in range(len(step.schedule.ranks)):
        # Classes are numbered by pipeline rank, then by pipeline.
        class_index, begin, end_ = rank * pipelines + pipeline, *lists.begin[rank : rank + 2]
        # Thousands of steps have a dozen different programs; each is compiled once.
        examples, number = _alike(lists, begin, end_)
        compiled = [programs.compiled(class_index, lists.steps[i]) for i in examples]
        after_s = np.array([t.after_input_s for t in compiled])
        after_input.append(after_s[number])
        ahead.append((np.array([t.done_s for t in compiled]) - after_s)[number])
        for stage in step.stages[class_index]:
            gathered[stage] = max(programs.prologue(class_index, stage).ends_s, default=0.0)
        last = programs.compiled(class_index, lists.steps[end_ - 1])
        # For so many seconds communication goes on after the action.
        left_s = max(0.0, max(last.ends_s, default=0.0) - last.done_s)
        end.append(left_s + programs.epilogue(class_index).done_s)
    return _Seconds(np.concatenate(after_input), np.concatenate(ahead), gathered, np.array(end))


def _alike(lists: ScheduleColumns, begin: int, end: int) -> tuple[list[int], Ints]:
    """Return examples of the steps from `begin` to `end`, and for each step the number of its example.

    Steps that differ only in their micro-batch share an example, from the middle of the list if possible: the first and
    the last micro-batch do more work.
    """
    mine = slice(begin, end)
    work = lists.stage[mine] * len(NUMBER) + lists.kind[mine]
    number = work[:, 0]
    if work.shape[1] > 1:
        paired = lists.direction[mine, 1] != NEITHER
        # A pair's number encodes both actions, and is above all numbers of single actions.
        number = number + np.where(paired, work[:, 1] + 1, 0) * (int(work.max(initial=0)) + 1)
    # `ends` marks the first forward and the last gradients of a stage, which gather and reduce more. A stable sort puts
    # them last, so np.unique finds a steady step first.
    middle_first = np.argsort(lists.ends[mine].max(axis=1), kind="stable")
    _, first, of_ordered = np.unique(number[middle_first], return_index=True, return_inverse=True)
    of_step = np.empty(len(number), dtype=np.int64)
    of_step[middle_first] = of_ordered
    return (begin + middle_first[first]).tolist(), of_step


def _sent(step: Prepared, messages: Messages, pipeline: int) -> tuple[Ints, Ints, Floats]:
    """Return, for all messages, the steps that send them, the steps that receive them, and their seconds."""
    lists = step.lists
    needs, gives = (hops[lists.stage, lists.direction] for hops in (messages.needs, messages.gives))
    # [hops, micro-batches]: the step that receives a message.
    taker = np.full((len(messages.hops) + 1, step.schedule.micro_batches), -1)  # the last row is of NO_HOP
    taker[needs, lists.micro_batch] = np.arange(len(lists.steps))[:, None]
    # Weight gradients and the ends of a chain send nothing.
    sent = (lists.direction != NEITHER) & (gives != NO_HOP)
    hop, (producer, _) = gives[sent], np.nonzero(sent)
    # All messages on a hop have one size and one route.
    seconds = np.array([messages.route(pipeline, i).seconds for i in range(len(messages.hops))])
    return producer, taker[hop, lists.micro_batch[sent]], seconds[hop]


def _first_forwards(step: Prepared) -> Ints:
    """Return the step of each stage's first forward."""
    index, column = np.nonzero((step.lists.kind == NUMBER[Kind.F]) & (step.lists.ends > 0))
    found = np.zeros(len(step.schedule.rank_of_stage), dtype=np.int64)
    found[step.lists.stage[index, column]] = index
    return found
