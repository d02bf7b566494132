"""Communications that share links as time passes: how fast each goes, recomputed on every arrival and departure.

A communication first pays its starts and steps (`Flows.quiet_s`), which others do not lengthen; then its bytes flow,
as fast as alone or max-min fairly beside others (`topology.contention.shared_fractions`).
"""

from __future__ import annotations

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
    """Flows under way, and how fast each goes.

    A flow's end moves only when its rate changes; one that was never slowed ends at its start plus its seconds, to the
    last bit. All that happens at one instant is told first and settled once.
    """

    def __init__(self, flows: Flows) -> None:
        self.capacity = flows.capacity_bytes_per_s
        self.paths: dict[int, dict[int, float]] = {}
        self.users: dict[int, dict[int, None]] = {}
        self.changed: dict[int, None] = {}  # links whose users are others than when last settled
        self.over: set[int] = set()  # links asked for more than they can carry
        self.rate: dict[int, float] = {}
        self.since_s: dict[int, float] = {}  # when the rate last changed
        self.left_s: dict[int, float] = {}  # to go from then on, at the rate of alone

    def arrive(self, task: int, path: dict[int, float], now_s: float, alone_end_s: float) -> None:
        """Bytes of a task begin to flow along a path; alone it ends at `alone_end_s`."""
        self.rate[task], self.since_s[task], self.left_s[task] = 1.0, now_s, alone_end_s - now_s
        self.paths[task] = path
        for link in path:
            users = self.users.setdefault(link, {})
            if users:
                self.changed[link] = None
            users[task] = None

    def leave(self, task: int) -> None:
        """A task has ended."""
        del self.rate[task], self.since_s[task], self.left_s[task]
        for link in self.paths.pop(task):
            del self.users[link][task]
            if link in self.over:
                self.changed[link] = None

    def settle(self, now_s: float) -> list[tuple[int, float]]:
        """New rates after all arrivals and departures of an instant: tasks whose ends move, and how far off these are
        now, seconds."""
        touched: dict[int, None] = {}
        for link in self.changed:
            users = self.users[link]
            full = len(users) > 1 and fsum(self.paths[t][link] for t in users) > self.capacity[link] * FULL
            if full or link in self.over:
                touched.update(users)
            (self.over.add if full else self.over.discard)(link)
        self.changed.clear()
        return self._rerate(self._coupled(touched), now_s) if touched else []

    def _coupled(self, touched: dict[int, None]) -> list[int]:
        """These flows and all that share a full link with them, directly or through others."""
        flows, seen = list(touched), set[int]()
        for task in flows:  # grows while it is walked
            for link in self.paths[task]:
                if link in self.over and link not in seen:
                    seen.add(link)
                    flows += [t for t in self.users[link] if t not in touched]
                    touched.update(self.users[link])
        return flows

    def _rerate(self, flows: list[int], now_s: float) -> list[tuple[int, float]]:
        loads = [{link: load for link, load in self.paths[t].items() if link in self.over} for t in flows]
        moved = []
        for task, rate in zip(flows, shared_fractions(loads, self.capacity), strict=True):
            before = self.rate[task]
            if rate != before:
                self.left_s[task] = max(0.0, self.left_s[task] - (now_s - self.since_s[task]) * before)
                self.rate[task], self.since_s[task] = rate, now_s
                moved.append((task, self.left_s[task] / rate))
        return moved
