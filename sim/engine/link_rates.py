"""Compute the rates of communications that share links, anew on every arrival and departure.

A communication first pays its latency (`Flow.quiet_s`), which others do not lengthen. Then its bytes flow, as fast as
alone, or with max-min fair rates beside others (`topology.contention.shared_fractions`).
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from itertools import islice
from math import fsum, inf
from typing import NamedTuple

from msgspec import Struct, field

from topology.contention import shared_fractions

FULL = 1.0 + 1e-9  # load ÷ capacity above which a link slows its flows


class Flow(NamedTuple):  # the compiled loop reads a tuple
    """Hold a communication's use of links. `quiet_s`: seconds before its bytes flow; `path`: its load on each link in
    bytes/s after that, when it runs alone."""

    quiet_s: float
    path: dict[int, float]


class Flows(Struct):
    """Hold the flows of a task graph by kind of task, and the capacity of each link."""

    capacity_bytes_per_s: dict[int, float] = field(default_factory=dict)
    by_task_kind: dict[int, Flow] = field(default_factory=dict)


class Sharing:
    """Hold the running flows and their rates; `task_kind`: the kind of each task.

    A flow's end moves only when its rate changes. A flow that was never slowed ends at its start plus its seconds, to
    the last bit. All arrivals and departures of an instant are reported first; `settle` then computes the rates once.
    """

    def __init__(self, flows: Flows, task_kind: list[int]) -> None:
        self.capacity = flows.capacity_bytes_per_s
        self.limit = {link: capacity * FULL for link, capacity in self.capacity.items()}
        # Dicts replace sets, because they keep the order of arrival: every run visits flows in one order.
        self.users: dict[int, dict[int, None]] = {link: {} for link in self.capacity}
        self.changed: dict[int, None] = {}  # links whose flows changed since rates were last computed
        self.over: dict[int, None] = {}  # overloaded links
        self.scaled: set[int] = set()  # links whose capacity was changed: a single flow may be slowed there
        self.rate = [1.0] * len(task_kind)
        self.since_s = [0.0] * len(task_kind)  # when the rate last changed
        self.left_s = [0.0] * len(task_kind)  # remaining seconds from then on, at the rate alone
        count = max(task_kind, default=0) + 1
        paths, like, number = list[dict[int, float]]([{}]) * count, [-1] * count, dict[object, int]()
        for s, flow in flows.by_task_kind.items():
            if s < count:
                paths[s], like[s] = flow.path, number.setdefault(tuple(flow.path.items()), len(number))
        self.paths = list(map(paths.__getitem__, task_kind))
        places = [[(link, self.users[link]) for link in path] for path in paths]
        self.places = list(map(places.__getitem__, task_kind))  # the links of each task, with their flows
        self.like = list(map(like.__getitem__, task_kind))  # tasks with equal paths have equal numbers
        self._known: dict[tuple[object, ...], list[float]] = {}

    def arrive(self, task: int, now_s: float, alone_end_s: float) -> None:
        """Let the bytes of a task begin to flow; alone the task ends at `alone_end_s`."""
        self.since_s[task], self.left_s[task] = now_s, alone_end_s - now_s
        for link, users in self.places[task]:
            # A single flow cannot overload a link of unchanged capacity, so an empty link is not marked.
            if users or link in self.scaled:
                self.changed[link] = None
            users[task] = None

    def leave(self, task: int) -> None:
        """Remove a task that has ended from its links."""
        over = self.over
        for link, users in self.places[task]:
            del users[task]
            # A link that was not overloaded slowed no flow, so no flow goes faster now.
            if link in over:
                self.changed[link] = None

    def settle(self, now_s: float) -> list[tuple[int, float]]:
        """Compute new rates after all arrivals and departures of an instant; return the tasks whose ends move, each
        with its remaining seconds."""
        # Only links that changed, and those connected with them by flows, are computed anew: a step has thousands of
        # links, and an instant changes a few.
        touched: dict[int, None] = {}
        paths, over, all_users, limit, links = self.paths, self.over, self.users, self.limit, list[int]()
        for link in self.changed:
            users = all_users[link]
            crowded = len(users) > 1 or (users and link in self.scaled)
            # `fsum` rounds once, so the sum does not depend on the order of flows. A plain sum might cross the limit in
            # one run and not in another.
            if crowded and fsum([paths[task][link] for task in users]) > limit[link]:
                over[link] = None
                links.append(link)
                touched.update(users)
            elif link in over:
                del over[link]
                touched.update(users)
        self.changed.clear()
        if over:
            self._spread(touched, links)
        flows = list(touched)
        return self._pace(flows, self._fair(flows, links) if links else [1.0] * len(flows), now_s)

    def _spread(self, touched: dict[int, None], links: list[int]) -> None:
        """Add the flows that share an overloaded link with these, directly or through others, and these links."""
        waiting = list(touched)
        for task in waiting:  # grows while it is walked
            for link in self.paths[task]:
                if link not in self.over or link in links:
                    continue
                links.append(link)
                new = [other for other in self.users[link] if other not in touched]
                touched.update(dict.fromkeys(new))
                waiting += new

    def _pace(self, flows: list[int], fair: list[float], now_s: float) -> list[tuple[int, float]]:
        """Set new rates; return the flows whose rate changed, each with its remaining seconds (infinite on a link
        without capacity)."""
        moved, rates, since_s, all_left_s = [], self.rate, self.since_s, self.left_s
        for task, rate in zip(flows, fair, strict=True):
            before = rates[task]
            if rate != before:
                # The rest counts in seconds at the rate alone, so bytes need not be known here.
                left_s = all_left_s[task] - (now_s - since_s[task]) * before
                if left_s < 0.0:
                    left_s = 0.0
                all_left_s[task], rates[task], since_s[task] = left_s, rate, now_s
                moved.append((task, left_s / rate if rate else inf))
        return moved

    def _fair(self, flows: list[int], links: list[int]) -> list[float]:
        """Return the rates of flows that share these overloaded links, relative to alone; results are cached."""
        # Sorting gives equal situations equal keys, whichever tasks are in them.
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
    """Return `shared_fractions` for the compiled loop, as the bytes of doubles.

    `key`: doubles, namely the number of overloaded links, the capacity of each, and for each flow pairs of link and
    load, ended by -1. Results are cached, because the same few patterns of flows recur.
    """
    numbers = iter(memoryview(key).cast("d"))
    capacity = dict(enumerate(islice(numbers, int(next(numbers)))))
    loads: list[dict[int, float]] = [{}]
    for link in numbers:
        if link < 0.0:
            loads.append({})
        else:
            loads[-1][int(link)] = next(numbers)
    return array("d", shared_fractions(loads[:-1], capacity)).tobytes()
