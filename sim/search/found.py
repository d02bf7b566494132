"""A search's result as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim.search.best_first import Found
from sim.search.evaluation import Outcome
from sim.search.space import Layout, Space, scenario_of
from sim.search.why_none import why_none_legal

TRILLION, HOUR_S = 1e12, 3600.0


def make_result(
    space: Space, found: Found, limit_bytes: float, objective: str, details: Sequence[dict[str, float]]
) -> dict[str, Any]:
    """The result as plain data: format sim-search/1. `details`: what `evaluation.detail` says of each of the best."""
    # Worker time, so that rates of searches on different machines compare.
    c, cpu_s, per_core = found.counts, found.cpu_s, found.wall_s * found.cores
    evaluating_s = sum(cpu_s.values()) - cpu_s["bounding"]
    return {
        "format": "sim-search/1",
        "name": space.base.name,
        "gpus": space.gpus,
        "objective": objective,
        "memory_limit_bytes": limit_bytes,
        "only": {k: list(v) for k, v in space.only.items()},
        "linked": [{"keys": list(link.keys), "rows": [list(row) for row in link.rows]} for link in space.linked],
        "trainer": space.trainer or None,
        # Each with the whole scenario: a best layout must run by itself, without the search's options.
        "best": [
            _row(space, o) | more | {"scenario": _scenario(space, o.layout)}
            for o, more in zip(found.best, details, strict=True)
        ],
        "pareto": [_row(space, o) for o in found.pareto],
        "evaluated": [_row(space, o) for o in found.fitting],
        "counts": c,
        # Asked only then, as it goes through the whole space again.
        "why_none_legal": "" if c["legal"] else why_none_legal(space),
        "refusals": [{"reason": reason, "count": n} for reason, n in found.refusals.items()],
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


def cost_per_trillion_tokens(row: dict[str, Any], price_per_gpu_hour: float) -> float | None:
    """What a layout's GPU hours for a trillion tokens cost."""
    rate = row["tokens_per_s_per_gpu"]
    return TRILLION / rate / HOUR_S * price_per_gpu_hour if rate else None


def _row(space: Space, outcome: Outcome) -> dict[str, Any]:
    t = space.training
    tokens = t.global_batch_size * t.seq_len
    return {
        "step_time_s": outcome.step_time_s,
        # Per GPU of the space, so that layouts compare with those of a search over another number of GPUs.
        "tokens_per_s_per_gpu": tokens / outcome.step_time_s / space.gpus if outcome.step_time_s else 0.0,
        "peak_memory_bytes": outcome.peak_memory_bytes,
        "layout": outcome.layout._asdict(),
        "parallelism": {
            k: v for k, v in outcome.layout._asdict().items() if k not in ("micro_batch_size", "recompute")
        },
    }


def _scenario(space: Space, layout: Layout) -> dict[str, Any]:
    return scenario_of(space, layout).model_dump(mode="json")
