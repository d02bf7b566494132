"""From a scenario to a simulated step: the whole path, and the result that is shown.

>>> from sim.inputs.scenario import parse_scenario
>>> s = parse_scenario({"model": "llama3-8b", "cluster": "dgx-h100", "parallelism": {"pp": 8},
...                     "training": {"seq_len": 4096, "global_batch_size": 16}})
>>> simulate(s).result["fits_in_memory"]
True
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sim import schedules
from sim.actions import Kind, Schedule
from sim.blame import blame
from sim.errors import InputError
from sim.faults import link_scales
from sim.finished import FinishedStep, make_timeline, rows_of
from sim.garbage import no_collection
from sim.graph.build import Build, Built
from sim.graph.contended import run_alone, run_step
from sim.graph.data_parallel import DataParallel, make_data_parallel
from sim.graph.link_book import LinkBook
from sim.graph.lists import Lists
from sim.graph.stages import Stage, layer_sort, stage_blocks, stage_input_bytes
from sim.graph.taskgraph import Deadlock
from sim.graph.template import compile_program
from sim.graph.uses import Kept
from sim.inputs.scenario import Scenario
from sim.memory import MemoryCurve, over_steps, peak_bytes, states
from sim.metrics import critical_path
from sim.plan import Plan, make_plan
from sim.prices.costs import Costs
from sim.prices.pricing import Pricing
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from sim.result import make_result
from sim.schedules.unit_time import UnitTimes
from sim.timeline import Timeline
from topology.network import Network

if TYPE_CHECKING:
    from sim.distillation import Teacher
    from sim.views.losses import Part

MOST_ACTIONS = 5_000_000  # of a pipeline: some 15 seconds and 5 GB
EXPAND_UP_TO = 4000  # spans: expanding a step of so many for its advice takes well under a second


class Simulation(FinishedStep):
    """One simulated step, its result, and what a teacher adds to both."""

    def memory_over(self, steps: int) -> list[MemoryCurve]:
        """Memory over the first `steps` steps; over one alone, a step in the steady state. A teacher is in it."""
        curves, before_s = self.memory, 0.0
        if self.teacher is not None:
            from sim.distillation import memory_with_teacher

            curves = [memory_with_teacher(c, self.teacher) for c in curves]
            before_s = self.teacher.own_s if self.teacher.placement == "same" else 0.0
        if steps == 1:
            return curves
        task, place, rows = self.built.graph.occupied
        ends = task[(rows[:, 2] == self.built.graph.kinds.get("OPTIMIZER", -1))[place]]
        start = float(self.times.start_s[ends].min()) if len(ends) else 0.0
        return [over_steps(c, before_s + self.step_time_s, before_s + start, steps) for c in curves]

    @cached_property
    def result(self) -> dict[str, Any]:
        """The numbers, in the form of `sim.run --json`."""
        if self.teacher is None:
            return self.student
        from sim.distillation import with_teacher

        return with_teacher(self.student, self.teacher, self.scenario)

    @cached_property
    def student(self) -> dict[str, Any]:
        """`result` without a teacher."""

        def without_s(scenario: Scenario) -> float:
            return simulate(scenario, self.profile).step_time_s

        return make_result(self, blame(self, without_s))

    @cached_property
    def teacher(self) -> Teacher | None:
        """What a teacher adds to the step; None without distillation."""
        if self.scenario.distillation is None:
            return None
        from sim.distillation import held_bytes, teacher_of

        return teacher_of(self.scenario, self.profile, held_bytes(self.student))

    @property
    def critical_rows(self) -> list[int]:
        """Rows of `timeline` that lie on the critical path."""
        _, chain = critical_path(self.built, self.times)
        own = rows_of(self.built, self.times)
        rows: list[int] = np.flatnonzero(np.isin(own[:, 0], chain)).tolist()
        before = len(self.timeline) - len(own)  # the teacher's
        return [row + before for row in rows]

    @cached_property
    def timeline(self) -> Timeline:
        """Every span of every simulated rank."""
        timeline = make_timeline(self.built, self.times)
        if self.teacher is None:
            return timeline
        from sim.distillation import timeline_with_teacher

        return timeline_with_teacher(timeline, self.teacher)

    def __repr__(self) -> str:
        return f"Simulation({self.scenario.name}: {self.step_time_s:.6g} s on {self.scenario.parallelism.ranks} ranks)"

    def losses(self, n: int = 3) -> list[tuple[Part, str]]:
        """The n largest losses of the step, each with what would remove it.

        Which messages are exposed can only be told where those of layers (tp, cp, ep) have spans of their own, as in
        an expanded simulation. One is made where that is quick; else the advice on communication is not guessed.
        """
        from sim.views.losses import largest_losses

        timeline, p = self.timeline, self.scenario.parallelism
        known = self.expanded or p.tp * p.cp * p.ep == 1
        if not known and len(timeline) <= EXPAND_UP_TO:
            timeline, known = simulate(self.scenario, self.profile, expand=True).timeline, True
        return largest_losses(self.result, timeline, n, known)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from sim.views.notebook import step_html

        return step_html(self.scenario.name, self.result, self.timeline, self.losses())


def simulate(
    scenario: Scenario,
    profile: Profile | None = None,
    *,
    expand: bool = False,
    engine: str = "static",
    fold: bool = True,
    costs: Costs | None = None,
    schedule: Schedule | None = None,
    share_links: bool = True,
) -> Simulation:
    """Simulate one training step.

    `profile` takes the place of the one that `scenario.calibration` names. With `expand` every operator and
    message inside an action has its own task, for views; times are the same. `engine`: static, or simpy, the
    reference. Unless `fold`, every rank is simulated by itself, equal or not; times are the same to the
    last bit as with `expand`, which sums no stretches of tasks beforehand.
    `costs` takes the place of a profile and keeps its answers, for many simulations on one sort of GPU. `schedule`
    takes the place of the one that the scenario names: a searched one may come out otherwise with another profile.
    Unless `share_links`, links carry everything at once: the step takes no longer than it does with them shared.

    Raises:
        InputError: where the scenario cannot be simulated (no training section, profile missing, a schedule that
            does not suit the number of micro-batches).
    """
    if scenario.training is None:
        raise InputError(
            f"{scenario.name}: this scenario has no `training` section; "
            "a serving workload is simulated by sim.serve.serving.simulate_serving"
        )
    if costs is None:
        costs = Costs(profile or load_profile(scenario.calibration), scenario.cluster.gpu)
    with no_collection():
        return prepare(scenario, costs, schedule, expand, fold).run(engine, share_links)


@dataclass(frozen=True, eq=False, repr=False)
class Prepared:
    """All that a step is built from. `stages` as in `Simulation`; `kept`: what is compiled already; `begin_s`: when."""

    plan: Plan
    schedule: Schedule
    pricing: Pricing
    stages: list[dict[int, Stage]]
    expand: bool
    kept: Kept
    begin_s: float

    @cached_property
    def lists(self) -> Lists:
        """The schedule by column."""
        return Lists(self.schedule, self.plan.scenario.parallelism.ep_overlap)

    @property
    def peak_bytes(self) -> float:
        """The most memory that a rank needs, as `Simulation.memory` has it."""
        return max(
            peak_bytes(held, *self.lists.of_rank(c.pipeline_rank)[1:], states(self.plan, tuple(held.values())))
            for c, held in zip(self.plan.classes, self.stages, strict=True)
        )

    def run(self, engine: str = "static", share_links: bool = True) -> Simulation:
        """Build the step's tasks and run them; see `simulate`."""
        plan, schedule, pricing, simpy = self.plan, self.schedule, self.pricing, engine == "simpy"

        def build(links: LinkBook | None) -> Built:
            return Build(plan, schedule, pricing, self.stages, self.lists, self.expand, links, self.kept).run()

        try:
            ran = run_step(build, pricing, schedule, simpy) if share_links else run_alone(build, simpy)
        except Deadlock as error:
            p, name = plan.scenario.parallelism, plan.scenario.name
            if p.p2p_overlap:
                raise
            raise InputError(
                f"{name}: parallelism.p2p_overlap: schedule {p.schedule} needs "
                f"overlapped messages (true); with blocking ones ranks wait for each other: {error}"
            ) from None
        wall_s, profile = time.perf_counter() - self.begin_s, pricing.costs.profile
        return Simulation(plan.scenario, profile, plan, schedule, pricing, self.stages, ran, wall_s, self.expand)


def prepare(
    scenario: Scenario, costs: Costs, schedule: Schedule | None = None, expand: bool = False, fold: bool = True,
    kept: Kept | None = None,
) -> Prepared:  # fmt: skip
    """What `simulate` runs. `kept`: what steps have in common that differ in schedule and virtual stages alone.

    Raises:
        InputError: if the schedule cannot run this many micro-batches.
    """
    begin_s, kept = time.perf_counter(), kept or Kept()
    plan = make_plan(scenario, fold)
    network = Network(scenario.cluster, link_scales(scenario))
    pricing = Pricing(plan, costs, network)
    dp = make_data_parallel(plan)
    schedule = schedule or make_schedule(scenario, plan, pricing, dp, kept)
    stages = _stages(plan, schedule, pricing, dp, expand, kept.stages)
    return Prepared(plan, schedule, pricing, stages, expand, kept, begin_s)


def make_schedule(scenario: Scenario, plan: Plan, pricing: Pricing, dp: DataParallel, kept: Kept) -> Schedule:
    """The action lists of the scenario's schedule; at pp 1 that of a single stage. `kept` as in `prepare`.

    Raises:
        InputError: if the schedule cannot run this many micro-batches.
    """
    p, m = scenario.parallelism, scenario.micro_batches
    if (actions := 2 * p.stages * m) > MOST_ACTIONS:
        raise InputError(
            f"{scenario.name}: training.global_batch_size: {m:,} micro-batches through {p.stages} stages make "
            f"{actions:,} forwards and backwards to simulate; at most {MOST_ACTIONS:,} (they repeat long before)"
        )
    if p.pp == 1:
        return schedules.build("1f1b", 1, m)
    try:
        times = None
        if p.schedule == "zb_search":
            times = unit_times(plan, schedules.build("zb_h1", p.pp, m), pricing, dp, kept)
        return schedules.build(p.schedule, p.pp, m, p.virtual_stages, times, p.schedule_memory)
    except ValueError as error:
        raise InputError(
            f"{scenario.name}: parallelism.schedule: {error} (global_batch_size / (micro_batch_size * dp) "
            f"= {m} micro-batches, pp = {p.pp})"
        ) from None


def unit_times(plan: Plan, layout: Schedule, pricing: Pricing, dp: DataParallel, kept: Kept) -> UnitTimes:
    """Seconds of F, I and W of every stage, and of a message, for the schedule that is searched for them.

    `kept` as in `prepare`: the step runs the same programs.
    """
    healthy, rows = pricing.healthy, []
    kept = kept if healthy is pricing else Kept(kept.stages)  # with faults, what is compiled takes other seconds
    stages = [stage for held in _stages(plan, layout, pricing, dp, False, kept.stages) for stage in held.values()]
    known: dict[tuple[object, ...], list[float]] = {}
    for i, (stage, c) in enumerate(zip(stages, plan.classes, strict=True)):
        price, context, leader = healthy.on(c.rank), healthy.context(c.rank), stages[i // plan.lanes * plan.lanes]
        key = (context, id(stage), id(leader))
        if key not in known:
            known[key] = []
            for kind in (Kind.F, Kind.I, Kind.W):
                program = stage.forward(False, True) if kind is Kind.F else stage.backward(kind, False, True)
                make = partial(compile_program, program, price)
                template = kept.compiled((context, (id(stage), id(leader), kind)), [program], make)
                known[key].append(template.makespan_s)
        rows.append(known[key])
    slowest = np.array(rows).reshape(-1, plan.lanes, 3).max(axis=1)  # of a pipeline rank's lanes
    forward, inputs, weights = (tuple(column) for column in slowest.T.tolist())
    first, second = (plan.classes[i * plan.lanes : (i + 1) * plan.lanes] for i in (0, 1))
    size = stage_input_bytes(plan)
    message_s = max(pricing.healthy.send(a.rank, b.rank, size).seconds for a, b in zip(first, second, strict=True))
    return UnitTimes(forward, inputs, weights, message_s)


def _stages(
    plan: Plan,
    schedule: Schedule,
    pricing: Pricing,
    dp: DataParallel,
    named: bool,
    made: dict[tuple[object, ...], Stage],
) -> list[dict[int, Stage]]:
    """What every class of ranks holds, by schedule stage. Unless `named`, equal stages are one object (whose layers
    then carry the first one's names); those in `made` are not made again."""
    s = plan.scenario
    t, p = s.training, s.parallelism
    assert t is not None
    gather = stage_input_bytes(plan) if p.p2p_scatter and p.tp > 1 and not p.sp else 0.0
    works = [(part.embedding, part.head, tuple([layer_sort(s, n) for n in part.layers])) for part in plan.parts]
    stages: list[list[int]] = [[] for _ in schedule.ranks]
    for i, r in enumerate(schedule.rank_of_stage):
        stages[r].append(i)
    out: list[dict[int, Stage]] = []
    for c in plan.classes:
        out.append({})
        mine = plan.work_of(c.rank)
        for i in stages[c.pipeline_rank]:
            part = schedule.part_of_stage[i]
            key: tuple[object, ...] = (i if named else works[part], mine)
            if key not in made:
                blocks = stage_blocks(plan, plan.parts[part], c.rank)
                made[key] = Stage(blocks, dp, pricing.costs, t.activation_offload, gather)
            out[-1][i] = made[key]
    return out
