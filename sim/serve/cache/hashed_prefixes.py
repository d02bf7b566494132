"""Prefixes known block by block, by hashes: what requests share is a tree, as of conversations with a common beginning.

A hash stands for `HASHED_TOKENS` tokens and all before them, as in Mooncake's traces (Qin et al. 2025, "Mooncake", FAST
'25, arXiv 2407.00079). What two sequences computed at once is kept once: the later one reads the other's copy from then
on (as SGLang's radix cache does; Zheng et al. 2024, arXiv 2312.07104). Whatever nobody reads goes, the least recently
used first, and of one sequence its end before its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items

from msgspec import field

from sim.inputs.serving_keys import HASHED_TOKENS
from sim.serve.cache.kv_cache import HostCache, Key, KvCache, PrefixName

Hash = int | str


class HashedKvCache(KvCache):
    """A `KvCache` whose prefixes are sequences of hashes. Each hash that is kept has `HASHED_TOKENS` tokens' blocks:
    `readers` counts who reads it, `idle` has those that nobody does, the least recently used first."""

    readers: dict[Hash, int] = field(default_factory=dict)
    idle: OrderedDict[Hash, None] = field(default_factory=OrderedDict)

    @property
    def each(self) -> int:
        """Blocks of a hash."""
        return HASHED_TOKENS // self.block_tokens

    @property
    def kept(self) -> int:
        """As `KvCache.kept`."""
        return self.each * (len(self.readers) + len(self.idle))

    def cached_tokens(self, name: PrefixName, wanted: int) -> int:
        """As `KvCache.cached_tokens`: of hashes from the first on, without a gap."""
        found = 0
        for h in name[: wanted // HASHED_TOKENS]:
            if h not in self.readers and h not in self.idle:
                break
            found += 1
        return found * HASHED_TOKENS

    @property
    def key_tokens(self) -> int:
        """As `KvCache.key_tokens`."""
        return HASHED_TOKENS

    def keys(self, name: PrefixName, first: int, tokens: int) -> Items[Key]:
        """As `KvCache.keys`: hashes."""
        return name[first // HASHED_TOKENS : tokens // HASHED_TOKENS]

    def use(self, name: PrefixName, blocks: int) -> None:
        """As `KvCache.use`."""
        for h in name[: blocks // self.each]:
            self._read_hash(h)

    def release(self, name: PrefixName, blocks: int) -> None:
        """As `KvCache.release`. The end becomes idle first, and so goes first."""
        each, readers = self.each, self.readers
        for h in reversed(name[: blocks // each]):
            readers[h] -= 1
            if not readers[h]:
                del readers[h]
                self.idle[h] = None
                self.unused += each

    def share(self, name: PrefixName, reads: int, blocks: int) -> int:
        """As `KvCache.share`; own copies of what is kept already are given back."""
        each = self.each
        fresh = name[reads // each : blocks // each]
        self.private -= len(fresh) * each
        self.tokens -= len(fresh) * HASHED_TOKENS
        for h in fresh:
            if h in self.readers or h in self.idle:
                self.free += each
                self._read_hash(h)
            else:
                self.readers[h] = 1
        return len(fresh) * each

    def keep_own(self, index: int, blocks: int) -> int:
        """As `KvCache.keep_own`; none, for what a request has beyond its hashes is known to nobody."""
        return 0

    def _read_hash(self, h: Hash) -> None:
        if h in self.idle:
            del self.idle[h]
            self.unused -= self.each
        self.readers[h] = self.readers.get(h, 0) + 1

    def _evict(self, count: int) -> None:
        h, _ = self.idle.popitem(last=False)
        if self.gone is not None:
            self.gone.append(h)
        self.unused -= self.each
        self.free += self.each
        self.evicted += self.each


class HashedHostCache(HostCache):
    """A `HostCache` of hashes, the least recently used of which give way."""

    hashes: OrderedDict[Hash, None] = field(default_factory=OrderedDict)

    def cached_tokens(self, name: PrefixName, wanted: int, block_tokens: int) -> int:
        """As `HostCache.cached_tokens`: of hashes from the first on, without a gap."""
        found = 0
        for h in name[: wanted // HASHED_TOKENS]:
            if h not in self.hashes:
                break
            found += 1
        for h in reversed(name[:found]):
            self.hashes.move_to_end(h)
        return found * HASHED_TOKENS

    def store(self, name: PrefixName, tokens: int) -> int:
        """As `HostCache.store`."""
        known = name[: min(tokens, self.tokens) // HASHED_TOKENS]
        added = sum([h not in self.hashes for h in known])
        for h in reversed(known):
            self.hashes[h] = None
            self.hashes.move_to_end(h)
        while len(self.hashes) * HASHED_TOKENS > self.tokens:
            self.hashes.popitem(last=False)
        return added * HASHED_TOKENS
