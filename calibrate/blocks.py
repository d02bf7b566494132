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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrate.model import Embedding, Head, Layer
from calibrate.parallel.runner import Runner, make_batch
from sim.actions import Action, Kind, parts

LEAST_ELEMENTS = 256  # smallest all-reduce worth timing
Sample = tuple[str, str]  # block key, phase
Samples = dict[Sample, list[tuple[float, float]]]  # wall and CPU seconds of one action's mean block


class Elapsed(NamedTuple):
    """Nanoseconds on the wall clock and of this thread's CPU time."""

    wall: int
    cpu: int


_NOTHING = Elapsed(0, 0)


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
        self.samples: Samples = defaultdict(list)
        self.flight: dict[tuple[int, int], _InFlight] = {}
        self.x = torch.randn(runner.pipeline.shape, dtype=runner.dtype, device=runner.device)
        self.grad = torch.randn_like(self.x) * 1e-3

    def _time(self, work: Callable[..., Any], *args: object) -> tuple[Elapsed, Any]:
        """Call `work` on both clocks; returns its result as well.

        A block runs on one thread, so on a quiet machine the two agree; when others want the core, CPU time
        leaves out the waiting for it. On a GPU only the wall clock, queued work included, has a meaning.
        """
        wall, cpu = self.runner.pipeline.now(), time.thread_time_ns()
        result = work(*args)
        cpu = time.thread_time_ns() - cpu
        wall = self.runner.pipeline.now() - wall
        return Elapsed(wall, cpu if self.runner.device == "cpu" else wall), result

    def run(self, batch: Tensor) -> Samples:
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
            head = isinstance(block, Head)
            elapsed, y = self._time(block, x, targets) if head else self._time(block, x)
            times.append(elapsed)
            state.inputs.append(x)
            state.edges.append(torch.autograd.graph.get_gradient_edge(y * stage.scale if head else y))
            x = y
        self.flight[a.stage, a.micro_batch] = state
        self._add(a, "forward", times)

    def _backward(self, a: Action) -> None:
        """Backward through all blocks: full, or (split) for the inputs alone."""
        blocks, state = self.runner.stages[a.stage].blocks, self.flight[a.stage, a.micro_batch]
        split = a.kind is Kind.I
        grad = None if isinstance(blocks[-1], Head) else self.grad
        times = [_NOTHING] * len(blocks)
        state.jobs = [[] for _ in blocks]
        for i in reversed(range(len(blocks))):
            if split and isinstance(blocks[i], Embedding):
                state.embedding_grad = grad
                continue
            if split:
                self.runner.store.deferred = state.jobs[i]
            times[i], _ = self._time(torch.autograd.backward, state.edges[i], grad)
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
            if isinstance(block, Embedding):
                elapsed, _ = self._time(torch.autograd.backward, state.edges[i], state.embedding_grad)
            else:
                elapsed, _ = self._time(self.runner.store.run, state.jobs[i])
            times.append(elapsed)
        self._add(a, "weight_grad", times)

    def _add(self, a: Action, phase: str, times: Sequence[Elapsed]) -> None:
        by_key: dict[str, list[Elapsed]] = defaultdict(list)
        for key, elapsed in zip(self.keys[a.stage], times, strict=True):
            if elapsed is not _NOTHING:
                by_key[key].append(elapsed)
        for key, values in by_key.items():
            wall, cpu = (sum(column) / len(values) * 1e-9 for column in zip(*values, strict=True))
            self.samples[key, phase].append((wall, cpu))


def time_messages(runner: Runner) -> list[tuple[tuple[object, ...], int, int]]:
    """Walk the list with all its messages, but one layer's forward in place of each action.

    So messages meet as they do in the step (both directions at once, with one end asleep), caches are as
    cold, and it takes a fraction of the time. Returns (message, own start, own end) in nanoseconds, the end 0
    on the sender: a message took from the later start of its ends until it was received.
    """
    pipeline = runner.pipeline
    own = pipeline.stages
    pipeline.stages = {s: _Rehearsed(_any_layer(runner), runner) for s in own}
    try:
        tokens, targets = runner.own_batch(make_batch(runner.scenario, 0, runner.device))
        dist.barrier()
        records = pipeline.step(tokens, targets)
    finally:
        pipeline.stages = own
    lane = runner.place.data_rank
    return [
        ((r.kind[-1], r.stage, r.micro_batch, lane), r.start_ns, r.end_ns if r.kind.startswith("RECV") else 0)
        for r in records
        if r.kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
    ]


def _any_layer(runner: Runner) -> nn.Module | None:
    blocks = [b for s in runner.stages.values() for b in s.blocks if isinstance(b, Layer)]
    return blocks[len(blocks) // 2] if blocks else None


@dataclass(slots=True)
class _Rehearsed:
    """Stands in for a stage: every action runs one layer's forward."""

    layer: nn.Module | None
    runner: Runner

    def forward(self, micro_batch: int, x: Tensor, targets: Tensor) -> Tensor:
        shape = self.runner.pipeline.shape
        out = torch.zeros(shape, dtype=self.runner.dtype, device=self.runner.device)
        with torch.no_grad():
            return out if self.layer is None else self.layer(out)

    def backward(self, micro_batch: int, grad: Tensor | None) -> Tensor:
        return self.forward(micro_batch, None, None)

    backward_input = backward

    def backward_weight(self, micro_batch: int) -> None:
        self.forward(micro_batch, None, None)


def time_all_reduces(runner: Runner) -> list[tuple[int, int, int, int]]:
    """Reduce each stage's gradients, whole and in ever smaller pieces, all ranks at once.

    Returns (number, bytes, own start, own end): the collective took from the latest start to the latest end.
    """
    found = []
    for data in runner.data.values():
        n, number = data.flat.numel(), data.stage * 100
        while n >= LEAST_ELEMENTS or number % 100 == 0:
            x = data.flat[:n]
            start = time.perf_counter_ns()
            dist.all_reduce(x, group=data.group)
            found.append((number, n * x.element_size(), start, runner.pipeline.now()))
            n, number = n // 4, number + 1
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
