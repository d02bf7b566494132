"""Which of several equal replicas a request goes to.

Source: SGLang's router, sgl-model-gateway/src/policies/cache_aware.rs, with its defaults: it sends a request where most
of its prefix went, and to the shortest queue where loads are too far apart or little of the prompt is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items

from sim.inputs.serving_keys import HASHED_TOKENS
from sim.models.dims import ceil_div
from sim.serve.requests import Request
from sim.serve.scheduling.scheduler import Scheduler
from sim.serve.scheduling.sequences import Sequence
from sim.variants.engines.admission import LoadScore, RouterName

# Loads count more than prefixes where the largest has more requests than the least by APART, and TIMES as many.
APART = 64  # balance_abs_threshold; 32 in sgl-router of 2024
TIMES = 1.5  # balance_rel_threshold
PLAIN = LoadScore()
KNOWN = 0.3  # of a prompt; where less went to any replica, the least loaded gets it (cache_threshold)


class Router:
    """Chooses a replica by number, out of those that are `ready`, which is one of them at least."""

    def __init__(self, replicas: Items[Scheduler], score: LoadScore = PLAIN) -> None:
        self._replicas, self._score = replicas, score
        self.ready = [True] * len(replicas)
        self.queue: deque[Sequence] = deque()  # requests that no replica has a place for

    def choose(self, sequence: Sequence) -> int:
        """The replica that takes this request."""
        raise NotImplementedError

    def has_place(self) -> bool:
        """Whether a request goes to a replica now; else it waits for one to leave."""
        return True

    def left(self, sequence: Sequence) -> None:
        """A request has left its replica."""


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
    """Where fewest requests wait or run, as `score` counts them; of equal ones the first, or the next in turn."""

    _first = 0

    def choose(self, sequence: Sequence) -> int:
        """The least loaded one."""
        n, first = len(self._replicas), self._first
        self._first = (first + 1) % n if self._score.rotates else first
        return min([i for i in range(n) if self.ready[i]], key=lambda i: (self._load(i), (i - first) % n))

    def _load(self, i: int) -> float:
        s, score = self._replicas[i], self._score
        counted = score.waiting
        if score.pressed:
            counted += score.pressed * max(0.0, 0.5 - s.cache.available / s.cache.blocks)
        return counted * len(s.waiting) + len(s.running)

    def loads(self) -> list[int]:
        """Requests that wait or run, by replica."""
        return [len(s.waiting) + len(s.running) for s in self._replicas]


class OneQueue(LeastLoaded):
    """TensorRT-LLM's ranks with attention of their own: a request waits in the server's queue while all ranks together
    have as many as may run on them. It goes to the rank with the fewest prompt tokens, of those with fewer requests
    than the fullest one, or than the mean with this one (executor_request_queue.py, `_get_from_waiting_queue` and
    `_balance_requests_across_ranks`; requests that come at once are dealt in their order, not the longest first).
    """

    def __init__(self, replicas: Items[Scheduler], score: LoadScore = PLAIN) -> None:
        super().__init__(replicas, score)
        self._tokens = [0] * len(replicas)  # of the prompts of requests that wait and run
        self._chosen: dict[Sequence, int] = {}  # the rank of each

    def choose(self, sequence: Sequence) -> int:
        """The rank with the fewest prompt tokens."""
        loads, ready = self.loads(), [i for i, on in enumerate(self.ready) if on]
        most = max(ceil_div(sum([loads[i] for i in ready]) + 1, len(ready)), *[loads[i] for i in ready])
        chosen = min([i for i in ready if loads[i] < most], key=lambda i: (self._tokens[i], loads[i]))
        self._tokens[chosen] += sequence.request.prompt_tokens
        self._chosen[sequence] = chosen
        return chosen

    def left(self, sequence: Sequence) -> None:
        """Its prompt counts no more."""
        if (rank := self._chosen.pop(sequence, None)) is not None:
            self._tokens[rank] -= sequence.request.prompt_tokens

    def has_place(self) -> bool:
        """Whether fewer requests wait and run on all ranks together than may run."""
        places = [s.limits.running for s, on in zip(self._replicas, self.ready, strict=True) if on]
        return sum(self.loads()) < sum(places)


class PrefixAware(LeastLoaded):
    """Where most of a request's prefix went last; the least loaded replica where loads are `APART`, or where less than
    `KNOWN` of the prompt is known."""

    def __init__(self, replicas: Items[Scheduler], score: LoadScore = PLAIN) -> None:
        super().__init__(replicas, score)
        self._sent: dict[int | str, int] = {}

    def choose(self, sequence: Sequence) -> int:
        """The one that has most of the prefix, or the least loaded."""
        r, loads, least = sequence.request, self.loads(), super().choose(sequence)
        names = r.hashes or ((r.prefix_id,) if r.prefix_id else ())
        most = max([load for load, ready in zip(loads, self.ready, strict=True) if ready])
        apart = most - loads[least] > APART and most > TIMES * loads[least]
        chosen = least if apart else self._where_known(r, names, least)
        self._sent.update(dict.fromkeys(names, chosen))
        return chosen

    def _where_known(self, request: Request, names: Items[int | str], least: int) -> int:
        """Where most of the names went, of enough of the prompt; else the `least` loaded."""
        for i in reversed(range(len(names))):
            replica = self._sent.get(names[i])
            if replica is not None and self.ready[replica]:
                tokens = (i + 1) * HASHED_TOKENS if request.hashes else request.prefix_tokens
                return replica if tokens > KNOWN * request.prompt_tokens else least
        return least


ROUTERS: dict[RouterName, type[Router]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_aware": PrefixAware,
    "one_queue": OneQueue,
}
