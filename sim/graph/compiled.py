"""Compile the programs of a step, once for all classes of ranks that run the same, and fit them to each class."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import NamedTuple

from msgspec import Struct, field

from sim.core.actions import Action, Kind, Step
from sim.core.program import Program
from sim.core.timeline import COMPUTE, HOST, Detail
from sim.graph.messages import DIRECTION, NO_HOP, Messages
from sim.graph.taskgraph import SHOWN, Collective, KindTable, WholeAction, named_actions
from sim.prices.rank_prices import Pricing
from sim.programs.compile import CompiledProgram, Launch, LocalTask, compile_program
from sim.programs.deferral import drained
from sim.programs.interleave import interleave
from sim.programs.stages import Stage
from sim.programs.step_end import epilogue
from sim.ranks.equal_ranks import embedding_ranks

ACROSS_STAGES = ("embedding", "pp", "model", "copies")  # groups with members on several pipeline ranks
ClassAction = tuple[int, Action]  # an action of a class of ranks


class Fineness(Struct, frozen=True):
    """Hold how finely actions are divided into tasks.

    `expand`: every action is placed operator by operator. `expanded`: these actions are. `apart(class_index, group)`:
    whether the communications of this group that an action leaves running are separate tasks; otherwise those of a
    stream are one task.
    """

    expand: bool = False
    expanded: frozenset[ClassAction] = frozenset()
    apart: Callable[[int, str], bool] | None = None


WHOLE_ACTIONS = Fineness()


class Launched(NamedTuple):
    """Hold tasks that start no earlier than `lags_s` seconds after the start of the whole action.

    `offset`: the number of the first of them minus that of the whole action.
    """

    offset: int
    lags_s: list[float]


class SingleTaskForm(Struct, frozen=True, eq=False):
    """Hold, as columns, one task for a whole action and the communications that it leaves running, stream by stream."""

    seconds: list[float]
    task_kinds: list[int]
    streams: list[str]
    launched: list[Launched]


class PlacedProgram(Struct, frozen=True, eq=False):
    """Hold a compiled program as a class of ranks runs it, for all its stages and micro-batches.

    `single`: the form with one task for the program, which waits for the gathers in `external`; None if one task is not
    exact. `early`: part of the program needs no input and may start before it arrives, so one task is exact only if the
    program waits for no input. `name`: the kind of its spans.
    """

    program: CompiledProgram
    name: str
    early: bool
    external: tuple[str, ...]
    single: SingleTaskForm | None

    @property
    def alone(self) -> bool:
        """Tell whether one task can replace the program's tasks."""
        return self.single is not None


# A search needs the same action of the same stage many times; `by_action` has it without building a program. Different
# actions often have equal programs; `by_content` avoids compiling them twice.
class ProgramCache(Struct, frozen=True, eq=False):
    """Cache stages and compiled programs of steps that differ only in their schedule.

    `stages`: by their content. `by_action`: by the prices' context, the stage and the action. `by_content`: lists of
    programs with their compiled form.
    """

    stages: dict[tuple[object, ...], Stage] = field(default_factory=dict)
    by_action: dict[tuple[object, ...], CompiledProgram] = field(default_factory=dict)
    by_content: dict[tuple[object, ...], list[tuple[list[Program], CompiledProgram]]] = field(default_factory=dict)

    def compiled(
        self, candidates: tuple[object, ...], programs: list[Program], make: Callable[[], CompiledProgram]
    ) -> CompiledProgram:
        """Compile `programs` with `make`, unless equal ones were compiled under the key `candidates`.

        The key leaves out whether an action is the first or last of its stage, as that often changes nothing.
        """
        compiled = self.by_content.setdefault(candidates, [])
        # A key has few candidates, and comparing them costs less than hashing programs of thousands of items.
        for before, program in compiled:
            if before == programs:
                return program
        compiled.append((programs, make()))
        return compiled[-1][1]


class ActionPrograms:
    """Compile the programs of actions, keep them in `cache`, and fit them to classes of ranks."""

    def __init__(
        self,
        ends: set[Action],
        pricing: Pricing,
        stages: list[dict[int, Stage]],
        table: KindTable,
        messages: Messages,
        cache: ProgramCache,
        fineness: Fineness = WHOLE_ACTIONS,
        early: Set[Action] = frozenset(),
    ) -> None:
        self.plan, self.pricing, self.stages, self.table = pricing.plan, pricing, stages, table
        self.messages, self.pipelines, self.fineness = messages, pricing.plan.pipelines, fineness
        self.ends, self.early = ends, early
        self._contexts: dict[int, tuple[object, ...]] = {}
        self._placed: dict[tuple[int, CompiledProgram], PlacedProgram] = {}
        self._cache = cache

    def prologue(self, class_index: int, stage: int) -> CompiledProgram:
        """Return the program that a class runs for one of its stages before all actions."""
        own = self.stages[class_index][stage]
        return self._once(class_index, ("prologue", own), own.prologue)

    def epilogue(self, class_index: int) -> CompiledProgram:
        """Return the program at the end of a class's step."""
        stages, holders = tuple(self.stages[class_index].values()), embedding_ranks(self.plan.scenario)
        tied = len(holders) > 1 and self.plan.classes[class_index].pipeline_rank in holders
        key = ("epilogue", tied, self.plan.group_size("copies"), *stages)
        return self._once(class_index, key, lambda: epilogue(stages, self.plan, tied))

    def put_off(self, class_index: int, stage: int) -> CompiledProgram:
        """Return the program that a class runs behind all actions for what those of a stage have put off."""
        own = self.stages[class_index][stage].deferral
        return self._once(class_index, ("put off", own), lambda: () if own is None else drained(own))

    def _once(self, class_index: int, key: tuple[object, ...], program: Callable[[], Program]) -> CompiledProgram:
        """Return a compiled program that runs once a step; equal keys mean equal programs."""
        key = (self._context(class_index), *key)
        compiled = self._cache.by_action
        if key not in compiled:
            compiled[key] = compile_program(program(), self.pricing.on(self.plan.classes[class_index].rank))
        return compiled[key]

    def members(self, class_index: int, group: str) -> tuple[int, ...]:
        """Return the classes that take part in a group's collectives with this class; () if no other class does."""
        if group == HOST or (self.pipelines == 1 and group not in ACROSS_STAGES):
            return ()
        # The two cases above need no look-up of the group's ranks: a copy to the host concerns one GPU, and with one
        # pipeline all ranks of a pipeline rank are in one class.
        return self.pricing.member_classes(group, self.plan.classes[class_index].rank)

    def of(self, class_index: int, step: Step) -> PlacedProgram:
        """Return the program of a step of the schedule, as a class of ranks runs it."""
        program = self.compiled(class_index, step)
        return self._placed.get((class_index, program)) or self._new_placed(class_index, program, step)

    def _new_placed(self, class_index: int, program: CompiledProgram, step: Step) -> PlacedProgram:
        name = "+".join([SHOWN[a.kind] for a in step])
        # A collective of several simulated classes starts when the last member arrives. The tasks after it then have no
        # fixed offsets, so one task with fixed seconds would not be exact.
        alone = program.alone and not self._meets_others(class_index, program)
        alone = alone and (not self.fineness.expand or not program.tasks)  # an empty stage still has its action
        placed = self._placed[class_index, program] = PlacedProgram(
            program,
            name,
            program.begins_early,
            program.external,
            self._single_task(class_index, program, name) if alone else None,
        )
        if not alone:
            # Names are numbered by first use, and results list kinds in that order. The order must not depend on
            # fineness, so the names of the single-task form are numbered here, too.
            for launch, _ in self._launches(class_index, program):
                self.table.row(class_index, launch.stream, launch.kind.upper())
            self.table.row(class_index, COMPUTE, name)
        return placed

    def _single_task(self, class_index: int, program: CompiledProgram, name: str) -> SingleTaskForm:
        """Return the form with one task for a whole program, then the communications that it leaves running."""
        table = self.table
        # The whole program is task 0, because launches count from the start of task 0. Its kind is set below.
        seconds, task_kinds, streams = [program.makespan_s], [-1], dict[str, Launched]()
        for (stream, kind, lag_s, launch_s, detail), local in self._launches(class_index, program):
            if stream not in streams:
                streams[stream] = Launched(len(task_kinds), [])
            streams[stream].lags_s.append(lag_s)
            seconds.append(launch_s)
            # Only communications that are separate tasks are loads on links.
            work = Collective(((class_index, local),)) if local is not None else None
            task_kinds.append(table.new_kind(detail, (table.row(class_index, stream, kind.upper()),), work=work))
        row, whole = table.row(class_index, COMPUTE, name), WholeAction(class_index, program)
        task_kinds[0] = table.new_kind(Detail(""), (row,), program.compute_s, program.exposed_s, named_actions, whole)
        return SingleTaskForm(seconds, task_kinds, list(streams), list(streams.values()))

    def _launches(self, class_index: int, program: CompiledProgram) -> Sequence[tuple[Launch, LocalTask | None]]:
        """Return the communications that a program leaves running, by stream; separately if `apart` says so."""
        apart = self.fineness.apart
        if apart is None or not any(apart(class_index, local.group) for _, local in program.launches_apart):
            return [(launch, None) for launch in program.launches]
        # `SingleTaskForm` needs the tasks of a stream together. The sort is stable, so each stream keeps its order.
        return sorted(program.launches_apart, key=lambda x: x[0].stream)

    def compiled(self, class_index: int, step: Step) -> CompiledProgram:
        """Return the compiled program of a step."""
        stages = self.stages[class_index]
        remote = [bool(self.messages.needs[a.stage, DIRECTION[a.kind]] != NO_HOP) for a in step]
        actions = [
            (stages[a.stage], a.kind, a in self.ends, far, stages[a.stage].defers(a), a in self.early)
            for a, far in zip(step, remote, strict=True)
        ]
        key = (self._context(class_index), *actions)
        if key not in self._cache.by_action:
            programs = [self._program(stages[a.stage], a, far) for a, far in zip(step, remote, strict=True)]
            make = partial(self._compile, class_index, programs)
            # The key leaves out whether the action is an end of its stage or has a remote input: if that matters, the
            # programs differ, and these are compared.
            candidates = (key[0], *[action[:2] for action in actions])
            self._cache.by_action[key] = self._cache.compiled(candidates, programs, make)
        return self._cache.by_action[key]

    def _compile(self, class_index: int, programs: list[Program]) -> CompiledProgram:
        price = self.pricing.on(self.plan.classes[class_index].rank)
        if len(programs) == 2:
            delays = self.plan.scenario.parallelism.delay_wgrad_compute
            return interleave(programs[0], programs[1], price, delays)
        return compile_program(programs[0], price)

    def _context(self, class_index: int) -> tuple[object, ...]:
        """Return a key for the prices of a class; equal keys mean equal prices."""
        if class_index not in self._contexts:
            self._contexts[class_index] = self.pricing.context(self.plan.classes[class_index].rank)
        return self._contexts[class_index]

    def _program(self, stage: Stage, action: Action, remote: bool) -> Program:
        end, early = action in self.ends, action in self.early
        if action.kind is Kind.F:
            return stage.forward(end, remote, early)
        return stage.backward(action.kind, end, remote, stage.defers(action), early)

    def _meets_others(self, class_index: int, program: CompiledProgram) -> bool:
        """Tell whether another class of ranks takes part in the program's collectives."""
        # The common case is decided by names alone, because this runs for every program of every class.
        if self.pipelines == 1 and program.groups.isdisjoint(ACROSS_STAGES):
            return False
        return any(self.members(class_index, g) for g in program.groups)
