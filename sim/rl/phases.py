"""When the parts of a step run.

Synchronous: one after another, each pool waiting for the other. One step off: the engine writes the next step's answers
while the trainer works on this step's, and both stop for the weights:

    step = max(Σ phases of the engine, Σ phases of the trainer) + Σ phases of both.

(verl's `one_step_off_policy`; NeMo-RL's asynchronous GRPO with `max_trajectory_age_steps: 1` and no updates in flight.)
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from sim.rl.records import Phase, Pool


def step_s(parts: Sequence[tuple[Pool, float]], steps_off: int) -> float:
    """Seconds of a step of parts with these pools and seconds.

    >>> parts = [("generation", 5.0), ("training", 3.0), ("both", 1.0)]
    >>> step_s(parts, 0), step_s(parts, 1)
    (9.0, 6.0)
    """
    sums = {pool: sum(s for p, s in parts if p == pool) for pool in ("generation", "training", "both")}
    alone = (sums["generation"], sums["training"])
    return (max(alone) if steps_off else sum(alone)) + sums["both"]


def place(parts: Sequence[Phase], steps_off: int) -> tuple[Phase, ...]:
    """The phases with their starts. One step off, each pool begins at 0 and what both do comes when both have ended."""
    out, free = [], {"generation": 0.0, "training": 0.0}
    for part in parts:
        ready = free[part.pool] if steps_off and part.pool != "both" else max(free.values())
        for pool in free if part.pool == "both" or not steps_off else (part.pool,):
            free[pool] = ready + part.seconds
        out.append(replace(part, start_s=ready))
    return tuple(out)
