"""From a scenario to a simulated step: the whole path, and the result that is shown.

    >>> from sim.scenario import parse_scenario
    >>> s = parse_scenario({"model": "llama3-8b", "cluster": "dgx-h100", "parallelism": {"pp": 8},
    ...                     "training": {"seq_len": 4096, "global_batch_size": 16}})
    >>> simulate(s).result["fits_in_memory"]
    True
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sim import schedules
from sim.actions import Action, Kind, Schedule
from sim.build import Build, Built
from sim.costs import Costs
from sim.data_parallel import DataParallel, make_data_parallel
from sim.engine import Times, run_simpy, run_static
from sim.errors import InputError
from sim.memory import MemoryCurve, States, memory_curve, over_steps, states
from sim.plan import Plan, make_plan
from sim.pricing import Pricing
from sim.profile import Profile, load_profile
from sim.result import make_result
from sim.scenario import Scenario
from sim.schedules.unit_time import UnitTimes
from sim.stages import Stage, stage_blocks, stage_input_bytes
from sim.template import compile_program
from sim.timeline import Timeline
from topology.network import Network


@dataclass(frozen=True, eq=False)
class Simulation:
    """One simulated step. `stages[c]` are the stages of class c of ranks by schedule stage."""

    scenario: Scenario
    profile: Profile
    plan: Plan
    schedule: Schedule
    pricing: Pricing
    stages: list[dict[int, Stage]]
    built: Built
    times: Times
    wall_s: float

    @cached_property
    def spans(self) -> list[dict[Action, tuple[float, float]]]:
        """Start and end of every action, by class of ranks."""
        out: list[dict[Action, tuple[float, float]]] = [{} for _ in self.plan.classes]
        start, end = self.times.start_s, self.times.end_s
        for (index, action), (first, last) in self.built.actions.items():
            out[index][action] = (start[first], end[last])
        return out

    @cached_property
    def states(self) -> list[States]:
        """Parameters, gradients and optimizer states of every class of ranks."""
        return [states(self.plan, tuple(s.values())) for s in self.stages]

    @cached_property
    def memory(self) -> list[MemoryCurve]:
        """Memory over time of every class of ranks."""
        return [memory_curve(self.plan, i, self.stages[i], self.spans[i], self.states[i])
                for i in range(len(self.plan.classes))]

    def memory_over(self, steps: int) -> list[MemoryCurve]:
        """Memory over the first `steps` steps; over one alone, a step in the steady state."""
        if steps == 1:
            return self.memory
        start = min((s for s, p in zip(self.times.start_s, self.built.graph.placed, strict=True)
                     if p.slots[0].kind == "OPTIMIZER"), default=0.0)
        return [over_steps(c, self.step_time_s, start, steps) for c in self.memory]

    @cached_property
    def result(self) -> dict[str, Any]:
        """The numbers, in the form of `sim.run --json`."""
        return make_result(self)

    @property
    def step_time_s(self) -> float:
        """End of the last task."""
        return max(self.times.end_s, default=0.0)

    @cached_property
    def timeline(self) -> Timeline:
        """Every span of every simulated rank."""
        return make_timeline(self.built, self.times)


def simulate(scenario: Scenario, profile: Profile | None = None, *, expand: bool = False,
             engine: str = "static") -> Simulation:
    """Simulate one training step.

    `profile` takes the place of the one that `scenario.calibration` names. With `expand` every operator and
    message inside an action has its own task, for views; times are the same. `engine`: static, or simpy, the
    reference.

    Raises:
        InputError: where the scenario cannot be simulated (no training section, profile missing, a schedule that
            does not suit the number of micro-batches).
    """
    begin = time.perf_counter()
    if scenario.training is None:
        raise InputError(f"{scenario.name}: this scenario has no `training` section; only training steps are simulated yet")
    if profile is None:
        profile = load_profile(scenario.calibration)
    plan = make_plan(scenario)
    pricing = Pricing(plan, Costs(profile, scenario.cluster.gpu), Network(scenario.cluster))
    dp = make_data_parallel(plan)
    schedule = make_schedule(scenario, plan, pricing, dp)
    stages = _stages(plan, schedule, pricing, dp)
    built = Build(plan, schedule, pricing, stages, expand).run()
    try:
        times = run_simpy(built.graph) if engine == "simpy" else run_static(built.graph)
    except ValueError as error:
        if scenario.parallelism.p2p_overlap:
            raise
        raise InputError(f"{scenario.name}: parallelism.p2p_overlap: schedule {scenario.parallelism.schedule} needs "
                         f"overlapped messages (true); with blocking ones ranks wait for each other: {error}") from None
    return Simulation(scenario, profile, plan, schedule, pricing, stages, built, times, time.perf_counter() - begin)


def make_schedule(scenario: Scenario, plan: Plan, pricing: Pricing, dp: DataParallel) -> Schedule:
    """The action lists of the scenario's schedule; at pp 1 that of a single stage.

    Raises:
        InputError: if the schedule cannot run this many micro-batches.
    """
    p = scenario.parallelism
    m = scenario.micro_batches
    if p.pp == 1:
        return schedules.build("1f1b", 1, m)
    try:
        times = None
        if p.schedule == "zb_search":
            times = unit_times(plan, schedules.build("zb_h1", p.pp, m), pricing, dp)
        return schedules.build(p.schedule, p.pp, m, p.virtual_stages, times, p.schedule_memory)
    except ValueError as error:
        raise InputError(f"{scenario.name}: parallelism.schedule: {error} (global_batch_size / (micro_batch_size * dp) "
                         f"= {m} micro-batches, pp = {p.pp})") from None


def unit_times(plan: Plan, layout: Schedule, pricing: Pricing, dp: DataParallel) -> UnitTimes:
    """Seconds of F, I and W of every stage, and of a message, for the schedule that is searched for them."""
    rows = []
    for held, c in zip(_stages(plan, layout, pricing, dp), plan.classes, strict=True):
        price, (stage,) = pricing.on(c.rank), held.values()
        programs = (stage.forward(False, True, ""), *(stage.backward(k, False, True, "") for k in (Kind.I, Kind.W)))
        rows.append([compile_program(program, price).makespan_s for program in programs])
    forward, inputs, weights = (tuple(column) for column in zip(*rows, strict=True))
    ends = [c.rank for c in plan.classes[:2]]
    return UnitTimes(forward, inputs, weights, pricing.send(ends[0], ends[1], stage_input_bytes(plan)).seconds)


def _stages(plan: Plan, schedule: Schedule, pricing: Pricing, dp: DataParallel) -> list[dict[int, Stage]]:
    """What every class of ranks holds, by schedule stage."""
    s = plan.scenario
    t, p = s.training, s.parallelism
    assert t is not None
    gather = stage_input_bytes(plan) if p.p2p_scatter and p.tp > 1 and not p.sp else 0.0
    out: list[dict[int, Stage]] = []
    for c in plan.classes:
        held = [i for i, r in enumerate(schedule.rank_of_stage) if r == c.pipeline_rank]
        out.append({i: Stage(stage_blocks(plan, plan.parts[schedule.part_of_stage[i]], c.rank), dp, pricing.costs,
                             t.activation_offload, gather) for i in held})
    return out


def make_timeline(built: Built, times: Times) -> Timeline:
    """The columns of a Timeline: a row for every slot of every task, in order of start."""
    graph = built.graph
    rows: list[tuple[float, float, int, str, str, int, int, int, Any]] = []
    for task, (placed, start, end) in enumerate(zip(graph.placed, times.start_s, times.end_s, strict=True)):
        message = task if len(placed.slots) == 2 and placed.slots[0].kind.startswith("SEND_") else -1
        for slot in placed.slots:
            rows.append((start, end, slot.class_index, slot.stream, slot.kind, placed.stage, placed.micro_batch,
                         message, placed.detail))
    rows.sort(key=lambda r: (r[0], r[2]))
    columns = list(zip(*rows, strict=True)) if rows else [()] * 9
    streams, kinds, details = (tuple(dict.fromkeys(columns[i])) for i in (3, 4, 8))
    codes = [{v: i for i, v in enumerate(x)} for x in (streams, kinds, details)]

    def ints(values: Any) -> Any:
        return np.array(values, dtype=np.int64)

    return Timeline(
        graph.classes, streams, kinds, details, ints(columns[2]), ints([codes[0][x] for x in columns[3]]),
        ints([codes[1][x] for x in columns[4]]), ints([codes[2][x] for x in columns[8]]), ints(columns[5]),
        ints(columns[6]), ints(columns[7]), np.array(columns[0], dtype=np.float64), np.array(columns[1], dtype=np.float64),
    )
