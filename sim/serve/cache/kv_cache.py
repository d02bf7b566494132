"""The KV cache of one model replica, counted in blocks: paged or contiguous, with shared prefixes.

Paged (Kwon et al. 2023, "PagedAttention", arXiv 2309.06180, section 4): a sequence holds as many blocks as its tokens
need, so only its last block is partly empty. Contiguous (section 3.1, "Orca (Max)"): a sequence holds room for the
longest one allowed from the start.

Prefixes are shared in whole blocks and counted by prefix, not block by block. Their blocks stay when no running
sequence uses them, until room is needed; then the prefix that was not used for longest gives up blocks from its end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence as Items

from msgspec import Struct, field

PrefixName = str | tuple[int | str, ...]  # a name, or hashes of its blocks (`sim.serve.cache.hashed_prefixes`)
Key = int | str | tuple[PrefixName, int]  # a piece of a prefix that is evicted at once: a hash, or a name's block


class Prefix(Struct):
    """Blocks of one prefix that are kept. `readers`: running sequences by how many of the first blocks they read."""

    blocks: int = 0
    readers: Counter[int] = field(default_factory=Counter)

    @property
    def read(self) -> int:
        """Blocks that somebody reads: only those behind them may go."""
        return max(self.readers, default=0)


class KvCache(Struct):
    """Blocks of `block_tokens` tokens. `reserve_tokens` (contiguous): what each sequence holds from the start.

    Of `blocks`, `free` hold nothing, `private` belong to one running sequence, the others to prefixes.
    `tokens` of the private blocks' places are filled.
    """

    blocks: int
    block_tokens: int
    reserve_tokens: int = 0
    free: int = 0
    private: int = 0
    tokens: int = 0
    evicted: int = 0
    prefixes: OrderedDict[PrefixName, Prefix] = field(default_factory=OrderedDict)  # the least recently used first
    unused: int = 0  # blocks of prefixes that nobody reads
    merges: bool = False  # SGLang's radix tree: what two sequences computed is kept once, what nobody reads goes whole
    late: int | None = None  # blocks taken before any gives way for them (`evict_late`); None: each gives way at once
    gone: list[Key] | None = None  # what was evicted, in that order, where somebody takes it from here

    def __post_init__(self) -> None:
        self.free = self.blocks

    def blocks_of(self, tokens: int) -> int:
        """Blocks that a sequence of `tokens` tokens needs."""
        places = tokens if tokens > self.reserve_tokens else self.reserve_tokens
        return -(-places // self.block_tokens)

    @property
    def kept(self) -> int:
        """Blocks of prefixes, read by somebody or not."""
        return sum([prefix.blocks for prefix in self.prefixes.values()])

    @property
    def available(self) -> int:
        """Blocks that can be had at once."""
        return self.free + self.unused

    def take(self, count: int) -> bool:
        """Take blocks for a sequence, from unused prefixes where none are free; False (and nothing done) if too few."""
        if count > self.available:
            return False
        if self.late is None:
            while self.free < count:
                self._evict(count - self.free)
        else:
            self.late += count
        self.free -= count
        self.private += count
        return True

    def evict_late(self) -> None:
        """Make room for blocks that were taken `late`."""
        taken, self.late = self.late or 0, None
        self.free += taken
        self.evict_at_least(taken)
        self.free -= taken

    def evict_at_least(self, count: int) -> None:
        """Make room for so many blocks: if there is too little, as if nothing were free (SGLang, schedule_batch.py,
        `_evict_tree_cache_if_needed`)."""
        wanted = self.evicted + (count if self.free < count else 0)
        while self.unused and self.evicted < wanted:
            self._evict(count)

    def give_back(self, count: int) -> None:
        """Blocks of a sequence that ended or was preempted."""
        self.private -= count
        self.free += count

    def cached_tokens(self, name: PrefixName, wanted: int) -> int:
        """How many of a prompt's first `wanted` tokens are kept, in whole blocks."""
        found = self.prefixes.get(name)
        return 0 if found is None else min(found.blocks, wanted // self.block_tokens) * self.block_tokens

    @property
    def key_tokens(self) -> int:
        """Tokens that a `Key` stands for."""
        return self.block_tokens

    def keys(self, name: PrefixName, first: int, tokens: int) -> Items[Key]:
        """Keys of a prefix's whole pieces from token `first` to `tokens`."""
        return [(name, i) for i in range(first // self.block_tokens, tokens // self.block_tokens)]

    def use(self, name: PrefixName, blocks: int) -> None:
        """A sequence begins to read a prefix's first `blocks` blocks, which therefore stay."""
        prefix = self.prefixes.setdefault(name, Prefix())
        self._read(prefix, blocks, 1)
        self.prefixes.move_to_end(name)

    def release(self, name: PrefixName, blocks: int) -> None:
        """A sequence that read so many has ended or was preempted."""
        prefix = self.prefixes[name]
        self._read(prefix, blocks, -1)
        self.prefixes.move_to_end(name)
        if not prefix.blocks and not prefix.readers:
            del self.prefixes[name]

    def share(self, name: PrefixName, reads: int, blocks: int) -> int:
        """Let a sequence, which `reads` so many blocks of its prefix, extend it to `blocks` by its own, which it reads
        from now on; the number that changed hands. What others had computed meanwhile it has twice (as in vLLM), or
        (`merges`) gives back."""
        prefix = self.prefixes[name]
        added = max(0, blocks - prefix.blocks)
        own = blocks - reads if self.merges else added
        if not own:
            return 0
        prefix.blocks += added
        self.unused += added
        self._read(prefix, blocks, 1)
        self._read(prefix, reads, -1)
        self.private -= own
        self.free += own - added
        self.tokens -= own * self.block_tokens
        return own

    def keep_own(self, index: int, blocks: int) -> int:
        """Leave so many blocks of a sequence, which nobody else looks for, until room is needed; how many stay."""
        if (index,) in self.prefixes:  # left earlier, and not taken back
            self.take_own(index, 0)
        if blocks:
            self.private -= blocks
            self.unused += blocks
            self.prefixes[index,] = Prefix(blocks)
        return blocks

    def own_blocks(self, index: int) -> int:
        """How many of them are still there."""
        found = self.prefixes.get((index,))
        return 0 if found is None else found.blocks

    def used_own(self, index: int) -> None:
        """They are the last used now."""
        self.prefixes.move_to_end((index,))

    def take_own(self, index: int, blocks: int) -> None:
        """The sequence takes the first `blocks` of them back; the others are free."""
        kept = self.prefixes.pop((index,)).blocks
        self.unused -= kept
        self.private += blocks
        self.free += kept - blocks

    def _read(self, prefix: Prefix, blocks: int, more: int) -> None:
        """One reader of so many blocks more, or (-1) one less."""
        before = prefix.read
        prefix.readers[blocks] += more
        if not prefix.readers[blocks]:
            del prefix.readers[blocks]
        self.unused += before - prefix.read

    def _evict(self, count: int) -> None:
        name = next(name for name, prefix in self.prefixes.items() if prefix.blocks > prefix.read)
        prefix = self.prefixes[name]
        gone = prefix.blocks - prefix.read
        if not self.merges:
            gone = min(count, gone)
        if self.gone is not None:
            self.gone += [(name, prefix.blocks - 1 - i) for i in range(gone)]
        prefix.blocks -= gone
        self.unused -= gone
        self.free += gone
        self.evicted += gone
        if not prefix.blocks and not prefix.readers:
            del self.prefixes[name]

    def occupancy(self) -> tuple[int, int, float]:
        """Blocks that running sequences hold, blocks of prefixes that none reads, share of the held places that no
        token fills."""
        held = self.blocks - self.free - self.unused
        if not held:
            return 0, self.unused, 0.0
        return held, self.unused, (self.private * self.block_tokens - self.tokens) / (held * self.block_tokens)


class HostCache(Struct):
    """Prefixes kept in the host's memory, in tokens; the least recently used give way whole."""

    tokens: int
    kept: OrderedDict[PrefixName, int] = field(default_factory=OrderedDict)
    used: int = 0

    def cached_tokens(self, name: PrefixName, wanted: int, block_tokens: int) -> int:
        """How many of a prompt's first `wanted` tokens are kept, in whole blocks."""
        found = self.kept.get(name, 0)
        if found:
            self.kept.move_to_end(name)
        return min(found, wanted) // block_tokens * block_tokens

    def store(self, name: PrefixName, tokens: int) -> int:
        """Keep a prefix up to `tokens`; how many of them are new (0 if it does not fit at all)."""
        if tokens > self.tokens:
            return 0
        added = max(0, tokens - self.kept.get(name, 0))
        self.used += added
        self.kept[name] = max(tokens, self.kept.get(name, 0))
        self.kept.move_to_end(name)
        while self.used > self.tokens:
            self.used -= self.kept.popitem(last=False)[1]
        return added
