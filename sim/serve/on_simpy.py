"""Serving as SimPy processes and resources.

A process for the arrivals, one for each replica, and one for each iteration under way, which passes the replica's
pipeline stages: resources that hold one iteration at a time. Replicas hear of each other through a router and through
what they send each other. Iterations are put together by the same scheduler as in `sim.serve.quick_pass`, which stands
in where replicas do not affect each other, and gives the same times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator
from collections.abc import Sequence as Items
from typing import Any

import simpy
from msgspec.structs import replace

from sim.engine.simpy_events import LAST, Clock
from sim.serve.prices.costs import IterationCosts
from sim.serve.replicas.pools import Pool, experts_span
from sim.serve.replicas.replica import Replica, Work, Worker
from sim.serve.replicas.router import Router
from sim.serve.scheduling.prompt_waits import BalancedPrompts
from sim.serve.scheduling.sequences import Sequence

Process = Generator[simpy.Event, Any, None]


class ReplicaProcess:
    """A replica on SimPy's clock. `on_left`: are told who left, with all tokens or for another replica; `on_chunk`: of
    whose prompt a chunk has been computed, but not the last; `held`: computed prompts that are still to be copied to
    other replicas; `on_copied_away`: are told when one has been."""

    def __init__(self, clock: Clock, replica: Replica, costs: IterationCosts, group: bool, alone: bool = True) -> None:
        self.clock, self.replica, self.costs = clock, replica, costs
        self.worker = Worker(replica, costs, group)
        self.stages = [simpy.Resource(clock) for _ in costs.stages]
        self.on_left: list[Callable[[Sequence], None]] = []
        self.on_chunk: list[Callable[[Sequence], None]] = []
        self.held = 0
        self.on_copied_away: list[Callable[[], None]] = []
        self.in_flight = 0
        self.news = clock.event()  # a request, a copy or a result has come
        if alone:
            clock.process(self._serve())

    def take(self, sequence: Sequence) -> None:
        """A request comes in."""
        self.replica.scheduler.waiting.append(sequence)
        self.tell()

    def tell(self) -> None:
        """Something has changed: whoever waits for that looks again."""
        news, self.news = self.news, self.clock.event()
        news.succeed()

    def copied_away(self, held: Sequence) -> None:
        """A computed prompt has come to another replica: its blocks here are free."""
        self.held -= 1
        self.replica.scheduler.free(held)
        for tell in self.on_copied_away:
            tell()
        self.tell()

    def end(self, work: Work) -> None:
        """An iteration has ended."""
        left = self.worker.end(work, self.clock.now)
        for piece in work.batch.pieces if self.on_chunk else ():
            if not piece.samples:
                for tell in self.on_chunk:
                    tell(piece.sequence)
        self._leave(left)

    def _leave(self, sequences: Items[Sequence]) -> None:
        for sequence in sequences:
            for tell in self.on_left:
                tell(sequence)

    def _serve(self) -> Process:
        """Put one iteration after another together, whenever the first stage is free and somebody can compute."""
        clock = self.clock
        while True:
            yield clock.at(clock.now, LAST)
            steps = self.worker.steady_steps(clock.now)
            if steps > 1:
                yield from self._run(steps)
                continue
            work = self.worker.begin(clock.now)
            if work is None:
                ready_s = self.worker.next_ready_s(clock.now)
                yield self.news if ready_s is None else self.news | clock.at(ready_s)
                continue
            passed = clock.event()
            clock.process(self._iteration(work, passed))
            yield passed
            while self.in_flight == len(self.stages):
                yield self.news

    def _run(self, steps: int) -> Process:
        """Alike iterations of the only stage, until one ends after news have come."""
        clock, start = self.clock, self.clock.now
        ends = self.worker.run_ends(start, steps)
        end = clock.at(ends[-1])
        yield self.news | end
        until = clock.now
        yield clock.at(ends[min(len(ends) - 1, bisect_left(ends, until))])
        self._leave(self.worker.run(start, ends, until))

    def _iteration(self, work: Work, passed: simpy.Event) -> Process:
        """Through all stages, each of which holds one iteration at a time; `passed` is the first of them."""
        clock, stages, iterations = self.clock, self.stages, self.replica.iterations
        self.in_flight += 1
        number, spans = len(iterations), []
        iterations.append(work.iteration(()))
        if work.ready_s > clock.now:
            yield clock.at(work.ready_s)
        turn = stages[0].request()
        for i, seconds in enumerate(self.costs.stage_seconds(work.load)):
            yield turn
            start = clock.now
            yield clock.timeout(seconds)
            spans.append((start, clock.now))
            done = turn
            if i + 1 < len(stages):
                turn = stages[i + 1].request()  # before the message is sent, so that none overtakes another
            stages[i].release(done)
            if i + 1 < len(stages):
                if i == 0:
                    passed.succeed()
                yield clock.timeout(self.costs.send_s(i, work.load.tokens))
        iterations[number] = work.iteration(tuple(spans))
        self.in_flight -= 1
        self.end(work)
        if len(stages) == 1:
            passed.succeed()
        self.tell()


class SharedExperts:
    """Replicas whose experts are spread over all of them: every layer exchanges tokens, so that their iterations start
    and end together. An iteration takes what the slowest of them takes, with the experts' share of all tokens; who has
    nothing to compute takes part with its experts alone (vLLM's data-parallel engines run empty batches meanwhile).
    `balance`: by which their prompts wait for each other."""

    def __init__(
        self, clock: Clock, members: Items[ReplicaProcess], span: int, balance: BalancedPrompts | None
    ) -> None:
        self.clock, self.members, self.span, self.balance = clock, members, span, balance
        clock.process(self._serve())

    def _serve(self) -> Process:
        clock = self.clock
        while True:
            yield clock.at(clock.now, LAST)
            self._hold_prompts()
            works = [(m, work) for m in self.members if (work := m.worker.begin(clock.now)) is not None]
            if not works:
                ready = [t for m in self.members if (t := m.worker.next_ready_s(clock.now)) is not None]
                yield clock.any_of([*[m.news for m in self.members], *[clock.at(t) for t in ready]])
                continue
            costs = self.members[0].costs
            pooled = costs.host.pooled([work.load for _, work in works], self.span, costs.dims.ep > 1)
            start, end = max([work.ready_s for _, work in works]), clock.now
            for m, work in works:
                load = replace(work.load, pooled=pooled)
                own = start + m.costs.stage_seconds(load)[0]
                m.replica.iterations.append(work.iteration(((start, own),), load))
                end = max(end, own)
            yield clock.at(end)
            for m, work in works:
                m.end(work)

    def _hold_prompts(self) -> None:
        """Let prompts of all members wait, or none."""
        if self.balance is None:
            return
        workers = [m.worker for m in self.members]
        held = self.balance.holds([w.prospect() for w in workers], workers[0].scheduler.limits.running)
        for worker in workers:
            worker.scheduler.held = held


def replica_processes(clock: Clock, pool: Pool, group: bool) -> list[ReplicaProcess]:
    """A pool's replicas on the clock."""
    span = experts_span(pool.scenario)
    members = [
        ReplicaProcess(clock, r, own, group, span == 1) for r, own in zip(pool.replicas, pool.prices, strict=True)
    ]
    i = pool.scenario.for_serving
    rule = i.balanced_prompts if i.disaggregated is None else None
    if span > 1:
        for first in range(0, len(members), span):
            balance = None if rule is None else BalancedPrompts(rule.timeout_iterations, rule.wait_iterations)
            SharedExperts(clock, members[first : first + span], span, balance)
    return members


def take_in(processes: Items[ReplicaProcess], router: Router, sequence: Sequence) -> None:
    """A request comes to a pool: to the replica that `router` sends it to, once that has a place for it."""
    router.queue.append(sequence)
    deal(processes, router)


def deal(processes: Items[ReplicaProcess], router: Router, left: Sequence | None = None) -> None:
    """Requests of the router's queue go to replicas, as long as there is a place for them; one may have left."""
    if left is not None:
        router.left(left)
    while router.queue and router.has_place():
        sequence = router.queue.popleft()
        chosen = processes[router.choose(sequence)]
        chosen.replica.sequences.append(sequence)
        chosen.take(sequence)


def serve_on_simpy(
    clock: Clock,
    pools: Items[Items[ReplicaProcess]],
    requests: Items[Sequence],
    enter: Callable[[Sequence], None],
    concurrency: int | None = None,
    before_s: float = 0.0,
) -> None:
    """Let all requests, in order of arrival, come in by `enter`, until all are served. Clients have at most
    `concurrency` of them under way; a request that must wait for another's end is sent then, as with
    `vllm bench serve --max-concurrency`, and takes `before_s` to the engine."""
    places = None if concurrency is None else simpy.Container(clock, init=concurrency)

    def sent_anew(after_s: float) -> Process:
        assert places is not None
        yield clock.at(clock.now + after_s)
        places.put(1)

    def ended(sequence: Sequence) -> None:
        if places is None or sequence.finish_s < 0:
            return
        if after_s := sequence.last_after_s + before_s:
            clock.process(sent_anew(after_s))
        else:
            places.put(1)

    def arrivals() -> Process:
        for sequence in requests:
            if sequence.request.arrival_s > clock.now:
                yield clock.at(sequence.request.arrival_s)
            if places is not None:
                yield places.get(1)
            sequence.arrival_s = clock.now
            enter(sequence)

    for replica in (r for pool in pools for r in pool):
        replica.on_left.append(ended)
    clock.process(arrivals())
    clock.run()
    unserved = sum(s.finish_s < 0 for s in requests)
    assert not unserved, f"{unserved} requests wait for nothing at {clock.now} s"
