"""Pipeline stages: sequences that add one token in every iteration, advanced together without looking at each.

Up to pp iterations are under way at once, each with sequences of its own. Those whose prompts are computed mostly stay
together: they leave the last stage at one time and enter the first at one time. Each such group is a `Lockstep`, whose
members' numbers follow from those worked out when each joined. Where this is not enough (too few free blocks, or a
limit below the number of sequences that are ready), `settle` writes every sequence's own numbers back, also those of
groups under way, and the scheduler looks at each sequence, as it does without groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import merge

from msgspec import Struct, field

from sim.serve.lockstep import Lockstep
from sim.serve.scheduling.scheduler import Scheduler
from sim.serve.scheduling.sequences import Batch, Piece, Sequence

# Where groups do not fit the limits once, they mostly do not the next time: making them anew costs more than they save.
APART = 64


class Group(Lockstep, kw_only=True):
    """Members that go through the stages together. `pieces`: empty, or, where their numbers were written back while
    their iteration was under way, what the scheduler would have made of them for it."""

    pieces: tuple[Piece, ...] = ()

    def take_in(self, ready: Iterable[Sequence]) -> None:
        """Make sequences that add a token in every iteration members."""
        self.others = list(ready)
        self._join(math.inf)

    @property
    def blocks_wanted(self) -> int:
        """Free blocks without which the group cannot begin an iteration."""
        return self._lacking(1) + self.spare

    def enter(self) -> None:
        """Begin an iteration: every member gets its place for a token."""
        self._compute(1, self._lacking(1))

    def left_last_stage(self, end_s: float) -> list[Sequence]:
        """End an iteration, and return who left."""
        self._got_tokens(end_s)
        self.step += 1
        return self._leave(end_s)

    def settle_on_the_way(self) -> None:
        """Write the members' numbers while their iteration is under way."""
        members = sorted(self.members, key=lambda x: x.order)
        self.settle()
        cache = self.scheduler.cache
        for x in members:
            x.private = cache.blocks_of(x.computed + 1) - x.shared // cache.block_tokens
            x.in_flight = True
        self.pieces = tuple([Piece(x, 1, True) for x in members])


class Pipelined(Struct):
    """The groups of one replica: who is `ready` for the first stage, who is `under_way`; and `others`, who run as well,
    oldest first: prompts, and who waits for a copy from the host."""

    scheduler: Scheduler
    ready: list[Group] = field(default_factory=list)
    under_way: list[Group] = field(default_factory=list)
    others: list[Sequence] = field(default_factory=list)
    apart: int = 0  # the next iterations for which the scheduler looks at everybody without being asked

    def schedule(self, now_s: float) -> tuple[Batch, Group] | None:
        """The next iteration: a group and the pieces of others; None, and nothing done, where the scheduler has to look
        at everybody."""
        s = self.scheduler
        if self.apart:
            self.apart -= 1
            return None
        group = self._group(now_s)
        n = len(group.members)
        budget, places = s.token_budget - n, s.limits.batch_sequences - n
        if budget < 0 or places < 0:
            return None
        blocks = group.blocks_wanted
        wanted: list[tuple[Sequence, int]] = []
        for x in self.others:
            if x.in_flight or x.ready_s > now_s:
                continue
            tokens = s.next_tokens(x, budget) if budget > 0 and places > 0 else 0
            if tokens < x.remaining and (not s.splits or x.order < max([m.order for m in group.members], default=0)):
                return None  # others that are younger would get what is left
            if tokens:
                wanted.append((x, tokens))
                budget, places = budget - tokens, places - 1
                blocks += s.lacks(x, tokens)
        if blocks > s.cache.available:
            return None
        group.enter()
        pieces: list[Piece] = []
        for x, tokens in wanted:
            s.grow(x, tokens)
            pieces.append(s.piece(x, tokens))
        before = len(s.running)
        s.admit(pieces, budget, s.limits.batch_sequences - n, now_s)
        self.others += s.running[before:]
        s.push_down(now_s)
        self.ready.clear()
        if n:
            self.under_way.append(group)
        return Batch(tuple(pieces), s.blocks_free_s), group

    def _group(self, now_s: float) -> Group:
        """Everybody ready who adds one token in every iteration, as one group; it may be empty."""
        s = self.scheduler
        joining, still = list[Sequence](), list[Sequence]()
        for x in self.others:
            plain = not x.in_flight and x.generated > 0 and x.remaining == 1 and x.ready_s <= now_s
            (joining if plain and not (s.by_content and s.may_share(x)) else still).append(x)
        group = self.ready[0] if self.ready else Group(s)
        if joining:
            group.take_in(joining)
            self.others = list(merge(still, group.others, key=lambda x: x.order)) if group.others else still
            group.others = []
        for other in self.ready[1:]:  # they go on together
            members = sorted(other.members, key=lambda x: x.order)
            other.settle()
            group.take_in(members)
        self.ready = [group]
        return group

    def finish(self, batch: Batch, group: Group, end_s: float) -> list[Sequence]:
        """An iteration out of `schedule` has ended; who left."""
        s = self.scheduler
        if group.pieces:  # settled on the way
            pieces = merge(group.pieces, batch.pieces, key=lambda p: p.sequence.order)
            return self.finish_pieces(batch._replace(pieces=tuple(pieces)), end_s)
        s.note_end()
        before_end, left = s.before_end, []
        if group.members:
            self.under_way = [x for x in self.under_way if x is not group]
            left = group.left_last_stage(end_s)
            if group.members:
                self.ready.append(group)
        left += self.finish_pieces(batch, end_s)
        s.before_end = before_end
        return left

    def finish_pieces(self, batch: Batch, end_s: float) -> list[Sequence]:
        """An iteration has ended whose sequences are all pieces; who left."""
        left = self.scheduler.finish(batch, end_s)
        if left:
            self.others = [x for x in self.others if x.running]
        return left

    def settle(self) -> None:
        """Every sequence has its own numbers again, and is in no group."""
        for group in self.ready:
            group.settle()
        for group in self.under_way:
            group.settle_on_the_way()
        if self.ready or self.under_way:
            self.apart = APART
        self.ready.clear()
        self.under_way.clear()

    def look_again(self) -> None:
        """The scheduler itself put an iteration together."""
        self.others = list(self.scheduler.running)
