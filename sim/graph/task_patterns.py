"""Patterns of tasks that are placed together: a program's tasks one by one, or one task for all of them and the
communications that it leaves running.

A pattern says which of its tasks wait for which, and which join the tasks that its rank runs before and after. It does
not depend on time, rank or micro-batch, so many placements share it.
"""

from __future__ import annotations

from typing import NamedTuple

from sim.graph.compiled import SingleTaskForm
from sim.programs.compile import COMPUTE, CompiledProgram
from sim.programs.data_parallel import DP


class TaskPattern(NamedTuple):
    """The tasks of a placement, by number, and their waits.

    `waits`: pairs of tasks; the second waits for the end of the first. `launches`: a task, and the seconds after the
    start of task 0 before which it does not start. `begins`: tasks that wait for the rank's last computation and for
    the `tail` of the placement before. `takes`: tasks that wait for the placement's messages. `first`, `last`: the
    first and last task on each stream; a stream keeps the rank's order. `tail`: tasks that the next placement waits
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
    """One task for a program, and what it leaves running; `needed`: handles of gathers that it waits for."""
    # The whole stands on the compute stream, whose order already puts it after what the rank computed before. It
    # therefore has no `begins` of its own.
    first, last = {COMPUTE: 0}, {COMPUTE: 0}
    waits, launches = list[tuple[int, int]](), list[tuple[int, float]]()
    for stream, (offset, lags_s) in zip(single.streams, single.launched, strict=True):
        first[stream], last[stream] = offset, offset + len(lags_s) - 1
        launches += enumerate(lags_s, offset)
        # Each has its own earliest start, but one stream: NCCL runs them one after another.
        waits += [(i, i + 1) for i in range(offset, last[stream])]
    left = {stream: last[stream] for stream in single.streams}
    external = [(0, needed)] if needed else []
    return TaskPattern(single.seconds, waits, launches, [], [0], first, last, (), left, external, (), (0, 0))


def one_by_one(program: CompiledProgram) -> TaskPattern:
    """Every task of a program. Parameter gathers (stream "dp") need no input of this micro-batch; the rest does."""
    tasks, first, last = program.tasks, dict[str, int](), dict[str, int]()
    waits, rooted, takes = list[tuple[int, int]](), dict[int, None](), list[int]()
    for i, task in enumerate(tasks):
        stream, deps = task.stream, task.deps
        waits += [(d, i) for d in deps]
        if stream != DP:
            # What comes after a task that waits for the input need not wait for it again. Fewer pairs, the same times.
            if rooted.keys().isdisjoint(deps):
                takes.append(i)
            rooted[i] = None
        if stream not in first:
            first[stream] = i
        # The order on the stream is a wait like any other, unless the task waits for its predecessor anyway.
        elif last[stream] not in deps:
            waits.append((last[stream], i))
        last[stream] = i
    # A communication that runs on is not the action's end: what needs its result waits for computation and tail alone.
    ends = [i for i in rooted if i in program.tail or tasks[i].stream == COMPUTE]  # gathers end before
    end = max(ends, key=program.ends_s.__getitem__, default=len(tasks) - 1)
    # An action begins with its first task that needs input. A gather that ran ahead would make it look longer than it
    # is, and its activations would count as held too early.
    return TaskPattern(
        [task.seconds for task in tasks],
        waits,
        [],
        [i for i, task in enumerate(tasks) if not task.deps],
        takes,
        first,
        last,
        program.tail,
        {tasks[i].stream: i for _, i in program.open},
        [(i, task.external) for i, task in enumerate(tasks) if task.external],
        program.open,
        (next(iter(rooted), 0), end),
    )
