"""Rule out layouts of one mesh that do not fit in memory or take too long, by lower bounds of both.

Both bounds use the blocks, prices and states of the simulation. Results are cached by what they depend on.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal

from sim.schedules import FORMS
from sim.search.bounded import Bounded, Bounds
from sim.search.memory_bound import MemoryBound
from sim.search.mesh_blocks import MeshBlocks, least_zeros
from sim.search.mesh_prices import MeshPrices
from sim.search.space import Layout, MeshSizes, PartialLayout, Space, layouts_of, partial_layouts_of, schedule_form
from sim.search.time_bound import TimeBound


class MeshSearch:
    """Bound the partial layouts and layouts of one mesh; results that layouts share are computed once."""

    def __init__(self, space: Space, mesh: MeshSizes, prices: MeshPrices, limit_bytes: float) -> None:
        self.space, self.mesh, self.prices, self.limit_bytes = space, mesh, prices, limit_bytes
        self.mesh_blocks = MeshBlocks(space, prices)
        self.memory, self.time = MemoryBound(mesh, self.mesh_blocks), TimeBound(self.mesh_blocks)

    def partial_layouts(self) -> Bounds:
        """Return the partial layouts of the mesh, which is legal, each with the least work of its layouts.

        A partial layout is ruled out here, before anything is priced, if the states of none of its layouts fit in
        memory. Which of its layouts fit is found when it is divided: most partial layouts never are.
        """
        bounded, counts, too_large_bytes = [], Counter[str](), math.inf
        for partial in partial_layouts_of(self.space, self.mesh):
            found = list(layouts_of(self.space, partial))
            legal = [x for x, fine in found if fine]
            counts.update(enumerated=len(found), legal=len(legal))
            # The highest ZeRO stage has the smallest states, so mostly the first test decides.
            if any(map(self._states_fit, sorted(legal, key=lambda x: -x.zero))):
                examples = self._unlike(legal)
                bounded.append(Bounded(min(map(self.time.least_work_s, examples)), 0.0, 1, partial, len(legal)))
            elif legal:
                counts["pruned_by_memory"] += len(legal)
                too_large_bytes = min(too_large_bytes, *map(self.memory.states_bytes, legal))
        return Bounds(bounded, counts, too_large_bytes, of_mesh=True)

    def layouts(self, partial: PartialLayout, patience_s: float, ceiling_s: float) -> Bounds:
        """Return the layouts of a partial layout that may fit in memory and take at most `ceiling_s` seconds.

        If the work alone takes longer than `patience_s` seconds, return the partial layout with a sharper bound.
        """
        legal = [x for x, fine in layouts_of(self.space, partial) if fine]
        left = [x for x in legal if self._states_fit(x)]
        # ZeRO-3 adds gathers, but its recomputation may stop earlier, so it is bounded by itself.
        least = [y for x in self._unlike(left) for y in ((x,) if x.zero == 3 else least_zeros(x))]
        if (work_s := min(map(self.time.work_bound_s, least))) > patience_s:
            return Bounds([Bounded(work_s, 0.0, 1, partial, len(legal))], Counter())
        bounded, counts = [], Counter(pruned_by_memory=len(legal) - len(left))
        too_large_bytes = min((self.memory.states_bytes(x) for x in legal if not self._states_fit(x)), default=math.inf)
        for layout in left:
            found = self._bounded(layout, ceiling_s)
            if isinstance(found, Bounded):
                bounded.append(found)
                continue
            counts[found] += 1
            if found == "pruned_by_memory":
                too_large_bytes = min(too_large_bytes, self.memory.least_bytes(layout))
        return Bounds(bounded, counts, too_large_bytes)

    def _states_fit(self, x: Layout) -> bool:
        """Tell whether parameters, gradients and optimizer alone fit in memory."""
        return self.memory.states_bytes(x) <= self.limit_bytes

    def _unlike(self, layouts: list[Layout]) -> list[Layout]:
        """Return one layout of each kind: those of a kind have one work bound (see `MeshBlocks.blocks`)."""
        by_stage = self.space.recomputes[layouts[0].recompute].layers is not None
        pairs = {x.schedule: schedule_form(self.space, x).pairs for x in layouts}
        one_of_kind = {
            (x.zero == 3, pairs[x.schedule], (x.schedule, x.virtual_stages) if by_stage else None): x for x in layouts
        }
        return list(one_of_kind.values())

    def _bounded(self, x: Layout, ceiling_s: float) -> Bounded | Literal["pruned_by_memory", "pruned_by_bound"]:
        """Return a layout with its bounds, or the name of the bound that rules it out."""
        # From the cheapest test to the most expensive: work, memory, the pipeline's bound.
        if self.time.work_bound_s(x) > ceiling_s:
            return "pruned_by_bound"
        if (memory := self.memory.least_bytes(x)) > self.limit_bytes:
            return "pruned_by_memory"
        if (bound := self.time.bound_s(x)) > ceiling_s:
            return "pruned_by_bound"
        # Only a searched schedule chooses its forwards by seconds, so only it needs prices for its memory.
        if FORMS[x.schedule].follows_times and (memory := self.memory.least_bytes(x, True)) > self.limit_bytes:
            return "pruned_by_memory"
        return Bounded(bound, memory, 2, x)
