"""Sequences that run on a replica: how one starts, gives way to others, gets its tokens and leaves.

Swapping (Kwon et al. 2023, arXiv 2309.06180, section 4.5): all blocks of a sequence leave together. The iteration that
takes them over starts when the copy is done; on the way back others compute meanwhile. Both directions of the bus work
at once, each serves one copy after another.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

from msgspec import field

from sim.serve.cache.found_prefixes import FoundPrefixes, Matched
from sim.serve.cache.host_copies import Copied, Copy, copied, copy_s
from sim.serve.scheduling.adapters import AdapterSlots
from sim.serve.scheduling.output_gaps import OutputGaps
from sim.serve.scheduling.reserved_output import ReservedOutput
from sim.serve.scheduling.sequences import Batch, Sequence


class Accepts(Protocol):
    """Decides how many drafted tokens are accepted."""

    def accepted(self, request: int, position: int, drafted: int) -> int:
        """Return how many of `drafted` tokens, from `position` of a request on, come before the first rejected one."""


class RunningSequences(FoundPrefixes):
    """The queue of one replica, the sequences that run, oldest first, and their cache."""

    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    started: int = 0
    drafted: int = 0  # tokens that a draft adds to each sequence in an iteration
    finds: Callable[[int, int], bool] | None = None  # whether it has any for a request at a position; None: always
    acceptance: Accepts | None = None
    hands_over: bool = False  # sequences leave with their first token, for a replica that adds the others
    fetch: Callable[[Sequence], None] | None = None  # asks another replica for what it has computed of a sequence
    arrived: list[Sequence] = field(default_factory=list)  # whose first tokens have come from another replica
    adapters: AdapterSlots | None = None
    output: ReservedOutput = field(default_factory=ReservedOutput)  # for which a request that enters leaves room
    known: int = 0  # of those who wait, the first ones, who had come when the last iteration was put together
    leaving: list[Sequence] = field(default_factory=list)  # who is done, but not for the next iteration
    blocks_free_s: float = 0.0  # when what lay in blocks that others take over has been copied away
    copies: list[Copy] = field(default_factory=list)
    gaps: OutputGaps = field(default_factory=OutputGaps)
    before_end: tuple[int, int, float] = (0, 0, 0.0)  # held, unused, waste when an iteration ended, before any left

    def added_tokens(self, steps: int) -> None:
        """Note that `steps` iterations have added tokens: the reserved share of output falls with each."""
        self.output.steps += steps

    def _last_blocks(self, sequence: Sequence) -> int:
        """Blocks of a sequence with all its tokens."""
        request = sequence.request
        return self.cache.blocks_of(request.prompt_tokens + (1 if self.hands_over else request.output_tokens))

    def _start(self, sequence: Sequence, matched: Matched, blocks: int, now_s: float) -> None:
        hit, loaded, own = matched[:3]
        if not sequence.preemptions and not sequence.remote:
            self.counts.prompt_tokens += sequence.request.prompt_tokens
        found = hit + loaded + own - sequence.lost - max(0, sequence.remote - sequence.again)
        self.counts.hit_tokens += max(0, found)
        self.counts.recomputed_tokens += max(0, -found)
        if sequence.admitted_s < 0:
            sequence.admitted_s = now_s
        sequence.lost = 0
        sequence.private, sequence.shared, sequence.computed = blocks, hit, hit + loaded + own
        sequence.reserved = self._last_blocks(sequence) - hit // self.cache.block_tokens
        self.reserved += sequence.reserved
        self.cache.tokens += loaded + own
        if self.share_on_gpu and sequence.request.prefix and sequence.reads is None:
            self._read_prefix(sequence, 0)
        self.started += 1
        sequence.order, sequence.running = self.started, True
        self.running.append(sequence)
        if sequence.remote:
            assert self.fetch is not None
            sequence.remote, sequence.again, sequence.ready_s = 0, 0, math.inf
            self.fetch(sequence)
        elif loaded:
            if self.tiers is not None and not sequence.swapped:
                keys = self.cache.keys(sequence.request.prefix, hit, hit + loaded)
                sequence.ready_s = self.tiers.load(keys, now_s)
            else:
                kind: Copied = "preempted sequence" if sequence.swapped else "prefix"
                sequence.ready_s = self._copy(kind, True, loaded, now_s)
            self.counts.loaded_tokens += loaded - sequence.swapped
            self.swap_tokens += sequence.swapped
            sequence.swapped = 0
        if self.adapters is not None:
            sequence.ready_s = max(sequence.ready_s, self.adapters.use(sequence.request.adapter, now_s))

    def _copy(self, what: Copied, up: bool, tokens: int, at_s: float) -> float:
        """When a copy from or to the host's memory is done that could begin at `at_s`."""
        start_s, end_s = copied((self.bus,), up, at_s, copy_s((self.bus,), tokens))
        self.copies.append(Copy(start_s, end_s, what, "host", up, tokens))
        return end_s

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """Who makes room for `sequence`: the youngest after it, itself if there is none, nobody while all after it are
        under way. So the oldest always goes on, and every request ends."""
        younger = self.running[self.running.index(sequence) + 1 :]
        return next((s for s in reversed(younger) if not s.in_flight), None if younger else sequence)

    def _put_out(self, victim: Sequence, now_s: float) -> None:
        """Take a sequence's blocks: preempt it, or let it leave if it has all its tokens."""
        if victim in self.leaving:
            self.leaving.remove(victim)
            self.free(victim)
            self.running.remove(victim)
        else:
            self._preempt(victim, now_s)

    def _preempt(self, victim: Sequence, now_s: float) -> None:
        self.counts.preemptions += 1
        victim.preemptions += 1
        if victim.generated and victim.first_token_s < 0:  # it is still to come; a simplification: it is there now
            victim.first_token_s = victim.last_output_s = now_s
        victim.lost = victim.computed
        if 0 < victim.computed <= self.swap_tokens and victim.ready_s < math.inf:
            at_s = max(now_s, victim.ready_s)
            self.blocks_free_s = self._copy("preempted sequence", False, victim.computed, at_s)
            self.counts.swapped_tokens += victim.computed
            self.swap_tokens -= victim.computed
            victim.swapped = victim.computed
        self.free(victim)
        victim.computed = 0
        victim.ready_s = 0.0
        victim.running = False
        self.running.remove(victim)
        self.waiting.appendleft(victim)
        self.known += 1

    def push_down(self, now_s: float) -> None:
        """Evicted prefixes go down to the tiers below."""
        if self.tiers is not None and self.cache.gone:
            self.blocks_free_s = max(self.blocks_free_s, self.tiers.evicted(self.cache.gone[::-1], now_s))
            self.cache.gone.clear()

    def free(self, sequence: Sequence) -> None:
        """Give a sequence's blocks back."""
        self.cache.tokens -= sequence.computed - sequence.shared
        self.cache.give_back(sequence.private - self._leave_own(sequence))
        if self.adapters is not None:
            self.adapters.leave(sequence.request.adapter)
        self._release_prefix(sequence)
        self.reserved -= sequence.reserved
        sequence.private = sequence.shared = sequence.reserved = 0

    def held_for_others(self, sequence: Sequence, goes: bool = True) -> Sequence:
        """What stays here of a sequence that goes on elsewhere, until `free`: its blocks, but no use of its adapter. If
        it does not go, another sequence does in its place, and it stays itself."""
        if self.adapters is not None:
            self.adapters.leave(sequence.request.adapter)
        held = copy.copy(sequence) if goes else sequence
        held.request = sequence.request._replace(adapter="")
        return held

    def first_tokens(self, now_s: float) -> list[Sequence]:
        """Sequences whose first tokens, which another replica has computed, leave for their clients now."""
        there = [x for x in self.arrived if x.ready_s <= now_s and x.first_token_s < 0]
        self.arrived = [x for x in self.arrived if x.ready_s > now_s and x.first_token_s < 0]
        for x in there:
            x.first_token_s = x.last_output_s = now_s
        return there

    def adapter_ready_s(self, sequence: Sequence, now_s: float) -> float:
        """When a running sequence's adapter is there, `now_s` at least."""
        return now_s if self.adapters is None else max(now_s, self.adapters.there.get(sequence.request.adapter, now_s))

    def finish(self, batch: Batch, end_s: float) -> list[Sequence]:
        """The iteration has ended: its tokens are in the cache, sampled ones join their sequences; who is done."""
        self.note_end()
        done, stays, gap_s, alike = [], not self.hands_over, -1.0, 0
        for sequence, tokens, samples, drafted in batch.pieces:
            if sequence.finish_s >= 0:
                continue
            sequence.in_flight = False
            if stays and samples and not drafted and 0 < sequence.generated < sequence.request.output_tokens - 1:
                # As below, for most sequences, most of the time. Equal gaps in a row are added at once.
                sequence.computed += tokens
                if (seconds := end_s - sequence.last_output_s) != gap_s:
                    self._add_gaps(gap_s, alike)
                    gap_s, alike = seconds, 0
                alike += 1
                sequence.output_before_s, sequence.last_output_s = sequence.last_output_s, end_s
                sequence.generated += 1
                sequence.running = True
                continue
            self._add_gaps(gap_s, alike)
            gap_s, alike = -1.0, 0
            wrong = drafted - self._right(sequence, drafted) if drafted else 0
            sequence.computed += tokens - wrong
            self.cache.tokens -= wrong
            if sequence.generated == 0 and (self.share_on_gpu or self.host is not None):
                self._keep_prefix(sequence, end_s)
            if samples and self._sampled(sequence, 1 + drafted - wrong, end_s):
                done.append(sequence)
        self._add_gaps(gap_s, alike)
        if not batch.prompts:
            self.added_tokens(1)
        if done:
            self.dismiss()
        return done

    def drafts_of(self, sequence: Sequence) -> int:
        """Tokens drafted for a sequence whose prompt is computed, in its next iteration."""
        found = self.finds is None or self.finds(sequence.index, sequence.generated)
        return self.drafted if found else 0

    def _add_gaps(self, seconds: float, outputs: int) -> None:
        if outputs:
            self.gaps.add(seconds, outputs)

    def dismiss(self) -> None:
        """Sequences that are done leave; an idle server reserves output as at first."""
        self.running = [s for s in self.running if s.running or s in self.leaving]
        if not self.running and not self.waiting:
            self.output.restart()

    def note_end(self) -> None:
        """Keep what the cache holds when an iteration ends, before anybody leaves."""
        self.before_end = self.cache.occupancy()

    def _right(self, sequence: Sequence, drafted: int) -> int:
        """Drafted tokens that are kept: those accepted, as far as the request asks for any."""
        assert self.acceptance is not None
        accepted = self.acceptance.accepted(sequence.index, sequence.generated, drafted)
        self.counts.drafted_tokens += drafted
        self.counts.accepted_tokens += accepted
        self.counts.verifications += 1
        return min(accepted, sequence.request.output_tokens - sequence.generated - 1)

    def _sampled(self, sequence: Sequence, tokens: int, end_s: float) -> bool:
        if sequence.first_token_s < 0:
            sequence.first_token_s = end_s
        else:
            self.gaps.add(end_s - sequence.last_output_s, 1)
        sequence.output_before_s, sequence.last_output_s = sequence.last_output_s, end_s
        sequence.generated += tokens
        if sequence.generated < sequence.request.output_tokens:
            sequence.running = not self.hands_over
            return self.hands_over
        self.end(sequence, end_s)
        return True

    def end(self, sequence: Sequence, end_s: float) -> None:
        """A sequence has all its tokens."""
        sequence.finish_s = end_s
        sequence.running = False
        if self.one_behind:
            self.leaving.append(sequence)
        else:
            self.free(sequence)

    @property
    def to_catch_up(self) -> bool:
        """Whether something has ended that the host does not know yet."""
        return bool(self.leaving)

    def catch_up(self) -> bool:
        """The iteration that was put together begins: who was done leaves, and who waits is known. Whether that
        changes anything."""
        changed = bool(self.leaving) or self.known < len(self.waiting)
        for sequence in self.leaving:
            self.free(sequence)
        if self.leaving:
            self.leaving.clear()
            self.dismiss()
        self.known = len(self.waiting)
        return changed
