"""Iterations by the rules of SGLang's scheduler, where prompts are computed first and alone.

Sources: SGLang 0.5.3, srt/managers/scheduler.py (`get_next_batch_to_run`, `get_new_batch_prefill`,
`update_running_batch`), schedule_policy.py (`PrefillAdder`), schedule_batch.py (`retract_decode`),
mem_cache/radix_cache.py.

A request enters if what it has to compute and all its output, for which at most `CLIP` tokens count, is less than what
is free beside the output of requests that enter with it and a share of the remaining output of those that run
(`sim.serve.reserved_output`). Once one did not enter, or no place was left, nobody does until the running batch shrinks
(`batch_is_full`), of which the scheduler takes note when it next adds tokens. Before it adds tokens all running
requests must find room; else it puts out those with the least output, of these the longest prompt, to the end of the
queue, until there is room for the next token (before 0.5.2: 20 tokens) of all others. As the result of the last
iteration is not known yet, its token is lost.

Prompts are found by others one iteration later than computed, save for a chunk that is not the last; what two computed
at once is kept once. All tokens of a request stay in the cache when it ends; of one that was put out the prompt does.
A simplification: of those that run the whole remaining output counts.
"""

from __future__ import annotations

from msgspec import field

from sim.serve.scheduler import Scheduler
from sim.serve.sequences import Batch, Piece, Sequence

CLIP = 4096  # CLIP_MAX_NEW_TOKENS
MAX_PREFILL_TOKENS = 16384  # server_args.py, max_prefill_tokens


class SglangScheduler(Scheduler):
    """`entered`: who computes prompts in the iteration that is put together; `promised`: their output."""

    full: bool = False
    entered: list[Sequence] = field(default_factory=list)
    promised: int = 0
    last_prompts: list[Sequence] | None = (
        None  # of the iteration before, who ended their prompts; None: it added tokens
    )
    ran_none: bool = False  # nobody added tokens when the last prompts entered
    computed: list[tuple[Sequence, float]] = field(default_factory=list)  # whole prompts, not found by others yet

    @property
    def keeps_own(self) -> bool:
        """As `FoundPrefixes.keeps_own`."""
        return self.share_on_gpu and self.tiers is None

    def prompts(self, begun: list[Sequence], now_s: float) -> list[Piece]:
        """As `Scheduler.prompts`."""
        chunked = any(x.prompts and x.running for x in begun)
        if chunked or (self.last_prompts is not None and self.ran_none):
            self.full = False
        self.entered, self.promised = [], 0
        if self.full:
            return []
        self.cache.late = 0
        pieces = super().prompts(begun, now_s)
        self.cache.evict_late()
        return pieces

    def prompts_alone(self, prompts: list[Piece]) -> Batch:
        """As `Scheduler.prompts_alone`."""
        self.ran_none = len(self.running) == len(self.entered) and not self.ended
        return super().prompts_alone(prompts)

    def admit(self, pieces: list[Piece], budget: int, places: int, now_s: float, ahead: int = 0) -> None:
        """As `Scheduler.admit`."""
        super().admit(pieces, budget, places, now_s, ahead)
        if self.known and len(self.running) + self.ended >= self.limits.running:
            self.full = True

    def part(self, tokens: int, budget: int) -> int:
        """As `Scheduler.part`: what does not fit beside others is not split where no chunk is smaller than the most."""
        used = self.limits.batch_tokens - budget
        if used and tokens >= MAX_PREFILL_TOKENS - used:
            return 0
        return super().part(tokens, budget)

    def fits(self, sequence: Sequence) -> bool:
        """Whether the scheduler has to look at who waits."""
        return bool(self.ended) or not self.full

    def piece(self, sequence: Sequence, tokens: int) -> Piece:
        """As `Scheduler.piece`."""
        if sequence.running and tokens == sequence.remaining:
            self.promised += min(sequence.request.output_tokens, CLIP)
        self.entered.append(sequence)
        return super().piece(sequence, tokens)

    def _may_enter(self, sequence: Sequence, shared_blocks: int) -> bool:
        block = self.cache.block_tokens
        whole = (self.cache.blocks_of(sequence.remaining) - shared_blocks) * block
        wanted = whole + min(sequence.request.output_tokens, CLIP)
        if wanted < self._free_tokens() or not self.running:
            return True
        self.full = True
        return False

    def _free_tokens(self) -> float:
        """Tokens that are free beside what requests will still write."""
        later = self.reserved - self.cache.private - sum([x.reserved - x.private for x in self.entered])
        left = later * self.cache.block_tokens
        adding = len(self.running) - len(self.entered)
        if not self.one_behind:
            left -= adding
        elif self.last_prompts is not None:  # whose tokens are not known yet, as all others' are
            left -= adding - len(self.last_prompts)
        return self.cache.available * self.cache.block_tokens - self.output.share * left - self.promised

    def before_tokens(self) -> None:
        """As `Scheduler.before_tokens`."""
        if self.ended:
            self.full, self.ended = False, 0

    def added_tokens(self, steps: int) -> None:
        """As `Scheduler.added_tokens`."""
        super().added_tokens(steps)
        self.last_prompts = None

    def make_room(self, now_s: float) -> None:
        """As `Scheduler.make_room`."""
        running = [x for x in self.running if not x.prompts and not x.in_flight]
        if sum([self.lacks(x, 1) for x in running]) <= self.cache.available:
            return
        order = sorted(running, key=lambda x: (self._known_output(x), -x.request.prompt_tokens), reverse=True)
        while len(order) > 1:
            self._preempt(order.pop(), now_s)
            if sum([self.lacks(x, self.retracts) for x in order]) <= self.cache.available:
                break
        self.full = False
        self.output.retracted(order, sum([self._known_output(x) for x in order]))

    def _known_output(self, sequence: Sequence) -> int:
        """Tokens of a sequence but those of the last iteration."""
        unknown = self.one_behind and (self.last_prompts is None or sequence in self.last_prompts)
        return sequence.generated - unknown

    def _preempt(self, victim: Sequence, now_s: float) -> None:
        victim.generated = self._known_output(victim)
        if not victim.generated:
            victim.first_token_s = -1.0
        super()._preempt(victim, now_s)
        self.waiting.popleft()
        self.waiting.insert(self.known - 1 if self.one_behind else len(self.waiting), victim)

    def _leave_own(self, sequence: Sequence) -> int:
        if sequence.finish_s >= 0:
            return super()._leave_own(sequence)
        computed, sequence.computed = sequence.computed, min(sequence.computed, sequence.request.prompt_tokens)
        if self.one_behind and self.last_prompts is not None and sequence in self.last_prompts:
            sequence.computed = 0
        kept = super()._leave_own(sequence)
        sequence.computed = computed
        return kept

    def _keep_prefix(self, sequence: Sequence, end_s: float) -> None:
        if self.one_behind and not sequence.remaining:
            self.computed.append((sequence, end_s))
        else:
            super()._keep_prefix(sequence, end_s)

    def finish(self, batch: Batch, end_s: float) -> list[Sequence]:
        """As `Scheduler.finish`."""
        left = super().finish(batch, end_s)
        if batch.prompts_alone:
            self.last_prompts = [p.sequence for p in batch.pieces if p.samples]
        return left

    def end(self, sequence: Sequence, end_s: float) -> None:
        """As `Scheduler.end`."""
        super().end(sequence, end_s)
        self.ended += not self.one_behind

    def catch_up(self) -> bool:
        """As `Scheduler.catch_up`."""
        for sequence, end_s in self.computed:
            if sequence.reads is not None:
                super()._keep_prefix(sequence, end_s)
        self.computed.clear()
        self.ended += len(self.leaving)
        return super().catch_up()
