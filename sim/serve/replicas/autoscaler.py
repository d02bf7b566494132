"""Replicas that are started and stopped while requests come, by a stated rule.

Every `interval_s` the requests under way (or those that wait alone) are counted over all replicas that take requests:

    wanted = ceil(counted / target), between min_replicas and max_replicas

Once more replicas have been wanted than there are for `upscale_delay_s`, the missing ones are started; they take
requests `startup_s` later. Once fewer have been wanted for `downscale_delay_s`, those that are still starting are
stopped, then those with the fewest requests are drained: they take no new ones and stop when the last of theirs is
done. A replica that is being drained is taken back before another is started. GPUs of a replica count from the
beginning of its start to its stop.

Requests stay with the replica that they were sent to. Each of two disaggregated pools follows the rule by itself, with
the requests that wait or run in it. So does Ray Serve, by an LLMConfig with an autoscaling_config for each
(docs.ray.io/en/master/serve/llm). A prefill replica that is being drained stops once its
last computed prompt has been copied away. Left out: an average of the count over a time (Ray's look_back_period_s),
scaling to no replica at all, starts that fail.

Sources: Ray Serve's AutoscalingConfig (min_replicas, max_replicas, target_ongoing_requests, upscale_delay_s,
downscale_delay_s; docs.ray.io, "Advanced Ray Serve Autoscaling"); Kubernetes' horizontal pod autoscaler, whose formula
ceil(replicas · value / target) is the same for a mean value per replica.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from functools import partial

from msgspec import Struct

from sim.engine.simpy_events import Clock
from sim.inputs.serving_keys import Autoscaling
from sim.serve.on_simpy import Process, ReplicaProcess, deal
from sim.serve.replicas.router import Router
from sim.serve.scheduling.sequences import Sequence

ROUNDED = 1 - 1e-9  # looks that are a delay apart are so up to the last bits


class Span(Struct, frozen=True):
    """The GPUs of a pool's replica were taken from `start_s` to `stop_s`, infinite where it was never stopped."""

    replica: int
    start_s: float
    stop_s: float
    pool: int = 0


class Unserved:
    """How many requests do not have all their tokens, in all pools."""

    def __init__(self, count: int, pools: Items[Items[ReplicaProcess]]) -> None:
        self.count = count
        for process in [p for pool in pools for p in pool]:
            process.on_left.append(self._left)

    def _left(self, sequence: Sequence) -> None:
        self.count -= sequence.finish_s >= 0


class Autoscaler:
    """Starts and stops `replicas` of a pool, which `router` sends requests to, from `begin_s` until none is
    `unserved`."""

    def __init__(
        self,
        clock: Clock,
        rule: Autoscaling,
        replicas: Items[ReplicaProcess],
        router: Router,
        begin_s: float,
        unserved: Unserved,
        pool: int = 0,
    ) -> None:
        self.clock, self.rule, self.replicas, self.router = clock, rule, replicas, router
        self.begin_s, self.unserved, self.pool = begin_s, unserved, pool
        self.since: list[float | None] = [self.begin_s if i < rule.min_replicas else None for i in range(len(replicas))]
        self.draining: set[int] = set()
        self.spans: list[Span] = []
        router.ready[:] = [i < rule.min_replicas for i in range(len(replicas))]
        for i, process in enumerate(replicas):
            process.on_left.append(partial(self._left, i))
            process.on_copied_away.append(partial(self._stop_if_empty, i))
        clock.process(self._watch())

    def finished(self) -> tuple[Span, ...]:
        """When each replica's GPUs were taken, after the last request."""
        still = [Span(i, since, math.inf, self.pool) for i, since in enumerate(self.since) if since is not None]
        return tuple(sorted([*self.spans, *still], key=lambda span: (span.start_s, span.replica)))

    def wanted(self) -> int:
        """Replicas that the rule asks for now."""
        schedulers = [p.replica.scheduler for p in self.replicas]
        waiting = len(self.router.queue) + sum([len(s.waiting) for s in schedulers])
        counted = waiting + (self.rule.metric == "ongoing") * sum([len(s.running) for s in schedulers])
        return min(len(self.replicas), max(self.rule.min_replicas, math.ceil(counted / self.rule.target)))

    def _watch(self) -> Process:
        """Look at regular times; `differs_s`: since when too few (1) or too many (-1) replicas have been there."""
        rule, clock = self.rule, self.clock
        way, differs_s, looks = 0, 0.0, 0
        while self.unserved.count:
            yield clock.at(self.begin_s + looks * rule.interval_s)
            looks += 1
            more = self.wanted() - self._serving()
            now_way = (more > 0) - (more < 0)
            if now_way != way:
                way, differs_s = now_way, clock.now
            delay_s = rule.upscale_delay_s if way > 0 else rule.downscale_delay_s
            if way and clock.now - differs_s >= delay_s * ROUNDED:
                for _ in range(abs(more)):
                    self._start() if way > 0 else self._drain()
                way = 0

    def _serving(self) -> int:
        """Replicas that take requests, or will when they have started."""
        return sum([since is not None for since in self.since]) - len(self.draining)

    def _start(self) -> None:
        if self.draining:
            chosen = min(self.draining)
            self.draining.remove(chosen)
            self._take(chosen)
            return
        chosen = self.since.index(None)
        self.since[chosen] = self.clock.now
        self.clock.process(self._starting(chosen))

    def _starting(self, chosen: int) -> Process:
        since = self.since[chosen]
        yield self.clock.timeout(self.rule.startup_s)
        if self.since[chosen] == since and chosen not in self.draining:  # else it was stopped before it was ready
            self._take(chosen)

    def _take(self, chosen: int) -> None:
        """A replica takes requests from now on, also those in the router's queue."""
        self.router.ready[chosen] = True
        deal(self.replicas, self.router)

    def _drain(self) -> None:
        """One that is still starting, or else the one with the fewest requests; of equal ones the last."""
        candidates = [i for i, since in enumerate(self.since) if since is not None and i not in self.draining]
        chosen = min(candidates, key=lambda i: (self.router.ready[i], self._load(i), -i))
        self.router.ready[chosen] = False
        self.draining.add(chosen)
        self._stop_if_empty(chosen)

    def _load(self, replica: int) -> int:
        process = self.replicas[replica]
        scheduler = process.replica.scheduler
        return len(scheduler.waiting) + len(scheduler.running) + process.held

    def _left(self, replica: int, _: Sequence) -> None:
        self._stop_if_empty(replica)

    def _stop_if_empty(self, replica: int) -> None:
        since = self.since[replica]
        if replica in self.draining and since is not None and not self._load(replica):
            self.draining.remove(replica)
            self.spans.append(Span(replica, since, self.clock.now, self.pool))
            self.since[replica] = None
