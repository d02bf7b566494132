"""Pipeline parallelism: executes the schedules of `sim.schedules` on real ranks, message by message.

Every rank runs its own list of actions and sends results to neighbouring stages point to point. With blocking messages
(`p2p_overlap: false`), after each action a rank posts in one batch the send of its result and the receive of the next
action's input, and waits for both (Megatron-LM's send_forward_recv_backward). With overlapped messages, a send is
posted right after its action and awaited at the step's end; receives are posted ahead and awaited by the action that
needs them (as in torch.distributed.pipelining).

Documentation: docs/pipeline.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrate.bundled_model.linear import WeightGrads, WeightJob, gradient
from calibrate.bundled_model.model import Embedding, Head
from sim.core.actions import Action, Entry, Kind, Schedule, parts

LOOKAHEAD = 4  # schedule entries for which overlapped receives are posted ahead


class Record(NamedTuple):
    """Hold an action of a rank and its times: nanoseconds of the clock that all ranks of a machine share
    (CLOCK_MONOTONIC)."""

    kind: str
    stage: int
    micro_batch: int
    start_ns: int
    end_ns: int


class Message(NamedTuple):
    """The result of an action, sent to another stage."""

    stage: int
    kind: str  # F or B
    micro_batch: int


def started(work: dist.Work | None) -> dist.Work:
    """Return the work of an asynchronous call of torch.distributed, which members of the group always get."""
    assert work is not None
    return work


class Links:
    """Which pipeline rank sends which message to which: the neighbours of every stage along the schedule's chains."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        stages = len(schedule.rank_of_stage)
        self.before, self.after = [-1] * stages, [-1] * stages
        for chain in schedule.chains:
            for a, b in pairwise(chain):
                self.after[a], self.before[b] = b, a
        self.made: dict[Message, int] = {}  # index of the sender's action that makes it
        self.needed: dict[Message, int] = {}  # index of the receiver's action that needs it
        for entries in schedule.ranks:
            for i, action in enumerate(a for entry in entries for a in parts(entry)):
                self.made |= {m: i for m in [self.gives(action)] if m is not None}
                self.needed |= {m: i for m in [self.takes(action)] if m is not None}

    def takes(self, a: Action) -> Message | None:
        """Return the message that an action needs, or None."""
        source = self.before[a.stage] if a.kind is Kind.F else self.after[a.stage]
        if a.kind is Kind.W or source < 0:
            return None
        return Message(source, "F" if a.kind is Kind.F else "B", a.micro_batch)

    def gives(self, a: Action) -> Message | None:
        """Return the message that an action makes, or None."""
        target = self.after[a.stage] if a.kind is Kind.F else self.before[a.stage]
        if a.kind is Kind.W or target < 0:
            return None
        return Message(a.stage, "F" if a.kind is Kind.F else "B", a.micro_batch)

    def giver(self, message: Message) -> int:
        """Return the pipeline rank that sends a message."""
        return self.schedule.rank_of_stage[message.stage]

    def taker(self, message: Message) -> int:
        """Return the pipeline rank that receives a message."""
        after = self.after if message.kind == "F" else self.before
        return self.schedule.rank_of_stage[after[message.stage]]

    def tag(self, message: Message) -> int:
        """Return a message's number, unique within a step."""
        return 2 * (message.stage * self.schedule.micro_batches + message.micro_batch) + (message.kind == "B")

    def received(self, rank: int, giver: int) -> list[Message]:
        """Return the messages from `giver` to `rank` in the order of their sends."""
        sent = (self.gives(a) for entry in self.schedule.ranks[giver] for a in parts(entry))
        return [m for m in sent if m is not None and self.taker(m) == rank]


class Acts(Protocol):
    """The methods that a pipeline needs of a stage."""

    def forward(self, micro_batch: int, x: Tensor, targets: Tensor) -> Tensor: ...
    def backward(self, micro_batch: int, grad: Tensor | None) -> Tensor | None: ...
    def backward_input(self, micro_batch: int, grad: Tensor | None) -> Tensor | None: ...
    def backward_weight(self, micro_batch: int) -> None: ...


@dataclass(slots=True)
class Stage:
    """Consecutive blocks of the model and their micro-batches in flight.

    The embedding's output is detached, so that the input gradient means the same on every stage; the embedding's own
    gradient is a weight gradient.
    """

    blocks: Sequence[nn.Module]
    scale: float  # factor of the loss: 1 ÷ (micro-batches of the global batch)
    store: WeightGrads = field(default_factory=WeightGrads)
    flight: dict[int, Any] = field(default_factory=dict)
    deferred: dict[int, Any] = field(default_factory=dict)
    before_block: Callable[[nn.Module, int], None] = lambda block, micro_batch: None
    after_block: Callable[[int], None] = lambda block: None  # called when a block's gradients are complete (ZeRO-3)
    losses: dict[int, Tensor] = field(default_factory=dict)

    def forward(self, micro_batch: int, x: Tensor, targets: Tensor) -> Tensor:
        """Run the blocks and return the detached output, or on the last stage the scaled loss."""
        embedded, blocks = None, self.blocks
        if blocks and isinstance(blocks[0], Embedding):
            self.before_block(blocks[0], micro_batch)
            embedded, blocks = blocks[0](x), blocks[1:]
            x = embedded.detach()
        y = x.requires_grad_()
        for block in blocks:
            self.before_block(block, micro_batch)
            y = block(y, targets) * self.scale if isinstance(block, Head) else block(y)
        if y.ndim == 0:
            self.losses[micro_batch] = y.detach()
        self.flight[micro_batch] = (embedded, x, torch.autograd.graph.get_gradient_edge(y))
        return y.detach()

    def backward(self, micro_batch: int, grad: Tensor | None) -> Tensor | None:
        """Run the full backward (B) and return the input's gradient."""
        embedded, x, edge = self.flight.pop(micro_batch)
        torch.autograd.backward(edge, grad)
        if embedded is not None:
            embedded.backward(x.grad)
        return gradient(x)

    def backward_input(self, micro_batch: int, grad: Tensor | None) -> Tensor | None:
        """Compute only the input's gradient (I); linear layers leave their weight gradients for `backward_weight`."""
        embedded, x, edge = self.flight.pop(micro_batch)
        jobs: list[WeightJob] = []
        self.store.deferred = jobs
        torch.autograd.backward(edge, grad)
        self.store.deferred = None
        self.deferred[micro_batch] = (jobs, embedded, gradient(x))
        return gradient(x)

    def backward_weight(self, micro_batch: int) -> None:
        """Compute the weight gradients (W) that `backward_input` left."""
        jobs, embedded, grad = self.deferred.pop(micro_batch)
        self.store.run(jobs)
        if embedded is not None:
            embedded.backward(grad)


@dataclass(slots=True)
class Pipeline:
    """One rank of a pipeline: its stages, its peers, and the shape of messages.

    `peers[i]` is the global rank of pipeline rank i. `ways`: groups for messages to higher and to lower pipeline ranks.
    With a single group NCCL would run messages between two ranks one after the other, and a receive posted ahead would
    block the send on which it depends. `together`: the forward and the backward of a pair run at once, in a thread
    each, so that one computes while the other waits for messages. `after_action` and `forward_of`, which replaces a
    stage's own forward, are for measurements.
    """

    schedule: Schedule
    rank: int
    peers: Sequence[int]
    stages: Mapping[int, Acts]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    overlap: bool
    ways: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None)
    together: bool = False
    links: Links = field(init=False)
    inbox: dict[Message, Tensor] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    after_action: Callable[[Action], None] = lambda action: None
    forward_of: dict[int, Callable[..., Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.links = Links(self.schedule)

    def now(self) -> int:
        """Return nanoseconds, after a GPU has finished its queued computation; receives posted ahead may still wait."""
        if self.device != "cpu":
            torch.cuda.current_stream().synchronize()
        return time.perf_counter_ns()

    def step(self, tokens: Tensor, targets: Tensor) -> list[Record]:
        """Run forward and backward of all micro-batches [micro-batches, b, s]; gradients accumulate in `.grad`."""
        self.records = []
        (self._overlapped if self.overlap else self._blocking)(tokens, targets)
        return self.records

    def _blocking(self, tokens: Tensor, targets: Tensor) -> None:
        runs = self.schedule.between_exchanges(self.rank)
        needs = [[message for entry in run for message in self._needs(entry)] for run in runs]
        self._exchange([], needs[0])
        for run, needed in zip(runs, [*needs[1:], []], strict=True):
            results = [result for entry in run for result in self._act(parts(entry), tokens, targets)]
            self._exchange(results, needed)

    def _overlapped(self, tokens: Tensor, targets: Tensor) -> None:
        entries = self.schedule.ranks[self.rank]
        receives = _Receives(self)
        sends: dict[Message, tuple[dist.Work, Tensor]] = {}
        for i, entry in enumerate(entries):
            for later in entries[i : i + LOOKAHEAD]:
                for message in self._needs(later):
                    receives.post(message)
            for acts in [parts(entry)] if self.together else [(a,) for a in parts(entry)]:
                for message in (m for a in acts for m in self._needs(a)):
                    start = self.now()
                    self.inbox[message] = receives.wait(message)
                    self._record(f"RECV_{message.kind}", message, start)
                    self._free_sent(sends, message)
                for result in self._act(acts, tokens, targets):
                    sends[result[0]] = self._send(*result)
        for work, _ in sends.values():
            work.wait()

    def _free_sent(self, sends: dict[Message, tuple[dist.Work, Tensor]], answer: Message) -> None:
        """Free sent tensors that the sender of `answer` has received; gloo shows a send's end only in a wait."""
        links = self.links
        for m in [m for m in sends if links.taker(m) == links.giver(answer)]:
            if links.needed[m] <= links.made[answer]:
                sends.pop(m)[0].wait()

    def _needs(self, entry: Entry) -> list[Message]:
        """Return the messages that an entry needs from other ranks."""
        taken = [self.links.takes(a) for a in parts(entry)]
        return [m for m in taken if m is not None and self.links.giver(m) != self.rank]

    def _act(self, acts: Sequence[Action], tokens: Tensor, targets: Tensor) -> list[tuple[Message, Tensor]]:
        """Run actions one after the other, or a pair's at once; return what to send to other ranks."""
        if not self.together or len(acts) == 1:
            return [r for a in acts if (r := self._run(a, tokens, targets)) is not None]
        forward, backward = sorted(acts, key=lambda a: a.kind is not Kind.F)
        with ThreadPoolExecutor(1) as beside:  # the backward, as hooks on forwards are bound to this thread
            pending = beside.submit(self._run, backward, tokens, targets)
            results = [self._run(forward, tokens, targets), pending.result()]
        return [r for r in results if r is not None]

    def _run(self, a: Action, tokens: Tensor, targets: Tensor) -> tuple[Message, Tensor] | None:
        """Run one action and return what to send to another rank, or None."""
        stage, m = self.stages[a.stage], a.micro_batch
        taken = self.links.takes(a)
        x = self.inbox.pop(taken) if taken is not None else None
        start = self.now()
        result: Tensor | None
        if a.kind is Kind.F:
            forward = self.forward_of.get(a.stage, stage.forward)
            result = forward(m, tokens[m] if x is None else x, targets[m])
        elif a.kind is Kind.B:
            result = stage.backward(m, x)
        elif a.kind is Kind.I:
            result = stage.backward_input(m, x)
        else:
            result = None
            stage.backward_weight(m)
        self.records.append(Record("B" if a.kind is Kind.I else a.kind.value, a.stage, m, start, self.now()))
        self.after_action(a)
        given = self.links.gives(a)
        if given is None or result is None:
            return None
        if self.links.taker(given) == self.rank:
            self.inbox[given] = result
            return None
        return given, result

    def _exchange(self, results: Sequence[tuple[Message, Tensor]], needs: Sequence[Message]) -> None:
        """Send and receive in one batch, and wait for all."""
        if not results and not needs:
            return
        start = self.now()
        ops = [
            dist.P2POp(dist.isend, x.contiguous(), self.peers[self.links.taker(m)], tag=self.links.tag(m))
            for m, x in results
        ]
        for m in needs:
            self.inbox[m] = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            peer = self.peers[self.links.giver(m)]
            ops.append(dist.P2POp(dist.irecv, self.inbox[m], peer, tag=self.links.tag(m)))
        ends = []
        for work in dist.batch_isend_irecv(ops):
            work.wait()
            ends.append(self.now())
        batch = [(f"SEND_{m.kind}", m) for m, _ in results] + [(f"RECV_{m.kind}", m) for m in needs]
        for i, (kind, m) in enumerate(batch):
            self.records.append(Record(kind, m.stage, m.micro_batch, start, ends[min(i, len(ends) - 1)]))

    def _send(self, message: Message, x: Tensor) -> tuple[dist.Work, Tensor]:
        x = x.contiguous()
        start = self.now()
        peer = self.peers[self.links.taker(message)]
        work = started(dist.isend(x, peer, self.way(message), self.links.tag(message)))
        self._record(f"SEND_{message.kind}", message, start)
        return work, x

    def way(self, message: Message) -> dist.ProcessGroup | None:
        """Return the process group of a message."""
        return self.ways[self.links.giver(message) > self.links.taker(message)]

    def _record(self, kind: str, message: Message, start: int) -> None:
        self.records.append(Record(kind, message.stage, message.micro_batch, start, self.now()))


class _Receives:
    """Receives posted ahead, in the order of each peer's sends, as NCCL matches messages by order alone."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.p = pipeline
        peers = range(len(pipeline.peers))
        self.coming = {r: pipeline.links.received(pipeline.rank, r) for r in peers if r != pipeline.rank}
        self.posted: dict[Message, tuple[dist.Work, Tensor]] = {}
        self.seen: set[Message] = set()

    def post(self, message: Message) -> None:
        """Post the receives of all messages from this message's sender up to this one."""
        p, giver = self.p, self.p.links.giver(message)
        while message not in self.seen:
            first = self.coming[giver].pop(0)
            x = torch.empty(p.shape, dtype=p.dtype, device=p.device)
            work = started(dist.irecv(x, p.peers[giver], p.way(first), p.links.tag(first)))
            self.posted[first] = (work, x)
            self.seen.add(first)

    def wait(self, message: Message) -> Tensor:
        """Wait for a message and return its tensor."""
        work, x = self.posted.pop(message)
        work.wait()
        return x
