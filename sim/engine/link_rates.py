"""Communications that share links as time passes: how fast each goes, recomputed on every arrival and departure.

A communication first pays its starts and steps (`Flows.quiet_s`), which others do not lengthen; then its bytes flow,
as fast as alone or max-min fairly beside others (`topology.contention.shared_fractions`).
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from itertools import islice
from math import fsum, inf
from typing import NamedTuple

from msgspec import Struct, field

from topology.contention import shared_fractions

FULL = 1.0 + 1e-9  # of its capacity: a link asked for more than this slows its flows


class Flow(NamedTuple):  # the compiled loop reads a tuple
    """What a communication does to links. `quiet_s`: seconds before its bytes flow; `path`: bytes/s that it then puts
    on each link when alone."""

    quiet_s: float
    path: dict[int, float]


class Flows(Struct):
    """The flows of a task graph, by kind of task, and what each link can carry."""

    capacity_bytes_per_s: dict[int, float] = field(default_factory=dict)
    by_task_kind: dict[int, Flow] = field(default_factory=dict)


class Sharing:
    """Flows under way, and how fast each goes; `task_kind`: of every task.

    A flow's end moves only when its rate changes; one that was never slowed ends at its start plus its seconds, to the
    last bit. All that happens at one instant is told first and settled once.
    """

    def __init__(self, flows: Flows, task_kind: list[int]) -> None:
        self.capacity = flows.capacity_bytes_per_s
        self.limit = {link: capacity * FULL for link, capacity in self.capacity.items()}
        # Dicts in place of sets: they keep the order of arrival, so every run visits flows alike.
        self.users: dict[int, dict[int, None]] = {link: {} for link in self.capacity}
        self.changed: dict[int, None] = {}  # links whose users are others than when last settled
        self.over: dict[int, None] = {}  # links asked for more than they can carry
        self.scaled: set[int] = set()  # links that carry more or less than they did: one flow alone may be slowed there
        self.rate = [1.0] * len(task_kind)
        self.since_s = [0.0] * len(task_kind)  # when the rate last changed
        self.left_s = [0.0] * len(task_kind)  # to go from then on, at the rate of alone
        count = max(task_kind, default=0) + 1
        paths, like, number = list[dict[int, float]]([{}]) * count, [-1] * count, dict[object, int]()
        for s, flow in flows.by_task_kind.items():
            if s < count:
                paths[s], like[s] = flow.path, number.setdefault(tuple(flow.path.items()), len(number))
        self.paths = list(map(paths.__getitem__, task_kind))
        places = [[(link, self.users[link]) for link in path] for path in paths]
        self.places = list(map(places.__getitem__, task_kind))  # the links of each task, and who uses them
        self.like = list(map(like.__getitem__, task_kind))  # tasks of one number have equal paths
        self._known: dict[tuple[object, ...], list[float]] = {}

    def arrive(self, task: int, now_s: float, alone_end_s: float) -> None:
        """Bytes of a task begin to flow; alone it ends at `alone_end_s`."""
        self.since_s[task], self.left_s[task] = now_s, alone_end_s - now_s
        for link, users in self.places[task]:
            # A flow alone on a whole link cannot ask for too much, so an empty link needs no look.
            if users or link in self.scaled:
                self.changed[link] = None
            users[task] = None

    def leave(self, task: int) -> None:
        """A task has ended."""
        over = self.over
        for link, users in self.places[task]:
            del users[task]
            # Where a link was not full nobody was slowed, so nobody goes faster for one flow less.
            if link in over:
                self.changed[link] = None

    def settle(self, now_s: float) -> list[tuple[int, float]]:
        """New rates after all arrivals and departures of an instant: tasks whose ends move, and how far off these are
        now, seconds."""
        # Only links that changed and what hangs together with them are worked out anew. A step has thousands of links,
        # and an instant concerns a few.
        touched: dict[int, None] = {}
        paths, over, all_users, limit, links = self.paths, self.over, self.users, self.limit, list[int]()
        for link in self.changed:
            users = all_users[link]
            crowded = len(users) > 1 or (users and link in self.scaled)
            # `fsum` rounds once, so the sum is the same in whatever order the users came. A plain sum might cross the
            # limit in one run and not in the other.
            if crowded and fsum([paths[task][link] for task in users]) > limit[link]:
                over[link] = None
                links.append(link)
                touched.update(users)
            elif link in over:
                del over[link]
                touched.update(users)
        self.changed.clear()
        flows = list(touched)
        if over:  # all that share a full link with these flows, directly or through others
            for task in flows:  # grows while it is walked
                for link in paths[task]:
                    if link in over and link not in links:
                        links.append(link)
                        for other in all_users[link]:
                            if other not in touched:
                                touched[other] = None
                                flows.append(other)
        return self._pace(flows, self._fair(flows, links) if links else [1.0] * len(flows), now_s)

    def _pace(self, flows: list[int], fair: list[float], now_s: float) -> list[tuple[int, float]]:
        """Let these flows go on at new rates; those whose rate was another, and how long each still takes, seconds
        (infinity where a link carries nothing)."""
        moved, rates, since_s, all_left_s = [], self.rate, self.since_s, self.left_s
        for task, rate in zip(flows, fair, strict=True):
            before = rates[task]
            if rate != before:
                # What is left counts in seconds at the rate of alone, so bytes need not be known here.
                left_s = all_left_s[task] - (now_s - since_s[task]) * before
                if left_s < 0.0:
                    left_s = 0.0
                all_left_s[task], rates[task], since_s[task] = left_s, rate, now_s
                moved.append((task, left_s / rate if rate else inf))
        return moved

    def _fair(self, flows: list[int], links: list[int]) -> list[float]:
        """How fast flows go that share these full links; the same few sets of flows meet over and over."""
        # Sorted links and flows make equal situations equal keys, whichever tasks are in them.
        links.sort()
        flows.sort(key=self.like.__getitem__)
        key = (*links, -1, *[self.like[t] for t in flows])
        known = self._known.get(key)
        if known is None:
            loads = [{link: load for link, load in self.paths[t].items() if link in links} for t in flows]
            known = self._known[key] = shared_fractions(loads, self.capacity)
        return known


@lru_cache(maxsize=1 << 12)
def fractions(key: bytes) -> bytes:
    """`shared_fractions` for the compiled loop, in doubles: how many links are full and what each can carry; by flow
    its loads on them, each behind the link's number, and -1. The same few patterns of flows meet over and over."""
    numbers = iter(memoryview(key).cast("d"))
    capacity = dict(enumerate(islice(numbers, int(next(numbers)))))
    loads: list[dict[int, float]] = [{}]
    for link in numbers:
        if link < 0.0:
            loads.append({})
        else:
            loads[-1][int(link)] = next(numbers)
    return array("d", shared_fractions(loads[:-1], capacity)).tobytes()
