"""The result of a simulated step as plain data: format sim-result/1."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from sim.actions import Kind
from sim.blame import ROUNDING, waiting
from sim.faults import disturbs, has_jitter
from sim.finished import FinishedStep
from sim.folding import APART_RANKS
from sim.garbage import no_collection
from sim.graph.template import compile_program
from sim.memory import CATEGORIES, stranded_bytes
from sim.metrics import RankSeconds, critical_path, interval, mean, provenance, rank_seconds, source_shares
from sim.models.flops import model_flops_per_token
from sim.models.head import stranded_logits_bytes
from sim.program import Block, Compute

ALLOCATOR_SEGMENT_BYTES = 2 * 2**20  # torch's caching allocator rounds large segments up to this
MATMUL_KINDS = ("gemm", "grouped_gemm", "attention_forward", "attention_backward")


@no_collection()
def make_result(sim: FinishedStep, lost: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything that `sim.run --json` prints; `lost`: to each fault, as `sim.blame.blame` has it."""
    scenario = sim.scenario
    t = scenario.training
    assert t is not None
    begin = time.perf_counter()
    step_s = sim.step_time_s
    seconds = rank_seconds(sim.built, *sim.span_arrays)
    path, _ = critical_path(sim.built, sim.times)
    stranded = stranded_logits_bytes(scenario)
    memory = [_memory_row(sim, i, most, stranded) for i, most in enumerate(sim.levels.at_most())]
    peak = max(m["peak"] for m in memory)
    reserved = max(m.pop("reserved") for m in memory)
    fits = peak <= scenario.cluster.gpu.memory_bytes
    throughput = t.global_batch_size * t.seq_len / step_s if step_s > 0 else 0.0
    return {
        "format": "sim-result/1",
        "scenario": scenario.model_dump(mode="json"),
        "step_time_s": step_s,
        "step_time_interval_s": list(interval(step_s, sim.built.shares)),
        "tokens_per_s": throughput,
        "tokens_per_s_per_gpu": throughput / scenario.parallelism.ranks,
        **_utilization(sim, throughput),
        **_seconds_of_mean_rank(sim, seconds),
        **_middle_layer(sim),
        "peak_memory_bytes": peak,
        "peak_reserved_bytes": reserved,
        "memory": memory,
        "fits_in_memory": fits,
        "critical_path": path,
        "ranks": _rank_rows(sim, seconds),
        "blame": lost,
        "waiting": waiting(sim) if disturbs(scenario) else [],
        "contention": _contention(sim),
        "communication": _communication(sim),
        "provenance": provenance(sim.profile, sim.built.shares),
        "warnings": [*scenario.warnings, *_warnings(sim, peak, fits)],
        "engine": _engine(sim, begin),
    }


def _seconds_of_mean_rank(sim: FinishedStep, seconds: Sequence[RankSeconds]) -> dict[str, float]:
    """Means over ranks: idle time over the step and over busy time, communication that nothing hides, computation."""
    busy, idle, exposed, compute = (
        mean((getattr(r, k) for r in seconds), sim.plan) for k in ("busy_s", "bubble_s", "exposed_comm_s", "compute_s")
    )
    return {
        "bubble_fraction": idle / sim.step_time_s if sim.step_time_s > 0 else 0.0,
        "bubble_ratio": idle / busy if busy > 0 else 0.0,
        "exposed_comm_s": exposed,
        "compute_s": compute,
    }


def _rank_rows(sim: FinishedStep, seconds: Sequence[RankSeconds]) -> list[dict[str, Any]]:
    """Where the time of each class of ranks goes; `waiting_s` is what the others leave of the step."""
    return [
        {
            "ranks": name,
            "rank": c.rank,
            "count": len(c.ranks),
            "pipeline_rank": c.pipeline_rank,
            "compute_s": r.compute_s,
            "busy_s": r.busy_s,
            "exposed_comm_s": r.exposed_comm_s,
            "bubble_s": r.bubble_s,
            "waiting_s": max(0.0, sim.step_time_s - r.compute_s - r.exposed_comm_s - r.bubble_s),
        }
        for name, c, r in zip(sim.names, sim.plan.classes, seconds, strict=True)
    ]


def _utilization(sim: FinishedStep, tokens_per_s: float) -> dict[str, float]:
    """Model FLOP/s a GPU, MFU with causal and with full attention, and HFU, which adds what is recomputed."""
    s = sim.scenario
    t = s.training
    assert t is not None
    ranks = s.parallelism.ranks
    peak = s.cluster.gpu.peak_flops_per_s[t.precision]
    frozen = t.lora is not None
    per_token = model_flops_per_token(s.model, t.seq_len, frozen=frozen)
    full = model_flops_per_token(s.model, t.seq_len, causal_half=False, frozen=frozen)
    per_gpu = per_token * tokens_per_s / ranks
    again = sum(_recomputed_flops(sim, i) * len(c.ranks) for i, c in enumerate(sim.plan.classes)) / ranks
    step_s = sim.step_time_s
    return {
        "model_flops_per_s_per_gpu": per_gpu,
        "mfu": per_gpu / peak,
        "mfu_full_attention": full * tokens_per_s / ranks / peak,
        "hfu": (per_gpu + (again / step_s if step_s > 0 else 0.0)) / peak,
    }


def _recomputed_flops(sim: FinishedStep, class_index: int) -> float:
    """Matmul FLOPs that one rank of a class recomputes in a step."""
    stages = sim.stages[class_index]
    per_stage = {
        i: sum(op.flops for b in s.blocks for op in b.recompute if isinstance(op, Compute) and op.kind in MATMUL_KINDS)
        for i, s in stages.items()
    }
    if not any(per_stage.values()):
        return 0.0
    return sum(per_stage[a.stage] for a in sim.built.actions[class_index].listed.actions if a.kind in (Kind.B, Kind.I))


def _middle_layer(sim: FinishedStep) -> dict[str, float]:
    """Forward and backward of one middle layer for one micro-batch, alone, its own communication included."""
    middle = sim.scenario.model.layers // 2
    part = next((p for p in sim.plan.parts if middle in p.layers), None)
    if part is None:
        return {"layer_forward_s": 0.0, "layer_backward_s": 0.0}
    index = next(
        i for i, stages in enumerate(sim.stages) if any(sim.schedule.part_of_stage[s] == part.index for s in stages)
    )
    rank = sim.plan.classes[index].rank
    stage = next(s for i, s in sim.stages[index].items() if sim.schedule.part_of_stage[i] == part.index)
    place = part.layers.index(middle) + part.embedding
    price = sim.pricing.on(rank)
    forward, backward = (stage.measured(k)[place] for k in (Kind.F, Kind.B))
    return {
        "layer_forward_s": compile_program(forward.forward, price).makespan_s,
        "layer_backward_s": compile_program(_whole_backward(backward), price).makespan_s,
    }


def _whole_backward(block: Block) -> tuple[Any, ...]:
    return (*block.recompute, *block.backward)


def _memory_row(sim: FinishedStep, index: int, at_most: dict[str, float], segment_bytes: float) -> dict[str, Any]:
    """One class of ranks: each category at its maximum, the peak of their sum, and what is reserved at the most."""
    c = sim.plan.classes[index]
    reserved = ALLOCATOR_SEGMENT_BYTES * sum((-at_most[k] / ALLOCATOR_SEGMENT_BYTES) % 1.0 for k in CATEGORIES)
    reserved += at_most["peak"]
    reserved += stranded_bytes(sim.stages[index].values(), segment_bytes)
    return {"ranks": sim.names[index], "rank": c.rank, "count": len(c.ranks), **at_most, "reserved": reserved}


def _communication(sim: FinishedStep) -> list[dict[str, Any]]:
    """Bytes a rank hands to each sort of collective in a step (as nccl-tests counts them), by class of ranks."""
    return [
        {"rank": c.rank, "kind": kind, "group": group, "bytes": size}
        for c, traffic in zip(sim.plan.classes, sim.built.traffic, strict=True)
        for (kind, group), size in sorted(traffic.items())
    ]


def _contention(sim: FinishedStep) -> dict[str, Any]:
    """What it costs that communications share links: seconds of the step, the links, and for each class of ranks and
    kind of communication how many were slowed and by how much in all."""
    graph = sim.built.graph
    slowed: list[dict[str, Any]] = []
    if sim.ran.flows is not None:
        start_s, end_s = sim.span_arrays
        slowed_s = end_s - start_s - graph.seconds
        task, place, rows = graph.occupied
        late = np.flatnonzero((slowed_s > ROUNDING * sim.step_time_s)[task])
        kinds = tuple(graph.kinds)
        key = (rows[:, 0] * len(kinds) + rows[:, 2])[place[late]]
        counts, seconds = np.bincount(key), np.bincount(key, slowed_s[task[late]])
        for i in np.flatnonzero(counts).tolist():
            c, kind = divmod(i, len(kinds))
            row = {"ranks": sim.names[c], "kind": kinds[kind]}
            slowed.append({**row, "count": int(counts[i]), "seconds": float(seconds[i])})
    return {
        "lost_s": max(0.0, sim.step_time_s - sim.ran.alone_s) if slowed else 0.0,
        "links": sorted(sim.ran.links),
        "slowed": slowed,
    }


def _engine(sim: FinishedStep, begin: float) -> dict[str, Any]:
    """What was simulated, and in how long: from the plan to the metrics, which began at `begin`."""
    return {
        "tasks": len(sim.built.graph),
        "events": sim.times.events,
        "wall_s": sim.wall_s + time.perf_counter() - begin,
        "path": sim.times.path,
        "links_shared": sim.ran.flows is not None,
        "simulated_ranks": len(sim.plan.classes),
    }


def _warnings(sim: FinishedStep, peak: float, fits: bool) -> list[str]:
    out = []
    if not fits:
        limit = sim.scenario.cluster.gpu.memory_bytes
        out.append(f"does not fit in memory: {peak / 2**30:.1f} GiB of {limit / 2**30:.1f} GiB on the fullest rank")
    if has_jitter(sim.scenario) and len(sim.plan.classes) < sim.scenario.parallelism.ranks:
        out.append(f"faults.jitter: above {APART_RANKS:,} ranks equal ones share their draws; waiting is understated")
    shares = source_shares(sim.built.shares)
    if shares["roofline"] > 0.5:
        out.append(
            f"{shares['roofline']:.0%} of the time is priced by the roofline: an optimistic bound, nothing measured"
        )
    return out
