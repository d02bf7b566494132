"""Which of several equal replicas a request goes to.

Source: SGLang's router (sgl-router): it sends a request where its prefix is cached, and to the shortest queue where
loads are too far apart.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

from sim.serve.scheduler import Scheduler, Sequence

APART = 32  # requests; further apart, loads count more than prefixes (sgl-router's balance_abs_threshold)


class Router(Protocol):
    """Chooses a replica by number."""

    def choose(self, sequence: Sequence) -> int:
        """The replica that takes this request."""
        ...


class RoundRobin:
    """One after another."""

    def __init__(self, replicas: Items[Scheduler]) -> None:
        self._count, self._next = len(replicas), 0

    def choose(self, sequence: Sequence) -> int:
        """The next one."""
        chosen = self._next
        self._next = (chosen + 1) % self._count
        return chosen


class LeastLoaded:
    """Where fewest requests wait or run; of equal ones the first."""

    def __init__(self, replicas: Items[Scheduler]) -> None:
        self._replicas = replicas

    def choose(self, sequence: Sequence) -> int:
        """The least loaded one."""
        loads = self.loads()
        return loads.index(min(loads))

    def loads(self) -> list[int]:
        """Requests that wait or run, by replica."""
        return [len(s.waiting) + len(s.running) for s in self._replicas]


class PrefixAware:
    """Where a request's prefix went last, unless that replica has `APART` requests more than the least loaded one."""

    def __init__(self, replicas: Items[Scheduler]) -> None:
        self._by_load = LeastLoaded(replicas)
        self._sent: dict[int | str, int] = {}

    def choose(self, sequence: Sequence) -> int:
        """The one that has most of the prefix, or the least loaded."""
        r, loads = sequence.request, self._by_load.loads()
        names = r.hashes or ((r.prefix_id,) if r.prefix_id else ())
        chosen = next((self._sent[name] for name in reversed(names) if name in self._sent), None)
        if chosen is None or loads[chosen] - min(loads) > APART:
            chosen = loads.index(min(loads))
        self._sent.update(dict.fromkeys(names, chosen))
        return chosen


ROUTERS: dict[str, type[RoundRobin] | type[LeastLoaded] | type[PrefixAware]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_aware": PrefixAware,
}
