"""The quick pass: the clock of one replica that nobody else's work changes.

An iteration passes the pipeline stages one after another; up to pp iterations, of different sequences, are on their
way at once. Runs of iterations that differ in nothing but their length are taken together, which changes no time.
`sim.serve.on_simpy` does the same, and what couples replicas, as SimPy processes.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence as Items

from sim.serve.prices.costs import IterationCosts
from sim.serve.prices.load import Load
from sim.serve.replicas.replica import Replica, Work, Worker
from sim.serve.scheduling.sequences import Sequence


def before_engine_s(costs: IterationCosts, sequences: Items[Sequence]) -> float:
    """Seconds that a request takes to the engine, in the mean of `sequences`: the next of a client comes so late."""
    tokens = sum([s.request.prompt_tokens for s in sequences])
    return costs.host.times.before_s(tokens / max(1, len(sequences)))


class QuickPass:
    """The clock of one replica, whose clients have at most `concurrency` requests under way."""

    def __init__(self, replica: Replica, costs: IterationCosts, group: bool, concurrency: int | None = None) -> None:
        self.replica, self.costs = replica, costs
        self.scheduler = replica.scheduler
        self.worker = Worker(replica, costs, group)
        self.pending = iter(replica.sequences)
        self.next: Sequence | None = next(self.pending, None)
        self.free_s = [0.0] * len(costs.stages)
        self.sent_s: dict[int, list[float]] = {}  # from each stage to the next, by an iteration's tokens
        self.in_flight: list[tuple[float, int, Work]] = []
        self.left = len(replica.sequences)
        # When each request that may be sent before another ends reaches the engine at the earliest, a heap.
        self.places = [0.0] * (concurrency or self.left)
        self.before_s = before_engine_s(costs, replica.sequences)
        self.next_s = 0.0  # when the next request is sent, as far as that is known; infinite where none is
        self._look_ahead()

    def run(self) -> None:
        """Until every request has its tokens."""
        now = 0.0
        while self.left:
            self._arrive(now)
            steps = self.worker.steady_steps(now)
            now = self._one_iteration(now) if steps < 2 else self._several(now, steps)

    def _arrive(self, now: float) -> None:
        while self.next is not None and self.next_s <= now:
            self.next.arrival_s = self.next_s
            heapq.heappop(self.places)
            self.scheduler.waiting.append(self.next)
            self.next = next(self.pending, None)
            self._look_ahead()

    def _look_ahead(self) -> None:
        if self.next is None or not self.places:
            self.next_s = math.inf
        else:
            self.next_s = max(self.next.request.arrival_s, self.places[0])

    def _leave(self, left: Items[Sequence], end_s: float) -> None:
        """Let requests leave, which have all their tokens: once clients have these they may send others, which pass the
        HTTP server first. Those that come until `end_s` have come."""
        if not left:
            return
        for sequence in left:
            heapq.heappush(self.places, end_s + (sequence.last_after_s + self.before_s))
        self.left -= len(left)
        self._look_ahead()

    def _several(self, now: float, steps: int) -> float:
        """Alike decode iterations at once, until a request arrives that may be admitted."""
        s = self.scheduler
        may_enter = not s.waiting and len(s.running) < s.limits.running
        arrival_s = self.next_s if may_enter else math.inf
        ends = self.worker.run_ends(now, steps, arrival_s)
        last = min(len(ends) - 1, bisect_left(ends, arrival_s))
        if last:
            self._arrive(ends[last - 1])
            s.known = len(s.waiting)
        end_s = ends[last]
        self._arrive(end_s)
        self._leave(self.worker.run(now, ends, end_s), end_s)
        return end_s

    def _one_iteration(self, now: float) -> float:
        """Start an iteration if anybody can compute, and go on to the time at which the next may start."""
        work = self.worker.begin(now)
        if work is not None:
            spans = self._pass_stages(work.ready_s, work.load)
            heapq.heappush(self.in_flight, (spans[-1][1], len(self.replica.iterations), work))
            self.replica.iterations.append(work.iteration(spans))
            if len(self.in_flight) < len(self.free_s):
                return self._until(self.free_s[0])
        return self._until(self._next_event(now, work is not None))

    def _pass_stages(self, now: float, load: Load) -> tuple[tuple[float, float], ...]:
        sent_s = self.sent_s.get(load.tokens)
        if sent_s is None:
            sent_s = [self.costs.send_s(i, load.tokens) for i in range(len(self.free_s) - 1)]
            self.sent_s[load.tokens] = sent_s
        spans, ready = [], now
        for i, seconds in enumerate(self.costs.stage_seconds(load)):
            start = max(ready, self.free_s[i])
            end = self.free_s[i] = start + seconds
            spans.append((start, end))
            if i < len(sent_s):
                ready = end + sent_s[i]
        return tuple(spans)

    def _next_event(self, now: float, started: bool) -> float:
        """The earliest time at which something changes."""
        times = [self.in_flight[0][0]] if self.in_flight else []
        if not started:
            ready_s = self.worker.next_ready_s(now)
            if ready_s is not None:
                times.append(ready_s)
            if self.next_s < math.inf:
                times.append(self.next_s)
        assert times, f"replica {self.replica.index}: {self.left} requests wait for nothing at {now} s"
        return max(now, min(times))

    def _until(self, time_s: float) -> float:
        """The time at which a next iteration may start, `time_s` at least; finish those that end by then."""
        start_s = max(time_s, self.free_s[0])
        while self.in_flight and self.in_flight[0][0] <= start_s:
            end, _, work = heapq.heappop(self.in_flight)
            self._arrive(end)
            self._leave(self.worker.end(work, end), end)
        return start_s
