"""Turn a search's result into plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sim.results.beside_allocator import is_tight, memory_limit, most_proposed_bytes, most_proposed_bytes_of_any
from sim.search.best_first import BestFirst, pareto
from sim.search.evaluation import Outcome
from sim.search.space import LAID_OUT, Space, scenario_of
from sim.search.why_none import why_none_legal


def make_result(found: BestFirst, objective: str, details: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the result in format sim-search/1. `details`: `evaluation.detail` of each of the best layouts."""
    space, limit_bytes = found.space, found.limit_bytes
    gpu = space.base.cluster.gpu
    # Rates are per second of a worker, so that searches on different numbers of cores compare.
    c, cpu_s, per_core = found.counts, found.cpu_s, found.wall_s * found.cores
    evaluating_s = sum(cpu_s.values()) - cpu_s["bounding"]
    return {
        "format": "sim-search/1",
        "name": space.base.name,
        "gpus": space.gpus,
        "objective": objective,
        "memory_limit_bytes": most_proposed_bytes_of_any(space.base, gpu) if limit_bytes is None else limit_bytes,
        "only": {k: list(v) for k, v in space.only.items()},
        "linked": [{"keys": list(link.keys), "rows": [list(row) for row in link.rows]} for link in space.linked],
        "trainer": space.trainer or None,
        # The whole scenario is included, so that a best layout runs without the search's options.
        "best": [
            _row(space, o) | more | _with_scenario(space, o, limit_bytes)
            for o, more in zip(found.best, details, strict=True)
        ],
        "pareto": [_row(space, o) for o in pareto(found.fitting)],
        "evaluated": [_row(space, o) for o in found.fitting],
        "counts": c,
        # This goes through the whole space again, so only if no layout is legal.
        "why_none_legal": "" if c["legal"] else why_none_legal(space),
        "too_large_bytes": found.too_large_bytes if math.isfinite(found.too_large_bytes) else None,
        "refusals": [{"reason": reason, "count": n} for reason, n in found.refusals.most_common()],
        "wall_s": found.wall_s,
        "cores": found.cores,
        "cpu_s": cpu_s,
        "rates": {
            "pruned_by_bound_or_evaluated_per_s_per_core": (c["pruned_by_bound"] + c["evaluated"]) / per_core,
            "legal_per_s_per_core": c["legal"] / per_core,
            "evaluated_per_s_per_core": c["evaluated"] / evaluating_s if evaluating_s else 0.0,
            "simulated_per_s_per_core": c["simulated"] / cpu_s["simulated"] if cpu_s["simulated"] else 0.0,
        },
    }


def _row(space: Space, outcome: Outcome) -> dict[str, Any]:
    t = space.training
    tokens = t.global_batch_size * t.seq_len
    return {
        "step_time_s": outcome.step_time_s,
        # Divided by all GPUs of the space, so that layouts compare with those of a search over other numbers of GPUs.
        "tokens_per_s_per_gpu": tokens / outcome.step_time_s / space.gpus if outcome.step_time_s else 0.0,
        "peak_memory_bytes": outcome.peak_memory_bytes,
        "layout": outcome.layout._asdict(),
        "parallelism": {key: getattr(outcome.layout, key) for key in LAID_OUT},
    }


def _with_scenario(space: Space, outcome: Outcome, limit_bytes: float | None) -> dict[str, Any]:
    """Return the whole scenario of the layout, the memory that it was allowed, and whether it leaves too little of it
    for CUDA and NCCL."""
    scenario = scenario_of(space, outcome.layout)
    gpu = scenario.cluster.gpu
    tight = limit_bytes is None and is_tight(outcome.peak_memory_bytes, memory_limit(scenario, gpu), gpu)
    allowed = most_proposed_bytes(scenario, gpu) if limit_bytes is None else limit_bytes
    return {"memory_limit_bytes": allowed, "tight": tight, "scenario": scenario.model_dump(mode="json")}
