"""Measures a step's memory: bytes saved for the backward, and the peak of all allocated bytes.

Documentation: docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from calibrate.parallel.recompute import kept_watchers
from calibrate.parallel.runner import Runner
from calibrate.parallel.storages import resident, storages
from sim.core.actions import Action, Kind

_RUN = "run whose allocations count"  # the name of a run among the profiler's events


@contextmanager
def saved_storages(ignore: dict[int, int]) -> Iterator[dict[int, int]]:
    """Yield the storages that forwards within the block save for their backward, without `ignore`: identity → bytes."""
    found: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in ignore:
            found[storage._cdata] = storage.nbytes()
        return t

    kept_watchers.append(pack)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            yield found
    finally:
        kept_watchers.remove(pack)


@dataclass(slots=True)
class SavedBytes:
    """Follows a step's actions and keeps the peak of bytes saved for the backward."""

    runner: Runner
    ignore: dict[int, int] = field(default_factory=dict)
    held: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    peak: int = 0

    def step(self, run: Callable[[], object]) -> int:
        """Run a step, watch every forward, and return the peak in bytes."""
        runner = self.runner
        self.ignore = resident(b for s in runner.stages.values() for b in s.blocks)
        originals = {s: stage.forward for s, stage in runner.stages.items()}
        runner.pipeline.forward_of = {s: self._watched(s, f) for s, f in originals.items()}
        runner.pipeline.after_action = self._after
        for offload in runner.offloads.values():
            offload.grown = self._note
        try:
            run()
        finally:
            for offload in runner.offloads.values():
                offload.grown = lambda: None
            runner.pipeline.forward_of = {}
            runner.pipeline.after_action = lambda action: None
        return self.peak

    def _watched(self, s: int, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watched(micro_batch: int, x: Tensor, targets: Tensor) -> Tensor:
            with saved_storages(self.ignore) as found:
                y = forward(micro_batch, x, targets)
            self.held[s, micro_batch] = found
            self._note()
            return y

        return watched

    def total(self) -> int:
        """Return the bytes saved now."""
        return sum(sum(found.values()) for found in (*self.held.values(), self._offloaded()))

    def _note(self) -> None:
        self.peak = max(self.peak, self.total())

    def _offloaded(self) -> dict[int, int]:
        """Return what offloading blocks hold on the device, with what a split backward's weight half still needs."""
        found: dict[int, int] = {}
        for s, offload in self.runner.offloads.items():
            jobs = self.runner.stages[s].store.deferred or []
            found |= offload.on_device | storages(x for job in jobs for x in job[:2])
        return found

    def _after(self, a: Action) -> None:
        key = (a.stage, a.micro_batch)
        if a.kind in (Kind.B, Kind.W):
            self.held.pop(key)
        elif a.kind is Kind.I:
            jobs, embedded, grad = self.runner.stages[a.stage].deferred[a.micro_batch]
            if jobs and isinstance(jobs[0], list):  # one list for each block
                jobs = [job for block in jobs for job in block]
            kept = storages(x for job in jobs for x in job[:2])
            kept |= {} if embedded is None else storages([grad])
            self.held[key] = kept


def allocated_peak(runner: Runner, run: Callable[[], object]) -> int:
    """Return the peak of allocated bytes over a step: parameters, gradients, optimizer state and all allocations.

    The figures are the allocator's: torch's memory statistics on a GPU, the profiler's allocation events on a CPU.
    Gloo's copies within a collective are left out, as NCCL makes none and its buffers do not count either.
    """
    if runner.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated()
    base = held_before(runner)
    _, allocations = profiled_allocations(runner, [run])
    return base + peak_bytes(allocations)


def profiled_allocations(
    runner: Runner, runs: Sequence[Callable[[], object]]
) -> tuple[list[tuple[int, int]], list[Allocation]]:
    """Run `runs` on a CPU and return each one's begin and end in nanoseconds, and all allocations and releases.

    Paired actions run one after the other meanwhile, since allocations of other threads count as the collectives' own.
    """
    pipeline, together = runner.pipeline, runner.pipeline.together
    pipeline.together = False
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            for run in runs:
                with record_function(_RUN):
                    run()
    finally:
        pipeline.together = together
    results: Any = profiler.profiler
    roots = results.kineto_results.experimental_event_tree()
    own = [root for root in roots if root.name == _RUN]
    allocations: list[Allocation] = []
    for root in roots:
        _collect(root, root.start_tid != own[0].start_tid, allocations)
    return sorted((root.start_time_ns, root.end_time_ns) for root in own), allocations


def peak_bytes(allocations: Sequence[Allocation]) -> int:
    """Return the most bytes held at once, without the collectives' own."""
    return max((held for _, held in held_over_time(allocations)), default=0)


def held_over_time(allocations: Sequence[Allocation]) -> list[tuple[int, int]]:
    """Return (nanoseconds, bytes held) after each allocation and release, without the collectives' own.

    If a collective's thread frees a tensor last, the release may be missing. A new allocation at the same address shows
    it.
    """
    held: dict[int, int] = {}
    out, now = [], 0
    for start_ns, pointer, size, transport in sorted(allocations):
        now -= held.pop(pointer, 0)
        if size > 0 and not transport:
            held[pointer] = size
            now += size
        out.append((start_ns, now))
    return out


class Allocation(NamedTuple):
    """An allocation event of the profiler. `bytes` is negative for a release; `transport`: a collective's own."""

    start_ns: int
    pointer: int
    bytes: int
    transport: bool


def _collect(event: Any, transport: bool, out: list[Allocation]) -> None:
    """Add to `out` all allocations under an event of the profiler's tree."""
    if event.tag == _EventType.Allocation:
        fields = event.extra_fields
        out.append(Allocation(event.start_time_ns, fields.ptr, fields.alloc_size, transport))
    inside = transport or event.name.startswith("c10d::")
    for child in event.children:
        _collect(child, inside, out)


def held_before(runner: Runner) -> int:
    """Return the bytes of parameters, gradients, optimizer state and constants."""
    found = resident(b for s in runner.stages.values() for b in s.blocks)
    found |= storages(x for p in runner.owned() for x in (p, p.grad) if x is not None)
    states = (v for p in runner.owned() for v in runner.optimizer.state.get(p, {}).values())
    found |= storages(v for v in states if isinstance(v, Tensor))
    return sum(found.values())
