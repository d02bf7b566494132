"""What a replica's sequences find computed: beginnings that they share with others, and blocks that they had before;
and the blocks that they take.

A prefix is known by its name or hashes (`sim.serve.cache.kv_cache`, `sim.serve.cache.hashed_prefixes`), on the GPU, in
the host's memory or in tiers below. With `shares_at_once` the cache knows every full block by its content from when it
is put into an iteration, as vLLM's does (v1/core/kv_cache_manager.py: allocate_slots, free; block_pool.py:
free_blocks). So sequences of one iteration find each other's beginning; and the blocks of a sequence that has ended, or
was preempted, stay until room is needed, the least recently freed first: a preempted one finds what is left of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct, field

from sim.serve.cache.host_copies import Link
from sim.serve.cache.kv_cache import HostCache, Key, KvCache
from sim.serve.cache.tiers import CacheTiers
from sim.serve.scheduling.sequences import Counts, Limits, Sequence


class Matched(NamedTuple):
    """Tokens that a sequence finds: `hit` of its prefix on the GPU, `loaded` below it, `own` that it had before.
    `read`: blocks of the prefix that stay for it."""

    hit: int
    loaded: int
    own: int
    read: int

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.hit + self.loaded + self.own


NOTHING = Matched(0, 0, 0, 0)


class FoundPrefixes(Struct):
    """The cache of a replica, and what is kept of prefixes below it."""

    cache: KvCache
    limits: Limits
    share_on_gpu: bool = False
    host: HostCache | None = None
    bus: Link = field(default_factory=Link)  # between GPU and host memory
    swap_tokens: int = 0  # room in the host's memory for preempted sequences; 0 recomputes
    counts: Counts = field(default_factory=Counts)
    tiers: CacheTiers | None = None  # below the cache on the GPU
    shares_at_once: bool = False  # a prefix is found from when it is put into an iteration, not from that one's end
    drops_last: bool = False  # the last block found is computed again: a draft reads the model's hidden states of it
    hashes_ahead: bool = False  # a block is found only if the token behind it is shared, too
    ends: set[Key] | None = None  # pieces of prefixes behind which layers with windows have what they see; None: all
    parted: dict[int, int] = field(default_factory=dict)  # tokens found but for these layers, by sequence
    one_behind: bool = False
    watermark: float | None = None  # as `Engine.watermark`
    keeps_ended: bool = False  # as `Admission.keeps_ended`
    lookahead: int = 0  # tokens for which who runs has blocks beyond those that an iteration computes
    reserved: int = 0  # blocks of all that run, once each has all its tokens

    @property
    def by_content(self) -> bool:
        """Whether the cache knows full blocks at once. A simplification where tiers are below it: these are told of
        prefixes alone, once they are computed."""
        return self.shares_at_once and self.share_on_gpu and self.tiers is None

    @property
    def keeps_own(self) -> bool:
        """Whether blocks of a sequence that has ended, or was preempted, stay in the cache."""
        return self.by_content or (self.keeps_ended and self.share_on_gpu and self.tiers is None)

    def matched(self, sequence: Sequence) -> Matched:
        """What a sequence finds and does not compute again. Without the last block where the engine `drops_last`; not
        where more has been found below the GPU's cache. With `hashes_ahead` without the last block that is shared if
        another token follows it."""
        hit, loaded = self.found(sequence)
        if not hit and not loaded and not sequence.preemptions:
            return NOTHING
        own, block = self.own_tokens(sequence, hit), self.cache.block_tokens
        if self.hashes_ahead and hit and not own and self._ends_shared(sequence, hit):
            hit -= block
            own = self.own_tokens(sequence, hit)
        if self.drops_last and not loaded and hit + own:
            if not own:
                hit -= block  # a copy of it that the sequence had before may be among its own
                own = self.own_tokens(sequence, hit)
            own = max(0, own - block)
        keys = -(-hit // self.cache.key_tokens)
        return Matched(hit, loaded, own, keys * self.cache.key_tokens // block)

    def _ends_shared(self, sequence: Sequence, hit: int) -> bool:
        """Whether what a sequence shares ends with the `hit` tokens found; a simplification where a prefix known by
        hashes is shared further, but was evicted from there on."""
        by_hash = bool(sequence.request.hashes) and hit % self.cache.key_tokens == 0
        return by_hash or hit == sequence.request.prefix_tokens

    def found(self, sequence: Sequence) -> tuple[int, int]:
        """Tokens found on the GPU and in the host's memory: of the prompt, or all that a swapped sequence had; at least
        one token is always computed."""
        request = sequence.request
        if sequence.remote or sequence.swapped:
            return 0, sequence.swapped or sequence.remote - sequence.again
        wanted = min(request.prefix_tokens, request.prompt_tokens - 1)
        if not request.prefix or wanted <= 0:
            return 0, 0
        if self.share_on_gpu:
            hit = self.cache.cached_tokens(request.prefix, wanted)
            if self.ends is not None:
                hit = self._where_windows_are(sequence, hit, wanted, self.ends)
            if self.tiers is None:
                return hit, 0
            return hit, self.tiers.found(self.cache.keys(request.prefix, hit, wanted)) * self.cache.key_tokens
        if self.host is not None:
            return 0, self.host.cached_tokens(request.prefix, wanted, self.cache.block_tokens)
        return 0, 0

    def _where_windows_are(self, sequence: Sequence, hit: int, wanted: int, ends: set[Key]) -> int:
        """Of `hit` tokens those up to the last end of a window that was kept. Where more is found, this sequence will
        keep what windows see there (vLLM, v1/core/kv_cache_manager.py, get_computed_blocks: shared_prefix_boundary)."""
        prefix, each = sequence.request.prefix, self.cache.key_tokens
        keys = self.cache.keys(prefix, 0, hit)
        ends.difference_update(self.cache.keys(prefix, hit, wanted))  # evicted
        last = next((i for i in range(len(keys), 0, -1) if keys[i - 1] in ends), 0)
        if last < len(keys):
            self.parted[sequence.index] = hit
        return last * each

    def _keep_windows(self, sequence: Sequence, tokens: int, ends: set[Key]) -> None:
        """Of a sequence with so many tokens, what windows see is kept where its prompt ends, for who has the same
        prompt, and where its beginning parted from others (single_type_kv_cache_manager.py, reachable_block_mask)."""
        request, each = sequence.request, self.cache.key_tokens
        for end in ((request.prompt_tokens - 1) // each * each, self.parted.get(sequence.index, 0)):
            if 0 < end <= min(tokens, request.prefix_tokens):
                ends.update(self.cache.keys(request.prefix, end - each, end))

    def own_tokens(self, sequence: Sequence, hit: int) -> int:
        """Tokens behind the `hit` ones of a prefix that a preempted sequence finds in blocks that it had."""
        if not sequence.preemptions or not self.keeps_own:
            return 0
        block, kept = self.cache.block_tokens, self.cache.own_blocks(sequence.index)
        if not kept or hit // block != sequence.own_from:  # what was before them is gone, or more of it is shared now
            return 0
        return min(kept, (sequence.remaining - 1) // block - sequence.own_from) * block

    def _take_own(self, sequence: Sequence, tokens: int) -> int:
        """A sequence takes the blocks of so many tokens back; how many these are."""
        blocks = tokens // self.cache.block_tokens
        if blocks:
            self.cache.take_own(sequence.index, blocks)
        return blocks

    def _leave_own(self, sequence: Sequence) -> int:
        """A sequence leaves its full blocks in the cache; how many."""
        if not self.keeps_own:
            return 0
        sequence.own_from = sequence.shared // self.cache.block_tokens
        unknown = self.one_behind and sequence.generated > 1  # the last token, when its iteration was put together
        full = (sequence.computed - unknown) // self.cache.block_tokens
        return self.cache.keep_own(sequence.index, max(0, full - sequence.own_from))

    def _read_prefix(self, sequence: Sequence, blocks: int) -> None:
        self.cache.use(sequence.request.prefix, blocks)
        sequence.reads = blocks

    def _release_prefix(self, sequence: Sequence) -> None:
        if sequence.reads is not None:
            self.cache.release(sequence.request.prefix, sequence.reads)
            sequence.reads = None

    def _keep_prefix(self, sequence: Sequence, end_s: float) -> None:
        """Computed whole blocks of the shared beginning are kept at once."""
        request, block = sequence.request, self.cache.block_tokens
        blocks = min(request.prefix_tokens, sequence.computed) // block
        if not request.prefix or not blocks:
            return
        if self.host is not None:
            self.counts.stored_tokens += self.host.store(request.prefix, blocks * block)
            return
        assert sequence.reads is not None
        if self.tiers is not None:
            own = self.cache.keys(request.prefix, sequence.reads * block, blocks * block)
            self.tiers.computed(own, end_s)
        self._share_prefix(sequence, sequence.computed)

    def _share_prefix(self, sequence: Sequence, tokens: int) -> None:
        """Whole blocks of the shared beginning, within so many tokens of a sequence, belong to its prefix."""
        request, block = sequence.request, self.cache.block_tokens
        blocks = min(request.prefix_tokens, tokens) // block
        if sequence.reads is None or not blocks:
            return
        if self.ends is not None:
            self._keep_windows(sequence, tokens, self.ends)
        added = self.cache.share(request.prefix, sequence.reads, blocks)
        if added:
            sequence.reads = blocks
        sequence.private -= added
        sequence.reserved -= added
        self.reserved -= added
        sequence.shared += added * block

    def may_share(self, sequence: Sequence) -> bool:
        """Whether a sequence has whole blocks of the shared beginning that are not its prefix's, if its prompt is
        computed."""
        return sequence.reads is not None and sequence.request.prefix_tokens // self.cache.block_tokens > sequence.reads

    @property
    def blocks_at_once(self) -> int:
        """Blocks that can be had without anything copied away."""
        return self.cache.available if self.tiers is None else self.cache.free

    def lacks(self, sequence: Sequence, tokens: int) -> int:
        """Blocks that a sequence needs for so many more tokens, and for what a draft writes behind them. A
        simplification: that ends with the request's own tokens, so that a request that fits alone is served; vLLM's
        ends with max_model_len (v1/core/kv_cache_manager.py, allocate_slots)."""
        have = sequence.private + sequence.shared // self.cache.block_tokens
        written = sequence.computed + tokens
        if self.lookahead:
            request = sequence.request
            written = max(written, min(written + self.lookahead, request.prompt_tokens + request.output_tokens))
        more = self.cache.blocks_of(written) - have
        return more if more > 0 else 0

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give a sequence the blocks for so many more tokens; False (and nothing done) if there are too few."""
        more = self.lacks(sequence, tokens)
        if self.watermark is not None and not self.cache.available:
            return False
        if not more:
            return True
        if not self.cache.take(more):
            return False
        sequence.private += more
        return True
