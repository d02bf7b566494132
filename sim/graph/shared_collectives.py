"""Merge the tasks of a collective's simulated members to one task.

The n-th collective of a group on one member is the n-th on all others. It starts when the waits of all members have
ended, and takes as long as for the slowest member.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from sim.core.columns import Ints, ints
from sim.graph.taskgraph import Collective, Columns, Deadlock, KindTable, Launches
from sim.programs.compile import LocalTask


class CollectivePart(Struct, frozen=True):
    """Hold a class's part in the collectives of a group."""

    class_index: int
    members: tuple[int, ...]
    local: LocalTask


def merge_collectives(columns: Columns, all_parts: list[CollectivePart], table: KindTable) -> tuple[Columns, Ints]:
    """Replace each collective's parts by one task; return the new columns and the new number of every task.

    Parts are the tasks whose kind is below zero: ~kind is an index of `all_parts`. The old columns are overwritten.

    Raises:
        Deadlock: if members of a group run different numbers of its collectives.
    """
    task, part, begin = _by_collective(columns.task_kind, all_parts)
    seconds, task_kind, first = columns.seconds, columns.task_kind, task[begin]
    stays = np.ones(len(task_kind), dtype=bool)
    # The part of the lowest class stays and becomes the collective; the other parts are removed.
    stays[task], stays[first] = False, True
    # NCCL's members run in step, so all take as long as the slowest.
    seconds[first] = np.maximum.reduceat(seconds[task], begin)
    # Micro-batches and layers repeat collectives of equal parts, so there are few kinds. They are numbered by first
    # appearance, because sums over flows follow these numbers.
    number, examples = _equal_runs(part, begin)
    new_kinds = [_new_kind([all_parts[i] for i in part[a:b].tolist()], table) for a, b in examples]
    task_kind[first] = ints(new_kinds)[number]
    # Tasks that stay are numbered without gaps. Removed parts get the number of their collective, so waits for any part
    # become waits for the collective.
    moved = np.cumsum(stays)
    moved -= 1
    moved[task] = np.repeat(moved[first], np.diff(np.append(begin, len(task))))
    waits, (launcher, launched, lag_s) = columns.waits, columns.launches
    for side in waits:  # in place, because they are the longest columns of a step ("clip" avoids a copy)
        np.take(moved, side, out=side, mode="clip")
    return columns._replace(
        seconds=seconds[stays],
        task_kind=task_kind[stays],
        step=columns.step[stays],
        launches=Launches(moved[launcher], moved[launched], lag_s),
    ), moved


def _by_collective(task_kind: Ints, all_parts: list[CollectivePart]) -> tuple[Ints, Ints, Ints]:
    """Return tasks and their parts, sorted by collective, then by class, and the begin of each collective."""
    groups: dict[tuple[str, tuple[int, ...]], int] = {}
    group_of = ints([groups.setdefault((p.local.group, p.members), len(groups)) for p in all_parts])
    at = np.flatnonzero(task_kind < 0)
    # `placements` marks a part by ~ of its index.
    part = ~task_kind[at]
    # Tasks are in the order of their classes, which the stable sort keeps. Numbers of 16 bits sort in linear time.
    group = group_of.astype(np.min_scalar_type(len(groups)))[part]
    order = np.argsort(group, kind="stable")
    group = group[order]
    runs = _starts(group, ints([p.class_index for p in all_parts])[part[order]])
    _check_equal(list(groups), group[runs], np.diff(np.append(runs, len(at))))
    # The tasks of a group are a table with a row for each member. Each column of the table is one collective.
    first, sizes = _starts(group), [len(members) for _, members in groups]
    tasks_of = zip(np.split(order, first[1:]), group[first].tolist(), strict=True)
    collectives = [tasks.reshape(sizes[number], -1).T for tasks, number in tasks_of]
    order = np.concatenate([table.ravel() for table in collectives])
    size = np.concatenate([np.full(len(table), table.shape[1]) for table in collectives])
    return at[order], part[order], np.cumsum(size) - size


def _check_equal(groups: list[tuple[str, tuple[int, ...]]], group: Ints, length: Ints) -> None:
    """Raise unless all members of each group run equally many collectives.

    `group` and `length` have a row for each member that runs any: the number of its group, and how many it runs. The
    rows are in the order of groups.
    """
    # Ranks that call different numbers of collectives hang in NCCL. The error names the group, which the engine could
    # not do.
    begin = np.searchsorted(group, np.arange(1, len(groups)))
    for (name, members), lengths in zip(groups, np.split(length, begin), strict=True):
        ran = lengths.tolist()
        if ran and (len(ran) != len(members) or len(set(ran)) > 1):
            least = min(ran) if len(ran) == len(members) else 0
            raise Deadlock(
                f"deadlock: collective {least} of group {name} is run by {sum(n > least for n in ran)} of its "
                f"{len(members)} simulated members"
            )


def _starts(*columns: Ints) -> Ints:
    """Return the indices of rows that differ from the row before."""
    changes = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return np.flatnonzero(np.append(True, changes))


def _equal_runs(values: Ints, begin: Ints) -> tuple[Ints, list[tuple[int, int]]]:
    """Number the runs of `values` by content, in order of appearance; return the numbers, and begin and end of the
    first run of each content.

    >>> number, examples = _equal_runs(ints([1, 2, 3, 1, 2]), ints([0, 2, 3]))
    >>> number.tolist(), examples
    ([0, 1, 0], [(0, 2), (2, 3)])
    """
    end = np.append(begin[1:], len(values))
    length = end - begin
    number, firsts = np.empty(len(begin), dtype=np.int64), list[int]()
    for size in dict.fromkeys(length.tolist()):  # runs of one size are rows of a table, compared as bytes
        at = np.flatnonzero(length == size)
        # `unique` compares single items, so each row is viewed as one item of raw bytes.
        rows = np.ascontiguousarray(values[begin[at][:, None] + np.arange(size)])
        _, example, pick = np.unique(rows.view(f"V{rows.itemsize * size}"), return_index=True, return_inverse=True)
        number[at] = len(firsts) + pick.reshape(-1)
        firsts += at[example].tolist()
    # `unique` numbers by bytes. Numbering by appearance keeps the order of kinds from run to run.
    order = np.argsort(firsts)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank[number], [(int(begin[i]), int(end[i])) for i in np.array(firsts)[order].tolist()]


def _new_kind(parts: list[CollectivePart], table: KindTable) -> int:
    """Make the kind of a collective of these parts, which are in the order of their classes."""
    rows = tuple([table.row(p.class_index, p.local.stream, p.local.kind.upper()) for p in parts])
    work = Collective(tuple([(p.class_index, p.local) for p in parts]))
    return table.new_kind(parts[0].local.detail, rows, work=work)
