"""Which sequences compute what in the next iteration: continuous batching by the rules of vLLM's scheduler.

Running sequences come first, oldest first: each gets its next token, or the next chunk of its prompt, out of the token
budget. If the cache has no block for one, the youngest running sequence is preempted: it gives up its blocks, goes back
to the head of the queue and later recomputes prompt and generated tokens, or (`swap`) its whole cache is copied to the
host's memory and back. Only if nobody was preempted are waiting requests admitted in order of arrival, while there is
budget, a place and room for the chunk in the cache. Prompts that exceed what is left of the budget are computed in
chunks.

Swapping (Kwon et al. 2023, section 4.5): all blocks of a sequence leave together. The iteration that takes them over
starts when the copy is done; on the way back others compute meanwhile. Both directions of the bus work at once, each
serves one copy after another.

Sources: Yu et al. 2022, "Orca" (iteration-level scheduling); Kwon et al. 2023, arXiv 2309.06180, sections 4.3 and
4.5; Agrawal et al. 2023, "Sarathi", arXiv 2308.16369 (chunked prefill); vLLM, vllm/v1/core/sched/scheduler.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sim.serve.kv_cache import HostCache, KvCache
from sim.serve.requests import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way. `computed` tokens are in the cache, `private` blocks are its own, `shared` of the tokens
    lie in its prefix's blocks, `swapped` are in the host's memory since it was preempted."""

    request: Request
    index: int
    computed: int = 0
    generated: int = 0
    private: int = 0
    shared: int = 0
    swapped: int = 0
    lost: int = 0  # tokens that were computed when it was preempted
    running: bool = False
    in_flight: bool = False
    reads: int | None = None  # blocks of its prefix that stay for it; None where it reads none and extends none
    ready_s: float = 0.0  # when its prefix, or all of its cache, has come from the host's memory
    first_token_s: float = -1.0
    finish_s: float = -1.0
    preemptions: int = 0

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.request.prompt_tokens + self.generated - self.computed


class Piece(NamedTuple):
    """What an iteration does for one sequence."""

    sequence: Sequence
    tokens: int
    samples: bool


class Batch(NamedTuple):
    """One iteration. `ready_s`: when the blocks that it took over have been copied away."""

    pieces: tuple[Piece, ...]
    ready_s: float = 0.0


class Copy(NamedTuple):
    """Tokens between GPU and host. `kind`: RELOAD (a prefix), SWAP_IN, SWAP_OUT."""

    start_s: float
    end_s: float
    tokens: int
    kind: str


@dataclass(slots=True)
class Counts:
    """What happened, for the result."""

    preemptions: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0  # of admitted requests, each time they are admitted for the first time
    hit_tokens: int = 0
    loaded_tokens: int = 0
    stored_tokens: int = 0
    swapped_tokens: int = 0  # out; as many come in again


@dataclass(slots=True)
class Limits:
    """`batch_sequences`: of one iteration, so that every pipeline stage finds sequences."""

    running: int
    batch_tokens: int
    batch_sequences: int


@dataclass(slots=True)
class Scheduler:
    """State of one replica: the queue, the running sequences (oldest first) and their cache."""

    cache: KvCache
    limits: Limits
    share_on_gpu: bool = False
    host: HostCache | None = None
    load_s_per_token: float = 0.0
    load_latency_s: float = 0.0
    swap_tokens: int = 0  # room in the host's memory for preempted sequences; 0 recomputes
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    host_free_s: float = 0.0  # the bus towards the GPU; `out_free_s` the other way
    out_free_s: float = 0.0
    copies: list[Copy] = field(default_factory=list)
    before_end: tuple[int, int, float] = (0, 0, 0.0)  # held, unused, waste when an iteration ended, before any left

    def schedule(self, now_s: float) -> Batch:
        """The next iteration; empty if nobody can compute now."""
        pieces: list[Piece] = []
        budget = self.limits.batch_tokens
        preempted = False
        for sequence in list(self.running):
            if budget <= 0 or len(pieces) >= self.limits.batch_sequences:
                break
            if sequence.in_flight or sequence.ready_s > now_s or not sequence.running:
                continue
            tokens = min(sequence.remaining, budget)
            while not self._grow(sequence, tokens):
                victim = self._victim(sequence)
                preempted = True
                if victim is None:  # it waits for those under way
                    break
                self._preempt(victim, now_s)
                if victim is sequence:
                    break
            else:
                pieces.append(self._piece(sequence, tokens))
                budget -= tokens
                continue
            break
        if not preempted or not self.running:  # the only one, put out by blocks that it and its prefix both have
            self._admit(pieces, budget, now_s)
        return Batch(tuple(pieces), self.out_free_s)

    def _admit(self, pieces: list[Piece], budget: int, now_s: float) -> None:
        while (self.waiting and budget > 0 and len(self.running) < self.limits.running
               and len(pieces) < self.limits.batch_sequences):  # fmt: skip
            sequence = self.waiting[0]
            hit, loaded = self._cached(sequence)
            tokens = min(sequence.remaining - hit - loaded, budget)
            shared_blocks = hit // self.cache.block_tokens
            if hit:
                self._read_prefix(sequence, shared_blocks)  # before room is made: not to be evicted for it
            needed = self.cache.blocks_of(hit + loaded + tokens) - shared_blocks
            if not self.cache.take(needed):
                self._release_prefix(sequence)
                return
            self.waiting.popleft()
            self._start(sequence, hit, loaded, needed, now_s)
            if sequence.ready_s <= now_s:
                pieces.append(self._piece(sequence, tokens))
                budget -= tokens

    def _start(self, sequence: Sequence, hit: int, loaded: int, blocks: int, now_s: float) -> None:
        if not sequence.preemptions:
            self.counts.prompt_tokens += sequence.request.prompt_tokens
        found = hit + loaded - sequence.lost
        self.counts.hit_tokens += max(0, found)
        self.counts.recomputed_tokens += max(0, -found)
        sequence.lost = 0
        sequence.private, sequence.shared, sequence.computed = blocks, hit, hit + loaded
        self.cache.tokens += loaded
        if self.share_on_gpu and sequence.request.prefix_id and sequence.reads is None:
            self._read_prefix(sequence, 0)
        if loaded:
            self.host_free_s = self._copy(
                max(now_s, self.host_free_s), loaded, "SWAP_IN" if sequence.swapped else "RELOAD"
            )
            sequence.ready_s = self.host_free_s
            self.counts.loaded_tokens += loaded - sequence.swapped
            self.swap_tokens += sequence.swapped
            sequence.swapped = 0
        sequence.running = True
        self.running.append(sequence)

    def _copy(self, begin_s: float, tokens: int, kind: str) -> float:
        """When a copy that begins at `begin_s` is done."""
        end_s = begin_s + self.load_latency_s + tokens * self.load_s_per_token
        self.copies.append(Copy(begin_s, end_s, tokens, kind))
        return end_s

    def _cached(self, sequence: Sequence) -> tuple[int, int]:
        """Tokens found on the GPU and in the host's memory: of the prompt, or all that a swapped sequence had; at least
        one token is always computed."""
        request = sequence.request
        if sequence.swapped:
            return 0, sequence.swapped
        wanted = min(request.prefix_tokens, request.prompt_tokens - 1)
        if not request.prefix_id or wanted <= 0:
            return 0, 0
        if self.share_on_gpu:
            return self.cache.cached_tokens(request.prefix_id, wanted), 0
        if self.host is not None:
            return 0, self.host.cached_tokens(request.prefix_id, wanted, self.cache.block_tokens)
        return 0, 0

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        have = sequence.private + sequence.shared // self.cache.block_tokens
        more = self.cache.blocks_of(sequence.computed + tokens) - have
        if more <= 0:
            return True
        if not self.cache.take(more):
            return False
        sequence.private += more
        return True

    def _piece(self, sequence: Sequence, tokens: int) -> Piece:
        sequence.in_flight = True
        self.cache.tokens += tokens  # their places are taken from now on
        return Piece(sequence, tokens, tokens == sequence.remaining)

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """Who makes room for `sequence`: the youngest after it, itself if there is none, nobody while all after it are
        under way. So the oldest always goes on, and every request ends."""
        younger = self.running[self.running.index(sequence) + 1 :]
        return next((s for s in reversed(younger) if not s.in_flight), None if younger else sequence)

    def _preempt(self, victim: Sequence, now_s: float) -> None:
        self.counts.preemptions += 1
        victim.preemptions += 1
        victim.lost = victim.computed
        if 0 < victim.computed <= self.swap_tokens:
            self.out_free_s = self._copy(max(now_s, self.out_free_s, victim.ready_s), victim.computed, "SWAP_OUT")
            self.counts.swapped_tokens += victim.computed
            self.swap_tokens -= victim.computed
            victim.swapped = victim.computed
        self._free(victim)
        victim.computed = 0
        victim.ready_s = 0.0
        victim.running = False
        self.running.remove(victim)
        self.waiting.appendleft(victim)

    def _free(self, sequence: Sequence) -> None:
        self.cache.tokens -= sequence.computed - sequence.shared
        self.cache.give_back(sequence.private)
        self._release_prefix(sequence)
        sequence.private = sequence.shared = 0

    def _read_prefix(self, sequence: Sequence, blocks: int) -> None:
        self.cache.use(sequence.request.prefix_id, blocks)
        sequence.reads = blocks

    def _release_prefix(self, sequence: Sequence) -> None:
        if sequence.reads is not None:
            self.cache.release(sequence.request.prefix_id, sequence.reads)
            sequence.reads = None

    def finish(self, batch: Batch, end_s: float) -> list[Sequence]:
        """The iteration has ended: its tokens are in the cache, sampled ones join their sequences; who is done."""
        self.before_end = (self.cache.held, self.cache.unused, self.cache.waste)
        done = []
        for sequence, tokens, samples in batch.pieces:
            sequence.in_flight = False
            sequence.computed += tokens
            if sequence.generated == 0 and (self.share_on_gpu or self.host is not None):
                self._keep_prefix(sequence)
            if samples and self._sampled(sequence, 1, end_s):
                done.append(sequence)
        if done:
            self.running = [s for s in self.running if s.finish_s < 0]
        return done

    def _sampled(self, sequence: Sequence, steps: int, end_s: float) -> bool:
        if sequence.first_token_s < 0:
            sequence.first_token_s = end_s
        sequence.generated += steps
        if sequence.generated < sequence.request.output_tokens:
            return False
        sequence.finish_s = end_s
        sequence.running = False
        self._free(sequence)
        return True

    def _keep_prefix(self, sequence: Sequence) -> None:
        """Computed whole blocks of the shared beginning are kept at once."""
        request = sequence.request
        blocks = min(request.prefix_tokens, sequence.computed) // self.cache.block_tokens
        if not request.prefix_id or not blocks:
            return
        if self.host is not None:
            self.counts.stored_tokens += self.host.store(request.prefix_id, blocks * self.cache.block_tokens)
        else:
            assert sequence.reads is not None
            added = self.cache.share(request.prefix_id, sequence.reads, blocks)
            if added:
                sequence.reads = blocks
            sequence.private -= added
            sequence.shared += added * self.cache.block_tokens

    def steady_steps(self, now_s: float) -> int:
        """How many of the next iterations are all alike: every running sequence adds one token, nobody joins, ends
        before the last of them, or lacks a block. 0 where the next one is not of that kind.

        A request that waits for room goes on waiting, as these steps free none. One that may be admitted when it
        arrives ends the run at that time, which the caller must look for.
        """
        running = self.running
        n = len(running)
        if not n or n > min(self.limits.batch_tokens, self.limits.batch_sequences):
            return 0
        if any(s.generated == 0 or s.remaining != 1 or s.in_flight or s.ready_s > now_s for s in running):
            return 0
        if self.waiting and n < self.limits.running and self._fits(self.waiting[0]):
            return 0
        steps = min(s.request.output_tokens - s.generated for s in running)
        return self._until_full(steps)

    def _fits(self, sequence: Sequence) -> bool:
        hit, loaded = self._cached(sequence)
        tokens = min(sequence.remaining - hit - loaded, self.limits.batch_tokens - len(self.running))
        if tokens <= 0:
            return False
        needed = self.cache.blocks_of(hit + loaded + tokens) - hit // self.cache.block_tokens
        return needed <= self.cache.available

    def _until_full(self, steps: int) -> int:
        """The most steps, at most `steps`, for which there are blocks."""
        block, reserve = self.cache.block_tokens, self.cache.reserve_tokens
        lengths = np.array([s.computed for s in self.running], dtype=np.int64)
        have = np.array([s.private + s.shared // block for s in self.running], dtype=np.int64)

        def needed(count: int) -> int:
            return int(np.maximum(0, -(-np.maximum(lengths + count, reserve) // block) - have).sum())

        low, high = 0, steps
        while low < high:
            middle = (low + high + 1) // 2
            if needed(middle) <= self.cache.available:
                low = middle
            else:
                high = middle - 1
        return low

    def run_steps(self, steps: int, end_s: float) -> list[Sequence]:
        """Do `steps` alike iterations at once (see `steady_steps`), the last ending at `end_s`; who is done."""
        done = []
        for sequence in self.running:
            grown = self._grow(sequence, steps)
            assert grown, "steady_steps promised the blocks"
            sequence.computed += steps
            self.cache.tokens += steps
        self.before_end = (self.cache.held, self.cache.unused, self.cache.waste)
        for sequence in self.running:
            if self._sampled(sequence, steps, end_s):
                done.append(sequence)
        if done:
            self.running = [s for s in self.running if s.finish_s < 0]
        return done
