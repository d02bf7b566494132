"""The compiled programs of a step, as each class of ranks uses them: once for all that run the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from sim.actions import Action, Kind
from sim.actions import Step as Step
from sim.graph.data_parallel import DP
from sim.graph.interleave import interleave
from sim.graph.link_book import LinkBook
from sim.graph.messages import NO_HOP, WAYS, Messages
from sim.graph.sharing import Flow
from sim.graph.stages import Stage
from sim.graph.taskgraph import SHOWN, Sorts, named_actions
from sim.graph.template import COMPUTE, Launch, Price, Template, compile_program
from sim.plan import Plan
from sim.prices.pricing import Pricing
from sim.program import Program
from sim.timeline import Detail

ACROSS_STAGES = ("embedding", "pp", "model", "copies")  # groups with members on several pipeline ranks


class Launched(NamedTuple):
    """Tasks that start no earlier than so many seconds each (`lags_s`) after another has started; the first of them
    stands `offset` behind that one."""

    offset: int
    lags_s: list[float]


@dataclass(frozen=True, slots=True, eq=False)
class Stamp:
    """A task and those that it launches: columns of them all. Those of each of `streams` stand together."""

    seconds: list[float]
    sorts: list[int]
    streams: list[str]
    launched: list[Launched]


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """How a template fits a class of ranks. `alone`: one task stands for it, with those that it leaves running a
    `stamp`, and waits for the gathers in `external`; `early`: part of it needs no input, so one task does so only where
    there is none to wait for."""

    template: Template
    name: str
    alone: bool
    early: bool
    external: tuple[str, ...]
    stamp: Stamp


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Stages and compiled programs of steps that differ in their schedule alone: by what a stage holds; by the prices'
    context, the stage and the action; and the programs that templates were compiled from."""

    stages: dict[tuple[object, ...], Stage] = field(default_factory=dict)
    templates: dict[tuple[object, ...], Template] = field(default_factory=dict)
    programs: dict[tuple[object, ...], list[tuple[list[Program], Template]]] = field(default_factory=dict)

    def compiled(self, alike: tuple[object, ...], programs: list[Program], make: Callable[[], Template]) -> Template:
        """The template of `programs`. Those that are `alike` up to being first or last in a step often are equal."""
        known = self.programs.setdefault(alike, [])
        found = next((template for before, template in known if before == programs), None)
        if found is None:
            found = make()
            known.append((programs, found))
        return found


class Uses:
    """Compiles what is asked for, and keeps it in `kept`. `expand`: no task stands for a whole action."""

    def __init__(
        self,
        plan: Plan,
        ends: set[Action],
        pricing: Pricing,
        stages: list[dict[int, Stage]],
        shown: Sorts,
        messages: Messages,
        expand: bool,
        links: LinkBook | None,
        kept: Kept,
    ) -> None:
        self.plan, self.pricing, self.stages, self.shown = plan, pricing, stages, shown
        self.messages, self.expand, self.lanes = messages, expand, plan.lanes
        self.ends = ends
        self.links = links
        self._contexts: dict[int, tuple[object, ...]] = {}
        self._fits: dict[tuple[int, Template], Fit] = {}
        self._kept, self._templates = kept, kept.templates

    def once(self, class_index: int, key: tuple[object, ...], program: Callable[[], Program]) -> Template:
        """A program that runs once a step; equal keys, equal programs."""
        key = (self._context(class_index), *key)
        if key not in self._templates:
            self._templates[key] = compile_program(program(), self.pricing.on(self.plan.classes[class_index].rank))
        return self._templates[key]

    def members(self, class_index: int, group: str) -> tuple[int, ...]:
        """Classes that take part in this group's collectives with a class; () if no other does."""
        if group == "host" or (self.lanes == 1 and group not in ACROSS_STAGES):
            return ()
        return self.pricing.member_classes(group, self.plan.classes[class_index].rank)

    def of(self, class_index: int, step: Step) -> Fit:
        """What a step runs; the first or last of a stage is often as any other."""
        template = self._template(class_index, step)
        return self._fits.get((class_index, template)) or self._new_fit(class_index, template, step)

    def _new_fit(self, class_index: int, template: Template, step: Step) -> Fit:
        """How the template of a step fits a class of ranks."""
        name = "+".join([SHOWN[a.kind] for a in step])
        alone = template.alone and not self._meets_others(class_index, template)
        fit = self._fits[class_index, template] = Fit(
            template,
            name,
            alone and (not self.expand or not template.tasks),  # an empty stage still has its action
            DP in template.first_streams,
            template.external,
            self._stamp(class_index, template, name),
        )
        return fit

    def _stamp(self, class_index: int, template: Template, name: str) -> Stamp:
        """A template as tasks: its own, and those that it leaves running."""
        shown, links = self.shown, self.links
        launches: list[tuple[Launch, Flow | None]] = [(launch, None) for launch in template.launches]
        if links is not None:
            launches = links.launched(class_index, template)
        seconds, sorts, streams = [template.makespan_s], [-1], dict[str, Launched]()
        for (stream, kind, lag_s, launch_s, detail), flow in launches:
            if stream not in streams:
                streams[stream] = Launched(len(sorts), [])
            streams[stream].lags_s.append(lag_s)
            seconds.append(launch_s)
            sort = shown.new_sort(detail, (shown.row(class_index, stream, kind),))
            sorts.append(sort)
            if flow is not None and links is not None:
                links.add(sort, flow)
        row, detail = shown.row(class_index, COMPUTE, name), Detail("", source=template.source, note=template.detail)
        sorts[0] = shown.new_sort(detail, (row,), template.compute_s, template.exposed_s, named_actions)
        if links is not None and links.hides(class_index, template):
            links.whole_actions[sorts[0]] = (class_index, template)
        return Stamp(seconds, sorts, list(streams), list(streams.values()))

    def _template(self, class_index: int, step: Step) -> Template:
        """The compiled program of a step."""
        held, first = self.stages[class_index], self.stages[class_index // self.lanes * self.lanes]
        remote = [bool(self.messages.needs[a.stage, WAYS[a.kind]] != NO_HOP) for a in step]
        what = [
            (id(held[a.stage]), id(first[a.stage]), a.kind, a in self.ends, far)
            for a, far in zip(step, remote, strict=True)
        ]
        key = (self._context(class_index), *what)
        found = self._templates.get(key)
        if found is None:
            programs = [self._program(held[a.stage], a, far) for a, far in zip(step, remote, strict=True)]

            def make() -> Template:
                if first is held:
                    return self._compile(class_index, programs, programs)
                leaders = [self._program(first[a.stage], a, far) for a, far in zip(step, remote, strict=True)]
                return self._compile(class_index, programs, leaders)

            found = self._templates[key] = self._kept.compiled((key[0], *[x[:3] for x in what]), programs, make)
        return found

    def _compile(self, class_index: int, programs: list[Program], leaders: list[Program]) -> Template:
        price = self.pricing.on(self.plan.classes[class_index].rank)
        if len(programs) == 2:
            return interleave((programs[0], programs[1]), price, (leaders[0], leaders[1]), self._planned(class_index))
        return compile_program(programs[0], price)

    def _context(self, class_index: int) -> tuple[object, ...]:
        """What the prices of a class depend on."""
        if class_index not in self._contexts:
            self._contexts[class_index] = self.pricing.context(self.plan.classes[class_index].rank)
        return self._contexts[class_index]

    def _program(self, stage: Stage, action: Action, remote: bool) -> Program:
        end = action in self.ends
        if action.kind is Kind.F:
            return stage.forward(end, remote)
        return stage.backward(action.kind, end, remote)

    def _meets_others(self, class_index: int, template: Template) -> bool:
        """Whether another class of ranks takes part in the template's collectives."""
        if self.lanes == 1 and template.groups.isdisjoint(ACROSS_STAGES):
            return False
        return any(self.members(class_index, g) for g in template.groups)

    def _planned(self, class_index: int) -> Price:
        """The prices by which overlapping actions are interleaved, the same for all lanes and with all faults off."""
        return self.pricing.healthy.on(self.plan.classes[class_index // self.lanes * self.lanes].rank)
