"""Which sequences compute what in the next iteration: continuous batching by the rules of vLLM's scheduler.

Running sequences come first, oldest first: each gets its next token, or the next chunk of its prompt, out of the token
budget. If the cache has no block for one, the youngest running sequence is preempted: it gives up its blocks, goes back
to the head of the queue and later recomputes prompt and generated tokens, or (`swap`) its whole cache is copied to the
host's memory and back. Only if nobody was preempted are waiting requests admitted in order of arrival, while there is
budget, a place and room for the chunk in the cache. Prompts that exceed what is left of the budget are computed in
chunks.

Without `mixes` (vLLM before 0.8, SGLang) an iteration has prompts or tokens, never both. Prompts go first: those begun,
then those that wait. Only if there are none does an iteration add a token to every running sequence. SGLang's mixed
chunks begin with prompts too, and then every running sequence gets a token beside them.

With a `watermark` (vLLM before V1) a request enters with the blocks of its whole prompt, so many that a share of all
blocks stays free, and a sequence goes on only while a block is free, whether it needs one or not. In iterations with
prompts and tokens others enter behind those who are preempted in the same iteration.

Without `splits` (vLLM before 0.8, TensorRT-LLM without chunked context) a prompt is computed in one iteration, or
waits. What a preempted sequence recomputes may exceed the budget; it has an iteration of its own.

With `defers_shared` (TensorRT-LLM) a waiting request whose next block of a shared beginning is computed in the same
iteration by another waits for that one, and those behind it may enter. A simplification: beside the overlap scheduler
TensorRT-LLM keeps computed blocks an iteration later than here, so a second one computes the beginning again.

With `one_behind` (asynchronous scheduling, overlap scheduling) an iteration is put together when the one before it
begins, as vLLM's EngineCore.step_with_batch_queue does. Requests that have come or ended since then are not known yet.
So a new request waits for one iteration more, and a finished one's blocks and place are free one iteration later.
With `token_more` that next iteration computes a token for who is done; where the engine `sees_arrivals` (vLLM 0.6,
LLMEngine.step with asynchronous output processing), no request waits for it.

Sources: Yu et al. 2022, "Orca" (iteration-level scheduling); Kwon et al. 2023, arXiv 2309.06180, sections 4.3 and
4.5; Agrawal et al. 2023, "Sarathi", arXiv 2308.16369 (chunked prefill); vLLM, vllm/v1/core/sched/scheduler.py, and of
0.6 vllm/core/scheduler.py (`_schedule_default`, `_schedule_chunked_prefill`) and block_manager.py; SGLang,
python/sglang/srt/managers/scheduler.py (`get_next_batch_to_run`) and schedule_policy.py (`PrefillAdder`).
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import islice

from msgspec import field

from sim.serve.cache.kv_cache import Key
from sim.serve.scheduling.prompt_waits import BatchWait, Prospect
from sim.serve.scheduling.running import RunningSequences
from sim.serve.scheduling.sequences import Batch, Piece, Sequence


class Scheduler(RunningSequences):
    """Puts the iterations of one replica together."""

    mixes: bool = True  # prompts and tokens of running sequences in one iteration
    splits: bool = True  # a prompt that exceeds what is left of the budget is computed in chunks
    whole_prompts_fit: bool = False  # a request enters once the cache has room for all chunks of its prompt
    whole_blocks: bool = False  # a request takes the blocks of its whole prompt when it enters
    counts_found: bool = False  # what it finds counts in the budget, and as blocks to find
    block_chunks: bool = False  # a chunk that is not the last of its prompt has whole blocks
    paddings: int | None = None  # most tokens by which prompts of an iteration may be padded
    token_more: bool = False  # who is done computes one token more in the iteration for which it has not left
    sees_arrivals: bool = False  # `one_behind` is true of ends alone
    ended: int = 0  # who has left but still counts among those that run
    defers_shared: bool = False  # who shares the next block with one whose prompt is computed lets others pass
    prompt_limit: int | None = None  # the most tokens of one prompt in an iteration
    limits_alone: bool = True  # also where no other request runs or waits
    wait: BatchWait | None = None
    held: bool = False  # prompts wait for others in the iteration that is put together
    coming: set[Key] = field(default_factory=set)  # next blocks of prompts that the iteration put together computes

    def schedule(self, now_s: float) -> Batch:
        """The next iteration; empty if nobody can compute now."""
        if self.prompts_first:
            adding = [x for x in self.running if not x.prompts and not x.in_flight] if self.mixes else []
            beside = sum([self.lacks(x, 1) for x in adding])
            if prompts := self.prompts(self.running, now_s, beside):
                self.evict_for(beside)
                return self.with_prompts(prompts, self.tokens_beside(adding, now_s), now_s)
        self.before_tokens()
        self.make_room(now_s)
        preemptions = self.counts.preemptions
        pieces, budget, preempted = self._running_tokens(now_s)
        # Nobody runs where the only one was put out by blocks that it and its prefix both have, or where who had ended
        # left no room for prompts.
        if self.prompts_first and not pieces:
            if prompts := self.prompts(self.running, now_s):
                return self.with_prompts(prompts, [], now_s)
            pieces, budget, preempted = self._running_tokens(now_s)  # a prompt without room waits for nobody any more
        if not self.prompts_first and (not preempted or self.watermark is not None or not self.running):
            ahead = self.counts.preemptions - preemptions if self.running else 0
            self.admit(pieces, budget, self.limits.batch_sequences, now_s, ahead)
        self.push_down(now_s)
        return Batch(tuple(pieces), self.blocks_free_s)

    def _running_tokens(self, now_s: float) -> tuple[list[Piece], int, bool]:
        """Compute the next tokens of running sequences, oldest first, and preempt the youngest where blocks lack.

        Returns:
            The pieces, what is left of the token budget, and whether a sequence lacked a block.
        """
        pieces: list[Piece] = []
        budget, preempted, cache, plain = self.token_budget, False, self.cache, self.plain_tokens
        shares, block = self.by_content, self.cache.block_tokens
        for sequence in [x for x in self.running if not x.in_flight]:  # with many stages few of all
            if budget <= 0 or len(pieces) >= self.limits.batch_sequences:
                break
            if sequence.ready_s > now_s:
                continue
            if not sequence.running and not (self.token_more and sequence in self.leaving):
                continue
            # As below, for most sequences, most of the time.
            lacks = sequence.next_lacks(block) if plain else None
            easy = lacks is not None and (not lacks or (cache.free > 0 and cache.late is None))
            if easy and not (shares and self.may_share(sequence)):
                if lacks:
                    cache.free -= 1
                    cache.private += 1
                    sequence.private += 1
                sequence.in_flight = True
                cache.tokens += 1
                pieces.append(Piece(sequence, 1, True))
                budget -= 1
                continue
            tokens = self.next_tokens(sequence, budget)
            if not tokens:
                continue
            while not self.grow(sequence, tokens):
                victim = self._victim(sequence)
                preempted = True
                if victim is None:  # it waits for those under way
                    break
                self._put_out(victim, now_s)
                if victim is sequence:
                    break
            else:
                pieces.append(self.piece(sequence, tokens))
                budget -= tokens
                continue
            break
        return pieces, budget, preempted

    @property
    def token_budget(self) -> int:
        """The most tokens of an iteration that begins with the sequences that run."""
        return self.limits.batch_tokens

    @property
    def plain_tokens(self) -> bool:
        """Whether a token of a sequence that has no block to share changes nothing in the cache but a free block that
        it may take."""
        return not self.drafted and self.watermark is None

    @property
    def prompts_first(self) -> bool:
        """Whether an iteration begins with prompts, not with the sequences that run."""
        return not self.mixes

    def before_tokens(self) -> None:
        """Note that an iteration will add tokens to running sequences."""

    def evict_for(self, blocks: int) -> None:
        """Make room for `blocks`, which all running sequences will take, if the engine does not make it one by one."""

    def make_room(self, now_s: float) -> None:
        """Preempt sequences before an iteration adds tokens, if the engine preempts several at once."""

    def with_prompts(self, prompts: list[Piece], tokens: list[Piece], now_s: float) -> Batch:
        """An iteration of prompts, which may be padded, and of `tokens` beside them."""
        self.push_down(now_s)
        longest = max([p.tokens for p in prompts])
        padding = 0 if self.paddings is None else sum([longest - p.tokens for p in prompts])
        return Batch((*prompts, *tokens), self.blocks_free_s, len(prompts), not self.mixes, padding)

    def tokens_beside(self, adding: list[Sequence], now_s: float) -> list[Piece]:
        """The next tokens of sequences whose prompts are computed, for which prompts have left room."""
        pieces = []
        for sequence in adding:
            if sequence.ready_s <= now_s and (sequence.running or self.token_more) and self.grow(sequence, 1):
                pieces.append(self.piece(sequence, 1))
        return pieces

    def prompts(self, begun: list[Sequence], now_s: float, beside: int = 0) -> list[Piece]:
        """Prompts of an iteration that begins with them: what is left of those `begun`, as far as the cache has room,
        and of requests that wait. `beside`: blocks that those who add tokens in the same iteration will take."""
        pieces: list[Piece] = []
        budget, places = self.prompt_tokens(beside), self.limits.batch_sequences
        for sequence in begun:
            if budget <= 0 or len(pieces) >= places:
                break
            if sequence.in_flight or sequence.ready_s > now_s or not sequence.prompts:
                continue
            tokens = self.next_part(sequence, budget)
            if tokens and self.grow(sequence, tokens):
                pieces.append(self.piece(sequence, tokens))
                budget -= tokens
        self.admit(pieces, budget, places, now_s)
        return pieces

    def admit(self, pieces: list[Piece], budget: int, places: int, now_s: float, ahead: int = 0) -> None:
        """Let waiting requests in, in order of arrival, behind the first `ahead`, who were just preempted: until
        `budget` tokens or `places` pieces are reached, nobody more may run, or the cache has no room."""
        if self.held:
            return
        if self.defers_shared:
            self.coming = {key for s in self.running if s.prompts for key in self._next_key(s, s.shared)}
        while self.waiting and budget > 0 and len(pieces) < places:
            if len(self.running) + self.ended >= self.limits.running:
                return
            self.push_down(now_s)
            sequence = self._next_waiting(ahead)
            if sequence is None:
                return
            found = self.matched(sequence)
            left = sequence.remaining - found.tokens
            counted = self._counted(sequence, left, budget)
            tokens = min(left, counted)
            if not tokens or not self._has_room_unfound(sequence) or self._pads_too_much(pieces, tokens):
                return
            shared_blocks = found.hit // self.cache.block_tokens
            if found.read:
                self._read_prefix(sequence, found.read)  # before room is made: not to be evicted for it
            own_tokens = found.tokens + (left if self.whole_blocks else tokens)
            needed = self.cache.blocks_of(own_tokens) - shared_blocks
            if not self._may_enter(sequence, shared_blocks) or needed > self.cache.available:
                self._release_prefix(sequence)
                return
            self.cache.take(needed - self._take_own(sequence, found.own))
            self.waiting.remove(sequence)  # mostly the first
            self.known -= 1
            self._start(sequence, found, needed, now_s)
            if sequence.ready_s <= now_s:
                pieces.append(self.piece(sequence, tokens))
                budget -= counted

    def _counted(self, sequence: Sequence, left: int, budget: int) -> int:
        """Tokens of an iteration that a waiting request takes up, which computes the `left` ones that it does not
        find."""
        return self.part(sequence.remaining if self.counts_found else left, budget)

    def prospect(self, known: int) -> Prospect:
        """What the next iteration would compute of those that run, and of the first `known` ones that wait. A
        simplification: who waits for a shared beginning counts."""
        begun = [x for x in self.running if x.running and x.prompts]
        adding = len(self.running) - len(begun) - (0 if self.token_more else len(self.leaving))
        added = adding * (1 + self.drafted)
        budget, tokens = self.token_budget - added, [0]
        for sequence in begun:
            counted = self.part(sequence.remaining, budget) if budget > 0 else 0
            tokens.append(self._seen(sequence, counted))
            budget -= counted
        room = self.cache.available - self.output.share * (self.reserved - self.cache.private)
        for sequence in islice(self.waiting, min(known, self.limits.running - len(self.running) - self.ended)):
            found = self.matched(sequence)
            counted = self._counted(sequence, sequence.remaining - found.tokens, budget) if budget > 0 else 0
            wanted = self._last_blocks(sequence) if self.output.share else self.cache.blocks_of(sequence.remaining)
            room -= wanted - (0 if self.counts_found else found.hit // self.cache.block_tokens)
            if not counted or room < 0:
                break
            tokens.append(self._seen(sequence, counted))
            budget -= counted
        return Prospect(sum([t > 0 for t in tokens]), sum(tokens), adding, added)

    def _seen(self, sequence: Sequence, counted: int) -> int:
        """Tokens of a prompt, of which an iteration computes `counted`, by which others wait: where what is found
        counts, all of the prompt's (TensorRT-LLM before 1.3, `_waiting_requests`: `len(get_tokens(0))`)."""
        whole = sequence.request.prompt_tokens + sequence.generated
        return whole if counted and self.counts_found else counted

    def prompt_tokens(self, beside: int) -> int:
        """Return the most tokens of prompts in an iteration of prompts; `beside`: blocks that others take in it."""
        assert not beside
        return self.limits.batch_tokens

    def next_part(self, sequence: Sequence, budget: int) -> int:
        """Return how many tokens of a begun prompt an iteration of prompts computes with `budget` tokens left."""
        return self.part(sequence.remaining, budget)

    def part(self, tokens: int, budget: int) -> int:
        """Return how many of a prompt's `tokens` an iteration computes with `budget` tokens left. vLLM limits what it
        takes of one prompt, since 0.32 unless there is no other request (v1/core/sched/scheduler.py,
        `long_prefill_token_threshold`)."""
        limit = self.prompt_limit
        if limit is not None and (self.limits_alone or len(self.running) + len(self.waiting) > 1):
            tokens = min(tokens, limit)
        if self.splits:
            unit = self.cache.block_tokens if self.block_chunks else 1
            cut = budget if tokens <= budget or self.limits.batch_tokens < unit else budget - budget % unit
            return min(tokens, cut)
        return tokens if tokens <= budget or budget == self.limits.batch_tokens else 0

    def next_tokens(self, sequence: Sequence, budget: int) -> int:
        """Return how many tokens an iteration computes for a running sequence with `budget` tokens left."""
        remaining = sequence.remaining
        if remaining > 1:
            return 0 if self.held else self.part(remaining, budget)
        return min(1 + self.drafts_of(sequence) if sequence.generated else 1, budget)

    def _pads_too_much(self, prompts: list[Piece], tokens: int) -> bool:
        """Whether prompts may not be padded to the longest of them with one more of so many tokens."""
        if self.paddings is None or not prompts or self.mixes:
            return False
        sizes = [tokens, *[p.tokens for p in prompts]]
        padded = len(sizes) * max(sizes)
        return padded > self.limits.batch_tokens or padded - sum(sizes) > self.paddings

    def _next_waiting(self, ahead: int) -> Sequence | None:
        """The first of the waiting requests behind `ahead`, of those that are known, whose LoRA adapter may be used,
        and which is not deferred."""
        known = self.known if self.one_behind and not self.sees_arrivals else len(self.waiting)
        if self.adapters is None and not self.defers_shared:
            return self.waiting[ahead] if known > ahead else None
        for sequence in islice(self.waiting, ahead, known):
            if self.adapters is not None and not self.adapters.can(sequence.request.adapter):
                continue
            if not self.defers_shared or self._comes_next(sequence):
                return sequence
        return None

    def _comes_next(self, sequence: Sequence) -> bool:
        """Whether nobody in the iteration computes the block of the shared beginning that this waiting request would
        compute first; then it is the one who does (TensorRT-LLM, cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp:
        beneficialToSkip, prefillWithChunkedContextsAlreadyExecuting)."""
        prefix = sequence.request.prefix
        hit = self.cache.cached_tokens(prefix, self._shareable(sequence)) if prefix else 0
        keys = self._next_key(sequence, hit)
        if any(key in self.coming for key in keys):
            return False
        self.coming.update(keys)
        return True

    def _next_key(self, sequence: Sequence, hit: int) -> Items[Key]:
        """The block behind `hit` tokens of what a sequence shares with others; empty if there is no whole one."""
        prefix, end = sequence.request.prefix, hit + self.cache.key_tokens
        return self.cache.keys(prefix, hit, end) if prefix and end <= self._shareable(sequence) else ()

    @staticmethod
    def _shareable(sequence: Sequence) -> int:
        """Tokens that a sequence may find computed: at least one of its prompt is always computed."""
        return min(sequence.request.prefix_tokens, sequence.request.prompt_tokens - 1)

    def fits(self, sequence: Sequence) -> bool:
        """Whether a waiting request would find room beside those that run, each of which adds one token."""
        budget = self.limits.batch_tokens - (len(self.running) if self.mixes else 0)
        if budget <= 0:
            return False
        # Room for all of it is room whatever is found; asking a host's cache makes its prefix the last used.
        found_is_no_matter = self.host is None and not self.output.share and self.part(sequence.remaining, budget) > 0
        if found_is_no_matter and self.cache.blocks_of(sequence.remaining) <= self.cache.available - self._kept_free:
            return True
        found = self.matched(sequence)
        left = sequence.remaining - found.tokens
        tokens = min(left, self._counted(sequence, left, budget))
        if not tokens or not self._has_room_unfound(sequence):
            return False
        shared_blocks = found.hit // self.cache.block_tokens
        needed = self.cache.blocks_of(found.tokens + tokens) - shared_blocks
        return needed <= self.cache.available and self._may_enter(sequence, shared_blocks)

    @property
    def _kept_free(self) -> int:
        """Blocks that stay free when a request enters."""
        return int((self.watermark or 0.0) * self.cache.blocks)

    def _may_enter(self, sequence: Sequence, shared_blocks: int) -> bool:
        """Whether a waiting request, which reads so many shared blocks, finds the room that must be left for what it
        and those that run will compute later."""
        whole = self.cache.blocks_of(sequence.remaining) - shared_blocks
        if self.whole_prompts_fit and whole > self.cache.available:
            return False
        if self.watermark is not None and self.running and whole > self.cache.available - self._kept_free:
            return False
        return self._can_finish(sequence, shared_blocks)

    def _has_room_unfound(self, sequence: Sequence) -> bool:
        """Whether, where what is found counts, there are enough blocks as if nothing was."""
        return not self.counts_found or self._can_finish(sequence, 0)

    def _can_finish(self, sequence: Sequence, shared_blocks: int) -> bool:
        """Where blocks are reserved: whether there are enough for all tokens of a waiting request, which reads so many
        shared ones, beside a share of what those that run will still take (all: TensorRT-LLM's GUARANTEED_NO_EVICT)."""
        if not self.output.share or not self.running:
            return True
        promised = self.output.share * (self.reserved - self.cache.private)
        return self._last_blocks(sequence) - shared_blocks <= self.cache.available - promised

    def piece(self, sequence: Sequence, tokens: int) -> Piece:
        """`tokens` of a sequence, whose blocks it has, in the iteration that is put together."""
        if not sequence.running:  # it is done, which the host does not know yet
            self.counts.late_tokens += 1
            return Piece(sequence, tokens, True)
        sequence.in_flight = True
        self.cache.tokens += tokens  # their places are taken from now on
        if self.by_content:
            self._share_prefix(sequence, sequence.computed + tokens)
        drafted = tokens - sequence.remaining
        if drafted < 0:  # a part of a prompt
            return Piece(sequence, tokens, False)
        return Piece(sequence, tokens, True, drafted)
