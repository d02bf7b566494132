"""One replica of the model: what it did, and how its iterations are put together and end, on whichever clock."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from itertools import accumulate

from msgspec import Struct, field

from sim.serve.cache.states import CacheStates
from sim.serve.lockstep import Lockstep
from sim.serve.pipelined import Group, Pipelined
from sim.serve.prices.costs import IterationCosts
from sim.serve.prices.front import Front
from sim.serve.prices.load import Load, load_of
from sim.serve.scheduling.prompt_waits import Prospect
from sim.serve.scheduling.scheduler import Scheduler
from sim.serve.scheduling.sequences import Batch, Counts, Sequence

LONGEST_RUN = 1 << 16  # iterations priced at once


class Iteration(Struct, frozen=True):
    """One iteration, or `steps` alike, on every stage: (start, end) each."""

    spans: tuple[tuple[float, float], ...]
    load: Load
    steps: int


class Replica(Struct):
    """What one replica did."""

    index: int
    sequences: list[Sequence]
    scheduler: Scheduler
    iterations: list[Iteration] = field(default_factory=list)
    states: CacheStates = field(default_factory=CacheStates)

    @property
    def counts(self) -> Counts:
        return self.scheduler.counts


class Work(Struct, frozen=True):
    """An iteration under way. `together`: its sequences in lockstep are no pieces; `ready_s`: when it may start;
    `group`: of pipeline stages, who goes through them together."""

    batch: Batch
    load: Load
    together: bool
    ready_s: float
    group: Group | None = None

    def iteration(self, spans: tuple[tuple[float, float], ...], load: Load | None = None) -> Iteration:
        """What it is once it has passed the stages."""
        return Iteration(spans, load or self.load, 1)


class Worker:
    """Puts a replica's iterations together and takes what they leave; clocks say when. Without `group` the scheduler
    looks at every sequence in every iteration: the reference."""

    def __init__(self, replica: Replica, costs: IterationCosts, group: bool) -> None:
        self.replica, self.costs, self.scheduler = replica, costs, replica.scheduler
        s, stages = replica.scheduler, len(costs.stages)
        plain = group and not s.drafted and not s.adapters
        self.lockstep = Lockstep(s) if plain and stages == 1 else None
        together = plain and stages > 1 and not s.prompts_first and not s.one_behind
        self.pipelined = Pipelined(s) if together else None
        self.front = costs.host.front
        self.step_s = 0.0  # of the last of alike iterations
        self.idle = len(costs.stages) == 1  # nobody could compute; stages of a pipeline always have others' iterations

    def begin(self, now: float) -> Work | None:
        """The next iteration, or None if nobody can compute now."""
        s = self.scheduler
        self._send_first_tokens(now)
        if self.idle and s.one_behind:
            s.catch_up()
        work = self._put_together(now)
        if s.one_behind and s.catch_up() and work is None:
            work = self._put_together(now)
            s.catch_up()
        self.idle = work is None and len(self.costs.stages) == 1
        self._note_state(now)
        return work

    def prospect(self) -> Prospect:
        """What the next iteration would compute."""
        s = self.scheduler
        return s.prospect(s.known if s.one_behind and not self.idle else len(s.waiting))

    def _put_together(self, now: float) -> Work | None:
        s = self.scheduler
        if s.wait is not None:
            s.held = s.wait.holds(self.prospect(), s.limits.batch_tokens)
        if self.pipelined is not None:
            return self._of_groups(self.pipelined, now)
        lockstep = self.lockstep
        batch = None if lockstep is None else lockstep.schedule(now)
        if lockstep is None or batch is None:
            return self._looking_at_all(now)
        n = 0 if batch.prompts_alone else len(lockstep.members)
        load = load_of(batch, n, lockstep.seen, lockstep.lengths if self.costs.tells_lengths else None)
        return self._work(batch, load, True, now) if load.tokens else None

    def _work(self, batch: Batch, load: Load, together: bool, now: float, group: Group | None = None) -> Work:
        return Work(batch, load, together, max(now, batch.ready_s), group)

    def _of_groups(self, pipelined: Pipelined, now: float) -> Work | None:
        found = pipelined.schedule(now)
        if found is None:
            pipelined.settle()
            work = self._looking_at_all(now)
            pipelined.look_again()
            return work
        batch, group = found
        load = load_of(batch, len(group.members), group.seen)
        return self._work(batch, load, True, now, group) if load.tokens else None

    def _looking_at_all(self, now: float) -> Work | None:
        if self.lockstep is not None:
            self.lockstep.settle()
        batch = self.scheduler.schedule(now)
        if batch.pieces:
            lengths = (0, 0) if self.costs.tells_lengths else None
            return self._work(batch, load_of(batch, lengths=lengths), False, now)
        if self.lockstep is not None:
            self.lockstep.look_again()
        return None

    def end(self, work: Work, end_s: float) -> list[Sequence]:
        """An iteration has ended; who left."""
        running = len(self.scheduler.running)
        if self.pipelined is not None and work.group is not None:
            left = self.pipelined.finish(work.batch, work.group, end_s)
        elif self.pipelined is not None:
            left = self.pipelined.finish_pieces(work.batch, end_s)
        elif self.lockstep is not None and work.together:
            left = self.lockstep.finish(work.batch, end_s)
        else:
            left = self.scheduler.finish(work.batch, end_s)
            if self.lockstep is not None:
                self.lockstep.look_again()
        if self.front is not None:
            self._sent(self.front, work, end_s, left)
        self._none_left()
        self._note_end(end_s, running, bool(work.batch.pieces or left or work.group))
        return left

    def _sent(self, front: Front, work: Work, end_s: float, left: list[Sequence]) -> None:
        """Note when clients have the first tokens and the last ones of an iteration."""
        firsts = [p.sequence for p in work.batch.pieces if p.sequence.first_token_s == end_s]
        if not firsts and not left:
            return
        iteration_s = (end_s - work.ready_s) / len(self.costs.stages)
        mean_s, last_s = front.after_s(work.load.sequences, iteration_s)
        first_s = mean_s if work.batch.prompts_alone else last_s
        for sequence in firsts:
            sequence.first_after_s = first_s
        for sequence in left:
            sequence.last_after_s = first_s if sequence.first_token_s == end_s else mean_s

    def _send_first_tokens(self, now: float) -> None:
        """Let the first tokens that came with their sequences' caches leave, before an iteration is put together."""
        if not self.scheduler.arrived:
            return
        there = self.scheduler.first_tokens(now)
        if there and self.front is not None:
            last_s = self.front.after_s(len(there), math.inf)[1]
            for sequence in there:
                sequence.first_after_s = last_s

    def _none_left(self) -> None:
        """Who was done leaves at once where there is no next iteration."""
        s = self.scheduler
        if len(s.leaving) == len(s.running) and not s.waiting:
            s.catch_up()

    def steady_steps(self, now: float) -> int:
        """As `Lockstep.steady_steps`."""
        self._send_first_tokens(now)
        return 0 if self.lockstep is None else self.lockstep.steady_steps(now)

    def run_ends(self, now: float, steps: int, until_s: float = math.inf) -> list[float]:
        """When the next iterations end, which are all alike (see `steady_steps`): `steps` of them, or fewer where
        about that many end before `until_s`."""
        assert self.lockstep is not None
        self.scheduler.known = len(self.scheduler.waiting)
        n, kv = len(self.lockstep.members), self.lockstep.seen
        lengths = self.lockstep.lengths if self.costs.tells_lengths else (0, 0)
        if until_s < math.inf and self.step_s > 0:
            steps = min(steps, 2 + int((until_s - now) / self.step_s))
        seconds = self.costs.decode_run(n, kv, min(steps, LONGEST_RUN), lengths)
        seconds[0] += now
        return list(accumulate(seconds))  # one after another, as a clock adds

    def run(self, now: float, ends: list[float], until_s: float) -> list[Sequence]:
        """Alike iterations, from `now` to the first of their `ends` that is not before `until_s`; who left."""
        assert self.lockstep is not None
        n, kv = len(self.lockstep.members), self.lockstep.seen
        steps = min(len(ends), bisect_left(ends, until_s) + 1)
        end_s = ends[steps - 1]
        lengths = self.lockstep.lengths if self.costs.tells_lengths else (0, 0)
        self.replica.iterations.append(Iteration(((now, end_s),), Load(n, n, kv, (), n, lengths=lengths), steps))
        self.step_s, self.idle = (end_s - now) / steps, False
        mean = self.lockstep.mean_occupancy(steps)
        for at_s in (now, end_s):
            self.replica.states.note(at_s, mean, n)
        left = self.lockstep.run(array("d", ends[:steps]))
        if left and self.front is not None:
            mean_s = self.front.after_s(n, self.step_s)[0]
            for sequence in left:
                sequence.last_after_s = mean_s
        self._none_left()
        self._note_end(end_s, n, bool(left))
        return left

    def next_ready_s(self, now: float) -> float | None:
        """When the next running sequence's copy arrives, where that is known."""
        running = self.scheduler.running if self.pipelined is None else self.pipelined.others
        return min([x.ready_s for x in running if now < x.ready_s < math.inf], default=None)

    def _note_end(self, at_s: float, running: int, changed: bool) -> None:
        """The cache when an iteration ended: before and after the sequences that are done have left."""
        self.replica.states.note(at_s, self.scheduler.before_end, running)
        if changed:
            self._note_state(at_s)

    def _note_state(self, at_s: float) -> None:
        self.replica.states.note(at_s, self.scheduler.cache.occupancy(), len(self.scheduler.running))
