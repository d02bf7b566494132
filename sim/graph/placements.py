"""Place the programs of every class of ranks one after another: a prologue, its actions, an epilogue.

A placement is a program placed once: a pattern of tasks, which many placements share, and the kinds of these tasks,
which belong to its class of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.core.columns import Ints
from sim.core.timeline import COMPUTE
from sim.graph.compiled import ActionPrograms, PlacedProgram
from sim.graph.schedule_columns import ScheduleColumns
from sim.graph.shared_collectives import CollectivePart
from sim.graph.task_patterns import TaskPattern, one_by_one, whole
from sim.graph.taskgraph import Collective
from sim.programs.compile import CompiledProgram, LocalTask
from sim.ranks.faults import Jitter


class Placements:
    """Collect all placements, class by class.

    `begin[c]`: the first placement of class c. `epilogue[c]`: the placement that ends its step, -1 if there is none.
    `parts`: columns [4, placements], in pieces: index of the pattern (in `patterns`), begin of the kinds of its tasks
    (in `task_kinds`), the step (in `steps`, those of the schedule first), and 1 for the schedule's actions, 0 for
    programs that run once. A kind below zero is a shared collective: ~kind is an index of `collective_parts`. `jitter`:
    that of the current class.
    """

    def __init__(self, lists: ScheduleColumns, programs: ActionPrograms) -> None:
        self.lists, self.steps = lists, list(lists.steps)
        self.patterns: list[TaskPattern] = []
        self.task_kinds: list[int] = []
        self.collective_parts: list[CollectivePart] = []
        self.begin: list[int] = []
        self.epilogue: list[int] = []
        self.parts: list[Ints] = []
        self.count = 0
        self.jitter: Jitter | None = None
        self._class_index = -1
        self._programs = programs
        self._placed: dict[object, tuple[int, int]] = {}  # pattern and begin of the kinds
        self._pattern_numbers: dict[object, int] = {}

    def begin_class(self, class_index: int, jitter: Jitter | None) -> None:
        """Begin a class: the placements added next belong to it."""
        self._class_index, self.jitter = class_index, jitter
        self.begin.append(self.count)

    def add(self, part: Ints) -> None:
        """Append placements, [4, placements]: see `parts`."""
        self.parts.append(part)
        self.count += part.shape[1]

    def end_class(self, has_epilogue: bool) -> None:
        """Close the class; `has_epilogue`: its last placement ends its step."""
        self.epilogue.append(self.count - 1 if has_epilogue else -1)

    def step(self, placed: PlacedProgram, alone: bool) -> tuple[int, int]:
        """Return pattern and begin of the kinds of an action, as one task (`alone`) or task by task."""
        if not alone:
            return self.one_by_one(placed.program, placed.name)
        # A `PlacedProgram` belongs to one class and is compared by identity, so it suffices as the key.
        if placed not in self._placed:
            single = placed.single
            assert single is not None  # `alone` implies it
            pattern = self._pattern(placed, lambda: whole(single, placed.external))
            return self._place(placed, pattern, single.task_kinds)
        return self._placed[placed]

    def one_by_one(self, program: CompiledProgram, name: str) -> tuple[int, int]:
        """Return pattern and begin of the kinds of a program task by task; computations are shown as `name`."""
        # The factor is drawn before the look-up, so that every placement of a program has its own.
        factor = self.jitter.draw() if self.jitter is not None else 1.0
        key = (self._class_index, program, name, factor)
        if key not in self._placed:
            # This key leaves out the class, because a program's pattern is the same on all ranks. Without jitter the
            # factor is 1.0, so all micro-batches share one pattern.
            pattern = self._pattern((program, factor), lambda: _scaled(one_by_one(program), program, factor))
            return self._place(key, pattern, self._new_kinds(program, name, factor))
        return self._placed[key]

    def _place(self, key: object, pattern: int, task_kinds: list[int]) -> tuple[int, int]:
        placed = self._placed[key] = (pattern, len(self.task_kinds))
        self.task_kinds += task_kinds
        return placed

    def _pattern(self, key: object, make: Callable[[], TaskPattern]) -> int:
        if key not in self._pattern_numbers:
            self._pattern_numbers[key] = len(self.patterns)
            self.patterns.append(make())
        return self._pattern_numbers[key]

    def _new_kinds(self, program: CompiledProgram, name: str, factor: float) -> list[int]:
        """Return the kind of each of a program's tasks."""
        class_index = self._class_index
        members = {group: self._programs.members(class_index, group) for group in program.groups}
        # Layers repeat their tasks, so a kind is made once for all layers.
        distinct, number_of_task = program.distinct
        kinds = list[int]()
        for local in distinct:
            if members.get(local.group):
                self.collective_parts.append(CollectivePart(class_index, members[local.group], local))
                # After the append, minus the length is ~ of the part's index: below zero even for index 0.
                kinds.append(-len(self.collective_parts))
            else:
                kinds.append(self._new_kind(local, name, factor))
        return [kinds[number] for number in number_of_task]

    def _new_kind(self, local: LocalTask, name: str, factor: float) -> int:
        computes, table = local.stream == COMPUTE, self._programs.table
        row = table.row(self._class_index, local.stream, name if computes else local.kind.upper())
        compute_s = local.seconds * factor if computes else 0.0
        # No other simulated class takes part (it would be a `CollectivePart`), but it loads this class's links.
        work = Collective(((self._class_index, local),)) if local.group else None
        return table.new_kind(local.detail, (row,), compute_s, work=work)


def _scaled(pattern: TaskPattern, program: CompiledProgram, factor: float) -> TaskPattern:
    """Return the pattern with computations that take `factor` times as long."""
    if factor == 1.0:
        return pattern
    # Messages keep their seconds: disturbances of the network are other faults (`sim.ranks.faults.nic_scales`).
    return pattern._replace(seconds=[t.seconds * factor if t.stream == COMPUTE else t.seconds for t in program.tasks])
