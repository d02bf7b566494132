"""The compiled programs of a step, as each class of ranks uses them: once for all that run the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec import Struct, field

from sim.core.actions import Action, Kind, Step
from sim.core.program import Program
from sim.core.timeline import Detail
from sim.graph.messages import DIRECTION, NO_HOP, Messages
from sim.graph.taskgraph import SHOWN, Collective, KindTable, WholeAction, named_actions
from sim.models.source import source_of
from sim.prices.price import Price
from sim.prices.rank_prices import Pricing
from sim.programs.compile import COMPUTE, CompiledProgram, Launch, LocalTask, compile_program
from sim.programs.data_parallel import DP
from sim.programs.interleave import interleave
from sim.programs.stages import Stage, epilogue
from sim.ranks.plan import Plan

ACROSS_STAGES = ("embedding", "pp", "model", "copies")  # groups with members on several pipeline ranks
ClassAction = tuple[int, Action]  # an action of a class of ranks


class Fineness(Struct, frozen=True):
    """How finely a step becomes tasks; finer ones tell what happens inside an action.

    `expand`: no task stands for a whole action; `expanded`: none does for these actions. `apart(class_index, group)`:
    whether communications of this group that an action leaves running must have tasks of their own; all those of a
    stream are one task elsewhere.
    """

    expand: bool = False
    expanded: frozenset[ClassAction] = frozenset()
    apart: Callable[[int, str], bool] | None = None


WHOLE_ACTIONS = Fineness()


class Launched(NamedTuple):
    """Tasks that start no earlier than so many seconds each (`lags_s`) after another has started; the first of them
    stands `offset` behind that one."""

    offset: int
    lags_s: list[float]


class SingleTaskForm(Struct, frozen=True, eq=False):
    """One task for a whole action and the communications that it starts, as columns; a stream's communications are
    consecutive.
    """

    seconds: list[float]
    task_kinds: list[int]
    streams: list[str]
    launched: list[Launched]


class PlacedProgram(Struct, frozen=True, eq=False):
    """A compiled program as a class of ranks runs it, worked out once for all its stages and micro-batches.

    `single`: the form in which one task may stand for the program, None where none may; it then waits for the gathers
    in `external`. `early`: part of
    the program needs no input and starts before it arrives, so one task stands for it only where no input is waited
    for. `name`: its spans' kind.
    """

    program: CompiledProgram
    name: str
    early: bool
    external: tuple[str, ...]
    single: SingleTaskForm | None

    @property
    def alone(self) -> bool:
        """True if one task can replace the program's tasks."""
        return self.single is not None


# Two levels of keys. A search asks for the same action of the same stage again and again, and `by_action` answers that
# without building a program. Different actions often have equal programs, and `by_content` spares pricing them twice.
class ProgramCache(Struct, frozen=True, eq=False):
    """Stages and compiled programs of steps that differ in their schedule alone.

    `stages` by what a stage holds; `by_action` by the prices' context, the stage and the action; `by_content`: programs
    and what they were compiled to, in lists of candidates.
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
        # A key has a handful of candidates, first or last of a stage, fed from afar or not. Comparing these costs less
        # than hashing programs of thousands of items.
        for before, program in compiled:
            if before == programs:
                return program
        compiled.append((programs, make()))
        return compiled[-1][1]


class ActionPrograms:
    """Compiles the programs of actions and fits them to classes of ranks; what is compiled stays in `cache`."""

    def __init__(
        self,
        plan: Plan,
        ends: set[Action],
        pricing: Pricing,
        stages: list[dict[int, Stage]],
        table: KindTable,
        messages: Messages,
        cache: ProgramCache,
        fineness: Fineness = WHOLE_ACTIONS,
    ) -> None:
        self.plan, self.pricing, self.stages, self.table = plan, pricing, stages, table
        self.messages, self.lanes, self.fineness = messages, plan.lanes, fineness
        self.ends = ends
        self._contexts: dict[int, tuple[object, ...]] = {}
        self._placed: dict[tuple[int, CompiledProgram], PlacedProgram] = {}
        self._cache = cache

    def prologue(self, class_index: int, stage: int) -> CompiledProgram:
        """The program that a class runs for one of its stages before all actions."""
        own = self.stages[class_index][stage]
        return self._once(class_index, ("prologue", id(own)), own.prologue)

    def epilogue(self, class_index: int) -> CompiledProgram:
        """The program at the end of a class's step."""
        stages, p = tuple(self.stages[class_index].values()), self.plan.scenario.parallelism
        is_end = self.plan.classes[class_index].pipeline_rank in (0, p.pp - 1)
        # Megatron keeps a copy of a tied embedding on the first and the last stage, and all-reduces its gradient
        # between them. At pp 1 there is one tensor, and nothing to sum.
        tied = source_of(self.plan.scenario).copied_elements() > 0 and p.pp > 1 and is_end
        key = ("epilogue", tied, self.plan.group_size("copies"), *map(id, stages))
        return self._once(class_index, key, lambda: epilogue(stages, self.plan, tied))

    def _once(self, class_index: int, key: tuple[object, ...], program: Callable[[], Program]) -> CompiledProgram:
        """A program that runs once a step; equal keys, equal programs."""
        key = (self._context(class_index), *key)
        compiled = self._cache.by_action
        if key not in compiled:
            compiled[key] = compile_program(program(), self.pricing.on(self.plan.classes[class_index].rank))
        return compiled[key]

    def members(self, class_index: int, group: str) -> tuple[int, ...]:
        """Classes that take part in this group's collectives with a class; () if no other does."""
        if group == "host" or (self.lanes == 1 and group not in ACROSS_STAGES):
            return ()
        # The first two cases are settled without asking for a group's ranks. A copy to the host concerns one GPU. With
        # one lane, every rank of a pipeline rank is in one class, so a group within it meets no other class.
        return self.pricing.member_classes(group, self.plan.classes[class_index].rank)

    def of(self, class_index: int, step: Step) -> PlacedProgram:
        """The program of a step of the schedule, as a class of ranks runs it."""
        program = self.compiled(class_index, step)
        return self._placed.get((class_index, program)) or self._new_placed(class_index, program, step)

    def _new_placed(self, class_index: int, program: CompiledProgram, step: Step) -> PlacedProgram:
        name = "+".join([SHOWN[a.kind] for a in step])
        # A collective of several simulated classes starts when the last member arrives. What follows it in the program
        # then stands at no fixed offset, so one task of fixed seconds cannot stand for the whole.
        alone = program.alone and not self._meets_others(class_index, program)
        alone = alone and (not self.fineness.expand or not program.tasks)  # an empty stage still has its action
        placed = self._placed[class_index, program] = PlacedProgram(
            program,
            name,
            # FSDP gathers parameters before the activations arrive. Such a gather needs no input, so it may start
            # early.
            DP in program.first_streams,
            program.external,
            self._single_task(class_index, program, name) if alone else None,
        )
        if not alone:
            # Names are numbered as they first come up, and results list equal kinds in that order. It must not depend
            # on how finely a step is cut, so what a single task would show is numbered here as well.
            for launch, _ in self._launches(class_index, program):
                self.table.row(class_index, launch.stream, launch.kind.upper())
            self.table.row(class_index, COMPUTE, name)
        return placed

    def _single_task(self, class_index: int, program: CompiledProgram, name: str) -> SingleTaskForm:
        """One task for a whole program, then the communications that it leaves running."""
        table = self.table
        # The whole comes first, since launches count from the start of task 0. Its kind is filled in below.
        seconds, task_kinds, streams = [program.makespan_s], [-1], dict[str, Launched]()
        for (stream, kind, lag_s, launch_s, detail), local in self._launches(class_index, program):
            if stream not in streams:
                streams[stream] = Launched(len(task_kinds), [])
            streams[stream].lags_s.append(lag_s)
            seconds.append(launch_s)
            # Only communications with tasks of their own can be loads on links; one task for several has none.
            work = Collective(((class_index, local),)) if local is not None else None
            task_kinds.append(table.new_kind(detail, (table.row(class_index, stream, kind.upper()),), work=work))
        row, detail = table.row(class_index, COMPUTE, name), Detail("", source=program.source, note=program.detail)
        whole = WholeAction(class_index, program)
        task_kinds[0] = table.new_kind(detail, (row,), program.compute_s, program.exposed_s, named_actions, whole)
        return SingleTaskForm(seconds, task_kinds, list(streams), list(streams.values()))

    def _launches(self, class_index: int, program: CompiledProgram) -> Sequence[tuple[Launch, LocalTask | None]]:
        """The communications that a program leaves running, by stream; one by one if some of them must have tasks of
        their own.
        """
        apart = self.fineness.apart
        if apart is None or not any(apart(class_index, local.group) for _, local in program.launches_apart):
            return [(launch, None) for launch in program.launches]
        # `SingleTaskForm` wants the tasks of a stream to stand together. The sort is stable, so each stream keeps its
        # order.
        return sorted(program.launches_apart, key=lambda x: x[0].stream)

    def compiled(self, class_index: int, step: Step) -> CompiledProgram:
        """The compiled program of a step."""
        # All lanes of a pipeline rank must order an overlapped pair's communications alike: the first lane leads.
        stages, leading = self.stages[class_index], self.stages[class_index // self.lanes * self.lanes]
        remote = [bool(self.messages.needs[a.stage, DIRECTION[a.kind]] != NO_HOP) for a in step]
        # Stages live as long as the cache does, so their identity stands for what they hold.
        actions = [
            (id(stages[a.stage]), id(leading[a.stage]), a.kind, a in self.ends, from_afar)
            for a, from_afar in zip(step, remote, strict=True)
        ]
        key = (self._context(class_index), *actions)
        if key not in self._cache.by_action:
            programs = [self._program(stages[a.stage], a, far) for a, far in zip(step, remote, strict=True)]

            def make() -> CompiledProgram:
                if leading is stages:
                    return self._compile(class_index, programs, programs)
                leaders = [self._program(leading[a.stage], a, far) for a, far in zip(step, remote, strict=True)]
                return self._compile(class_index, programs, leaders)

            # Only prices, stages and kinds are in this key. Whether the action is an end of its stage or fed from afar
            # shows in the programs, where it matters, and these are compared.
            candidates = (key[0], *[action[:3] for action in actions])
            self._cache.by_action[key] = self._cache.compiled(candidates, programs, make)
        return self._cache.by_action[key]

    def _compile(self, class_index: int, programs: list[Program], leaders: list[Program]) -> CompiledProgram:
        price = self.pricing.on(self.plan.classes[class_index].rank)
        if len(programs) == 2:
            return interleave((programs[0], programs[1]), price, (leaders[0], leaders[1]), self._planned(class_index))
        return compile_program(programs[0], price)

    def _context(self, class_index: int) -> tuple[object, ...]:
        """A key for the prices of a class: equal keys, equal prices."""
        if class_index not in self._contexts:
            self._contexts[class_index] = self.pricing.context(self.plan.classes[class_index].rank)
        return self._contexts[class_index]

    def _program(self, stage: Stage, action: Action, remote: bool) -> Program:
        end = action in self.ends
        if action.kind is Kind.F:
            return stage.forward(end, remote)
        return stage.backward(action.kind, end, remote)

    def _meets_others(self, class_index: int, program: CompiledProgram) -> bool:
        """True if another class of ranks takes part in the program's collectives."""
        # The common case is decided by names alone: this runs for every program of every class.
        if self.lanes == 1 and program.groups.isdisjoint(ACROSS_STAGES):
            return False
        return any(self.members(class_index, g) for g in program.groups)

    def _planned(self, class_index: int) -> Price:
        """The prices by which overlapping actions are interleaved, the same for all lanes and with all faults off."""
        # NCCL runs a communicator's collectives in the order of their launch. If each lane ordered them by its own
        # speed, members could launch them in different orders and wait for each other for ever.
        return self.pricing.healthy.on(self.plan.classes[class_index // self.lanes * self.lanes].rank)
