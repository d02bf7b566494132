"""What every class of ranks runs, piece after piece: a prologue, its actions, an epilogue.

A piece is a program placed once: a shape, which many share, and the sorts of its tasks, which are its class's own.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.faults import Jitter
from sim.graph.lists import Lists
from sim.graph.meetings import Meeting
from sim.graph.shapes import Shape, one_by_one, whole
from sim.graph.taskgraph import Ints
from sim.graph.template import COMPUTE, LocalTask, Template
from sim.graph.uses import Fit, Uses


class Pieces:
    """Class c's pieces begin at `begin[c]`, and `epilogue[c]` is the one that ends its step, -1 if nothing does.

    By piece, in stretches of `parts`: its shape (of `shapes`), where in `sorts` those of its tasks begin, its step (of
    `steps`, those of the lists first), and whether it is one of the lists', 1 or 0. A sort below zero is a meeting's,
    ~sort of `meetings`. `jitter`: of the class whose pieces are being listed.
    """

    def __init__(self, lists: Lists, uses: Uses) -> None:
        self.lists, self.steps = lists, list(lists.steps)
        self.shapes: list[Shape] = []
        self.sorts: list[int] = []
        self.meetings: list[Meeting] = []
        self.begin: list[int] = []
        self.epilogue: list[int] = []
        self.parts: list[Ints] = []
        self.count = 0
        self.jitter: Jitter | None = None
        self._class_index = -1
        self._uses = uses
        self._placed: dict[object, tuple[int, int]] = {}  # shape and place of the sorts, of what is known already
        self._shapes: dict[object, int] = {}

    def begin_class(self, class_index: int, jitter: Jitter | None) -> None:
        """What follows is this class's."""
        self._class_index, self.jitter = class_index, jitter
        self.begin.append(self.count)

    def add(self, part: Ints) -> None:
        """Pieces that follow, [4, pieces]: shape, sorts, step, and whether it is of the lists."""
        self.parts.append(part)
        self.count += part.shape[1]

    def end_class(self, ends: bool) -> None:
        """The class has all of its pieces; whether the last one ends its step."""
        self.epilogue.append(self.count - 1 if ends else -1)

    def step(self, fit: Fit, alone: bool) -> tuple[int, int]:
        """Shape and place of its sorts, of a step as one task or task by task."""
        if not alone:
            return self.one_by_one(fit.template, fit.name)
        return self._placed.get(fit) or self._place(fit, self._shape(fit, lambda: whole(fit)), fit.stamp.sorts)

    def one_by_one(self, template: Template, name: str) -> tuple[int, int]:
        """The same of a program, shown under this name, task by task."""
        factor = self.jitter.draw() if self.jitter is not None else 1.0
        key = (self._class_index, template, name, factor)
        found = self._placed.get(key)
        if found is None:
            shape = self._shape((template, factor), lambda: _scaled(one_by_one(template), template, factor))
            found = self._place(key, shape, self._sorts(template, name, factor))
        return found

    def _place(self, key: object, shape: int, sorts: list[int]) -> tuple[int, int]:
        found = self._placed[key] = (shape, len(self.sorts))
        self.sorts += sorts
        return found

    def _shape(self, key: object, make: Callable[[], Shape]) -> int:
        if key not in self._shapes:
            self._shapes[key] = len(self.shapes)
            self.shapes.append(make())
        return self._shapes[key]

    def _sorts(self, template: Template, name: str, factor: float) -> list[int]:
        """The sort of each of a template's tasks; of those that other simulated ranks take part in a meeting's."""
        out, class_index = list[int](), self._class_index
        members = {g: self._uses.members(class_index, g) for g in template.groups}
        for local in template.tasks:
            if members.get(local.group):
                self.meetings.append(Meeting(class_index, members[local.group], local))
                out.append(-len(self.meetings))
            else:
                out.append(self._sort(local, name, factor))
        return out

    def _sort(self, local: LocalTask, name: str, factor: float) -> int:
        computes = local.stream == COMPUTE
        row = self._uses.shown.row(self._class_index, local.stream, name if computes else local.kind)
        sort = self._uses.shown.new_sort(local.detail, (row,), local.seconds * factor if computes else 0.0)
        if self._uses.links is not None and local.group:
            self._uses.links.collective(sort, {self._class_index: local})
        return sort


def _scaled(shape: Shape, template: Template, factor: float) -> Shape:
    """With computations that take so many times as long."""
    if factor == 1.0:
        return shape
    return shape._replace(seconds=[t.seconds * factor if t.stream == COMPUTE else t.seconds for t in template.tasks])
