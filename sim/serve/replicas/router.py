"""Which of several equal replicas a request goes to.

Source: SGLang's router (sgl-router): it sends a request where its prefix is cached, and to the shortest queue where
loads are too far apart.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from sim.inputs.workloads import RouterName
from sim.serve.scheduling.scheduler import Scheduler
from sim.serve.scheduling.sequences import Sequence

APART = 32  # requests; further apart, loads count more than prefixes (sgl-router's balance_abs_threshold)


class Router:
    """Chooses a replica by number, out of those that are `ready`, which is one of them at least."""

    def __init__(self, replicas: Items[Scheduler]) -> None:
        self._replicas = replicas
        self.ready = [True] * len(replicas)

    def choose(self, sequence: Sequence) -> int:
        """The replica that takes this request."""
        raise NotImplementedError


class RoundRobin(Router):
    """Gives requests to the replicas in turn, and leaves out those that are not ready."""

    _next = 0

    def choose(self, sequence: Sequence) -> int:
        """The next one."""
        count = len(self._replicas)
        chosen = next(i % count for i in range(self._next, self._next + count) if self.ready[i % count])
        self._next = (chosen + 1) % count
        return chosen


class LeastLoaded(Router):
    """Where fewest requests wait or run; of equal ones the first."""

    def choose(self, sequence: Sequence) -> int:
        """The least loaded one."""
        loads = self.loads()
        return min([i for i, ready in enumerate(self.ready) if ready], key=loads.__getitem__)

    def loads(self) -> list[int]:
        """Requests that wait or run, by replica."""
        return [len(s.waiting) + len(s.running) for s in self._replicas]


class PrefixAware(LeastLoaded):
    """Where a request's prefix went last, unless that replica has `APART` requests more than the least loaded one."""

    def __init__(self, replicas: Items[Scheduler]) -> None:
        super().__init__(replicas)
        self._sent: dict[int | str, int] = {}

    def choose(self, sequence: Sequence) -> int:
        """The one that has most of the prefix, or the least loaded."""
        r, loads, least = sequence.request, self.loads(), super().choose(sequence)
        names = r.hashes or ((r.prefix_id,) if r.prefix_id else ())
        sent = (self._sent[name] for name in reversed(names) if name in self._sent)
        chosen = next((replica for replica in sent if self.ready[replica]), None)
        if chosen is None or loads[chosen] - loads[least] > APART:
            chosen = least
        self._sent.update(dict.fromkeys(names, chosen))
        return chosen


ROUTERS: dict[RouterName, type[Router]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_aware": PrefixAware,
}
