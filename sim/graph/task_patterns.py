"""Make patterns of tasks that are placed together.

A pattern has a program's tasks one by one, or one task for the program and the communications that it leaves running.
It says which of its tasks wait for which, and which connect to the tasks that its rank runs before and after. It does
not depend on time, rank or micro-batch, so many placements share it.
"""

from __future__ import annotations

from typing import NamedTuple

from sim.core.timeline import COMPUTE, DP
from sim.graph.compiled import SingleTaskForm
from sim.programs.compile import CompiledProgram
from sim.programs.step_end import LAST_INPUT_GRADIENT


class TaskPattern(NamedTuple):
    """Hold the tasks of a placement, by number, and their waits.

    `seconds`: of each task. `waits`: pairs of tasks; the second waits for the end of the first. `launches`: a task, and
    the seconds after the start of task 0 before which it does not start. `begins`: tasks that wait for the rank's last
    computation and for the `tail` of the placement before. `takes`: tasks that wait for the placement's messages.
    `first`, `last`:
    the first and last task on each stream; a stream keeps the rank's order. `tail`: tasks that the next placement waits
    for, besides the last computation. `open`: by stream, the last task that no task waits for. `external`: tasks with
    the handles of the prologue that they wait for. `handles`: the handles of tasks for which later ones may wait.
    `acts`: the tasks with which the action begins and ends.
    """

    seconds: list[float]
    waits: list[tuple[int, int]]
    launches: list[tuple[int, float]]
    begins: list[int]
    takes: list[int]
    first: dict[str, int]
    last: dict[str, int]
    tail: tuple[int, ...]
    open: dict[str, int]
    external: list[tuple[int, tuple[str, ...]]]
    handles: tuple[tuple[str, int], ...]
    acts: tuple[int, int]


def whole(single: SingleTaskForm, needed: tuple[str, ...]) -> TaskPattern:
    """Return one task for a program, and the communications that it leaves running; `needed`: handles it waits for."""
    # The compute stream's order puts the whole after the rank's earlier computation, so `begins` is empty.
    first, last = {COMPUTE: 0}, {COMPUTE: 0}
    waits, launches = list[tuple[int, int]](), list[tuple[int, float]]()
    for stream, (offset, lags_s) in zip(single.streams, single.launched, strict=True):
        first[stream], last[stream] = offset, offset + len(lags_s) - 1
        launches += enumerate(lags_s, offset)
        # Each launch has its own earliest start, but NCCL runs those of a stream one after another.
        waits += [(i, i + 1) for i in range(offset, last[stream])]
    left = {stream: last[stream] for stream in single.streams}
    external = [(0, needed)] if needed else []
    return TaskPattern(single.seconds, waits, launches, [], [0], first, last, (), left, external, (), (0, 0))


def one_by_one(program: CompiledProgram) -> TaskPattern:
    """Return every task of a program; all need the micro-batch's input, unless they are `early`."""
    tasks, first, last = program.tasks, dict[str, int](), dict[str, int]()
    waits, rooted, takes = list[tuple[int, int]](), dict[int, None](), list[int]()
    for i, task in enumerate(tasks):
        stream, deps = task.stream, task.deps
        waits += [(d, i) for d in deps]
        if not task.early:
            # A task that waits for a task with input need not wait for the input again.
            if rooted.keys().isdisjoint(deps):
                takes.append(i)
            rooted[i] = None
        if stream not in first:
            first[stream] = i
        # The order on a stream is a wait, unless the task waits for its predecessor anyway.
        elif last[stream] not in deps:
            waits.append((last[stream], i))
        last[stream] = i
    return TaskPattern(
        [task.seconds for task in tasks],
        waits,
        [],
        [i for i, task in enumerate(tasks) if not task.deps and LAST_INPUT_GRADIENT not in task.external],
        takes,
        first,
        last,
        program.tail,
        {tasks[i].stream: i for _, i in program.open},
        [(i, task.external) for i, task in enumerate(tasks) if task.external],
        program.open,
        acts(program),
    )


def acts(program: CompiledProgram) -> tuple[int, int]:
    """Return the tasks with which an action begins and ends.

    It begins with its first task that needs input. With a gather that runs ahead, the action would look too long, and
    its activations would count too early. It ends with its last computation or tail. Communication that is left running
    is not part of its end.
    """
    rooted = [i for i, task in enumerate(program.tasks) if task.stream != DP]
    ends = [i for i in rooted if i in program.tail or program.tasks[i].stream == COMPUTE]
    return (
        rooted[0] if rooted else 0,
        max(ends, key=program.ends_s.__getitem__, default=len(program.tasks) - 1),
    )


def around(program: CompiledProgram) -> tuple[float, float]:
    """Return the seconds of a program that stands as one task before its action begins, and after it ends."""
    if not program.tasks:  # a stage without layers
        return 0.0, 0.0
    first, last = acts(program)
    before_s = program.ends_s[first] - program.tasks[first].seconds
    return before_s, program.makespan_s - program.ends_s[last]
