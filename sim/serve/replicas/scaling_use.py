"""How many replicas were on over a workload, and what that comes to in GPU hours."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from sim.core.units import HOUR_S
from sim.serve.results.records import ScalingUse

if TYPE_CHECKING:
    from sim.serve.replicas.autoscaler import Span
    from sim.serve.replicas.pools import Pool


def scaling_use(spans: Items[Span], pools: Items[Pool], start_s: float, end_s: float) -> ScalingUse | None:
    """Return what autoscaling used from the first arrival to the last token, in all pools; None without autoscaling.

    `spans`: when each replica was on.
    """
    if not spans:
        return None
    hours = [pool.gpus / HOUR_S for pool in pools]  # of GPUs for a replica's second
    kept = [x for x in spans if x.start_s < end_s or x.start_s <= start_s]
    own = [(max(x.start_s, start_s), min(x.stop_s, end_s), hours[x.pool]) for x in kept]
    changes: dict[float, int] = {}
    for begin, end, _ in own:
        changes[begin] = changes.get(begin, 0) + 1
        if end < end_s:
            changes[end] = changes.get(end, 0) - 1
    level, replicas = 0, []
    for time_s in sorted(changes):
        level += changes[time_s]
        replicas.append((time_s, level))
    whole = end_s - start_s
    return ScalingUse(
        replicas_mean=sum([end - begin for begin, end, _ in own]) / whole if whole > 0 else float(level),
        replicas_max=max(n for _, n in replicas),
        starts=sum(begin > start_s for begin, _, _ in own),
        stops=sum(end < end_s for _, end, _ in own),
        gpu_hours=sum([(end - begin) * each for begin, end, each in own]),
        gpu_hours_always_on=whole * sum([len(pool.replicas) * each for pool, each in zip(pools, hours, strict=True)]),
        replicas=tuple(replicas),
    )
