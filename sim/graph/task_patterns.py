"""Tasks that are placed together: those of a program one by one, or one task for them all and what it leaves running.

A pattern says how its tasks hang together and where it joins what its rank does before and after; where each stands in
time, on which rank and for which micro-batch is none of its business, so one serves many.
"""

from __future__ import annotations

from typing import NamedTuple

from sim.graph.compiled import SingleTaskForm
from sim.programs.compile import COMPUTE, CompiledProgram
from sim.programs.data_parallel import DP


class TaskPattern(NamedTuple):
    """Tasks by number. `waits`: pairs, the second for the end of the first; `launches`: those that start no earlier
    than so many seconds after task 0 has started.

    `begins` wait for what the rank did before, its last computation and `tail`; `takes` for its messages. `first` and
    `last` are those on each stream, whose order is that of the rank. What follows waits for `tail` besides the last
    computation; `open` are the last ones, by stream, that nobody waits for; `external`: tasks that wait for these
    handles of the prologue, `handles`: those that it leaves. `acts`: where the action begins and ends.
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
