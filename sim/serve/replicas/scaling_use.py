"""How many replicas were on over a workload, and what that comes to in GPU hours."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from sim.inputs.scenario import Scenario
from sim.serve.results.records import ScalingUse

if TYPE_CHECKING:
    from sim.serve.replicas.autoscaler import Span


def scaling_use(spans: Items[Span], scenario: Scenario, start_s: float, end_s: float) -> ScalingUse | None:
    """Of `spans`, from the first arrival to the last token; None for none."""
    if not spans:
        return None
    own = [(max(x.start_s, start_s), min(x.stop_s, end_s)) for x in spans if x.start_s < end_s or x.start_s <= start_s]
    changes: dict[float, int] = {}
    for begin, end in own:
        changes[begin] = changes.get(begin, 0) + 1
        if end < end_s:
            changes[end] = changes.get(end, 0) - 1
    level, replicas = 0, []
    for time_s in sorted(changes):
        level += changes[time_s]
        replicas.append((time_s, level))
    whole = end_s - start_s
    on_s, dp = sum([end - begin for begin, end in own]), scenario.parallelism.dp
    hours = scenario.ranks / dp / 3600.0  # of GPUs for a replica's second
    return ScalingUse(
        replicas_mean=on_s / whole if whole > 0 else float(level),
        replicas_max=max(n for _, n in replicas),
        starts=sum(begin > start_s for begin, _ in own),
        stops=sum(end < end_s for _, end in own),
        gpu_hours=on_s * hours,
        gpu_hours_always_on=whole * dp * hours,
        replicas=tuple(replicas),
    )
