"""The time per step of many steps in a row, whose ranks do not wait for each other between two steps.

With optimizer post-validation a rank begins the next step after its own optimizer (Qi et al. 2024, section 4). The
step's graph then repeats: the first tasks of a rank wait for the last tasks of the same rank in the step before. Let
x[r] be the end of rank r's step, and A[r, s] the longest path from the begin of rank s's step to the end of rank r's.
Then x[r] of the next step is the maximum of x[s] + A[r, s] over all s. In the steady state the mean time between two
such ends is the largest mean of A along a cycle of ranks (Baccelli et al. 1992, Synchronization and Linearity,
theorem 3.23). In most schedules the cycle is one rank: the time from its first forward to its own optimizer's end.

Left out: links that messages of two overlapping steps would share; the message that tells ranks of a norm that was too
large, which arrives while forwards run; and the step that is then repeated.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sim.core.columns import Floats, Ints
from sim.engine.run import Times, after_of, launched_by, missing_of
from sim.graph.taskgraph import Message, TaskGraph


class SteadyState(NamedTuple):
    """Hold the mean time of a step, and the tasks on the cycle that fixes it with their share of that time."""

    period_s: float
    tasks: list[int]
    seconds: Floats


def borders(graph: TaskGraph) -> tuple[list[Ints], list[Ints]]:
    """Return by class of ranks the tasks that wait for nothing else of the class's step, and those for which nothing
    else waits. Messages are neither: one waits for its sender alone, and the next step for no message."""
    task, row, rows = graph.slots
    is_message = np.array([isinstance(kind.work, Message) for kind in graph.task_kinds])[graph.task_kind]
    own = ~is_message[task]
    classes, task = rows[row[own], 0], task[own]
    member = np.zeros((len(graph), len(graph.classes)), dtype=bool)
    member[task, classes] = True
    columns = graph.columns
    first = np.concatenate([columns.waits.first, columns.launches.first])
    second = np.concatenate([columns.waits.second, columns.launches.second])
    begins, ends = member.copy(), member.copy()
    for c in range(len(graph.classes)):
        inside = member[first, c] & member[second, c]
        begins[second[inside], c] = False
        ends[first[inside], c] = False
    return [np.flatnonzero(column) for column in begins.T], [np.flatnonzero(column) for column in ends.T]


def longest_paths(graph: TaskGraph, seconds: Floats, begins: list[Ints]) -> Floats:
    """Return the longest path from the begin of each class's step to the start of each task, [tasks, classes]; -inf
    where none leads there. `seconds`: of each task."""
    start = np.full((len(graph), len(begins)), -np.inf)
    for c, tasks in enumerate(begins):
        start[tasks, c] = 0.0
    after, missing, launched = after_of(graph), missing_of(graph), launched_by(graph)
    ready = [task for task, n in enumerate(missing) if not n]
    for task in ready:  # grows while it is walked
        end = start[task] + seconds[task]
        later = [(s, end) for s in after[task]]
        later += [(s, start[task] + lag_s) for s, lag_s in launched.get(task, ())]
        for s, at_least in later:
            np.maximum(start[s], at_least, out=start[s])
            missing[s] -= 1
            if not missing[s]:
                ready.append(s)
    return start


def steady_state(graph: TaskGraph, times: Times) -> SteadyState:
    """Return the steady state of steps that take as long as one that ran in these times."""
    seconds = times.end_s - times.start_s
    begins, ends = borders(graph)
    start = longest_paths(graph, seconds, begins)
    end = start + seconds[:, None]
    last = [tasks[end[tasks].argmax(axis=0)] for tasks in ends]  # by class, and by the class whose step began
    paths = np.array([end[tasks, range(len(begins))] for tasks in last])
    period_s, cycle = largest_mean(paths)
    tasks, shares = list[int](), list[Floats]()
    for r, s in pairwise(cycle):
        chain = _chain(graph, start[:, s], seconds, int(last[r][s]))
        tasks += chain
        shares.append(np.diff(start[chain, s], append=paths[r, s]))
    return SteadyState(period_s, tasks, np.concatenate(shares) / len(shares))


def largest_mean(weights: Floats) -> tuple[float, list[int]]:
    """Return the largest mean weight of a cycle, and the cycle backwards, its first at the end again. `weights[r, s]`
    leads from s to r, -inf where nothing does; something leads from each to itself (Karp 1978, A characterization of
    the minimum cycle mean in a digraph).

    >>> largest_mean(np.array([[2.0, 5.0], [3.0, 1.0]]))
    (4.0, [1, 0, 1])
    """
    n = len(weights)
    most, before = np.zeros((n + 1, n)), np.zeros((n + 1, n), dtype=np.int64)
    for k in range(1, n + 1):  # the heaviest walk of k edges to each
        walks = weights + most[k - 1]
        before[k] = walks.argmax(axis=1)
        most[k] = walks.max(axis=1)
    means = (most[n] - most[:n]) / (n - np.arange(n))[:, None]
    at = int(means.min(axis=0).argmax())
    walk = [at]
    for k in range(n, 0, -1):
        walk.append(int(before[k, walk[-1]]))
    best = (-np.inf, [at, at])
    latest: dict[int, int] = {}
    for i, rank in enumerate(walk):  # a walk of n edges among n ranks meets one of them again
        if rank in latest:
            cycle = walk[latest[rank] : i + 1]
            mean = sum(weights[r, s] for r, s in pairwise(cycle)) / (len(cycle) - 1)
            best = max(best, (float(mean), cycle))
        latest[rank] = i
    return best


def _chain(graph: TaskGraph, start: Floats, seconds: Floats, task: int) -> list[int]:
    """Return the tasks of the longest path to a task, first to last; `start` as in `longest_paths`, of one class."""
    launched: dict[int, list[tuple[int, float]]] = {}
    for first, second, lag_s in zip(*(column.tolist() for column in graph.columns.launches), strict=True):
        launched.setdefault(second, []).append((first, lag_s))
    chain = [task]
    while start[task] > 0:
        came = [(start[w] + seconds[w], w) for w in graph.waits_of[task]]
        came += [(start[w] + lag_s, w) for w, lag_s in launched.get(task, ())]
        task = max(came)[1]
        chain.append(task)
    return chain[::-1]
