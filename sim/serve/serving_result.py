"""A simulated serving workload, and what it shows: its result as plain data (format sim-result/1), timeline, memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from sim.faults import has_jitter
from sim.inputs.scenario import Scenario
from sim.memory import MemoryCurve
from sim.metrics import interval, provenance, source_shares, text_of
from sim.prices.profile import Profile
from sim.serve.clock import CacheState, Iteration, Replica
from sim.serve.serving_costs import IterationCosts
from sim.serve.serving_memory import Capacity
from sim.timeline import Detail, RankClass, Span, Timeline, from_spans

COPIES = {
    "RELOAD": "prefix from host memory",
    "SWAP_OUT": "preempted sequence to host memory",
    "SWAP_IN": "preempted sequence from host memory",
}


@dataclass(frozen=True, eq=False, repr=False)
class ServingSimulation:
    """One simulated workload: `result` as `sim.run --json` prints it, `timeline` and `memory` for views."""

    scenario: Scenario
    profile: Profile
    costs: IterationCosts
    capacity: Capacity
    replicas: tuple[Replica, ...]
    wall_s: float

    @cached_property
    def start_s(self) -> float:
        """When the first request arrived: a trace may begin at any time, and rates and means count from here."""
        return min(s.request.arrival_s for r in self.replicas for s in r.sequences)

    @cached_property
    def end_s(self) -> float:
        """When the last token came out."""
        return max(s.finish_s for r in self.replicas for s in r.sequences)

    @cached_property
    def result(self) -> dict[str, Any]:
        """The numbers, in format sim-result/1."""
        return _make_result(self)

    @cached_property
    def timeline(self) -> Timeline:
        """A span for every iteration (or run of alike ones) on every stage."""
        return _make_timeline(self)

    @cached_property
    def memory(self) -> list[MemoryCurve]:
        """Weights, cache (as activations) and what an iteration needs for the moment, on every stage."""
        return _memory_curves(self)

    def __repr__(self) -> str:
        served = sum(len(r.sequences) for r in self.replicas)
        return f"ServingSimulation({self.scenario.name}: {served:,} requests in {self.end_s:.6g} s)"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from sim.views.headline_html import result_html

        return result_html(self.scenario.name, self.result)

    def memory_over(self, steps: int) -> list[MemoryCurve]:
        """`memory`: a workload has no further steps."""
        return self.memory

    @property
    def critical_rows(self) -> list[int]:
        """No row is marked: an iteration follows the one before."""
        return []


def _make_result(sim: ServingSimulation) -> dict[str, Any]:
    """Everything that `sim.run --json` prints."""
    sequences = [s for r in sim.replicas for s in r.sequences]
    output = sum(s.request.output_tokens for s in sequences)
    rate = output / (sim.end_s - sim.start_s) if sim.end_s > sim.start_s else 0.0
    memory = _memory(sim)
    peak = max(m["peak"] for m in memory)
    fits = sim.capacity.blocks <= sim.capacity.blocks_fit and peak <= sim.scenario.cluster.gpu.memory_bytes
    shares = sim.costs.shares()
    return {
        "format": "sim-result/1",
        "scenario": sim.scenario.model_dump(mode="json"),
        "duration_s": sim.end_s,
        "duration_interval_s": list(interval(sim.end_s, shares)),
        "requests": len(sequences),
        "request_latency_s": percentiles([s.finish_s - s.request.arrival_s for s in sequences]),
        "time_to_first_token_s": percentiles([s.first_token_s - s.request.arrival_s for s in sequences]),
        "time_per_output_token_s": percentiles(
            [(s.finish_s - s.first_token_s) / (s.request.output_tokens - 1)
             for s in sequences if s.request.output_tokens > 1]),
        "output_tokens": output,
        "output_tokens_per_s": rate,
        "output_tokens_per_s_per_gpu": rate / sim.scenario.parallelism.ranks,
        "iterations": sum(i.steps for r in sim.replicas for i in r.iterations),
        "kv_cache": _kv_cache(sim),
        "comm_share": sim.costs.comm_share(),
        "peak_memory_bytes": peak,
        "memory": memory,
        "fits_in_memory": fits,
        "provenance": provenance(sim.profile, shares),
        "warnings": [*sim.scenario.warnings, *_warnings(sim, fits, shares)],
        "engine": {"tasks": sum(len(r.iterations) for r in sim.replicas), "wall_s": sim.wall_s, "path": "serving"},
    }  # fmt: skip


def _kv_cache(sim: ServingSimulation) -> dict[str, Any]:
    """Blocks are those of one replica, counts the sums over replicas; waste and use are means over time."""
    inference, capacity, replicas = sim.scenario.inference, sim.capacity, sim.replicas
    assert inference is not None
    counts = [r.counts for r in replicas]
    prompts = sum(c.prompt_tokens for c in counts)
    hits = sum(c.hit_tokens for c in counts)
    block = inference.kv_cache.block_tokens
    return {
        "layout": inference.kv_cache.layout,
        "block_tokens": block,
        "blocks": capacity.blocks,
        "capacity_tokens": capacity.blocks * block,
        "bytes_per_token": capacity.stage_token_bytes,
        "blocks_used": max(s.held for r in replicas for s in r.states),
        "blocks_used_mean": _mean_over_time(sim, "held"),
        "waste": _waste(replicas),
        "running_max": max(s.running for r in replicas for s in r.states),
        "running_mean": _mean_over_time(sim, "running"),
        "preemptions": sum(c.preemptions for c in counts),
        "recomputed_tokens": sum(c.recomputed_tokens for c in counts),
        "prefix_hit_rate": hits / prompts if prompts else 0.0,
        "prefix_hit_tokens": hits,
        "evicted_blocks": sum(r.scheduler.cache.evicted for r in replicas),
        "loaded_bytes": sum(c.loaded_tokens for c in counts) * capacity.stage_token_bytes,
        "stored_bytes": sum(c.stored_tokens for c in counts) * capacity.stage_token_bytes,
        "load_s": _copy_s(replicas, "RELOAD"),
        "swapped_bytes": sum(c.swapped_tokens for c in counts) * capacity.stage_token_bytes,
        "swap_s": _copy_s(replicas, "SWAP_OUT") + _copy_s(replicas, "SWAP_IN"),
    }


def _copy_s(replicas: tuple[Replica, ...], kind: str) -> float:
    """Seconds of all copies of one kind between GPU and host."""
    return sum(c.end_s - c.start_s for r in replicas for c in r.scheduler.copies if c.kind == kind)


def _mean_over_time(sim: ServingSimulation, name: str) -> float:
    """The mean of a state's value over time since the first request, and over replicas."""
    total, seconds = 0.0, 0.0
    for r in sim.replicas:
        for before, after in pairwise(r.states):
            width = max(after.time_s, sim.start_s) - max(before.time_s, sim.start_s)
            total += getattr(before, name) * width
            seconds += width
    return total / seconds if seconds > 0 else 0.0


def _waste(replicas: tuple[Replica, ...]) -> float:
    """Empty places over held places, both summed over time."""
    empty, held = 0.0, 0.0
    for r in replicas:
        for before, after in pairwise(r.states):
            width = (after.time_s - before.time_s) * (before.held + after.held) / 2
            empty += width * (before.waste + after.waste) / 2
            held += width
    return empty / held if held > 0 else 0.0


def _memory(sim: ServingSimulation) -> list[dict[str, Any]]:
    """Per pipeline stage: weights, the most cache in use (as activations), and an iteration's own tensors."""
    out = []
    ranks = _classes(sim)[: len(sim.costs.stages)]
    used = max(s.held + s.unused for r in sim.replicas for s in r.states)
    inference = sim.scenario.inference
    assert inference is not None
    capacity = sim.capacity
    for i, c in enumerate(ranks):
        cache = used * inference.kv_cache.block_tokens * capacity.token_bytes[i]
        weights, buffers = capacity.weight_bytes[i], capacity.buffer_bytes[i]
        out.append(
            {
                "ranks": text_of(c.ranks),
                "rank": c.rank,
                "count": len(c.ranks),
                "parameters": weights,
                "gradients": 0.0,
                "optimizer": 0.0,
                "activations": cache,
                "kv_cache": cache,
                "buffers": buffers,
                "peak": weights + cache + buffers,
            }
        )
    return out


def _classes(sim: ServingSimulation) -> list[RankClass]:
    """One class per replica and stage: its tensor-parallel ranks."""
    mesh, found = sim.costs.plan.mesh, []
    for r in sim.replicas:
        for i in range(len(sim.costs.stages)):
            first = r.index * mesh.strides["dp"] + i * mesh.strides["pp"]
            found.append(RankClass(first, tuple(mesh.along(["tp"], first)), i))
    return found


def _warnings(sim: ServingSimulation, fits: bool, shares: dict[tuple[str, str, float], float]) -> list[str]:
    out = []
    inference = sim.scenario.inference
    assert inference is not None
    if not fits:
        c, block = sim.capacity, inference.kv_cache.block_tokens
        out.append(
            f"does not fit in memory: the requests need a cache of {c.blocks * block:,} tokens; beside weights "
            f"and buffers there is room for {c.blocks_fit * block:,}"
        )
    if has_jitter(sim.scenario):
        out.append("faults.jitter: is not simulated for serving; stragglers and links are")
    linear = sim.costs.dims.linear
    if inference.quantization in ("fp8", "llm_int8") and linear == sim.costs.dims.act:
        out.append(
            f"inference.quantization: {sim.scenario.cluster.gpu.name} multiplies no {inference.quantization}; "
            f"weights are kept in 8 bits and multiplied in {linear}"
        )
    roofline = source_shares(shares)["roofline"]
    if roofline > 0.5:
        out.append(f"{roofline:.0%} of the time is priced by the roofline: an optimistic bound, nothing measured")
    return out


def _make_timeline(sim: ServingSimulation) -> Timeline:
    """A row for every iteration, or run of alike ones, on every stage, and for every load from the host's memory."""
    classes = _classes(sim)
    stages = len(sim.costs.stages)
    spans = []
    for r in sim.replicas:
        for number, iteration in enumerate(r.iterations):
            detail = _detail(iteration)
            kind = _kind(iteration)
            for i, (start, end) in enumerate(iteration.spans):
                rank = classes[r.index * stages + i].rank
                spans.append(Span(rank, "compute", kind, i, number, start, end, detail))
        size = sim.capacity.stage_token_bytes
        for start, end, tokens, kind in r.scheduler.copies:
            detail = Detail(COPIES[kind], tokens * size, 0.0, "topology", f"{tokens:,} tokens")
            stream = "to host" if kind == "SWAP_OUT" else "host"
            spans.append(Span(classes[r.index * stages].rank, stream, kind, 0, -1, start, end, detail))
    spans.sort(key=lambda s: s.start_s)
    return from_spans(spans, classes)


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
        words.append(f"{load.tokens - load.decodes:,} prompt tokens of {prompts:,} requests")
    if load.decodes:
        words.append(
            f"{load.decodes:,} sequences add {'a token' if steps == 1 else f'{steps:,} tokens'} each, "
            f"{load.decode_kv / load.decodes:,.0f} in the cache"
        )
    return Detail("iteration" if steps == 1 else f"{steps:,} iterations", note="; ".join(words))


def _memory_curves(sim: ServingSimulation) -> list[MemoryCurve]:
    """Bytes over time on every stage of every replica."""
    inference = sim.scenario.inference
    assert inference is not None
    block, capacity = inference.kv_cache.block_tokens, sim.capacity
    stages = len(sim.costs.stages)
    out = []
    for i, c in enumerate(_classes(sim)):
        states, stage = sim.replicas[i // stages].states, i % stages
        out.append(
            _curve(
                c.rank,
                states,
                block * capacity.token_bytes[stage],
                capacity.weight_bytes[stage],
                capacity.buffer_bytes[stage],
            )
        )
    return out


def _curve(rank: int, states: list[CacheState], block_bytes: float, weights: float, buffers: float) -> MemoryCurve:
    times = np.array([0.0, *(s.time_s for s in states)])
    cache = np.array([0.0, *((s.held + s.unused) * block_bytes for s in states)])
    last = np.append(times[1:] != times[:-1], True)
    times, cache = times[last], cache[last]
    ones = np.ones(len(times))
    return MemoryCurve(rank, times, ones * weights, ones * 0.0, ones * 0.0, cache, ones * buffers)


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p90 and p99, between neighbours where needed; zeros for no values."""
    if not values:
        return {"p50": 0.0, "p90": 0.0, "p99": 0.0}
    found = np.percentile(np.array(values), (50, 90, 99))
    return {name: float(v) for name, v in zip(("p50", "p90", "p99"), found, strict=True) if math.isfinite(v)}
