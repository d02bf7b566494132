"""Best-first search: layouts are simulated in the order of their bounds, until no bound is below the best times.

A layout is left out only if its bound is above the `top`-th best simulated time (ties are simulated), so with a true
bound the best `top` are those of exhaustive search, whatever the order in which workers answer.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from sim.layout.bound import GridBounds
from sim.layout.evaluation import Outcome, bound_grid, evaluate, pack
from sim.layout.executors import Workers
from sim.layout.layouts import Grid, Layout, Space, grid_is_legal, grids

SCOUTS = 6  # meshes to bound before the first layouts are simulated
EAGER = 0.9  # while meshes are left, only layouts that may be this much better than the best are simulated


@dataclass
class Counts:
    """What became of the layouts: `legal` = pruned by memory + by bound + evaluated; evaluated = too large by their
    exact peak + beaten (too slow even before links were shared) + refused by the simulator + simulated in full."""

    enumerated: int = 0
    legal: int = 0
    pruned_by_memory: int = 0
    pruned_by_bound: int = 0
    evaluated: int = 0
    too_large: int = 0
    beaten: int = 0
    refused: int = 0
    simulated: int = 0


@dataclass
class CpuSeconds:
    """What it took, over all workers: to bound all layouts, and to evaluate those that turned out so."""

    bounding: float = 0.0
    too_large: float = 0.0
    beaten: float = 0.0
    refused: float = 0.0
    simulated: float = 0.0

    @property
    def evaluating(self) -> float:
        """All but bounding."""
        return self.too_large + self.beaten + self.refused + self.simulated


@dataclass(frozen=True)
class Found:
    """The best layouts, best first; the Pareto line of time against memory; everything simulated that fits."""

    best: list[Outcome]
    pareto: list[Outcome]
    fitting: list[Outcome]
    counts: Counts
    wall_s: float
    cpu_s: CpuSeconds
    cores: int

    @property
    def evaluating_s(self) -> float:
        """CPU seconds spent on layouts one by one."""
        return self.cpu_s.evaluating


@dataclass
class BestFirst:
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
    counts: Counts = field(default_factory=Counts)
    fitting: list[Outcome] = field(default_factory=list)
    meshes_left: list[Grid] = field(default_factory=list)
    meshes: int = 0
    cpu_s: CpuSeconds = field(default_factory=CpuSeconds)
    _heap: list[tuple[float, float, Layout]] = field(default_factory=list)
    _best_s: list[float] = field(default_factory=list)  # the `top` least times, negated heap
    _front: list[tuple[float, float]] = field(default_factory=list)
    _walked: set[Layout] = field(default_factory=set)  # which stand in the heap with the time of their walk

    def run(self) -> Found:
        """Search."""
        begin = time.perf_counter()
        packed = pack(self.space)
        self.meshes_left = sorted(self._legal_meshes(), key=lambda g: _promise(self.space, g))
        self.meshes = len(self.meshes_left)
        running: set[Future[Any]] = set()
        while True:
            slots = self.workers.slots
            while len(running) < slots and (task := self._next(packed)) is not None:
                running.add(self.workers.executor.submit(*task))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                self._take(future.result())
            self.report(self)
        for _, _, layout in self._heap:
            self._leave_out(layout)
        ranked = sorted(self.fitting, key=_rank)
        return Found(
            ranked[: self.top],
            pareto(self.fitting),
            ranked,
            self.counts,
            time.perf_counter() - begin,
            self.cpu_s,
            self.workers.cores(),
        )

    @property
    def ceiling_s(self) -> float:
        """The time that the `top`-th best layout takes so far."""
        return -self._best_s[0] if len(self._best_s) == self.top else float("inf")

    def _legal_meshes(self) -> list[Grid]:
        found = []
        for grid in grids(self.space):
            if grid_is_legal(self.space, grid):
                found.append(grid)
            else:
                self.counts.enumerated += 1
        return found

    def _next(self, packed: bytes) -> tuple[Any, ...] | None:
        """The next task: simulate what may be better by far, else bound a mesh, else simulate what may be better."""
        scouting = self.meshes - len(self.meshes_left) < min(SCOUTS, self.meshes)
        share = EAGER if self.meshes_left else 1.0
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
        while self._heap and self._heap[0][0] <= self.ceiling_s * share:
            return heapq.heappop(self._heap)[2]
        while self.whole_front and not self.meshes_left and self._heap:
            bound_s, memory, layout = heapq.heappop(self._heap)
            if not any(t < bound_s and m <= memory for t, m in self._front):
                return layout
            self._leave_out(layout)
        return None

    def _patience_s(self, layout: Layout) -> float:
        """Up to which least time a layout is simulated at once: beyond, another may be faster, and it is put off."""
        if self.whole_front or layout in self._walked:
            return float("inf")
        return min(self.ceiling_s, self._heap[0][0] if self._heap else float("inf"))

    def _leave_out(self, layout: Layout) -> None:
        """Count a layout that is too slow by its bound, or by its walk."""
        walked = layout in self._walked
        self.counts.evaluated += walked
        self.counts.beaten += walked
        self.counts.pruned_by_bound += not walked

    def _take(self, result: GridBounds | Outcome) -> None:
        if isinstance(result, Outcome):
            self._judge(result)
            return
        self.cpu_s.bounding += result.cpu_s
        self.counts.enumerated += result.enumerated
        self.counts.legal += result.legal
        self.counts.pruned_by_memory += result.pruned_by_memory
        self.counts.pruned_by_bound += result.pruned_by_bound
        for b in result.bounded:
            heapq.heappush(self._heap, (b.bound_s, b.memory_bytes, b.layout))

    def _judge(self, result: Outcome) -> None:
        counts, cpu_s = self.counts, self.cpu_s
        if result.beaten:
            cpu_s.beaten += result.cpu_s
            self._walked.add(result.layout)
            heapq.heappush(self._heap, (result.step_time_s, result.peak_memory_bytes, result.layout))
            return
        counts.evaluated += 1
        if result.refused:
            counts.refused += 1
            cpu_s.refused += result.cpu_s
            return
        if result.peak_memory_bytes > self.limit_bytes:
            counts.too_large += 1
            cpu_s.too_large += result.cpu_s
            return
        counts.simulated += 1
        cpu_s.simulated += result.cpu_s
        self.fitting.append(result)
        heapq.heappush(self._best_s, -result.step_time_s)
        if len(self._best_s) > self.top:
            heapq.heappop(self._best_s)
        point = (result.step_time_s, result.peak_memory_bytes)
        if not any(t <= point[0] and m <= point[1] for t, m in self._front):
            self._front = [f for f in self._front if not (point[0] <= f[0] and point[1] <= f[1])] + [point]


def pareto(outcomes: list[Outcome]) -> list[Outcome]:
    """Those that no other beats in time or memory without losing in the other, fastest first."""
    line: list[Outcome] = []
    for outcome in sorted(outcomes, key=_rank):
        if not line or outcome.peak_memory_bytes < line[-1].peak_memory_bytes:
            line.append(outcome)
    return line


def _rank(outcome: Outcome) -> tuple[float, float, Layout]:
    return outcome.step_time_s, outcome.peak_memory_bytes, outcome.layout


def _promise(space: Space, grid: Grid) -> tuple[float, ...]:
    """Which meshes are looked at first: a good time found early spares work, and changes nothing else."""
    inside = grid.tp * grid.ep <= space.base.cluster.domain_gpus
    return (inside, -grid.cp, -abs(grid.pp - 4), grid.tp)
