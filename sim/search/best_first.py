"""Best-first branch and bound: the part of the space with the least bound is divided next, until every bound is above
the K-th best time.

A part is a mesh, a way to run its layers, or a layout. The part of the least bound is divided into smaller ones with
sharper bounds; a layout is simulated. A part is left out only if its bound is above the `top`-th best simulated time
(ties are simulated), so with true bounds the best `top` are those of exhaustive search, whatever the order in which
workers answer. With one worker no part is divided whose bound is above that time.
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

from sim.search.bound import Bounded, Bounds
from sim.search.evaluation import FATES, Fate, Outcome, bound_grid, bound_way, evaluate, pack
from sim.search.space import Grid, Layout, Space, Way, grid_is_legal, grids
from sim.studies.executors import Workers

COUNTED = ("enumerated", "legal", "pruned_by_memory", "pruned_by_bound", "evaluated", *FATES)


class Found(Struct, frozen=True, dict=True):
    """The best layouts, best first; the Pareto line of time against memory; everything simulated that fits.

    `counts` by COUNTED: legal = pruned by memory + by bound + evaluated; evaluated = the sum over FATES. `refusals` by
    reason. `cpu_s`, over all workers: what it took to bound all layouts, and to evaluate those of each fate.
    """

    best: list[Outcome]
    pareto: list[Outcome]
    fitting: list[Outcome]
    counts: dict[str, int]
    refusals: dict[str, int]
    wall_s: float
    cpu_s: dict[str, float]
    cores: int


class BestFirst(Struct, dict=True):
    """The state of a search: parts by bound, times so far.

    With `whole_front` a layout is left out only if a simulated one is both faster than its bound and within its least
    memory, so the Pareto line is that of the whole space.
    """

    space: Space
    limit_bytes: float
    top: int
    whole_front: bool
    workers: Workers
    report: Callable[[BestFirst], None] = lambda _: None
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTED, 0)))
    fitting: list[Outcome] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("bounding", *FATES), 0.0))
    _refusals: Counter[str] = field(default_factory=Counter)
    _heap: list[Bounded] = field(default_factory=list)
    _best_s: list[float] = field(default_factory=list)  # the `top` least times, negated heap
    _front: list[tuple[float, float]] = field(default_factory=list)
    _put_back: set[Layout] = field(default_factory=set)  # in the heap again, with their least time

    def run(self) -> Found:
        """Search."""
        begin = time.perf_counter()
        # Packed once: every task carries the same bytes, and a worker unpacks them once by their hash.
        packed = pack(self.space)
        # No mesh has a bound yet, so all are bounded before anything else.
        self._heap = [Bounded(0.0, 0.0, 0, grid, 0) for grid in self._legal_meshes()]
        heapq.heapify(self._heap)
        running: set[Future[Any]] = set()
        while True:
            # Asked anew each time: workers of a Dask cluster come and go.
            slots = self.workers.slots
            # Tasks go out only when a slot is free. A queued layout would run though a new result has ruled it out.
            while len(running) < slots and (task := self._next(packed)) is not None:
                running.add(self.workers.executor.submit(*task))
            # Nothing runs and nothing was to be started: every part left has a bound above the ceiling.
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                self._take(future.result())
            self.report(self)
        # What is left was never simulated. It is counted here, so that the counts add up to the legal layouts.
        for left in self._heap:
            self._leave_out(left)
        ranked = sorted(self.fitting, key=_rank)
        return Found(
            ranked[: self.top],
            pareto(self.fitting),
            ranked,
            dict(self.counts),
            dict(self._refusals.most_common()),
            time.perf_counter() - begin,
            self.cpu_s,
            self.workers.cores(),
        )

    @property
    def ceiling_s(self) -> float:
        """The time that the `top`-th best layout takes so far."""
        # With fewer than `top` times the slowest layout may still be among the best, so nothing may be ruled out.
        return -self._best_s[0] if len(self._best_s) == self.top else float("inf")

    def _legal_meshes(self) -> list[Grid]:
        """An illegal mesh counts as one layout."""
        found = list(grids(self.space))
        legal = [grid for grid in found if grid_is_legal(self.space, grid)]
        self.counts["enumerated"] += len(found) - len(legal)
        return legal

    @property
    def progress(self) -> float:
        """How near the least bound has come to the time that it must reach, from 0 to 1."""
        if not self._heap:
            return 1.0
        return min(1.0, self._heap[0].bound_s / self.ceiling_s)

    def _next(self, packed: bytes) -> tuple[Any, ...] | None:
        """The next task: divide the part of the least bound, or simulate it."""
        if (found := self._pop()) is None:
            return None
        # A slow layout of little memory may be on the Pareto line, so time alone must not prune it there.
        ceiling_s = math.inf if self.whole_front else self.ceiling_s
        # The next bound in the heap. Beyond it another part has the better chance to hold something quick. It is never
        # below this part's own, so a part that is put off with a sharper bound is divided when it comes again.
        next_s = min(ceiling_s, self._heap[0].bound_s if self._heap else math.inf)
        part = found.part
        if isinstance(part, Grid):
            return bound_grid, packed, part, self.limit_bytes
        if isinstance(part, Way):
            return bound_way, packed, part, self.limit_bytes, next_s, ceiling_s
        # Its least time is its place in the heap already. Asking for that again would put it off for ever.
        at_once = self.whole_front or part in self._put_back
        return evaluate, packed, part, self.limit_bytes, math.inf if at_once else next_s

    def _pop(self) -> Bounded | None:
        """The part with the lowest bound, if that is not above the ceiling."""
        # A tie counts: it may need less memory, and rank before.
        if self._heap and self._heap[0].bound_s <= self.ceiling_s:
            return heapq.heappop(self._heap)
        # The rest is above the ceiling and of interest for its memory alone.
        while self.whole_front and self._heap:
            found = heapq.heappop(self._heap)
            # Both numbers are lower bounds. A point that beats them beats the layout, whatever it really takes.
            if not any(t < found.bound_s and m <= found.memory_bytes for t, m in self._front):
                return found
            self._leave_out(found)
        return None

    def _leave_out(self, left: Bounded) -> None:
        """Count a part whose layouts are too slow by its bound, or a layout that is by its least time."""
        # Its compiled programs were priced, so it counts as evaluated though no engine ran it in full.
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
        self.counts.update(result.counts)
        for part in result.bounded:
            heapq.heappush(self._heap, part)

    def _judge(self, result: Outcome) -> None:
        self.cpu_s[result.fate] += result.cpu_s
        point = (result.step_time_s, result.peak_memory_bytes)
        # A least time is a sharper bound than the mesh's. The layout returns to the heap with it.
        if result.fate == "beaten":  # so far: its turn may come
            self._put_back.add(result.layout)
            heapq.heappush(self._heap, Bounded(*point, 2, result.layout))
            return
        self._settle(result.fate)
        if result.fate == "refused":
            self._refusals[result.reason] += 1
        if result.fate != "simulated":
            return
        self.fitting.append(result)
        # heapq pops the least, and here the slowest of the best must go: times are negated.
        heapq.heappush(self._best_s, -result.step_time_s)
        if len(self._best_s) > self.top:
            heapq.heappop(self._best_s)
        # Only undominated points are kept, since each layout that is popped is compared with all of them.
        if not any(t <= point[0] and m <= point[1] for t, m in self._front):
            self._front = [f for f in self._front if not (point[0] <= f[0] and point[1] <= f[1])] + [point]


def pareto(outcomes: list[Outcome]) -> list[Outcome]:
    """Those that no other beats in time or memory without losing in the other, fastest first."""
    line: list[Outcome] = []
    # In the order of time a point is on the line if it needs less memory than the last one on it.
    for outcome in sorted(outcomes, key=_rank):
        if not line or outcome.peak_memory_bytes < line[-1].peak_memory_bytes:
            line.append(outcome)
    return line


def _rank(outcome: Outcome) -> tuple[float, float, Layout]:
    return outcome.step_time_s, outcome.peak_memory_bytes, outcome.layout
