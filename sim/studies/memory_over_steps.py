"""Memory over the first steps of a real run beside the simulated one: the optimizer's states come in the first step."""

from __future__ import annotations

import math
from typing import Any

from sim.inputs.measured_run import MeasuredMemory, MeasuredRun
from sim.results.memory import thinned
from sim.simulation import Simulation

MOST_POINTS = 600  # of a simulated curve, about


def over_steps(simulation: Simulation, run: MeasuredRun) -> list[dict[str, Any]]:
    """For each rank whose memory was recorded step by step: both curves as [steps done, bytes], and peaks step by step.

    Times differ between the two, so a curve's axis is the step and its fraction.
    """
    found = []
    for memory in run.memory:
        if memory.over_steps:
            steps = max(1, math.ceil(memory.over_steps[-1][0]))
            found.append(_of_rank(simulation, memory, steps))
    return found


def _of_rank(simulation: Simulation, memory: MeasuredMemory, steps: int) -> dict[str, Any]:
    mine = simulation.plan.class_of(memory.rank)
    ours = simulation.memory_over(steps)[mine]
    at, total = ours.time_s / simulation.step_time_s, ours.total
    peaks = []
    for i in range(steps):
        recorded = [b for x, b in memory.over_steps if i <= x < i + 1]
        within = total[(at >= i) & (at < i + 1)]
        if recorded and len(within):
            simulated, measured = float(within.max()), max(recorded)
            peaks.append({"simulated": simulated, "measured": measured, "error": simulated / measured - 1})
    keep = thinned(total, MOST_POINTS)
    curve = [list(p) for p in zip(at[keep].tolist(), total[keep].tolist(), strict=True)]
    measured_curve = [list(p) for p in memory.over_steps]
    return {"rank": memory.rank, "peaks": peaks, "simulated": curve, "measured": measured_curve}
