"""A served workload's timeline and memory curves, for views."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.core.timeline import Detail, RankClass, Span, Timeline, from_spans
from sim.core.units import counted
from sim.results.memory import MemoryCurve
from sim.serve.cache.host_copies import Copy
from sim.serve.cache.states import StateArrays
from sim.serve.replicas.pools import Pool
from sim.serve.replicas.replica import Iteration, Replica

if TYPE_CHECKING:
    from sim.serve.replicas.handover import Transfer

SWAPPED = "preempted sequence"


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
            spans += [_copy_span(c, own[0].rank, pool.capacity.stage_token_bytes) for c in r.scheduler.copies]
    for t in transfers:
        size = max(pool.capacity.stage_token_bytes for pool in pools) * t.tokens
        note = f"{counted(t.tokens, 'token')} from prefill replica {t.prefill}"
        rank = pools[-1].first_rank_of(pools[-1].replicas[t.decode])
        detail = Detail("computed prompt", size, 0.0, "topology", note)
        spans.append(Span(rank, "network", "KV_TRANSFER", 0, -1, t.start_s, t.end_s, detail))
    spans.sort(key=lambda s: s.start_s)
    return from_spans(spans, classes)


def _copy_span(c: Copy, rank: int, token_bytes: float) -> Span:
    """The row of a copy between the GPU and what lies below it."""
    kind = ("SWAP_IN" if c.up else "SWAP_OUT") if c.what == SWAPPED else "RELOAD" if c.up else "OFFLOAD"
    words = f"{c.what} {'from' if c.up else 'to'} {'host memory' if c.below == 'host' else c.below}"
    detail = Detail(words, c.tokens * token_bytes, 0.0, "topology", c.note or counted(c.tokens, "token"))
    return Span(rank, c.below if c.up else f"to {c.below}", kind, 0, -1, c.start_s, c.end_s, detail)


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
