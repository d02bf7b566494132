"""A step that has run: its graph, its times and what follows from them, rank by rank."""

from __future__ import annotations

from functools import cache, cached_property, partial
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from sim.core.actions import Action, Schedule
from sim.core.columns import Ints
from sim.core.timeline import MESSAGES, Detail, Timeline
from sim.core.units import rank_numbers
from sim.engine.run import Times
from sim.engine.shared_links import RunOutcome
from sim.graph.build import Built
from sim.graph.taskgraph import TaskGraph
from sim.inputs.scenario import Scenario
from sim.models.source import source_of
from sim.prices.profile import Profile
from sim.prices.rank_prices import Pricing
from sim.programs.stages import Stage
from sim.ranks.plan import Plan
from sim.results.beside_allocator import MemoryLimit, memory_limit
from sim.results.fit import Fit, judge
from sim.results.graph_pools import pooled_levels
from sim.results.memory import AtMost, Levels, MemoryCurve
from sim.results.metrics import critical_path, deciding, seconds_by_kind
from sim.results.reserved import reserved_bytes
from sim.results.states import States, states
from sim.results.steady_state import SteadyState, steady_state

SLOWED = 1e-6  # of its seconds: what a communication takes longer is shown from there on


class SpanWaits(NamedTuple):
    """Hold for every span of a timeline its task, and the task whose end let that start; -1: none. A task of several
    spans is a message or collective with an end on each of its ranks."""

    task: Ints
    after: Ints


class FinishedStep(Struct, frozen=True, eq=False, dict=True):
    """One simulated training step, without the teacher of a distillation.

    `stages[c]`: the stages of the ranks of class c, by their number in the schedule.
    """

    scenario: Scenario
    profile: Profile
    plan: Plan
    schedule: Schedule
    pricing: Pricing
    stages: list[dict[int, Stage]]
    ran: RunOutcome
    wall_s: float
    expanded: bool = False

    @property
    def built(self) -> Built:
        """The task graph and what it was built from."""
        return self.ran.built

    @property
    def times(self) -> Times:
        """When its tasks ran."""
        return self.ran.times

    @cached_property
    def spans(self) -> list[dict[Action, tuple[float, float]]]:
        """Start and end of every action, by class of ranks."""
        start, end = self.times.start_s, self.times.end_s
        return [
            dict(zip(listed.actions, zip(start[first].tolist(), end[last].tolist(), strict=True), strict=True))
            for listed, first, last in self.built.actions
        ]

    @cached_property
    def names(self) -> list[str]:
        """The ranks of every class in words."""
        return [rank_numbers(c.ranks) for c in self.plan.classes]

    @cached_property
    def states(self) -> list[States]:
        """Parameters, gradients and optimizer states of every class of ranks; equal stages are one object."""
        of = cache(partial(states, self.plan))
        return [of(tuple(s.values())) for s in self.stages]

    @cached_property
    def levels(self) -> Levels:
        """Memory over time of all classes of ranks."""
        return self._levels(self.expanded)

    def _levels(self, fine: bool) -> Levels:
        times, done = self.times, self.built.actions
        return pooled_levels(self.plan.scenario, self.stages, done, times.start_s, times.end_s, self.states, fine)

    @cached_property
    def memory(self) -> list[MemoryCurve]:
        """Memory over time of every class of ranks."""
        return [self.levels.curve(i, c.rank) for i, c in enumerate(self.plan.classes)]

    @cached_property
    def most_memory(self) -> list[AtMost]:
        """The most memory of every class of ranks."""
        return self.levels.at_most()

    @cached_property
    def most_by_category(self) -> list[AtMost]:
        """The most of each category of every class of ranks, also within actions: what a page's curves show."""
        levels = self.levels if self.expanded else self._levels(fine=True)
        pairs = zip(levels.at_most(), self.most_memory, strict=True)
        return [x._replace(peak=most.peak) for x, most in pairs]  # the peaks differ by rounding

    @property
    def peak_memory_bytes(self) -> float:
        """Memory of the fullest rank."""
        return max(most.peak for most in self.most_memory)

    @cached_property
    def memory_limits(self) -> list[MemoryLimit]:
        """Return what the memory of every class of ranks may be, on its own GPU."""
        gpu_of = self.scenario.cluster.gpu_of
        return [memory_limit(self.scenario, gpu_of(c.rank)) for c in self.plan.classes]

    @cached_property
    def reserved(self) -> list[float]:
        """The most that the allocator of every class of ranks reserves; a host's has no segments."""
        logits_bytes, gpu_of = source_of(self.scenario).stranded_bytes(), self.scenario.cluster.gpu_of
        return [
            most.peak
            if gpu_of(c.rank).chip.is_host
            else reserved_bytes(tuple(stages.values()), most, partial(self.levels.curve, i, c.rank), logits_bytes)
            for i, (c, stages, most) in enumerate(zip(self.plan.classes, self.stages, self.most_memory, strict=True))
        ]

    @property
    def reserved_bytes(self) -> float:
        """What the allocator of the fullest rank reserves."""
        return max(self.reserved)

    @cached_property
    def fit(self) -> Fit:
        """Whether the memory of every rank suffices: the verdict on the one that is nearest to its limit."""
        pairs = zip(self.reserved, self.memory_limits, strict=True)
        return min((judge(size, may.limit, least_odds=may.least_odds) for size, may in pairs), key=lambda fit: fit.odds)

    @property
    def fits_in_memory(self) -> bool:
        """Tell whether every rank's memory fits on its own GPU."""
        return self.fit.fits

    @cached_property
    def steady_state(self) -> SteadyState | None:
        """Steps in a row whose ranks do not wait for each other between two; None where they do."""
        if not self.scenario.for_training.optimizer_post_validation:
            return None
        return steady_state(self.built.graph, self.times)

    @property
    def step_time_s(self) -> float:
        """End of the last task; in the steady state, the mean time from one step to the next."""
        return self.times.step_s if self.steady_state is None else self.steady_state.period_s

    @cached_property
    def critical(self) -> tuple[dict[str, float], list[int]]:
        """Seconds by kind along the tasks that fix the step time, and these tasks."""
        if self.steady_state is None:
            return critical_path(self.built, self.times)
        _, tasks, seconds = self.steady_state
        return seconds_by_kind(self.built.graph, tasks, seconds), tasks


def make_timeline(built: Built, times: Times) -> Timeline:
    """The columns of a Timeline: a row for every slot of every task, in order of start."""
    graph, slots = built.graph, rows_of(built, times)
    task = slots[:, 0]
    details, detail = _details(graph, times)
    kinds = tuple(graph.span_kinds)
    message = np.array([k in MESSAGES for k in kinds])[slots[:, 3]]
    return Timeline(
        graph.classes,
        tuple(graph.streams),
        kinds,
        details,
        class_index=slots[:, 1],
        stream=slots[:, 2],
        kind=slots[:, 3],
        detail=detail[task],
        stage=graph.stages[task],
        micro_batch=graph.micro_batches[task],
        flow=np.where(message, task, -1),
        start_s=times.start_s[task],
        end_s=times.end_s[task],
    )


def _details(graph: TaskGraph, times: Times) -> tuple[tuple[Detail, ...], Ints]:
    """All details, and by task which; one that others on its links slowed says how long it takes alone."""
    slowed = times.end_s - times.start_s > graph.seconds * (1 + SLOWED)
    each = graph.details()
    details = {d: i for i, d in enumerate(dict.fromkeys(each))}
    detail = np.array([details[d] for d in each], dtype=np.int64)
    for task in np.flatnonzero(slowed).tolist():
        plain = each[task]
        clock = times.stretch is not None and times.stretch[task] != 1.0
        why = "at its full clock" if clock else "if alone on its links"
        note = f"{plain.note}; {graph.seconds[task] * 1e3:.3g} ms {why}".removeprefix("; ")
        detail[task] = details.setdefault(plain._replace(note=note), len(details))
    return tuple(details), detail


def span_waits(built: Built, times: Times) -> SpanWaits:
    """Return what the rows of `make_timeline` waited for."""
    task = rows_of(built, times)[:, 0]
    return SpanWaits(task, deciding(built.graph, times)[task])


def rows_of(built: Built, times: Times) -> Ints:
    """The slots of all tasks, in order of start, then of class."""
    slots = built.graph.slot_table()
    return slots[np.lexsort((slots[:, 1], times.start_s[slots[:, 0]]))]


def optimizer_starts_s(built: Built, times: Times, classes: int) -> list[float]:
    """Return when each class of ranks starts its own optimizer, in seconds, `[classes]`; 0 for one without."""
    slots = built.graph.slot_table()  # task, class, stream, kind
    slots = slots[slots[:, 3] == built.graph.span_kinds.get("OPTIMIZER", -1)]
    of_class = [slots[slots[:, 1] == c, 0] for c in range(classes)]
    return [float(times.start_s[tasks].min()) if len(tasks) else 0.0 for tasks in of_class]
