"""Tiers below the GPU's cache of prefixes: host memory, then a disk.

A prefix that the GPU's cache evicts goes down to host memory, and what host memory evicts goes down to disk (write
back); or host memory is given a copy of every prefix as soon as it is computed (write through), and nothing is copied
when the GPU's cache evicts it. Each tier gives up what was used least recently. A prompt that begins with a prefix of a
lower tier gets it back by a copy, while others compute; on its way from disk it is kept in host memory again.

A copy takes latency + bytes / bandwidth. GPU and host memory are joined by one link with two directions, host memory
and disk by another; each direction carries one copy at a time. A copy between GPU and disk takes both links, for as
long as the slower one needs. Blocks that are evicted by writing back are free once they are copied, so the iteration
that takes them over waits. A copy out of a tier starts when the copy into it has ended.

Left out: copies into host memory that wait until it has written something to disk (a staging buffer is assumed), and
tiers that several replicas share.

Sources: SGLang's HiCache (docs.sglang.io, "HiCache System Design": GPU, host and storage as L1, L2, L3; write policies
write_back and write_through); LMCache's local_cpu and local_disk (Liu et al. 2025, arXiv 2510.09665); Qin et al. 2025,
"Mooncake", FAST '25, arXiv 2407.00079.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items

from msgspec import Struct, field

from sim.inputs.serving_keys import Tiers
from sim.serve.cache.host_copies import Copy, Link, copied, copy_s
from sim.serve.cache.kv_cache import Key, KvCache


class Tier(Struct):
    """`capacity` tokens. `kept`: when each key's copy has come, the least recently used first."""

    name: str
    capacity: int
    kept: OrderedDict[Key, float] = field(default_factory=OrderedDict)
    hit_tokens: int = 0
    stored_tokens: int = 0
    evicted_tokens: int = 0


class CacheTiers(Struct):
    """The tiers of one replica. `links[i]` joins tier i to what is above it, `links[0]` to the GPU; a key stands for
    `key_tokens` tokens."""

    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]
    key_tokens: int
    copies: list[Copy]
    write_through: bool = False

    def found(self, keys: Items[Key]) -> int:
        """How many of the keys, from the first on and without a gap, some tier has."""
        for i, key in enumerate(keys):
            if not any(key in tier.kept for tier in self.tiers):
                return i
        return len(keys)

    def load(self, keys: Items[Key], now_s: float) -> float:
        """Copy keys, each of which some tier has, to the GPU; when the last of them is there."""
        ready_s = now_s
        for i, tier in enumerate(self.tiers):
            own = [k for k in keys if k in tier.kept and not any(k in above.kept for above in self.tiers[:i])]
            if not own:
                continue
            tokens, come_s = len(own) * self.key_tokens, max([tier.kept[k] for k in own])
            ready_s = max(ready_s, self._copy(i, 0, True, tokens, max(now_s, come_s)))
            tier.hit_tokens += tokens
            self._use(tier, own)
            if i:  # after it has been read; making room above may push others down here
                self._keep(0, own, ready_s, passing=True)
        return ready_s

    def computed(self, keys: Items[Key], now_s: float) -> None:
        """Keys were computed on the GPU, whose copies host memory is given if it is written through."""
        if self.write_through:
            self._keep(0, keys, now_s)

    def evicted(self, keys: Items[Key], now_s: float) -> float:
        """The GPU's cache gives these keys up; when their blocks are free."""
        if not self.write_through:
            return self._keep(0, keys, now_s)
        return max([now_s, *[tier.kept[k] for tier in self.tiers for k in keys if k in tier.kept]])

    def _keep(self, i: int, keys: Items[Key], at_s: float, first: int = 0, passing: bool = False) -> float:
        """Keep keys in tier i or, where it has no room at all, further down; they leave the tier above `first` at
        `at_s`, or are `passing` on their way up anyway. When the last of them has come. The end of a prefix counts as
        used less recently than its beginning."""
        if i >= len(self.tiers):
            return at_s
        tier, end_s, room = self.tiers[i], at_s, self.tiers[i].capacity // self.key_tokens
        if not room:
            return at_s if passing else self._keep(i + 1, keys, at_s, first)
        fresh = [k for k in keys if k not in tier.kept]
        self._use(tier, [k for k in keys if k in tier.kept])
        if fresh and not passing:
            end_s = self._copy(i, first, False, len(fresh) * self.key_tokens, at_s)
            tier.stored_tokens += len(fresh) * self.key_tokens
        for k in reversed(fresh):
            tier.kept[k] = end_s
        gone: list[Key] = []
        while len(tier.kept) > room:
            key, come_s = tier.kept.popitem(last=False)
            at_s = max(at_s, come_s)
            gone.append(key)
        if gone:
            tier.evicted_tokens += len(gone) * self.key_tokens
            self._keep(i + 1, gone[::-1], at_s, i + 1)
        return end_s

    def _use(self, tier: Tier, keys: Items[Key]) -> None:
        for k in reversed(keys):
            tier.kept.move_to_end(k)

    def _copy(self, i: int, first: int, up: bool, tokens: int, at_s: float) -> float:
        """When a copy has ended between tier i and what is above tier `first`, over all links between them."""
        path = self.links[first : i + 1]
        start_s, end_s = copied(path, up, at_s, copy_s(path, tokens))
        self.copies.append(Copy(start_s, end_s, "prefix", self.tiers[i].name, up, tokens))
        return end_s


def cache_tiers(given: Tiers, cache: KvCache, bus: Link, token_bytes: float, copies: list[Copy]) -> CacheTiers:
    """The tiers of one replica, whose GPUs each keep `token_bytes` of a token. What the GPU's cache evicts is taken
    from `cache.gone`; `bus` joins GPU and host memory, at the host tier's own bandwidth where one is given; `copies`
    are told to the replica."""
    host, disk = given.host, given.disk
    if host.bandwidth_bytes_per_s is not None:
        bus.s_per_token = token_bytes / host.bandwidth_bytes_per_s
    if host.latency_s is not None:
        bus.latency_s = host.latency_s
    tiers, links = [Tier("host", int(host.capacity_bytes // token_bytes))], [bus]
    if disk is not None:
        tiers.append(Tier("disk", int(disk.capacity_bytes // token_bytes)))
        links.append(Link(token_bytes / disk.bandwidth_bytes_per_s, disk.latency_s))
    cache.gone = []
    return CacheTiers(tuple(tiers), tuple(links), cache.key_tokens, copies, given.write_policy == "write_through")
