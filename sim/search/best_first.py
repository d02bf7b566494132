"""Best-first search: layouts are simulated in the order of their bounds, until no bound is below the best times.

A layout is left out only if its bound is above the `top`-th best simulated time (ties are simulated), so with a true
bound the best `top` are those of exhaustive search, whatever the order in which workers answer.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from msgspec import Struct, field

from sim.search.bound import GridBounds
from sim.search.evaluation import FATES, Fate, Outcome, bound_grid, evaluate, pack
from sim.search.space import Grid, Layout, Space, grid_is_legal, grids
from sim.studies.executors import Workers

# The first mesh may be a poor one. Simulating its layouts would set a ceiling that rules out nothing.
SCOUTS = 6  # meshes to bound before the first layouts are simulated
COUNTED = ("enumerated", "legal", "pruned_by_memory", "pruned_by_bound", "evaluated", *FATES)
# Bounding a mesh is cheaper than simulating and may lower the ceiling. Layouts that can win little wait.
EAGER = 0.9  # while meshes are left, only layouts that may be this much better than the best are simulated


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
    """The state of a search: meshes to bound, layouts by bound, times so far.

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
    meshes_left: list[Grid] = field(default_factory=list)
    meshes: int = 0
    cpu_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("bounding", *FATES), 0.0))
    _refusals: Counter[str] = field(default_factory=Counter)
    # (bound in seconds, least memory in bytes, layout): equal bounds leave the heap in one fixed order.
    _heap: list[tuple[float, float, Layout]] = field(default_factory=list)
    _best_s: list[float] = field(default_factory=list)  # the `top` least times, negated heap
    _front: list[tuple[float, float]] = field(default_factory=list)
    _timed: set[Layout] = field(default_factory=set)  # which stand in the heap with their least time

    def run(self) -> Found:
        """Search."""
        begin = time.perf_counter()
        # Packed once: every task carries the same bytes, and a worker unpacks them once by their hash.
        packed = pack(self.space)
        # Ascending, because meshes are taken from the end.
        self.meshes_left = sorted(self._legal_meshes(), key=lambda g: _promise(self.space, g))
        self.meshes = len(self.meshes_left)
        running: set[Future[Any]] = set()
        while True:
            # Asked anew each time: workers of a Dask cluster come and go.
            slots = self.workers.slots
            # Tasks go out only when a slot is free. A queued layout would run though a new result has ruled it out.
            while len(running) < slots and (task := self._next(packed)) is not None:
                running.add(self.workers.executor.submit(*task))
            # Nothing runs and nothing was to be started: every layout left has a bound above the ceiling.
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                self._take(future.result())
            self.report(self)
        # What is left was never simulated. It is counted here, so that the counts add up to the legal layouts.
        for _, _, layout in self._heap:
            self._leave_out(layout)
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

    def _next(self, packed: bytes) -> tuple[Any, ...] | None:
        """The next task: simulate what may be better by far, else bound a mesh, else simulate what may be better."""
        scouting = self.meshes - len(self.meshes_left) < min(SCOUTS, self.meshes)
        share = EAGER if self.meshes_left else 1.0
        # A slow layout of little memory may be on the Pareto line, so time alone must not prune it there.
        ceiling = float("inf") if self.whole_front else self.ceiling_s
        if not scouting:
            layout = self._pop(share)
            if layout is not None:
                return evaluate, packed, layout, self.limit_bytes, self._patience_s(layout)
        if self.meshes_left:
            return bound_grid, packed, self.meshes_left.pop(), self.limit_bytes, ceiling
        return None

    def _pop(self, share: float) -> Layout | None:
        """The layout with the lowest bound, if that is below `share` of the ceiling."""
        # A tie counts: it may need less memory, and rank before.
        if self._heap and self._heap[0][0] <= self.ceiling_s * share:
            return heapq.heappop(self._heap)[2]
        # The rest is above the ceiling and of interest for its memory alone. It waits until all meshes are bounded, as
        # a front of more points rules out more.
        while self.whole_front and not self.meshes_left and self._heap:
            bound_s, memory, layout = heapq.heappop(self._heap)
            # Both numbers are lower bounds. A point that beats them beats the layout, whatever it really takes.
            if not any(t < bound_s and m <= memory for t, m in self._front):
                return layout
            self._leave_out(layout)
        return None

    def _patience_s(self, layout: Layout) -> float:
        """Up to which least time a layout is simulated at once: beyond, another may be faster, and it is put off."""
        # Its least time is its place in the heap already. Asking for that again would put it off for ever.
        if self.whole_front or layout in self._timed:
            return float("inf")
        # The next bound in the heap: beyond it another layout has the better chance to be quick.
        return min(self.ceiling_s, self._heap[0][0] if self._heap else float("inf"))

    def _leave_out(self, layout: Layout) -> None:
        """Count a layout that is too slow by its bound, or by its least time."""
        # Its compiled programs were priced, so it counts as evaluated though no engine ran it in full.
        if layout in self._timed:
            self._settle("beaten")
        else:
            self.counts["pruned_by_bound"] += 1

    def _settle(self, fate: Fate) -> None:
        self.counts["evaluated"] += 1
        self.counts[fate] += 1

    def _take(self, result: GridBounds | Outcome) -> None:
        if isinstance(result, Outcome):
            self._judge(result)
            return
        self.cpu_s["bounding"] += result.cpu_s
        self.counts.update(result.counts)
        for b in result.bounded:
            heapq.heappush(self._heap, (b.bound_s, b.memory_bytes, b.layout))

    def _judge(self, result: Outcome) -> None:
        self.cpu_s[result.fate] += result.cpu_s
        point = (result.step_time_s, result.peak_memory_bytes)
        # A least time is a sharper bound than the mesh's. The layout returns to the heap with it.
        if result.fate == "beaten":  # so far: its turn may come
            self._timed.add(result.layout)
            heapq.heappush(self._heap, (*point, result.layout))
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


def _promise(space: Space, grid: Grid) -> tuple[float, ...]:
    """Which meshes are looked at first: a good time found early spares work, and changes nothing else."""
    # Tensor- and expert-parallel messages block every layer, so NVLink decides most. Context parallelism is seldom
    # needed. Around four stages bubbles are small and states are divided well.
    inside = grid.tp * grid.ep <= space.base.cluster.domain_gpus
    return (inside, -grid.cp, -abs(grid.pp - 4), grid.tp)
