"""Communications that share links as time passes: how fast each goes, recomputed on every arrival and departure.

A communication first pays its starts and steps (`Flows.quiet_s`), which others do not lengthen; then its bytes flow,
as fast as alone or max-min fairly beside others (`topology.contention.shared_fractions`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import fsum
from typing import NamedTuple

from topology.contention import shared_fractions

FULL = 1.0 + 1e-9  # of its capacity: a link asked for more than this slows its flows


class Flow(NamedTuple):
    """What a communication does to links. `quiet_s`: seconds before its bytes flow; `path`: bytes/s that it then puts
    on each link when alone."""

    quiet_s: float
    path: dict[int, float]


@dataclass(slots=True)
class Flows:
    """The flows of a task graph, by sort of task, and what each link can carry."""

    capacity_bytes_per_s: dict[int, float] = field(default_factory=dict)
    by_sort: dict[int, Flow] = field(default_factory=dict)


class Sharing:
    """Flows under way, and how fast each goes; `sort`: of every task.

    A flow's end moves only when its rate changes; one that was never slowed ends at its start plus its seconds, to the
    last bit. All that happens at one instant is told first and settled once.
    """

    def __init__(self, flows: Flows, sort: list[int]) -> None:
        self.capacity = flows.capacity_bytes_per_s
        self.limit = {link: capacity * FULL for link, capacity in self.capacity.items()}
        count = max(sort, default=0) + 1
        paths, like, number = list[dict[int, float]]([{}]) * count, [-1] * count, dict[object, int]()
        self.path_of: list[dict[int, float]] = []  # by number
        for s, flow in flows.by_sort.items():
            if s < count:
                paths[s], like[s] = flow.path, number.setdefault(tuple(flow.path.items()), len(number))
                if like[s] == len(self.path_of):
                    self.path_of.append(flow.path)
        self.paths: list[dict[int, float]] = list(map(paths.__getitem__, sort))
        self.like = list(map(like.__getitem__, sort))  # tasks of one number have equal paths
        self.users: dict[int, dict[int, None]] = {link: {} for link in self.capacity}
        self.changed: dict[int, None] = {}  # links whose users are others than when last settled
        self.over: dict[int, None] = {}  # links asked for more than they can carry
        self.rate = [1.0] * len(sort)
        self.since_s = [0.0] * len(sort)  # when the rate last changed
        self.left_s = [0.0] * len(sort)  # to go from then on, at the rate of alone
        self._known: dict[tuple[int, ...], list[float]] = {}

    def arrive(self, task: int, now_s: float, alone_end_s: float) -> None:
        """Bytes of a task begin to flow; alone it ends at `alone_end_s`."""
        self.rate[task], self.since_s[task], self.left_s[task] = 1.0, now_s, alone_end_s - now_s
        all_users = self.users
        for link in self.paths[task]:
            users = all_users[link]
            if users:
                self.changed[link] = None
            users[task] = None

    def go_away(self, task: int) -> None:
        """A task flows on as fast as alone on links that nobody else uses; `come_back` before others do."""
        for link in self.paths[task]:
            del self.users[link][task]

    def come_back(self, task: int) -> None:
        """A task that went away still flows, as before."""
        for link in self.paths[task]:
            self.users[link][task] = None

    def unsettle(self, links: Iterable[int]) -> None:
        """Look anew at who uses these links."""
        for link in links:
            self.changed[link] = self.over[link] = None

    def leave(self, task: int) -> None:
        """A task has ended."""
        users, over = self.users, self.over
        for link in self.paths[task]:
            del users[link][task]
            if link in over:
                self.changed[link] = None

    def settle(self, now_s: float) -> list[tuple[int, float]]:
        """New rates after all arrivals and departures of an instant: tasks whose ends move, and how far off these are
        now, seconds."""
        touched: dict[int, None] = {}
        paths, over = self.paths, self.over
        for link in self.changed:
            users = self.users[link]
            if len(users) > 1 and fsum([paths[t][link] for t in users]) > self.limit[link]:
                over[link] = None
                touched.update(users)
            elif link in over:
                del over[link]
                touched.update(users)
        self.changed.clear()
        flows, rates = list(touched), self.rate
        if over:
            for task in flows:  # grows while it is walked: all that share a full link, directly or through others
                for link in paths[task]:
                    if link in over:
                        for other in self.users[link]:
                            if other not in touched:
                                touched[other] = None
                                flows.append(other)
        like = self.like
        flows.sort(key=like.__getitem__)
        fair = self.fair(tuple([like[t] for t in flows]))
        return [
            (task, self.pace(task, rate, now_s)) for task, rate in zip(flows, fair, strict=True) if rate != rates[task]
        ]

    def pace(self, task: int, rate: float, now_s: float) -> float:
        """A task goes on at this rate; how long it takes from now on, seconds."""
        left_s = self.left_s[task] - (now_s - self.since_s[task]) * self.rate[task]
        self.left_s[task] = left_s = left_s if left_s > 0.0 else 0.0
        self.rate[task], self.since_s[task] = rate, now_s
        return left_s / rate

    def fair(self, kinds: tuple[int, ...]) -> list[float]:
        """How fast flows go beside each other, of which nobody else uses a full link (`kinds`: their numbers); the same
        few sets of flows meet over and over."""
        known = self._known.get(kinds)
        if known is None:
            known = self._known[kinds] = self._fair([self.path_of[kind] for kind in kinds])
        return known

    def _fair(self, paths: list[dict[int, float]]) -> list[float]:
        """The same, group by group of flows that full links couple."""
        sent: dict[int, list[float]] = {}
        for path in paths:
            for link, load in path.items():
                sent.setdefault(link, []).append(load)
        full = {link for link, loads in sent.items() if len(loads) > 1 and fsum(loads) > self.limit[link]}
        loads = [{link: load for link, load in path.items() if link in full} for path in paths]
        rates = [1.0] * len(paths)
        left = [i for i, load in enumerate(loads) if load]
        while left:
            links, group = set(loads[left[0]]), list[int]()
            while len(group) < len(group := [i for i in left if not links.isdisjoint(loads[i])]):
                links.update(*(loads[i] for i in group))
            for i, rate in zip(group, shared_fractions([loads[i] for i in group], self.capacity), strict=True):
                rates[i] = rate
            left = [i for i in left if i not in group]
        return rates
