"""One training step, from scenario to result. This page is the whole path; each part's file says more:

    scenario   what the user wrote, checked and complete           sim/inputs/scenario.py
    plan       the ranks, and which of them are equal              sim/ranks/plan.py
    prices     seconds of operators and messages                   sim/prices/rank_prices.py
    schedule   forwards and backwards of each rank, in order       sim/schedules/, chosen in sim/graph/scheduling.py
    programs   operators and messages of one action of a stage     sim/programs/stages.py, sim/core/program.py
    graph      tasks, and which of them wait for which             sim/graph/build.py
    times      start and end of every task                         sim/engine/run.py, sim/engine/shared_links.py
    result     the numbers, memory over time, the timeline         sim/results/result.py, memory.py, step.py

>>> from sim.inputs.scenario import parse_scenario
>>> s = parse_scenario({"model": "llama3-8b", "cluster": "dgx-h100", "parallelism": {"pp": 8},
...                     "training": {"seq_len": 4096, "global_batch_size": 16}})
>>> simulate(s).outcome.fits_in_memory
True
"""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from sim.core.actions import Schedule
from sim.core.engines import Engine
from sim.core.gc_paused import no_collection
from sim.core.timeline import Timeline
from sim.core.units import counted
from sim.engine.shared_links import RunOutcome, run_alone, run_messages, run_step
from sim.graph.build import Built, StepBuilder
from sim.graph.compiled import Fineness, ProgramCache
from sim.graph.schedule_columns import ScheduleColumns
from sim.graph.scheduling import make_schedule, needs_overlap
from sim.graph.taskgraph import Deadlock
from sim.inputs.called import check_called
from sim.inputs.scenario import Overrides, Scenario
from sim.models.balance import with_balanced_stages
from sim.prices.operator_prices import Costs
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from sim.prices.rank_prices import Pricing
from sim.prices.shared_cores import costs_of
from sim.programs.data_parallel import make_data_parallel
from sim.programs.stages import Stage, class_stages
from sim.ranks.equal_ranks import UNFOLDED_RANKS, check_each_rank
from sim.ranks.faults import network_of
from sim.ranks.plan import Plan, make_plan
from sim.results.evidence import nearest
from sim.results.fault_costs import blame
from sim.results.graph_pools import pooled_peak_bytes
from sim.results.memory import MemoryCurve, over_steps
from sim.results.operator_times import host_wait_s, time_by_operator, time_by_part
from sim.results.processes import ProcessesRun, processes_result, timeline_with_processes
from sim.results.result import StepResult, make_result
from sim.results.states import states
from sim.results.step import FinishedStep, SpanWaits, make_timeline, optimizer_starts_s, rows_of, span_waits
from sim.results.teacher import Teacher, memory_with_teacher, timeline_with_teacher
from sim.results.training_run import training_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bokeh.plotting import figure

    from sim.processes.cluster import Process
    from sim.results.losses import LossShare

EXPAND_UP_TO = 4000  # most spans of a step that `losses` expands, which then takes well under a second


def simulate(
    scenario: Scenario,
    profile: Profile | None = None,
    *,
    expand: bool = False,
    engine: Engine = "auto",
    fold: bool = True,
    costs: Costs | None = None,
    schedule: Schedule | None = None,
    share_links: bool = True,
    processes: Sequence[Process] = (),
    apart: Iterable[int] | None = None,
    overrides: Overrides = (),
) -> Simulation:
    """Simulate one training step. `overrides`: of keys of the scenario, as `load_scenario` takes them.

    `profile`: used in place of the profile that `scenario.calibration` names. `costs`: used in place of a profile; it
    caches prices, for many simulations on one kind of GPU. `schedule`: used in place of the scenario's schedule,
    because a searched schedule may differ with another profile.

    `expand`: every operator and message inside an action has its own task, for views; times are the same. `engine`:
    simpy, static (passes without a clock), or auto, which takes SimPy for steps of few tasks; times are equal to the
    last bit. `fold` false: every rank is simulated by itself, equal or not; times are equal to the last bit to those
    with `expand`. `share_links` false: links carry any number of messages at full speed; the step takes no longer than
    with shared links.

    `processes`: generator functions of (env, cluster), beside the scenario's own processes, that change the cluster
    while the step runs on SimPy (`sim.processes.cluster`). A process that changes nothing changes no bit of a time.
    With processes every rank is simulated by itself, or, with `apart`, only the ranks of `apart` and the ranks that
    differ from others because of them.

    Raises:
        InputError: where the scenario cannot be simulated (no training section, profile missing, a schedule that
            does not suit the number of micro-batches), and for a wrong call in a process.
    """
    check_called(scenario, profile, engine)
    scenario = scenario.with_overrides(overrides) if overrides else scenario
    if scenario.training is None:
        raise scenario.error(("training",), "is missing; simulate_serving simulates a serving workload")
    if scenario.rl is not None:
        raise scenario.error(("rl",), "simulate_rl simulates such a step (python -m sim.run)")
    scenario = with_balanced_stages(scenario)
    if costs is None:
        costs = costs_of(scenario, profile or load_profile(scenario.calibration))
    with no_collection():
        if processes and scenario.for_training.optimizer_post_validation:
            why = "cannot be combined with processes, which act on one step; there it runs beside the next"
            raise scenario.error(("training", "optimizer_post_validation"), why)
        if processes and engine == "static":
            raise scenario.error(("processes",), "need SimPy's clock; take engine='simpy'")
        if processes or scenario.processes is not None:
            return _with_processes(scenario, costs, schedule, expand, processes, apart)
        return prepare(scenario, costs, schedule, expand, fold).run(engine, share_links)


def _with_processes(
    scenario: Scenario,
    costs: Costs,
    schedule: Schedule | None,
    expand: bool,
    processes: Sequence[Process],
    apart: Iterable[int] | None,
) -> Simulation:
    """Simulate the step with the scenario's processes and `processes`; without them, if they changed nothing."""
    if scenario.processes is not None:
        from sim.processes.examples import listed_in

        if apart is None and not processes and scenario.parallelism.ranks > UNFOLDED_RANKS:
            apart = scenario.processes.named_ranks
        processes = (*listed_in(scenario.processes), *processes)
    if apart is None:
        check_each_rank(
            scenario,
            "name those that the processes change or watch by themselves: simulate(…, apart=[…]); [] where all are "
            "changed alike",
        )
    alone = prepare(scenario, costs, schedule, expand).run("simpy")
    known = None if apart is None else frozenset(apart)
    whole = expand or known is not None or bool(scenario.for_training.activation_offload)
    step = prepare(scenario, costs, alone.schedule, whole, known is not None, apart=known or frozenset())
    return step.run_with(processes, alone)


def prepare(
    scenario: Scenario,
    costs: Costs,
    schedule: Schedule | None = None,
    expand: bool = False,
    fold: bool = True,
    cache: ProgramCache | None = None,
    apart: frozenset[int] = frozenset(),
) -> Prepared:
    """Make plan, prices and schedule of a scenario, and the programs of every rank's stages.

    `cache`: compiled programs, shared by steps that differ only in schedule and virtual stages. `apart`: ranks that are
    simulated by themselves, though equal to others.

    Raises:
        InputError: if the schedule cannot run this many micro-batches.
    """
    begin_s, cache = time.perf_counter(), cache or ProgramCache()
    if scenario.engine.collectives == "messages":
        check_each_rank(scenario, "engine.collectives: messages needs that; take closed_form")
        fold = False
    plan = make_plan(scenario, fold, apart)
    pricing = Pricing(plan, costs.near(scenario), network_of(scenario))
    dp = make_data_parallel(plan)
    schedule = schedule or make_schedule(scenario, plan, pricing, dp, cache)
    stages = class_stages(plan, schedule, pricing.costs_of, dp, expand, cache.stages)
    return Prepared(plan, schedule, pricing, stages, expand, cache, begin_s)


class Prepared(Struct, frozen=True, eq=False, dict=True):
    """Hold everything from which a step's graph is built. `stages`: as in `FinishedStep`; `cache`: as in `prepare`;
    `begin_s`: the clock's seconds when planning began."""

    plan: Plan
    schedule: Schedule
    pricing: Pricing
    stages: list[dict[int, Stage]]
    expand: bool
    cache: ProgramCache
    begin_s: float

    @cached_property
    def lists(self) -> ScheduleColumns:
        """The schedule by column."""
        p = self.plan.scenario.parallelism
        early = p.shares_optimizer or self.plan.scenario.for_training.parameter_offload
        return ScheduleColumns(self.schedule, p.overlaps_exchanges, p.reduces_rows, early)

    @property
    def peak_bytes(self) -> float:
        """The peak memory of the fullest rank in bytes, equal to the maximum of `Simulation.memory`."""
        return max(
            pooled_peak_bytes(
                self.plan.scenario,
                held,
                *self.lists.of_rank(c.pipeline_rank)[1:],
                states(self.plan, tuple(held.values())),
            )
            for c, held in zip(self.plan.classes, self.stages, strict=True)
        )

    def run(self, engine: Engine = "static", share_links: bool = True) -> Simulation:
        """Build the graph, run it, and return the simulated step. Options: as in `simulate`."""
        fineness = Fineness(self.expand)
        try:
            if self.plan.scenario.engine.collectives == "messages":
                ran = run_messages(self._build_apart(), self.pricing, engine)
            elif share_links:
                ran = run_step(self._build, fineness, self.pricing, self.schedule, engine)
            else:
                ran = run_alone(self._build, fineness, engine)
        except Deadlock as error:
            if self.plan.scenario.parallelism.p2p_overlap:
                raise
            raise needs_overlap(self.plan.scenario) from error
        return self._simulation(ran)

    def run_with(self, processes: Sequence[Process], alone: Simulation) -> Simulation:
        """Run the step with processes; `alone`: the step without them."""
        from sim.processes.run import run_live

        ran, processes_run = run_live(processes, self._build_apart(), self.pricing, self.plan, alone.ran)
        if not processes_run.changed:
            return replace(alone, processes_run=processes_run, wall_s=time.perf_counter() - self.begin_s + alone.wall_s)
        return replace(self._simulation(ran), processes_run=processes_run, alone_s=alone.step_time_s)

    def _build(self, fineness: Fineness) -> Built:
        return StepBuilder(self.schedule, self.pricing, self.stages, self.lists, fineness, self.cache).run()

    def _build_apart(self) -> Built:
        """Build the graph with a task for each communication, or for each message (`engine.collectives: messages`)."""
        built = self._build(Fineness(self.expand, apart=lambda class_index, group: True))
        if self.plan.scenario.engine.collectives == "closed_form":
            return built
        from sim.graph.collective_steps import as_messages

        return as_messages(built, self.pricing)

    def _simulation(self, ran: RunOutcome) -> Simulation:
        plan, profile, wall_s = self.plan, self.pricing.costs.profile, time.perf_counter() - self.begin_s
        return Simulation(
            plan.scenario, profile, plan, self.schedule, self.pricing, self.stages, ran, wall_s, self.expand
        )


class Simulation(FinishedStep, frozen=True, eq=False, dict=True):
    """One simulated step and its result.

    `FinishedStep` has what follows from one run of one graph. This class adds what needs further simulations: the cost
    of each fault, a teacher, expanded spans for losses, and processes. `processes_run`: what the processes did;
    `alone_s`: seconds of the step without them, None if they changed nothing.
    """

    processes_run: ProcessesRun | None = None
    alone_s: float | None = None

    @property
    def without_processes_s(self) -> float:
        """Return how long the step takes without processes beside it."""
        return self.step_time_s if self.alone_s is None else self.alone_s

    @cached_property
    def result(self) -> dict[str, Any]:
        """`outcome` as plain data, as `sim.run --json` has it, with times by operator and part, summed here alone."""
        times = {
            "time_by_operator": [row.to_json() for row in time_by_operator(self)],
            "time_by_part": [row.to_json() for row in time_by_part(self)],
        }
        return self.outcome.to_json() | times | {"evidence": [row.to_json() for row in nearest(self.scenario)]}

    @cached_property
    def outcome(self) -> StepResult:
        """The result; if `training.tokens` is given, also steps, days and GPU hours of the training."""

        def step_s(scenario: Scenario) -> float:
            same = scenario.for_training.global_batch_size == self.scenario.for_training.global_batch_size
            return (self._step if same else self._again(scenario)._step).step_time_s

        if self.scenario.for_training.tokens is None:
            return self._step
        return replace(self._step, training_run=training_run(self.scenario, step_s))

    @cached_property
    def _step(self) -> StepResult:
        """The result of one step, with the costs of a teacher."""
        if self.teacher is None:
            return self.student
        from sim.distillation import with_teacher

        return with_teacher(self.student, self.teacher, self.scenario)

    @cached_property
    def student(self) -> StepResult:
        """The result of one step without a teacher."""
        if self.processes_run is None:
            return make_result(self, blame(self, lambda scenario: self._again(scenario).step_time_s))
        return replace(make_result(self, ()), processes=processes_result(self.processes_run, self.without_processes_s))

    def _again(self, scenario: Scenario) -> Simulation:
        """Simulate another scenario of the same GPUs, whose operators have their prices already."""
        return simulate(scenario, costs=self.pricing.costs, engine="static")

    def by_operator(self, engine: Engine = "auto") -> Simulation:
        """Simulate the step once more, with `expand`; prices and schedule are this step's."""
        return simulate(self.scenario, expand=True, engine=engine, costs=self.pricing.costs, schedule=self.schedule)

    @cached_property
    def teacher(self) -> Teacher | None:
        """Costs of the teacher; None without distillation."""
        if self.scenario.distillation is None:
            return None
        from sim.distillation import teacher_of

        return teacher_of(self.scenario, self.profile, max(row.lasting for row in self.student.memory))

    @cached_property
    def timeline(self) -> Timeline:
        """Every span of every simulated rank."""
        timeline = make_timeline(self.built, self.times)
        if self.processes_run is not None:
            timeline = timeline_with_processes(timeline, self.plan, self.processes_run)
        if self.teacher is None:
            return timeline
        return timeline_with_teacher(timeline, self.teacher)

    @property
    def critical_rows(self) -> list[int]:
        """Rows of `timeline` that lie on the critical path."""
        _, chain = self.critical
        own = rows_of(self.built, self.times)
        rows: list[int] = np.flatnonzero(np.isin(own[:, 0], chain)).tolist()
        return [row + self._rows_before(len(own)) for row in rows]

    def _rows_before(self, own: int) -> int:
        """Number of a teacher's rows of `timeline`, which come before the step's `own` rows."""
        return len(self.timeline) - own - (self.processes_run.rows(self.plan) if self.processes_run else 0)

    @property
    def waits(self) -> SpanWaits:
        """Return the row that each row of `timeline` waited for; unknown for a teacher and for processes."""
        own = span_waits(self.built, self.times)
        before = self._rows_before(len(own.task))
        around = (before, len(self.timeline) - before - len(own.task))
        return SpanWaits(*(np.pad(column, around, constant_values=-1) for column in own))

    def memory_over(self, steps: int) -> list[MemoryCurve]:
        """Memory over the first `steps` steps, with a teacher's; `steps` 1: over a step in the steady state."""
        curves, before_s = self.memory, 0.0
        if self.teacher is not None:
            curves = [memory_with_teacher(c, self.teacher) for c in curves]
            before_s = self.teacher.own_s if self.teacher.placement == "same" else 0.0
        if steps == 1:
            return curves
        starts = optimizer_starts_s(self.built, self.times, len(curves))
        return [
            over_steps(c, before_s + self.step_time_s, before_s + start, steps)
            for c, start in zip(curves, starts, strict=True)
        ]

    def __repr__(self) -> str:
        ranks = counted(self.scenario.parallelism.ranks, "rank")
        return f"Simulation({self.scenario.name}: {self.step_time_s:.6g} s on {ranks})"

    def losses(self, n: int = 3) -> list[tuple[LossShare, str]]:
        """Return the n largest losses of the step, each with its cause.

        Exposed messages of layers (tp, cp, ep) have spans in an expanded simulation alone, made for small steps.
        For others the text on communication names no messages.
        """
        from sim.results.losses import largest_losses

        timeline, p = self.timeline, self.scenario.parallelism
        known = self.expanded or p.tp * p.cp * p.ep == 1
        if not known and len(timeline) <= EXPAND_UP_TO:
            timeline, known = self.by_operator().timeline, True
        return largest_losses(self.outcome, timeline, n, known, host_wait_s(time_by_part(self)))

    def plot(self) -> figure:
        """Return the timeline as a Bokeh figure, which `bokeh.plotting.show` opens and `save` writes."""
        from sim.views.figures import timeline_figure
        from sim.views.rows import tracks_of

        chart: figure = timeline_figure([self.timeline], tracks_of(self.timeline), self.critical_rows)[0]
        return chart

    def _repr_html_(self) -> str:
        """HTML for a notebook."""
        from sim.views.notebook import step_html

        return step_html(self.outcome, self.timeline, self.losses())
