"""Running sequences that add one token in every iteration, advanced together without looking at each.

Most running sequences do nothing else: in every iteration each adds one token, and takes a block where its last one is
full. Who ends when, and how many need a block in which iteration, follows from numbers that are worked out when a
sequence joins (`Lockstep.ends`, `Lockstep.lacking`). An iteration then costs what changes in it: prompts, arrivals and
ends. Wherever the scheduler's rules ask for more than that (nobody has a block left, the token budget is too small for
all), `settle` writes every sequence's own numbers back, and the scheduler decides as ever.
"""

from __future__ import annotations

import heapq
from array import array
from itertools import accumulate

from msgspec import Struct, field

from sim.serve.scheduling.scheduler import Scheduler
from sim.serve.scheduling.sequences import Batch, Piece, Sequence


class Lockstep(Struct):
    """Members of one replica without pipeline stages. After `step` iterations a member has computed its `base` + `step`
    tokens. `others` run as well, oldest first: prompts, and who waits for a copy from the host."""

    scheduler: Scheduler
    step: int = 0
    members: dict[Sequence, int] = field(default_factory=dict)  # and their base
    bases: int = 0  # their sum
    newest: int = 0  # the youngest member's order, at least
    ends: list[tuple[int, int, Sequence]] = field(default_factory=list)  # a heap: the step after which each ends
    lacking: list[int] = field(
        default_factory=list
    )  # members that lack a block in a step, by its number modulo a block
    others: list[Sequence] = field(default_factory=list)
    last_s: float = 0.0  # when members last got tokens, save `fresh` ones, who got none as members
    before_s: float = 0.0  # and the time before that
    fresh: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lacking = [0] * self.scheduler.cache.block_tokens

    @property
    def spare(self) -> int:
        """Blocks that must be free beside those that members take."""
        return int(self.scheduler.watermark is not None)

    @property
    def seen(self) -> int:
        """Tokens that the members' next tokens see, themselves included."""
        return self.bases + len(self.members) * (self.step + 1)

    @property
    def lengths(self) -> tuple[int, int]:
        """The fewest and the most tokens that a member's next token sees, itself included."""
        if not self.members:
            return 0, 0
        bases = self.members.values()
        return min(bases) + self.step + 1, max(bases) + self.step + 1

    def schedule(self, now_s: float) -> Batch | None:
        """The next iteration: every member's token (which are no pieces), and the pieces of others; or prompts alone.
        None, and no piece made, where the scheduler has to look at everybody."""
        s = self.scheduler
        self._join(now_s)
        own = self._lacking(1)
        if s.prompts_first and (batch := self._prompts(own, now_s)) is not None:
            return batch
        n = len(self.members)
        wanted = [(x, 1) for x in s.leaving] if s.token_more else []
        newest = max([self.newest, *[x.order for x, _ in wanted]])
        budget = s.token_budget - n - len(wanted)
        if budget < 0:
            return None
        blocks = own + self.spare + sum([s.lacks(x, 1) for x, _ in wanted])
        for sequence in self.others:
            if sequence.ready_s > now_s:
                continue
            tokens = s.next_tokens(sequence, budget)
            if tokens < sequence.remaining and (not s.splits or sequence.order < newest):
                return None  # others that are younger would get what is left
            if tokens:
                wanted.append((sequence, tokens))
                budget -= tokens
                blocks += s.lacks(sequence, tokens)
        late = s.prompts_first and (any(x.prompts for x, _ in wanted) or not n + len(wanted))
        if late or blocks > s.cache.available:
            return None
        s.before_tokens()
        s.evict_for(blocks - self.spare)
        self._compute(1, own)
        pieces: list[Piece] = []
        for sequence, tokens in wanted:
            s.grow(sequence, tokens)
            pieces.append(s.piece(sequence, tokens))
        before = len(s.running)
        if not s.prompts_first:
            s.admit(pieces, budget, s.limits.batch_sequences - n, now_s)
        self.others += s.running[before:]
        s.push_down(now_s)
        return Batch(tuple(pieces), s.blocks_free_s)

    def _prompts(self, own: int, now_s: float) -> Batch | None:
        """An iteration that begins with prompts, if any can be computed; `own`: blocks that the members will lack."""
        s = self.scheduler
        adding = [*[x for x in self.others if not x.prompts], *s.leaving] if s.mixes else []
        beside = own + sum([s.lacks(x, 1) for x in adding]) if s.mixes else 0
        before = len(s.running)
        prompts = s.prompts(self.others, now_s, beside)
        self.others += s.running[before:]
        if not prompts:
            return None
        s.evict_for(beside)
        if s.mixes:
            self._compute(1, own)
        return s.with_prompts(prompts, s.tokens_beside(adding, now_s), now_s)

    def finish(self, batch: Batch, end_s: float) -> list[Sequence]:
        """An iteration out of `schedule` has ended; who left."""
        left = self.scheduler.finish(batch, end_s)
        if left:
            self.others = [x for x in self.others if x.running]
        if batch.prompts_alone:
            return left
        self._got_tokens(end_s)
        self.step += 1
        return left + self._leave(end_s)

    def settle(self) -> None:
        """Every member has its own numbers again, and is none."""
        if not self.members:
            return
        for sequence, base in self.members.items():
            self._write(sequence, base)
        self.members.clear()
        self.fresh.clear()
        self.lacking = [0] * len(self.lacking)
        self.ends.clear()
        self.bases = self.newest = 0

    def look_again(self) -> None:
        """The scheduler itself did an iteration."""
        self.others = [x for x in self.scheduler.running if x.running]

    def steady_steps(self, now_s: float) -> int:
        """How many of the next iterations are all alike: members alone, of whom none ends before the last of them, or
        lacks a block; 0 where the next one is not of that kind.

        A request that waits for room goes on waiting, as these steps free none. One that may be admitted when it
        arrives ends the run at that time, which the caller must look for.
        """
        self._join(now_s)
        s, n = self.scheduler, len(self.members)
        if not n or self.others or s.to_catch_up or n > s.token_budget:
            return 0
        if s.waiting and n < s.limits.running and s.fits(s.waiting[0]):
            return 0
        return self._steps_within(s.blocks_at_once - self.spare, self.ends[0][0] - self.step)

    def _steps_within(self, room: int, high: int) -> int:
        """How many steps, of at most `high`, members can take with so many blocks."""
        low = 0
        if len(self.members) * (high // self.scheduler.cache.block_tokens + 1) <= room:
            return high
        while low < high:
            middle = (low + high + 1) // 2
            if self._lacking(middle) <= room:
                low = middle
            else:
                high = middle - 1
        return low

    def run(self, ends: array[float]) -> list[Sequence]:
        """Do alike iterations (see `steady_steps`) at once, which end at these times; who left."""
        s, steps = self.scheduler, len(ends)
        last = self.step + steps
        self._got_tokens(ends[0])
        if steps > 1:
            s.gaps.runs.append((ends, len(self.members)))
            self.before_s, self.last_s = ends[-2:]
        s.before_tokens()
        while self.step < last:
            more = last - self.step
            if s.cache.merges:  # what gives way depends on how much is taken at once
                more = max(1, self._steps_within(s.cache.free, more))
                s.evict_for(self._lacking(1))
            self._compute(more, self._lacking(more))
            self.step += more
        s.note_end()
        s.added_tokens(steps)
        return self._leave(ends[-1])

    def _got_tokens(self, end_s: float) -> None:
        """Every member got a token."""
        gaps = self.scheduler.gaps
        if old := len(self.members) - len(self.fresh):
            gaps.add(end_s - self.last_s, old)
        for x in self.fresh:
            gaps.add(end_s - x.last_output_s, 1)
        self.fresh.clear()
        self.before_s, self.last_s = self.last_s, end_s

    def mean_occupancy(self, steps: int) -> tuple[float, float, float]:
        """`KvCache.occupancy`'s means over `steps` alike iterations, as if each took as long; called before them.

        Every `block_tokens` steps each member takes a block; `taken` says how many all take up to each of these steps.
        """
        cache, block, n, more = self.scheduler.cache, self.scheduler.cache.block_tokens, len(self.members), 0.0
        if not cache.reserve_tokens:
            rounds, rest = divmod(steps, block)
            taken = list(accumulate(self._next_lacking(min(steps, block))))
            earlier = n * (block * rounds * (rounds - 1) // 2 + rest * rounds)  # what whole rounds before took
            more = (rounds * sum(taken) + sum(taken[:rest]) + earlier) / steps
        held, unused, _ = cache.occupancy()
        empty = (cache.private + more) * block - cache.tokens - n * (steps + 1) / 2
        return held + more, min(unused, cache.blocks - held - more), empty / ((held + more) * block)

    def _join(self, now_s: float) -> None:
        """Others that from now on add a token in every iteration become members."""
        if not self.others:
            return
        block, still = self.scheduler.cache.block_tokens, []
        for x in self.others:
            if x.generated == 0 or x.remaining != 1 or x.ready_s > now_s or x.private != self._blocks(x):
                still.append(x)
                continue
            base = self.members[x] = x.computed - self.step
            self.fresh.append(x)
            self.bases += base
            self.newest = max(self.newest, x.order)
            self.lacking[-base % block] += 1
            heapq.heappush(self.ends, (self.step + x.request.output_tokens - x.generated, x.order, x))
        self.others = still

    def _lacking(self, steps: int) -> int:
        """Blocks that members need for so many steps: one each time all of a member's are full. In the contiguous
        layout a sequence has all its places from the start."""
        cache = self.scheduler.cache
        if cache.reserve_tokens:
            return 0
        if steps == 1:  # asked in every iteration
            return self.lacking[self.step % cache.block_tokens]
        rounds, rest = divmod(steps, cache.block_tokens)
        return rounds * len(self.members) + sum(self._next_lacking(rest))

    def _next_lacking(self, steps: int) -> list[int]:
        """How many members lack a block in each of the next steps, which are no more than a block's tokens."""
        first = self.step % len(self.lacking)
        found = self.lacking[first : first + steps]
        return found + self.lacking[: steps - len(found)]

    def _compute(self, steps: int, blocks: int) -> None:
        """Members' tokens of so many steps, for which they lack so many blocks."""
        cache = self.scheduler.cache
        taken = cache.take(blocks)
        assert taken, "the members' blocks were promised"
        cache.tokens += steps * len(self.members)

    def _leave(self, end_s: float) -> list[Sequence]:
        """Members that have all their tokens end."""
        s, left = self.scheduler, []
        while self.ends and self.ends[0][0] <= self.step:
            sequence = heapq.heappop(self.ends)[2]
            base = self.members.pop(sequence)
            self._write(sequence, base)
            self.bases -= base
            self.lacking[-base % s.cache.block_tokens] -= 1
            s.end(sequence, end_s)
            left.append(sequence)
        if not self.members:
            self.newest = 0
        if left:
            s.dismiss()
        return left

    def _write(self, sequence: Sequence, base: int) -> None:
        new = base + self.step - sequence.computed
        sequence.computed += new
        sequence.generated += new
        if new:
            sequence.output_before_s = self.before_s if new > 1 else sequence.last_output_s
            sequence.last_output_s = self.last_s
        sequence.private = self._blocks(sequence)

    def _blocks(self, sequence: Sequence) -> int:
        """A member's own blocks: just enough for what is computed."""
        cache = self.scheduler.cache
        return cache.blocks_of(sequence.computed) - sequence.shared // cache.block_tokens
