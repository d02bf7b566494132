"""The paired calibration: a real step's blocks timed one by one, in the order in which the step runs them.

Kernels timed apart miss what autograd, dispatch and cold caches cost (4–9 % of a step, 29 % of a small
one), and blocks timed in a hot loop come out 12–17 % low. So every rank walks its own action list, as in
the step, all ranks at once and over distinct blocks with gradients adding up; only the messages are left
out, and each block has its own clock. Messages, all-reduces and the optimizer are timed on their own
right after, in the same surroundings.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrate.model import Embedding, Head
from calibrate.parallel.runner import Runner
from sim.actions import Action, Kind, parts

Sample = tuple[str, str]  # block key, phase


@dataclass(slots=True)
class _InFlight:
    """One micro-batch on one stage: per block its input, its output's place in the graph, and deferred
    jobs."""

    inputs: list[Tensor] = field(default_factory=list)
    edges: list[object] = field(default_factory=list)
    jobs: list[list[object]] = field(default_factory=list)
    embedding_grad: Tensor | None = None


class Rehearsal:
    """Times every block of a rank's action list. `keys[stage]` are the profile keys of its blocks."""

    def __init__(self, runner: Runner, keys: dict[int, Sequence[str]]) -> None:
        self.runner, self.keys = runner, keys
        self.samples: dict[Sample, list[float]] = defaultdict(list)
        self.flight: dict[tuple[int, int], _InFlight] = {}
        self.x = torch.randn(runner.pipeline.shape, dtype=runner.dtype, device=runner.device)
        self.grad = torch.randn_like(self.x) * 1e-3

    def _clock(self) -> int:
        """Nanoseconds of this thread's own CPU time; on a GPU of the wall clock, queued work included.

        A block runs on one thread, so on a quiet machine the two clocks agree; when others want the core, CPU
        time leaves out the waiting for it.
        """
        return time.thread_time_ns() if self.runner.device == "cpu" else self.runner.pipeline.now()

    def run(self, batch: Tensor) -> dict[Sample, list[float]]:
        """Walk the list once. Returns seconds by (key, phase): for each action the mean over equal blocks."""
        self.samples = defaultdict(list)
        tokens, targets = self.runner.own_batch(batch)
        for entry in self.runner.schedule.ranks[self.runner.place.pipeline_rank]:
            for a in parts(entry):
                if a.kind is Kind.F:
                    self._forward(a, tokens[a.micro_batch], targets[a.micro_batch])
                elif a.kind is Kind.W:
                    self._weights(a)
                else:
                    self._backward(a)
        return dict(self.samples)

    def _forward(self, a: Action, tokens: Tensor, targets: Tensor) -> None:
        stage, state = self.runner.stages[a.stage], _InFlight()
        x = self.x.clone()
        times = []
        for block in stage.blocks:
            stage.before_block(block, a.micro_batch)
            x = tokens if isinstance(block, Embedding) else x.detach().requires_grad_()
            start = self._clock()
            y = block(x, targets) * stage.scale if isinstance(block, Head) else block(x)
            times.append(self._clock() - start)
            state.inputs.append(x)
            state.edges.append(torch.autograd.graph.get_gradient_edge(y))
            x = y
        self.flight[a.stage, a.micro_batch] = state
        self._add(a, "forward", times)

    def _backward(self, a: Action) -> None:
        """Backward through all blocks: full, or (split) for the inputs alone."""
        blocks, state = self.runner.stages[a.stage].blocks, self.flight[a.stage, a.micro_batch]
        split = a.kind is Kind.I
        grad = None if isinstance(blocks[-1], Head) else self.grad
        times = [0] * len(blocks)
        state.jobs = [[] for _ in blocks]
        for i in reversed(range(len(blocks))):
            if split and isinstance(blocks[i], Embedding):
                state.embedding_grad = grad
                continue
            if split:
                self.runner.store.deferred = state.jobs[i]
            start = self._clock()
            torch.autograd.backward(state.edges[i], grad)
            times[i] = self._clock() - start
            grad = state.inputs[i].grad
        if split:
            self.runner.store.deferred = None
        else:
            del self.flight[a.stage, a.micro_batch]
        self._add(a, "input_grad" if split else "backward", times)

    def _weights(self, a: Action) -> None:
        state = self.flight.pop((a.stage, a.micro_batch))
        times = []
        for i, block in enumerate(self.runner.stages[a.stage].blocks):
            start = self._clock()
            if isinstance(block, Embedding):
                torch.autograd.backward(state.edges[i], state.embedding_grad)
            else:
                self.runner.store.run(state.jobs[i])
            times.append(self._clock() - start)
        self._add(a, "weight_grad", times)

    def _add(self, a: Action, phase: str, times: Sequence[int]) -> None:
        by_key: dict[str, list[int]] = defaultdict(list)
        for key, ns in zip(self.keys[a.stage], times, strict=True):
            if ns > 0:
                by_key[key].append(ns)
        for key, values in by_key.items():
            self.samples[key, phase].append(sum(values) / len(values) * 1e-9)


def time_messages(runner: Runner, repeats: int) -> list[tuple[int, int, int]]:
    """Exchange messages with the neighbours, each after a block's forward, so with caches as cold as in a
    step.

    Returns (message number, own start, own end) in nanoseconds; the message took from the later start of
    its two ends to its receiver's end. Pairs of neighbours take turns.
    """
    place, pipeline = runner.place, runner.pipeline
    found = []
    for i in range(repeats):
        for left in range(len(place.peers) - 1):
            forward = i % 2 == 0
            src, dst = (left, left + 1) if forward else (left + 1, left)
            if place.pipeline_rank not in (src, dst):
                continue
            number = (place.data_rank * len(place.peers) + left) * repeats + i
            x = torch.empty(pipeline.shape, dtype=runner.dtype, device=runner.device)
            peer = place.peers[dst if place.pipeline_rank == src else src]
            op = dist.isend if place.pipeline_rank == src else dist.irecv
            if place.pipeline_rank == src:
                _some_work(runner)
                x.fill_(1.0)
            start = pipeline.now()
            for work in dist.batch_isend_irecv([dist.P2POp(op, x, peer, tag=1_000_000 + i)]):
                work.wait()
            found.append((number, start, pipeline.now()))
    return found


def _some_work(runner: Runner) -> None:
    """One block's forward on random input, as before a send."""
    stage = next(iter(runner.stages.values()))
    with torch.no_grad():
        block: nn.Module = stage.blocks[len(stage.blocks) // 2]
        if not isinstance(block, Embedding | Head):
            block(torch.randn(runner.pipeline.shape, dtype=runner.dtype, device=runner.device))


def time_all_reduces(runner: Runner) -> list[tuple[int, int, int, int]]:
    """Reduce every piece that the step reduces, one after the other, all ranks at once.

    Returns (number, bytes, own start, own end): the collective took from the latest start to the latest end.
    """
    found = []
    for data in runner.data.values():
        for i, x in enumerate(data.slices):
            start = time.perf_counter_ns()
            dist.all_reduce(x, group=data.group)
            size = x.numel() * x.element_size()
            found.append((data.stage * 10_000 + i, size, start, runner.pipeline.now()))
    return found


def restore_point(runner: Runner) -> list[Tensor]:
    """Copies of parameters and optimizer state, to undo what a calibration did to them."""
    return [x.clone() for x in _state(runner)]


def restore(runner: Runner, saved: list[Tensor]) -> None:
    """Undo a calibration; gradients are zeroed."""
    with torch.no_grad():
        for x, old in zip(_state(runner), saved, strict=True):
            x.copy_(old)
    runner.zero_gradients()


def _state(runner: Runner) -> list[Tensor]:
    states = [v for p in runner.parameters() for v in runner.optimizer.state.get(p, {}).values()]
    return [p.detach() for p in runner.parameters()] + [v for v in states if isinstance(v, Tensor)]
