"""A served workload's timeline and memory curves, for views."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.core.timeline import Detail, RankClass, Span, Timeline, from_spans
from sim.core.units import counted
from sim.results.memory import MemoryCurve
from sim.serve.cache_states import StateArrays
from sim.serve.pools import Pool
from sim.serve.replica import Iteration, Replica

if TYPE_CHECKING:
    from sim.serve.handover import Transfer

COPIES = {
    "RELOAD": "prefix from host memory",
    "SWAP_OUT": "preempted sequence to host memory",
    "SWAP_IN": "preempted sequence from host memory",
}


def classes_of(pool: Pool, replica: Replica) -> list[RankClass]:
    """One class for each stage of a replica: its tensor-parallel ranks."""
    found = []
    for i in range(len(pool.costs.stages)):
        first = pool.first_rank_of(replica, i)
        own = pool.costs.plan.mesh.along(["tp", "cp"], first - pool.first_rank)
        found.append(RankClass(first, tuple([pool.first_rank + rank for rank in own]), i))
    return found


def make_timeline(pools: tuple[Pool, ...], transfers: tuple[Transfer, ...]) -> Timeline:
    """A row for every iteration, or run of alike ones, on every stage, and for every load from the host's memory or
    from another replica."""
    classes, spans = [], []
    for pool in pools:
        for r in pool.replicas:
            own = classes_of(pool, r)
            classes += own
            for number, iteration in enumerate(r.iterations):
                detail = _detail(iteration)
                kind = _kind(iteration)
                for i, (start, end) in enumerate(iteration.spans):
                    spans.append(Span(own[i].rank, "compute", kind, i, number, start, end, detail))
            size = pool.capacity.stage_token_bytes
            for start, end, tokens, kind in r.scheduler.copies:
                detail = Detail(COPIES[kind], tokens * size, 0.0, "topology", counted(tokens, "token"))
                stream = "to host" if kind == "SWAP_OUT" else "host"
                spans.append(Span(own[0].rank, stream, kind, 0, -1, start, end, detail))
            spans += _tier_spans(r, own[0].rank, size)
            for start, end, name in () if r.scheduler.adapters is None else r.scheduler.adapters.copies:
                detail = Detail("LoRA adapter from host memory", 0.0, 0.0, "topology", f"adapter {name}")
                spans.append(Span(own[0].rank, "host", "RELOAD", 0, -1, start, end, detail))
    for t in transfers:
        size = max(pool.capacity.stage_token_bytes for pool in pools) * t.tokens
        note = f"{counted(t.tokens, 'token')} from prefill replica {t.prefill}"
        rank = pools[-1].first_rank_of(pools[-1].replicas[t.decode])
        detail = Detail("computed prompt", size, 0.0, "topology", note)
        spans.append(Span(rank, "network", "KV_TRANSFER", 0, -1, t.start_s, t.end_s, detail))
    spans.sort(key=lambda s: s.start_s)
    return from_spans(spans, classes)


def _tier_spans(replica: Replica, rank: int, token_bytes: float) -> list[Span]:
    """A row for every copy between the GPU's cache and the tiers below it."""
    out = []
    for c in () if replica.scheduler.tiers is None else replica.scheduler.tiers.copies:
        words = f"prefix from {c.tier}" if c.up else f"prefix to {c.tier}"
        detail = Detail(words, c.tokens * token_bytes, 0.0, "topology", counted(c.tokens, "token"))
        kind, stream = ("RELOAD", c.tier) if c.up else ("OFFLOAD", f"to {c.tier}")
        out.append(Span(rank, stream, kind, 0, -1, c.start_s, c.end_s, detail))
    return out


def _kind(iteration: Iteration) -> str:
    load = iteration.load
    if not load.decodes:
        return "PREFILL"
    return "MIXED" if load.prefills else "DECODE"


def _detail(iteration: Iteration) -> Detail:
    load, steps = iteration.load, iteration.steps
    prompts = sum(n for _, _, n in load.prefills)
    words = []
    if prompts:
        words.append(f"{counted(load.tokens - load.decodes, 'prompt token')} of {counted(prompts, 'request')}")
    if load.decodes:
        words.append(
            f"{counted(load.decodes, 'sequence')}, {counted(steps, 'more token')} each, "
            f"{load.decode_kv / load.decodes:,.0f} in the cache"
        )
    return Detail("iteration" if steps == 1 else f"{steps:,} iterations", note="; ".join(words))


def memory_curves(pools: tuple[Pool, ...]) -> list[MemoryCurve]:
    """Bytes over time on every stage of every replica."""
    out: list[MemoryCurve] = []
    for pool in pools:
        c, block = pool.capacity, pool.scenario.for_serving.kv_cache.block_tokens
        for r in pool.replicas:
            states = r.states.arrays()
            for i, ranks in enumerate(classes_of(pool, r)):
                curve = _curve(ranks.rank, states, block * c.token_bytes[i], c.weight_bytes[i], c.buffer_bytes[i])
                out.append(curve)
    return out


def _curve(rank: int, states: StateArrays, block_bytes: float, weights: float, buffers: float) -> MemoryCurve:
    times = np.append(0.0, states.time_s)
    cache = np.append(0.0, (states.held + states.unused) * block_bytes)
    last = np.append(times[1:] != times[:-1], True)
    times, cache = times[last], cache[last]
    ones = np.ones(len(times))
    return MemoryCurve(rank, times, ones * weights, ones * 0.0, ones * 0.0, cache, ones * buffers)
