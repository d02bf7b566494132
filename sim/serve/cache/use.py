"""What became of a pool's key-value cache, for the result."""

from __future__ import annotations

import math

import numpy as np

from sim.serve.cache.host_copies import Copied
from sim.serve.cache.states import Floats, StateArrays
from sim.serve.replicas.pools import Pool
from sim.serve.replicas.replica import Replica
from sim.serve.results.records import KvCacheUse, TierUse


def kv_cache_use(pool: Pool, start_s: float) -> KvCacheUse:
    """A pool's cache from `start_s` on, which is when the first request came; no block where its engine does not
    start."""
    cache, capacity, replicas = pool.scenario.for_serving.kv_cache, pool.capacity, pool.replicas
    states = [r.states.arrays() for r in replicas]
    counts, tiers = [r.counts for r in replicas], _tiers(pool)
    prompts = sum(c.prompt_tokens for c in counts)
    hits = sum(c.hit_tokens for c in counts)
    block = cache.block_tokens
    blocks = capacity.blocks if capacity.starts else 0
    used = [(s.time_s, s.held) for s in states] if capacity.starts else []
    return KvCacheUse(
        layout=cache.layout,
        block_tokens=block,
        blocks=blocks,
        capacity_tokens=blocks * block,
        bytes_per_token=capacity.stage_token_bytes,
        blocks_used=max([int(held.max()) for _, held in used], default=0),
        blocks_used_mean=_mean_over_time(used, start_s),
        waste=_waste(states),
        running_max=max([int(s.running.max()) for s in states]),
        running_mean=_mean_over_time([(s.time_s, s.running) for s in states], start_s),
        preemptions=sum(c.preemptions for c in counts),
        recomputed_tokens=sum(c.recomputed_tokens for c in counts),
        prefix_hit_rate=hits / prompts if prompts else 0.0,
        prefix_hit_tokens=hits,
        evicted_blocks=sum(r.scheduler.cache.evicted for r in replicas),
        loaded_bytes=sum(c.loaded_tokens for c in counts) * capacity.stage_token_bytes,
        stored_bytes=sum(c.stored_tokens for c in counts) * capacity.stage_token_bytes
        + sum([t.stored_bytes for t in tiers]),
        load_s=_copy_s(replicas, "prefix", (True,)),
        swapped_bytes=sum(c.swapped_tokens for c in counts) * capacity.stage_token_bytes,
        swap_s=_copy_s(replicas, "preempted sequence", (False, True)),
        tiers=tiers or None,
    )


def _tiers(pool: Pool) -> tuple[TierUse, ...]:
    """The tiers below the GPU's cache, each of all replicas together."""
    below = [r.scheduler.tiers.tiers for r in pool.replicas if r.scheduler.tiers is not None]
    size, out = pool.capacity.stage_token_bytes, []
    for own in zip(*below, strict=True):
        out.append(
            TierUse(
                name=own[0].name,
                capacity_tokens=own[0].capacity,
                hit_tokens=sum(t.hit_tokens for t in own),
                evicted_tokens=sum(t.evicted_tokens for t in own),
                loaded_bytes=sum(t.hit_tokens for t in own) * size,
                load_s=_copy_s(pool.replicas, "prefix", (True,), own[0].name),
                stored_bytes=sum(t.stored_tokens for t in own) * size,
                store_s=_copy_s(pool.replicas, "prefix", (False,), own[0].name),
            )
        )
    return tuple(out)


def _copy_s(replicas: tuple[Replica, ...], what: Copied, up: tuple[bool, ...], below: str = "") -> float:
    """Seconds of all copies of one kind in these directions, between the GPU and one tier, or any."""
    copies = [c for r in replicas for c in r.scheduler.copies if c.what == what and c.up in up]
    return sum(c.end_s - c.start_s for c in copies if below in ("", c.below))


def _mean_over_time(values: list[tuple[Floats, Floats]], start_s: float) -> float:
    """The mean of times and the values from them on over time since the first request, and over replicas."""
    total, seconds = 0.0, 0.0
    for times, own in values:
        widths = np.diff(np.maximum(times, start_s))
        total += math.fsum(widths * own[:-1])  # exact, so that states that no time passes in change no bit
        seconds += math.fsum(widths)
    return total / seconds if seconds > 0 else 0.0


def _waste(states: list[StateArrays]) -> float:
    """Empty places over held places, both summed over time, in which each state holds until the next."""
    empty, held = 0.0, 0.0
    for s in states:
        width = np.diff(s.time_s) * s.held[:-1]
        empty += math.fsum(width * s.waste[:-1])
        held += math.fsum(width)
    return empty / held if held > 0 else 0.0
