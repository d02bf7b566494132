"""Iterations by the rules of SGLang's scheduler: prompts first, alone or (`mixes`) with tokens beside them.

Sources: SGLang 0.5.3, srt/managers/scheduler.py (`get_next_batch_to_run`, `get_new_batch_prefill`,
`update_running_batch`), schedule_policy.py (`PrefillAdder`), schedule_batch.py (`retract_decode`, `mix_with_running`),
mem_cache/radix_cache.py.

- Admission: a request enters if its uncomputed prompt and its output (at most `CLIP` tokens of it) need less room than
  is free. Room is kept for the output of requests that enter with it, and for a share of the remaining output of
  running ones (`sim.serve.scheduling.reserved_output`).
- `batch_is_full`: once a request did not enter, or no place was left, none enters until the running batch shrinks. The
  scheduler notes that when it next adds tokens.
- Preemption (`retract_decode`): before tokens are added, all running requests must find room for their next token
  (before 0.5.2: for 20). Else requests go back to the end of the queue until the others have room: those with the least
  output first, of these the longest prompt. The result of the last iteration is not known yet, so its token is lost.
  A simplification: a request that has ended with that token does not come again. A server that takes computed prompts
  over copies them to the host and lets them go on before others enter.
- A server that takes computed prompts over (`takes_over`; disaggregation/decode.py, DecodePreallocQueue) has a rule of
  its own: a request enters with room for its prompt and `RESERVED_DECODE_TOKENS`, beside as many for each that has
  entered, and if each could end alone. It looks in every iteration.

With mixed chunks every running request gets a token in an iteration of prompts. These leave it room in the cache and in
the budget, as they do for who is known to have ended but had no iteration since. The batch of such an iteration, whose
prompts stand before those that ran, is the running batch of the next: it is not full. The reserved share falls only in
iterations without prompts, before which alone requests are put out.

Prompts are found by others one iteration later than computed, save for a chunk that is not the last; what two computed
at once is kept once. All tokens of a request stay in the cache when it ends; of one that was put out the prompt does.
A simplification: of those that run the whole remaining output counts.
"""

from __future__ import annotations

import math

from msgspec import field

from sim.serve.requests import Request
from sim.serve.scheduling.reserved_output import RETRACT_STEPS
from sim.serve.scheduling.scheduler import Scheduler
from sim.serve.scheduling.sequences import Batch, Piece, Sequence
from sim.variants.engines.defaults import MAX_PREFILL_TOKENS

CLIP = 4096  # CLIP_MAX_NEW_TOKENS
RESERVED_DECODE_TOKENS = 512  # scheduler.py, num_reserved_decode_tokens


class SglangScheduler(Scheduler):
    """`entered`: who computes prompts in the iteration that is put together; `promised`: their output; `beside_tokens`
    and `beside_blocks`: what those take that will add tokens beside them."""

    takes_over: bool = False  # prompts that other servers have computed
    room_tokens: int = 1  # as `Engine.retract_room_tokens`
    caps_chunks: bool = True  # as `Engine.caps_chunks`
    beside_tokens: int = 0
    beside_blocks: int = 0
    full: bool = False
    begun: list[Sequence] = field(default_factory=list)  # whose prompts are begun; SGLang has one
    stuck: bool = False  # nobody adds tokens, and no prompt found room
    entered: list[Sequence] = field(default_factory=list)
    promised: int = 0
    last_prompts: list[Sequence] | None = None  # of the iteration before, who ended their prompts; None: it had none
    ran_none: bool = False  # nobody added tokens when the last prompts entered
    computed: list[tuple[Sequence, float]] = field(default_factory=list)  # whole prompts, not found by others yet

    @property
    def keeps_own(self) -> bool:
        """As `FoundPrefixes.keeps_own`."""
        return self.share_on_gpu and self.tiers is None

    @property
    def prompts_first(self) -> bool:
        """As `Scheduler.prompts_first`."""
        return True

    @property
    def _new_batch(self) -> bool:
        """Whether the running batch is that of the iteration before, which had prompts: it is not full, and has nobody
        who is known to have ended."""
        return self.last_prompts is not None and (self.mixes or self.ran_none)

    def prompts(self, begun: list[Sequence], now_s: float, beside: int = 0) -> list[Piece]:
        """As `Scheduler.prompts`."""
        chunks = sorted([x for x in begun if x.running and x.prompts], key=lambda x: x.order)
        if self._new_batch:
            self.full, self.ended = False, 0
        if chunks:
            self.full = False
        self.entered, self.promised, self.begun, self.stuck = [], 0, chunks, False
        if self.full:
            return []
        if self.mixes:
            adding = len(self.running) - len(chunks)
            counted = self.ended if adding or self.ended < self.limits.batch_tokens else 0
            self.beside_blocks, self.beside_tokens = beside, adding + counted
        self.cache.late = 0
        pieces = super().prompts(chunks, now_s, beside)
        self.cache.evict_late()
        self.stuck = not pieces and len(self.running) == len(chunks)
        return pieces

    @property
    def token_budget(self) -> int:
        """As `Scheduler.token_budget`: every sequence that runs gets its tokens (managers/scheduler.py,
        update_running_batch), for chunked_prefill_size is of prompts alone."""
        tokens = self.limits.batch_tokens
        return tokens if self.stuck else max(tokens, len(self.running) * (1 + self.drafted))

    def prompt_tokens(self, beside: int) -> int:
        """As `Scheduler.prompt_tokens`."""
        return self.limits.batch_tokens - self.beside_tokens

    def next_part(self, sequence: Sequence, budget: int) -> int:
        """As `Scheduler.next_part`."""
        own = sequence.private * self.cache.block_tokens + sequence.shared - sequence.computed
        return self.part(min(sequence.remaining, own + max(0, int(self._free_tokens()))), budget)

    def with_prompts(self, prompts: list[Piece], tokens: list[Piece], now_s: float) -> Batch:
        """As `Scheduler.with_prompts`."""
        self.ran_none = len(self.running) == len(self.entered) and not self.ended
        if self.mixes:
            entered = set(self.entered)
            self.running = self.entered + [x for x in self.running if x not in entered]
            self.ended = 0
        return super().with_prompts(prompts, tokens, now_s)

    def admit(self, pieces: list[Piece], budget: int, places: int, now_s: float, ahead: int = 0) -> None:
        """As `Scheduler.admit`."""
        super().admit(pieces, budget, places, now_s, ahead)
        waiting = self.known if self.one_behind else len(self.waiting)
        if waiting and len(self.running) + self.ended >= self.limits.running and not self.takes_over:
            self.full = True

    def part(self, tokens: int, budget: int) -> int:
        """As `Scheduler.part`: what does not fit beside others is not split where no chunk is smaller than the most
        (`caps_chunks`; else it is, until the most is reached)."""
        used = self.limits.batch_tokens - budget
        if self.entered and (tokens if self.caps_chunks else 1) > MAX_PREFILL_TOKENS - used - self.caps_chunks:
            return 0
        return super().part(tokens, budget)

    def next_tokens(self, sequence: Sequence, budget: int) -> int:
        """As `Scheduler.next_tokens`: prompts that found no room wait, unless nobody else runs."""
        return 0 if sequence.prompts and not self.stuck else super().next_tokens(sequence, budget)

    def fits(self, sequence: Sequence) -> bool:
        """Whether the scheduler has to look at who waits."""
        if self.takes_over:
            return self._may_be_taken_over(sequence)
        return bool(self.ended) or not self.full or self._new_batch

    def piece(self, sequence: Sequence, tokens: int) -> Piece:
        """As `Scheduler.piece`."""
        if sequence.prompts:
            self.entered.append(sequence)
            if tokens == sequence.remaining:
                self.promised += self._output(sequence)
        return super().piece(sequence, tokens)

    def _may_enter(self, sequence: Sequence, shared_blocks: int) -> bool:
        if self.takes_over:
            return self._may_be_taken_over(sequence)
        block = self.cache.block_tokens
        whole = (self.cache.blocks_of(sequence.remaining) - shared_blocks) * block
        wanted = whole + self._output(sequence)
        if wanted < self._free_tokens() or not self.running:
            return True
        self.full = True
        return False

    def _output(self, sequence: Sequence) -> int:
        """Tokens of output for which a request needs room when it enters: one where it leaves with its first
        (srt/disaggregation/prefill.py, `_process_req`: max_new_tokens is 1)."""
        return 1 if self.hands_over else min(sequence.request.output_tokens, CLIP)

    def _may_be_taken_over(self, sequence: Sequence) -> bool:
        """Whether a request whose prompt others have computed enters, or one that was put out goes on."""
        if not self.running:
            return True
        wanted = sequence.remaining - 1 + RESERVED_DECODE_TOKENS
        kept = RESERVED_DECODE_TOKENS * len(self.running)
        adding = [x for x in self.running if x.ready_s < math.inf]
        if adding and not sequence.preemptions:
            others = sum([x.request.prompt_tokens + x.generated for x in adding])
            kept = max(kept, max([_longest(x.request) for x in adding]) - others)
            wanted = max(wanted, _longest(sequence.request) - others)
        return wanted <= self.cache.available * self.cache.block_tokens - kept

    def _free_tokens(self) -> float:
        """Tokens that are free beside what requests will still write whose prompts are computed, and who entered."""
        prompts = {*self.entered, *self.begun}
        block = self.cache.block_tokens
        left = (self.reserved - self.cache.private - sum([x.reserved - x.private for x in prompts])) * block
        adding = len(self.running) - len(prompts)
        if not self.one_behind:
            left -= adding
        elif self.last_prompts is not None and not self.mixes:  # whose tokens are not known yet, as all others' are
            left -= adding - len(self.last_prompts)
        beside = max(self.beside_tokens, self.beside_blocks * block)
        return self.cache.available * block - self.output.share * left - self.promised - beside

    def before_tokens(self) -> None:
        """As `Scheduler.before_tokens`."""
        if self.ended:
            self.full, self.ended = False, 0

    def added_tokens(self, steps: int) -> None:
        """As `Scheduler.added_tokens`."""
        super().added_tokens(steps)
        self.last_prompts = None

    def evict_for(self, blocks: int) -> None:
        """As `Scheduler.evict_for`."""
        self.cache.evict_at_least(blocks)

    def make_room(self, now_s: float) -> None:
        """As `Scheduler.make_room`."""
        running = [x for x in self.running if not (x.in_flight or x.prompts or x.ready_s > now_s)]
        lacking = sum([self.lacks(x, 1) for x in running])
        self.evict_for(lacking)
        if lacking <= self.cache.available:
            return
        order = sorted(running, key=lambda x: (self._known_output(x), -x.request.prompt_tokens), reverse=True)
        while len(order) > 1:
            self._put_out(order.pop(), now_s)
            for tokens in (RETRACT_STEPS, self.room_tokens):
                lacking = sum([self.lacks(x, tokens) for x in order])
                self.evict_for(lacking)
            if lacking <= self.cache.available:
                break
        self.full = False
        self.output.retracted(order, sum([self._known_output(x) for x in order]))

    def _known_output(self, sequence: Sequence) -> int:
        """Tokens of a sequence but those of the last iteration."""
        unknown = self.one_behind and (self.last_prompts is None or self.mixes or sequence in self.last_prompts)
        return sequence.generated - unknown

    def _preempt(self, victim: Sequence, now_s: float) -> None:
        known = self._known_output(victim)
        if not known:
            victim.first_token_s = -1.0
        elif known < victim.generated:  # its client gets the next output in the place of the lost one
            self.gaps.lost.append(victim.last_output_s - victim.output_before_s)
            victim.last_output_s = victim.output_before_s
        victim.generated = known
        if self.swap_tokens:  # what goes to the host leaves a token to compute
            unknown = max(0, 1 - victim.remaining)
            victim.computed -= unknown
            self.cache.tokens -= unknown
        super()._preempt(victim, now_s)
        self.waiting.popleft()
        behind = self.known - 1 if self.one_behind else len(self.waiting)
        if self.takes_over:
            behind = next((i for i, x in enumerate(self.waiting) if not x.preemptions), behind)
        self.waiting.insert(behind, victim)

    def held_for_others(self, sequence: Sequence, goes: bool = True) -> Sequence:
        """As `Scheduler.held_for_others`. A prefill server forgets in each round that the batch was full
        (srt/disaggregation/prefill.py, `event_loop_overlap_disagg_prefill`)."""
        self.full = False
        return super().held_for_others(sequence, goes)

    def own_tokens(self, sequence: Sequence, hit: int) -> int:
        """As `FoundPrefixes.own_tokens`; who looks for them uses them."""
        found = super().own_tokens(sequence, hit)
        if found:
            self.cache.used_own(sequence.index)
        return found

    def _leave_own(self, sequence: Sequence) -> int:
        if sequence.finish_s >= 0:
            return super()._leave_own(sequence)
        block, known = self.cache.block_tokens, min(sequence.computed, sequence.request.prompt_tokens)
        if self.one_behind and self.last_prompts is not None and sequence in self.last_prompts:
            known = 0
        sequence.own_from = sequence.shared // block
        return self.cache.keep_own(sequence.index, max(0, known // block - sequence.own_from)) if self.keeps_own else 0

    def _keep_prefix(self, sequence: Sequence, end_s: float) -> None:
        if self.one_behind and not sequence.remaining:
            self.computed.append((sequence, end_s))
        else:
            super()._keep_prefix(sequence, end_s)

    def finish(self, batch: Batch, end_s: float) -> list[Sequence]:
        """As `Scheduler.finish`."""
        left = super().finish(batch, end_s)
        if batch.prompts:
            self.last_prompts = [p.sequence for p in batch.pieces[: batch.prompts] if p.samples]
        return left

    def end(self, sequence: Sequence, end_s: float) -> None:
        """As `Scheduler.end`."""
        super().end(sequence, end_s)
        self.ended += not self.one_behind

    @property
    def to_catch_up(self) -> bool:
        """As `Scheduler.to_catch_up`."""
        return super().to_catch_up or bool(self.computed)

    def catch_up(self) -> bool:
        """As `Scheduler.catch_up`."""
        for sequence, end_s in self.computed:
            if sequence.reads is not None:
                super()._keep_prefix(sequence, end_s)
        self.computed.clear()
        if self.mixes and len(self.leaving) > 1:  # in the batch's order
            places = {x: i for i, x in enumerate(self.running)}
            self.leaving.sort(key=lambda x: places[x])
        self.ended += len(self.leaving)
        return super().catch_up()


def _longest(request: Request) -> int:
    """Tokens of a request at its end, as far as they are looked at."""
    return request.prompt_tokens + min(request.output_tokens, CLIP)
