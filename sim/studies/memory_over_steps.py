"""Memory over the first steps of a real run beside the simulated one: the optimizer's states come in the first step."""

from __future__ import annotations

import math

from sim.inputs.measured_run import MeasuredMemory, MeasuredRun
from sim.results.memory import thinned
from sim.simulation import Simulation
from sim.studies.compared import MemoryOverSteps, Pair

MOST_POINTS = 600  # of a simulated curve, about


def over_steps(simulation: Simulation, run: MeasuredRun) -> tuple[MemoryOverSteps, ...]:
    """For each rank whose memory was recorded step by step: both curves, and peaks step by step.

    Times differ between the two, so a curve's axis is the step and its fraction.
    """
    found = []
    for memory in run.memory:
        if memory.over_steps:
            steps = max(1, math.ceil(memory.over_steps[-1][0]))
            found.append(_of_rank(simulation, memory, steps))
    return tuple(found)


def _of_rank(simulation: Simulation, memory: MeasuredMemory, steps: int) -> MemoryOverSteps:
    mine = simulation.plan.class_of(memory.rank)
    ours = simulation.memory_over(steps)[mine]
    at, total = ours.time_s / simulation.step_time_s, ours.total
    peaks = []
    for i in range(steps):
        recorded = [b for x, b in memory.over_steps if i <= x < i + 1]
        within = total[(at >= i) & (at < i + 1)]
        if recorded and len(within):
            peaks.append(Pair.of(float(within.max()), max(recorded)))
    keep = thinned(total, MOST_POINTS)
    curve = tuple(zip(at[keep].tolist(), total[keep].tolist(), strict=True))
    return MemoryOverSteps(memory.rank, tuple(peaks), curve, tuple(memory.over_steps))
