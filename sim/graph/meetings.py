"""Collectives whose members are several simulated ranks: each has a task of every member, which become one.

The n-th collective of a group on one member is the n-th on all others. It starts when what all members wait for has
ended, and takes as long as for the slowest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim.graph.link_book import LinkBook
from sim.graph.taskgraph import Columns, Deadlock, Ints, Launches, Sorts, Waits, ints
from sim.graph.template import LocalTask


class Meeting(NamedTuple):
    """A class's part in the collectives of a group."""

    class_index: int
    members: tuple[int, ...]
    local: LocalTask


def met(columns: Columns, meetings: list[Meeting], shown: Sorts, links: LinkBook | None) -> tuple[Columns, Ints]:
    """The columns, which are used up, with one task for each collective in place of those whose sort is below zero,
    ~sort of `meetings`; and where each task now stands.

    Raises:
        Deadlock: if members of a group run different numbers of its collectives.
    """
    at, part, begin = _together(columns.sort, meetings)
    seconds, sort, first = columns.seconds, columns.sort, at[begin]
    stays = np.ones(len(sort), dtype=bool)
    stays[at], stays[first] = False, True
    seconds[first] = np.maximum.reduceat(seconds[at], begin)
    sorts: dict[tuple[int, ...], int] = {}
    found, ends = part.tolist(), [*begin[1:].tolist(), len(part)]
    for task, a, b in zip(first.tolist(), begin.tolist(), ends, strict=True):
        parts = tuple(found[a:b])
        if parts not in sorts:
            sorts[parts] = _new_sort([meetings[i] for i in parts], shown, links)
        sort[task] = sorts[parts]
    now = np.cumsum(stays)
    now -= 1
    now[at] = np.repeat(now[first], np.diff(np.append(begin, len(at))))
    waits, (launcher, launched, lag_s) = columns.waits, columns.launches
    return columns._replace(
        seconds=seconds[stays],
        sort=sort[stays],
        step=columns.step[stays],
        waits=Waits(now[waits.first], now[waits.second]),
        launches=Launches(now[launcher], now[launched], lag_s),
    ), now


def _together(sort: Ints, meetings: list[Meeting]) -> tuple[Ints, Ints, Ints]:
    """Tasks and their meetings, collective by collective and in each by class; where each collective begins."""
    groups: dict[tuple[str, tuple[int, ...]], int] = {}
    group_of = ints([groups.setdefault((m.local.group, m.members), len(groups)) for m in meetings])
    at = np.flatnonzero(sort < 0)
    part = ~sort[at]
    group, class_index = group_of[part], ints([m.class_index for m in meetings])[part]
    order = np.lexsort((class_index, group))  # stable: the tasks of a rank stay in its order
    runs = _starts(group[order], class_index[order])
    number = np.arange(len(at)) - np.repeat(runs, np.diff(np.append(runs, len(at))))  # of a group's on each member
    again = np.lexsort((number, group[order]))
    order = order[again]
    begin = _starts(group[order], number[again])
    came = np.diff(np.append(begin, len(at)))
    wanted = ints([len(members) for _, members in groups])[group[order[begin]]]
    if (came != wanted).any():
        i = int(np.flatnonzero(came != wanted)[0])
        name = list(groups)[group[order[begin[i]]]][0]
        raise Deadlock(f"deadlock: collective {number[again[begin[i]]]} of group {name} is run by {came[i]} of its "
                         f"{wanted[i]} simulated members")  # fmt: skip
    return at[order], part[order], begin


def _starts(*columns: Ints) -> Ints:
    """Where rows begin that differ from the one before."""
    changes = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return np.flatnonzero(np.append(True, changes))


def _new_sort(parts: list[Meeting], shown: Sorts, links: LinkBook | None) -> int:
    """The sort of a collective in which these parts meet, which are in the order of their classes."""
    rows = tuple([shown.row(m.class_index, m.local.stream, m.local.kind) for m in parts])
    sort = shown.new_sort(parts[0].local.detail, rows)
    if links is not None:
        links.collective(sort, {m.class_index: m.local for m in parts})
    return sort
