"""Search for the best layouts by best-first branch and bound.

A part of the space is a mesh, a partial layout (mesh and how its layers run), or a layout. The search always takes
the part with the least lower bound on the step time. It divides a mesh or a partial layout into smaller parts with
sharper bounds, and simulates a layout. It leaves out a part only if the part's bound is above the `top`-th best
simulated time. With true lower bounds the best `top` layouts are therefore those of an exhaustive search, in whatever
order workers answer. Two kinds of twins would fill the list, and are left out of it: of layouts that differ in the
number of virtual stages alone, which mostly take nearly the same time, all but the fastest; and layouts whose
recomputation makes the step longer and does not save `WORTH` of the memory of an otherwise equal one.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from msgspec import Struct, field

from sim.core.executors import Workers
from sim.search.bounded import Bounded, Bounds
from sim.search.evaluation import FATES, Fate, Outcome, bound_mesh, bound_partial_layout, evaluate, pack
from sim.search.space import Layout, MeshSizes, PartialLayout, Space, mesh_is_legal, meshes_of

WORTH = 0.01
COUNTED = ("enumerated", "legal", "pruned_by_memory", "pruned_by_bound", "evaluated", *FATES)


class BestFirst(Struct, dict=True):
    """Hold the state of a search: the parts by their bounds, and what was found so far.

    `limit_bytes` is that of `sim.search.evaluation`.

    With `whole_front` a layout is left out only if a simulated layout is faster than its bound and needs no more than
    its least memory. The Pareto front is then that of the whole space.

    `fitting`: all simulated layouts that fit in memory, at the end best first. `counts`: number of layouts by COUNTED;
    legal = pruned by memory + pruned by bound + evaluated; evaluated = the sum over FATES. `refusals`: their number by
    reason. `meshes`: the number of legal meshes; `meshes_bounded`: of those that have a bound so far. No layout is
    evaluated before all of them have one. `too_large_bytes`: as in `Bounds`. `cpu_s`: CPU seconds of all workers, for
    bounds and for the evaluations of each fate. `wall_s`: seconds of the search. `cores`: workers' cores.
    `interrupted`: Ctrl-C ended it; `fitting` and `counts` then have what was found by then.
    """

    space: Space
    limit_bytes: float | None
    top: int
    whole_front: bool
    workers: Workers
    report: Callable[[BestFirst], None] = lambda _: None
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTED, 0)))
    fitting: list[Outcome] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    cpu_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("bounding", *FATES), 0.0))
    too_large_bytes: float = math.inf
    wall_s: float = 0.0
    cores: int = 0
    meshes: int = 0
    meshes_bounded: int = 0
    interrupted: bool = False
    _heap: list[Bounded] = field(default_factory=list)
    _best_s: dict[Layout, float] = field(default_factory=dict)  # the least time of each `_family`
    _front: list[tuple[float, float]] = field(default_factory=list)
    _put_back: set[Layout] = field(default_factory=set)  # layouts that are in the heap again, with their least time

    def run(self) -> BestFirst:
        """Run the search to its end, and return it.

        Raises:
            KeyboardInterrupt: at Ctrl-C; the search then has what it found so far, as a finished one has.
        """
        begin = time.perf_counter()
        try:
            self._search()
        except KeyboardInterrupt:
            self.interrupted = True
            raise
        finally:
            # Parts that are left are counted too, so that the counts add up to the legal layouts of a finished search.
            for left in self._heap if not self.interrupted else self._above_ceiling():
                self._leave_out(left)
            self.fitting.sort(key=_rank)
            self.wall_s, self.cores = time.perf_counter() - begin, self.workers.cores()
        return self

    def _search(self) -> None:
        # Every task carries the same bytes, so that a worker finds them unpacked already.
        packed = pack(self.space)
        # A bound of 0 puts all meshes first: each must be bounded before any part is divided.
        self._heap = [Bounded(0.0, 0.0, 0, mesh, 0) for mesh in self._legal_meshes()]
        self.meshes = len(self._heap)
        heapq.heapify(self._heap)
        running: set[Future[Any]] = set()
        while True:
            # The number may change: workers of a Dask cluster come and go.
            slots = self.workers.slots
            # Tasks are sent only when a slot is free: a new result may rule out a layout that waits in a queue.
            while len(running) < slots and (task := self._next(packed)) is not None:
                running.add(self.workers.executor.submit(*task))
            # Nothing runs and nothing can start: every part that is left has a bound above the ceiling.
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                self._take(future.result())
            self.report(self)

    @property
    def ruled_out(self) -> int:
        """Return the number of layouts that bounds rule out so far, by memory or by time."""
        above = sum(left.legal for left in self._above_ceiling() if left.part not in self._put_back)
        return self.counts["pruned_by_memory"] + self.counts["pruned_by_bound"] + above

    def _above_ceiling(self) -> list[Bounded]:
        """Return the parts that are left and that nothing but the whole front would still look at."""
        ceiling_s = math.inf if self.whole_front else self.ceiling_s
        return [left for left in self._heap if left.bound_s > ceiling_s]

    @property
    def best(self) -> list[Outcome]:
        """Return the best layouts, best first, once the search has ended."""
        found: dict[Layout, Outcome] = {}
        for outcome in self.fitting:
            found.setdefault(_alike(outcome.layout), outcome)
        listed: list[Outcome] = []
        least: dict[Layout, float] = {}  # bytes of each family's listed layouts
        for outcome in found.values():
            family = _family(outcome.layout)
            if outcome.peak_memory_bytes <= (1 - WORTH) * least.get(family, math.inf):
                least[family] = outcome.peak_memory_bytes
                listed.append(outcome)
        return listed[: self.top]

    @property
    def ceiling_s(self) -> float:
        """Return a time within which `top` layouts are listed so far, in seconds; infinite with fewer layouts."""
        # With fewer than `top` times the slowest layout may still be among the best, so nothing may be ruled out. The
        # fastest of a family is surely listed. Others may yet be found to be no better than it, so they do not count.
        least = heapq.nsmallest(self.top, self._best_s.values())
        return least[-1] if len(least) == self.top else float("inf")

    def _legal_meshes(self) -> list[MeshSizes]:
        """Return the legal meshes, and count each illegal one as one layout."""
        found = list(meshes_of(self.space))
        legal = [mesh for mesh in found if mesh_is_legal(self.space, mesh)]
        self.counts["enumerated"] += len(found) - len(legal)
        return legal

    @property
    def progress(self) -> float:
        """Return a number from 0 to 1, at which the search ends: half of it for bounds of meshes, half for the rest.

        The second half is least bound ÷ ceiling.
        """
        if self.meshes_bounded < self.meshes:
            return 0.5 * self.meshes_bounded / self.meshes
        return 0.5 + 0.5 * min(1.0, self._heap[0].bound_s / self.ceiling_s) if self._heap else 1.0

    def _next(self, packed: bytes) -> tuple[Any, ...] | None:
        """Return the next task, a function and its arguments: divide the part with the least bound, or simulate it."""
        if (found := self._pop()) is None:
            return None
        # A slow layout that needs little memory may lie on the whole Pareto front, so time alone must not rule it out.
        ceiling_s = math.inf if self.whole_front else self.ceiling_s
        # A part whose sharper bound exceeds the heap's next bound goes back into the heap: the next part is then the
        # one with the least bound. The heap's next bound is never below this part's, so each part makes progress.
        next_s = min(ceiling_s, self._heap[0].bound_s if self._heap else math.inf)
        part = found.part
        if isinstance(part, MeshSizes):
            return bound_mesh, packed, part, self.limit_bytes
        if isinstance(part, PartialLayout):
            return bound_partial_layout, packed, part, self.limit_bytes, next_s, ceiling_s
        # A layout that was put back has its least time as its bound. Testing that again would put it back for ever.
        at_once = self.whole_front or part in self._put_back
        return evaluate, packed, part, self.limit_bytes, math.inf if at_once else next_s

    def _pop(self) -> Bounded | None:
        """Take the part with the least bound from the heap, if that bound is not above the ceiling."""
        # A layout of equal time may need less memory and so rank before.
        if self._heap and self._heap[0].bound_s <= self.ceiling_s:
            return heapq.heappop(self._heap)
        # Parts above the ceiling matter only for the whole Pareto front, by their memory.
        while self.whole_front and self._heap:
            found = heapq.heappop(self._heap)
            # Both numbers are lower bounds, so a point that beats them beats the layout.
            if not any(t < found.bound_s and m <= found.memory_bytes for t, m in self._front):
                return found
            self._leave_out(found)
        return None

    def _leave_out(self, left: Bounded) -> None:
        """Count a part that is ruled out by its bound, or a layout that is ruled out by its least time."""
        # A layout with a least time was priced and compiled, so it counts as evaluated though it was not simulated.
        if left.part in self._put_back:
            self._settle("beaten")
        else:
            self.counts["pruned_by_bound"] += left.legal

    def _settle(self, fate: Fate) -> None:
        self.counts["evaluated"] += 1
        self.counts[fate] += 1

    def _take(self, result: Bounds | Outcome) -> None:
        if isinstance(result, Outcome):
            self._judge(result)
            return
        self.cpu_s["bounding"] += result.cpu_s
        self.meshes_bounded += result.of_mesh
        self.counts.update(result.counts)
        self.too_large_bytes = min(self.too_large_bytes, result.too_large_bytes)
        for part in result.bounded:
            heapq.heappush(self._heap, part)

    def _judge(self, result: Outcome) -> None:
        self.cpu_s[result.fate] += result.cpu_s
        point = (result.step_time_s, result.peak_memory_bytes)
        # A least time is a sharper bound than the layout had. The layout returns to the heap with it.
        if result.fate == "beaten":  # for now; it is simulated if its least time becomes the least bound
            self._put_back.add(result.layout)
            heapq.heappush(self._heap, Bounded(*point, 2, result.layout))
            return
        self._settle(result.fate)
        if result.fate == "refused":
            self.refusals[result.reason] += 1
        if result.fate == "too_large":
            self.too_large_bytes = min(self.too_large_bytes, result.peak_reserved_bytes)
        if result.fate != "simulated":
            return
        self.fitting.append(result)
        family = _family(result.layout)
        self._best_s[family] = min(result.step_time_s, self._best_s.get(family, math.inf))
        # Only undominated points are kept, because each part that is popped is compared with all of them.
        if not any(t <= point[0] and m <= point[1] for t, m in self._front):
            self._front = [f for f in self._front if not (point[0] <= f[0] and point[1] <= f[1])] + [point]


def pareto(outcomes: list[Outcome]) -> list[Outcome]:
    """Return the outcomes for which no other needs less memory without being slower, fastest first."""
    line: list[Outcome] = []
    # In the order of time an outcome is on the front if it needs less memory than the last one on it.
    for outcome in sorted(outcomes, key=_rank):
        if not line or outcome.peak_memory_bytes < line[-1].peak_memory_bytes:
            line.append(outcome)
    return line


def _alike(layout: Layout) -> Layout:
    """Return what layouts have in common that differ in the number of virtual stages alone."""
    return layout._replace(virtual_stages=0)


def _family(layout: Layout) -> Layout:
    """Return what layouts have in common that differ in recomputation and the number of virtual stages alone."""
    return _alike(layout)._replace(recompute="")


def _rank(outcome: Outcome) -> tuple[float, float, Layout]:
    return outcome.step_time_s, outcome.peak_memory_bytes, outcome.layout
