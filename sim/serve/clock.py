"""The clock of one data-parallel replica: iterations start and end, and what they leave on record.

An iteration passes the pipeline stages one after another; up to pp iterations, of different sequences, are on their
way at once. Runs of iterations that differ in nothing but their length are taken together, which changes no time.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sim.serve.scheduler import Batch, Counts, Scheduler, Sequence
from sim.serve.serving_costs import IterationCosts, Load
from sim.serve.serving_faults import FaultyCosts

LONGEST_RUN = 1 << 16  # steps priced at once


class Iteration(NamedTuple):
    """One iteration, or `steps` alike, on every stage: (start, end) each."""

    spans: tuple[tuple[float, float], ...]
    load: Load
    steps: int


class CacheState(NamedTuple):
    """The cache from `time_s` on: blocks held by running sequences, blocks kept for prefixes, waste."""

    time_s: float
    held: int
    unused: int
    waste: float
    running: int


@dataclass(slots=True)
class Replica:
    """What one data-parallel replica did."""

    index: int
    sequences: list[Sequence]
    scheduler: Scheduler
    iterations: list[Iteration] = field(default_factory=list)
    states: list[CacheState] = field(default_factory=list)

    @property
    def counts(self) -> Counts:
        return self.scheduler.counts


class Server:
    """The clock of one replica."""

    def __init__(self, replica: Replica, costs: IterationCosts | FaultyCosts, group: bool) -> None:
        self.replica, self.costs, self.group = replica, costs, group
        self.scheduler = replica.scheduler
        self.pending = iter(replica.sequences)
        self.next: Sequence | None = next(self.pending, None)
        self.free_s = [0.0] * len(costs.stages)
        self.in_flight: list[tuple[float, int, Batch]] = []
        self.left = len(replica.sequences)

    def run(self) -> None:
        """Until every request has its tokens."""
        now = 0.0
        while self.left:
            self._arrive(now)
            end = self._run_of_steps(now)
            now = self._one_iteration(now) if end is None else end

    def _arrive(self, now: float) -> None:
        while self.next is not None and self.next.request.arrival_s <= now:
            self.scheduler.waiting.append(self.next)
            self.next = next(self.pending, None)

    def _run_of_steps(self, now: float) -> float | None:
        """Alike decode iterations at once; None where the next iteration is not one."""
        s = self.scheduler
        if not self.group:
            return None
        steps = min(s.steady_steps(now), LONGEST_RUN)
        if steps < 2:
            return None
        n = len(s.running)
        kv = sum(x.computed for x in s.running) + n
        ends = now + np.cumsum(self.costs.decode_run(n, kv, steps))
        if self.next is not None and not s.waiting and n < s.limits.running:
            steps = min(steps, int(np.searchsorted(ends, self.next.request.arrival_s)) + 1)
        end = float(ends[steps - 1])
        load = Load(n, n, kv, (), n)
        self.costs.note_decode_run(n, kv, steps)
        running = len(s.running)
        self.left -= len(s.run_steps(steps, end))
        self.replica.iterations.append(Iteration(((now, end),), load, steps))
        self._note_end(end, running)
        return end

    def _one_iteration(self, now: float) -> float:
        """Start an iteration if anybody can compute, and go on to the time at which the next may start."""
        batch = self.scheduler.schedule(now)
        if batch.pieces:
            load = load_of(batch)
            self.costs.note(load)
            spans = self._pass_stages(max(now, batch.ready_s), load)
            heapq.heappush(self.in_flight, (spans[-1][1], len(self.replica.iterations), batch))
            self.replica.iterations.append(Iteration(spans, load, 1))
        self._note_state(now)
        if batch.pieces and len(self.in_flight) < len(self.free_s):
            return self._until(self.free_s[0])
        return self._until(self._next_event(now, bool(batch.pieces)))

    def _pass_stages(self, now: float, load: Load) -> tuple[tuple[float, float], ...]:
        spans, ready = [], now
        for i, seconds in enumerate(self.costs.stage_seconds(load)):
            start = max(ready, self.free_s[i])
            self.free_s[i] = start + seconds
            spans.append((start, start + seconds))
            if i + 1 < len(self.free_s):
                ready = start + seconds + self.costs.send_s(i, load.tokens)
        return tuple(spans)

    def _next_event(self, now: float, started: bool) -> float:
        """The earliest time at which something changes."""
        times = [self.in_flight[0][0]] if self.in_flight else []
        if not started:
            times += [x.ready_s for x in self.scheduler.running if x.ready_s > now]
            if self.next is not None:
                times.append(self.next.request.arrival_s)
        assert times, f"replica {self.replica.index}: {self.left} requests wait for nothing at {now} s"
        return max(now, min(times))

    def _until(self, time_s: float) -> float:
        """Finish the iterations that end by `time_s`; the time at which a next one may start."""
        while self.in_flight and self.in_flight[0][0] <= time_s:
            end, _, batch = heapq.heappop(self.in_flight)
            running = len(self.scheduler.running)
            self.left -= len(self.scheduler.finish(batch, end))
            self._note_end(end, running)
        return max(time_s, self.free_s[0]) if self.in_flight else time_s

    def _note_end(self, at_s: float, running: int) -> None:
        """The cache when an iteration ended: before and after the sequences that are done have left."""
        self.replica.states.append(CacheState(at_s, *self.scheduler.before_end, running))
        self._note_state(at_s)

    def _note_state(self, at_s: float) -> None:
        s = self.scheduler
        state = CacheState(at_s, s.cache.held, s.cache.unused, s.cache.waste, len(s.running))
        self.replica.states.append(state)


def load_of(batch: Batch) -> Load:
    """What an iteration computes, alike prompt chunks together."""
    chunks: Counter[tuple[int, int]] = Counter()
    decodes = decode_kv = samples = tokens = 0
    for sequence, count, sampled in batch.pieces:
        tokens += count
        samples += sampled
        if count == 1:
            decodes += 1
            decode_kv += sequence.computed + 1
        else:
            chunks[count, sequence.computed + count] += 1
    return Load(tokens, decodes, decode_kv, tuple((q, kv, n) for (q, kv), n in chunks.items()), samples)
