"""The paired calibration: times a step's blocks one by one, in the order in which the step runs them.

Kernels timed one by one miss the cost of autograd, dispatch and cold caches (4–9 % of a step, 29 % of a small step).
Blocks timed in a hot loop come out 12–17 % too low. So all ranks run their own action lists at once, over distinct
blocks and with accumulating gradients, as in the step. Only the messages between stages are left out. A block with
communications of its own (tensor, context and expert parallelism) is timed in the pieces between them. Messages,
all-reduces and the optimizer are timed right after, on the same ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrate.bundled_model.linear import WeightGrads, WeightJob
from calibrate.bundled_model.model import Embedding, Head, Layer
from calibrate.parallel.comm import Clock, Entry, Tape
from calibrate.parallel.recompute import keeping
from calibrate.parallel.runner import Runner
from calibrate.real_steps.block_cuts import Cuts, Elapsed, Transfer, pieces_between, sum_by_run, transfers
from sim.core.actions import Action, Kind, parts
from sim.core.timeline import MESSAGES, RECEIVES

RECOMPUTING = "recomputing"  # a backward (or input gradient) with what it recomputes
Sample = tuple[str, str, int]  # block key, phase, run
Samples = dict[Sample, list[tuple[float, float]]]  # wall and CPU seconds of one action's mean block


class _Piece(NamedTuple):
    """One block's part of an action: when it began and ended, and its communications."""

    key: str
    phase: str
    start: Clock
    end: Clock
    entries: list[Entry]


@dataclass(slots=True)
class _InFlight:
    """One micro-batch on one stage: for each block its input, its output's gradient edge and its deferred jobs."""

    inputs: list[Tensor] = field(default_factory=list)
    edges: list[object] = field(default_factory=list)
    jobs: list[list[WeightJob]] = field(default_factory=list)
    embedding_grad: Tensor | None = None


class Rehearsal:
    """Times every block of a rank's action list.

    `keys[stage]` are the profile keys of a stage's blocks; `cuts[key]` says where the simulator cuts a block.
    """

    def __init__(self, runner: Runner, keys: Mapping[int, Sequence[str]], cuts: dict[str, dict[str, Cuts]]) -> None:
        self.runner, self.keys, self.cuts = runner, keys, cuts
        self.samples: Samples = defaultdict(list)
        self.transfers: list[Transfer] = []
        self.ended_ns = 0  # when this rank finished its list
        self.walks = 0
        self.walked: list[tuple[str, list[_Piece]]] = []  # actions: their phase and blocks
        self.flight: dict[tuple[int, int], _InFlight] = {}
        self.x = torch.randn(runner.pipeline.shape, dtype=runner.dtype, device=runner.device)
        self.grad = torch.randn_like(self.x) * 1e-3

    @property
    def tape(self) -> Tape:
        return self.runner.place.model.tape

    def _time(self, key: str, phase: str, work: Callable[..., Any], *args: object) -> tuple[_Piece, Any]:
        """Call `work` and record when it began and ended; also return its result."""
        self.tape.take()
        start = self.tape.now()
        result = work(*args)
        return _Piece(key, phase, start, self.tape.now(), self.tape.take()), result

    def run(self, batch: Tensor) -> Samples:
        """Run the list once and return seconds by (key, phase, run): for each action the mean over equal blocks."""
        self.samples, self.transfers, self.walked = defaultdict(list), [], []
        self.tape.rehearsing = True
        try:
            with silence(self.runner):
                self._walk(batch)
                self.ended_ns = self.runner.pipeline.now()
        finally:
            self.tape.rehearsing = False
        at = self.tape.moments()
        for phase, pieces in self.walked:
            self._sample(phase, [_at(at, piece) for piece in pieces])
        return dict(self.samples)

    def _walk(self, batch: Tensor) -> None:
        tokens, targets = self.runner.micro_batch_tokens(batch)
        self.walks += 1
        for entry in self.runner.schedule.ranks[self.runner.place.pipeline_rank]:
            for a in parts(entry):
                if self.runner.device != "cpu":
                    torch.cuda.synchronize()  # as the step does at every action's end
                if a.kind is Kind.F:
                    self._forward(a, tokens[a.micro_batch], targets[a.micro_batch])
                elif a.kind is Kind.W:
                    self._weights(a)
                else:
                    self._backward(a)

    def _forward(self, a: Action, tokens: Tensor, targets: Tensor) -> None:
        stage, state = self.runner.stages[a.stage], _InFlight()
        x = self.x.clone()
        pieces: list[_Piece] = []
        for key, block in zip(self.keys[a.stage], stage.blocks, strict=True):
            stage.before_block(block, a.micro_batch)
            x = tokens if isinstance(block, Embedding) else x.detach().requires_grad_()
            head = isinstance(block, Head)
            with nullcontext() if self._again(a) else keeping():
                piece, y = self._time(key, "forward", block, *((x, targets) if head else (x,)))
            pieces.append(piece)
            state.inputs.append(x)
            state.edges.append(torch.autograd.graph.get_gradient_edge(y * stage.scale if head else y))
            x = y
        self.flight[a.stage, a.micro_batch] = state
        self.walked.append(("forward", pieces))

    def _backward(self, a: Action) -> None:
        """Run the backward of all blocks: the full backward (B), or the input-gradient half (I)."""
        stage, state = self.runner.stages[a.stage], self.flight[a.stage, a.micro_batch]
        blocks = stage.blocks
        split = a.kind is Kind.I
        keys, phase = self.keys[a.stage], "input_grad" if split else "backward"
        grad = None if isinstance(blocks[-1], Head) else self.grad
        pieces: list[_Piece] = []
        state.jobs = [[] for _ in blocks]
        for i in reversed(range(len(blocks))):
            if split and isinstance(blocks[i], Embedding):
                state.embedding_grad = grad
                continue
            if split:
                stage.store.deferred = state.jobs[i]
            done = _nothing if split else stage.after_block
            work = (_backward, state.edges[i], grad, done, i)
            again = self._again(a) and self.runner.recomputes(blocks[i])
            pieces.append(self._time(keys[i], RECOMPUTING if again else phase, *work)[0])
            grad = state.inputs[i].grad
        if split:
            stage.store.deferred = None
        else:
            del self.flight[a.stage, a.micro_batch]
        self.walked.append((phase, pieces))

    def _again(self, a: Action) -> bool:
        """Return whether layers recompute in this action.

        They do in every second micro-batch only, so that the backward is also timed without the recomputation.
        """
        return (a.micro_batch + self.walks) % 2 == 1

    def _weights(self, a: Action) -> None:
        state = self.flight.pop((a.stage, a.micro_batch))
        pieces: list[_Piece] = []
        stage = self.runner.stages[a.stage]
        for i, (key, block) in enumerate(zip(self.keys[a.stage], stage.blocks, strict=True)):
            if isinstance(block, Embedding):
                work: tuple[Any, ...] = (_backward, state.edges[i], state.embedding_grad)
            else:
                work = (_run_jobs, stage.store, state.jobs[i])
            pieces.append(self._time(key, "weight_grad", *work, stage.after_block, i)[0])
        self.walked.append(("weight_grad", pieces))

    def _sample(self, phase: str, pieces: Sequence[_Piece]) -> None:
        """Add the seconds of one action's blocks, run by run, as the mean over equal blocks.

        A block runs on one thread, so wall time and CPU time agree on a quiet machine. If other processes use the core,
        CPU time leaves out the wait for it. A backward that recomputes counts only as a whole, and not at all if it has
        communications.
        """
        by_run: dict[Sample, list[Elapsed]] = defaultdict(list)
        for p in pieces:
            if p.phase == RECOMPUTING:
                if not p.entries:
                    wall, cpu = p.end.wall - p.start.wall, p.end.cpu - p.start.cpu
                    self.samples[p.key, RECOMPUTING, 0].append((wall * 1e-9, cpu * 1e-9))
                continue
            self.transfers += transfers(p.entries)
            between = pieces_between(p.entries, p.start, p.end)
            runs = sum_by_run(between, self.cuts[p.key][phase], p.entries, f"{phase} of {p.key}")
            for run, elapsed in runs.items():
                by_run[p.key, phase, run].append(elapsed)
        for sample, values in by_run.items():
            wall, cpu = (sum(column) / len(values) * 1e-9 for column in zip(*values, strict=True))
            self.samples[sample].append((wall, cpu))


def _at(moment: Callable[[Clock], Clock], piece: _Piece) -> _Piece:
    entries = [e._replace(start=moment(e.start), end=moment(e.end)) for e in piece.entries]
    return piece._replace(start=moment(piece.start), end=moment(piece.end), entries=entries)


def _backward(edge: Any, grad: Tensor | None, done: Callable[[int], None], i: int) -> None:
    torch.autograd.backward(edge, grad)
    done(i)


def _run_jobs(store: WeightGrads, jobs: list[WeightJob], done: Callable[[int], None], i: int) -> None:
    store.run(jobs)
    done(i)


def _nothing(block: int) -> None:
    pass


def time_messages(runner: Runner) -> list[tuple[tuple[object, ...], int, int]]:
    """Run the list with all its messages, but with one layer's forward in place of each action.

    So messages meet as they do in the step (both directions at once, one end asleep) and caches are as cold, in a
    fraction of the time. Returns (message, own start, own end) in nanoseconds; the sender's end is 0. A message's time
    runs from the later of its two starts until it was received.
    """
    pipeline = runner.pipeline
    own = pipeline.stages
    pipeline.stages = {s: _Rehearsed(_any_layer(runner), runner) for s in own}
    try:
        tokens, targets = runner.micro_batch_tokens(runner.batch(0))
        with silence(runner):
            dist.barrier()
            records = pipeline.step(tokens, targets)
    finally:
        pipeline.stages = own
    replica = runner.place.data_rank
    return [
        ((r.kind[-1], r.stage, r.micro_batch, replica), r.start_ns, r.end_ns if r.kind in RECEIVES else 0)
        for r in records
        if r.kind in MESSAGES
    ]


def _any_layer(runner: Runner) -> nn.Module | None:
    blocks = [b for s in runner.stages.values() for b in s.blocks if isinstance(b, Layer)]
    return blocks[len(blocks) // 2] if blocks else None


@dataclass(slots=True)
class _Rehearsed:
    """Stands in for a stage: every action runs one layer's forward."""

    layer: nn.Module | None
    runner: Runner

    def forward(self, micro_batch: int, x: Tensor | None, targets: Tensor | None) -> Tensor:
        shape = self.runner.pipeline.shape
        out = torch.zeros(shape, dtype=self.runner.dtype, device=self.runner.device)
        with torch.no_grad():
            return out if self.layer is None else self.layer(out)

    def backward(self, micro_batch: int, grad: Tensor | None) -> Tensor:
        return self.forward(micro_batch, None, None)

    backward_input = backward

    def backward_weight(self, micro_batch: int) -> None:
        self.forward(micro_batch, None, None)


def restore_point(runner: Runner) -> list[Tensor]:
    """Copy parameters and optimizer state, to undo what a calibration changes."""
    return [x.clone() for x in _state(runner)]


def restore(runner: Runner, saved: list[Tensor]) -> None:
    """Restore what `restore_point` copied, and zero the gradients."""
    with torch.no_grad():
        for x, old in zip(_state(runner), saved, strict=True):
            x.copy_(old)
    runner.zero_gradients()


def _state(runner: Runner) -> list[Tensor]:
    states = [v for p in runner.owned() for v in runner.optimizer.state.get(p, {}).values()]
    held = [x for data in runner.data.values() for x in data.state()]
    return held + [v for v in states if isinstance(v, Tensor)]


@contextmanager
def silence(runner: Runner) -> Iterator[None]:
    """Suspend data-parallel communication and copies to the host; all parameters stay gathered. Collective."""
    for offload in runner.offloads.values():
        offload.silent = True
    for data in runner.data.values():
        data.silence()
    try:
        yield
    finally:
        for data in runner.data.values():
            data.speak()
        for offload in runner.offloads.values():
            offload.silent = False
