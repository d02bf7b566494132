"""A serving workload simulated: requests arrive, iterations compute, tokens come out.

Each data-parallel replica serves every dp-th request with a scheduler and a cache of its own. An iteration passes the
pipeline stages one after another; up to pp iterations, of different sequences, are on their way at once. Runs of
iterations that differ in nothing but their length are taken together, which changes no time.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from sim.errors import InputError
from sim.inputs.scenario import Scenario
from sim.memory import MemoryCurve
from sim.prices.profile import Profile, load_profile
from sim.serve.kv_cache import HostCache, KvCache
from sim.serve.requests import Request, make_requests
from sim.serve.scheduler import Batch, Counts, Limits, Scheduler, Sequence
from sim.serve.serving_costs import IterationCosts, Load, iteration_costs
from sim.serve.serving_faults import FaultyCosts, replica_costs
from sim.serve.serving_memory import Capacity, cache_capacity
from sim.timeline import Timeline

UNLIMITED = 1 << 60
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


@dataclass(frozen=True, eq=False, repr=False)
class ServingSimulation:
    """One simulated workload: `result` as `sim.run --json` prints it, `timeline` and `memory` for views."""

    scenario: Scenario
    profile: Profile
    costs: IterationCosts
    capacity: Capacity
    replicas: tuple[Replica, ...]
    wall_s: float

    @cached_property
    def end_s(self) -> float:
        """When the last token came out."""
        return max(s.finish_s for r in self.replicas for s in r.sequences)

    @cached_property
    def result(self) -> dict[str, Any]:
        """The numbers, in format sim-result/1."""
        from sim.serve.serving_result import make_result

        return make_result(self)

    @cached_property
    def timeline(self) -> Timeline:
        """A span for every iteration (or run of alike ones) on every stage."""
        from sim.serve.serving_result import make_timeline

        return make_timeline(self)

    @cached_property
    def memory(self) -> list[MemoryCurve]:
        """Weights, cache (as activations) and what an iteration needs for the moment, on every stage."""
        from sim.serve.serving_result import memory_curves

        return memory_curves(self)

    def __repr__(self) -> str:
        served = sum(len(r.sequences) for r in self.replicas)
        return f"ServingSimulation({self.scenario.name}: {served:,} requests in {self.end_s:.6g} s)"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from sim.views.notebook import result_html

        return result_html(self.scenario.name, self.result)

    def memory_over(self, steps: int) -> list[MemoryCurve]:
        """`memory`: a workload has no further steps."""
        return self.memory

    @property
    def critical_rows(self) -> list[int]:
        """No row is marked: an iteration follows the one before."""
        return []


def simulate_serving(
    scenario: Scenario, profile: Profile | None = None, requests: tuple[Request, ...] | None = None, *,
    group: bool = True, held_bytes: float = 0.0,
) -> ServingSimulation:
    """Serve the scenario's requests, or `requests` in their place. Without `group` every iteration is its own.
    `held_bytes` of every GPU belong to others.

    Raises:
        InputError: without an inference section, or for a trace that cannot be read.
    """
    begin = time.perf_counter()
    inference = scenario.inference
    if inference is None:
        raise InputError(f"{scenario.name}: this scenario has no `inference` section")
    costs = iteration_costs(scenario, profile or load_profile(scenario.calibration))
    found = make_requests(inference.requests) if requests is None else requests
    dp = scenario.parallelism.dp
    capacity = cache_capacity(scenario, costs, found, held_bytes)
    replicas = []
    for i in range(min(dp, len(found))):
        sequences = [Sequence(r, n) for n, r in enumerate(found[i::dp])]
        replica = Replica(i, sequences, _scheduler(scenario, costs, capacity, sequences))
        _Server(replica, replica_costs(costs, scenario, i), group and len(costs.stages) == 1).run()
        replicas.append(replica)
    return ServingSimulation(scenario, costs.pricing.costs.profile, costs, capacity, tuple(replicas),
                             time.perf_counter() - begin)


def _scheduler(scenario: Scenario, costs: IterationCosts, capacity: Capacity, sequences: list[Sequence]) -> Scheduler:
    i, pp = scenario.inference, scenario.parallelism.pp
    assert i is not None
    if i.batching == "static":
        limits = Limits(len(sequences), UNLIMITED, -(-len(sequences) // pp))
    else:
        limits = Limits(i.max_running_requests, i.max_batch_tokens, -(-i.max_running_requests // pp))
    cache = KvCache(capacity.blocks, i.kv_cache.block_tokens, capacity.reserve_tokens)
    host = HostCache(capacity.host_tokens) if i.prefix_cache == "cpu" else None
    network = costs.pricing.network
    latency = network.host_copy(0.0)
    per_token = network.host_copy(capacity.stage_token_bytes) - latency
    room = capacity.host_tokens if i.preemption == "swap" else 0
    return Scheduler(cache, limits, i.prefix_cache == "gpu", host, per_token, latency, room)


class _Server:
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


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p90 and p99, between neighbours where needed; zeros for no values."""
    if not values:
        return {"p50": 0.0, "p90": 0.0, "p99": 0.0}
    found = np.percentile(np.array(values), (50, 90, 99))
    return {name: float(v) for name, v in zip(("p50", "p90", "p99"), found, strict=True) if math.isfinite(v)}
