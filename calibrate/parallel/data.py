"""Data parallelism: every rank computes on its own sequences, and gradients are summed over the ranks.

- `after_backward`: one all-reduce of all gradients after the last backward;
- `reduce_broadcast`: at the same time, a reduction to the group's first rank and a broadcast of the sum;
- `per_parameter`: an all-reduce for each parameter as soon as its gradient is complete;
- `bucketed`: an all-reduce for each bucket of consecutive parameters, last layer first (PyTorch DDP, Li et al. 2020,
  arXiv 2006.15704).

All gradients are slices of one flat buffer, so a bucket is a slice too and nothing is copied. With gradient
accumulation a gradient is complete once every micro-batch has added to it.

Documentation: docs/data_parallel.md.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrate.bundled_model.linear import Linear, WeightGrads, gradient
from calibrate.parallel.pipeline import Record
from sim.inputs.parallelism import AT_THE_END


def flat_gradients(params: Sequence[nn.Parameter]) -> Tensor:
    """Make a zeroed buffer whose slices are the `.grad` of `params`, in this order."""
    flat = torch.zeros(sum(p.numel() for p in params), dtype=params[0].dtype, device=params[0].device)
    at = 0
    for p in params:
        p.grad = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    return flat


def make_buckets(sizes: Sequence[int], limit: float) -> list[list[int]]:
    """Put consecutive items into buckets of at least `limit` bytes each (the last may be smaller).

    A bucket is closed as soon as it reaches the limit, as in DDP. So a parameter larger than the limit shares its
    bucket with smaller ones before it.

    >>> make_buckets([3, 3, 3, 3, 3], 6)
    [[0, 1], [2, 3], [4]]
    """
    buckets: list[list[int]] = []
    full = True
    for i, _ in enumerate(sizes):
        if full:
            buckets.append([])
        buckets[-1].append(i)
        full = sum(sizes[j] for j in buckets[-1]) >= limit
    return buckets


class Sent(NamedTuple):
    """A started collective: its name, its group, and its bytes as nccl-tests counts them."""

    op: str
    group: dist.ProcessGroup | None
    bytes: int


class Wait(NamedTuple):
    """When a collective started, and from when to when this rank waited for it, in nanoseconds."""

    sent: Sent
    start_ns: int
    from_ns: int
    until_ns: int


@dataclass(slots=True)
class Traffic:
    """The collectives of data parallelism and this rank's waits for them, for calibrations."""

    sent: list[Sent] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)

    def wait(self, work: dist.Work, sent: Sent, start_ns: int) -> None:
        """Wait for a collective that started at `start_ns`, and record the wait."""
        begin = time.perf_counter_ns()
        work.wait()
        self.waits.append(Wait(sent, start_ns, begin, time.perf_counter_ns()))


@dataclass(frozen=True, slots=True)
class Sync:
    """When gradients are sent: `how` is after_backward, reduce_broadcast, per_parameter or bucketed."""

    how: str
    bucket_bytes: int
    micro_batches: int

    @property
    def after_backward(self) -> bool:
        """Tell whether gradients are sent only after the last backward."""
        return self.how in AT_THE_END

    @property
    def limit_bytes(self) -> float:
        """The bytes at which a bucket is full."""
        if self.after_backward:
            return float("inf")
        return 0 if self.how == "per_parameter" else self.bucket_bytes


def distinct_parameters(blocks: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of all blocks, first to last, shared ones once."""
    return list({id(p): p for block in blocks for p in block.parameters()}.values())


def hook_gradients(
    blocks: Sequence[nn.Module], store: WeightGrads | None, added: Callable[[nn.Parameter], None]
) -> dict[int, int]:
    """Call `added(p)` whenever a micro-batch has added to p's gradient; return by id how often each does.

    Autograd's hooks call it, and `store` for linear layers with deferred weight gradients. A micro-batch adds twice to
    a matrix that two blocks share.
    """
    split = {
        id(p)
        for block in blocks
        for x in block.modules()
        if isinstance(x, Linear) and x.store is not None
        for p in x.deferred_parameters()
    }
    uses: dict[int, int] = defaultdict(int)
    for block in blocks:
        for p in block.parameters():
            uses[id(p)] += 1
    for p in distinct_parameters(blocks):
        if id(p) not in split:
            p.register_post_accumulate_grad_hook(added)
    if store is not None:
        store.listeners.append(added)
    return uses


class DataParallel:
    """Sums the gradients of one stage's blocks over the ranks of `group`; the caller scales the loss.

    `silent`: communicate nothing, so that blocks can be timed by themselves.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        group: dist.ProcessGroup | None,
        sync: Sync,
        stage: int,
        store: WeightGrads | None,
    ) -> None:
        params = distinct_parameters(blocks)[::-1]
        self.params, self.group, self.stage = params, group, stage
        self.flat = flat_gradients(params)
        self.silent = False
        self.traffic = Traffic()
        self.works: list[tuple[dist.Work, Sent, int]] = []  # started collectives, and when they started (ns)
        self.records: list[Record] = []
        self.slices: list[Tensor] = [self.flat]
        self.bucket_of: dict[int, int] = {}
        self.micro_batches = sync.micro_batches
        self.by_one_rank = sync.how == "reduce_broadcast"
        self.due: list[int] = []
        self.missing: list[int] = []
        if group is not None and not sync.after_backward:
            self._make_slices(sync.limit_bytes)
            uses = hook_gradients(blocks, store, self.added)
            self.due = [sum(uses[id(params[i])] for i in members) * sync.micro_batches for members in self.buckets]
            self.missing = list(self.due)

    def _make_slices(self, limit: float) -> None:
        sizes = [p.numel() * p.element_size() for p in self.params]
        self.buckets = make_buckets(sizes, limit)
        self.slices, at = [], 0
        for b, members in enumerate(self.buckets):
            n = sum(self.params[i].numel() for i in members)
            self.slices.append(self.flat[at : at + n])
            at += n
            self.bucket_of.update({id(self.params[i]): b for i in members})

    def owned(self) -> list[nn.Parameter]:
        """Return the parameters that this rank's optimizer updates: all."""
        return self.params

    def owned_gradients(self) -> list[Tensor]:
        """Return all gradients, flat."""
        return [self.flat]

    def own_gradient(self, p: nn.Parameter, row: int = 0) -> Tensor:
        """Return the gradient of `p` from a row on, flat."""
        return gradient(p)[row:].view(-1)

    def reduced(self) -> list[tuple[dist.ProcessGroup | None, int]]:
        """Return the groups that sum gradients by all-reduce, and how many elements each sums."""
        return [(self.group, self.flat.numel())]

    def copied_gradient(self, p: nn.Parameter) -> Tensor:
        """Return the gradient of `p`, which all ranks with a copy of `p` have to sum."""
        return gradient(p)

    def state(self) -> list[Tensor]:
        """Return the tensors that hold all parameters, to save and restore them."""
        return [p.detach() for p in self.params]

    def silence(self) -> None:
        """Stop communicating."""
        self.silent = True

    def speak(self) -> None:
        """Communicate again."""
        self.silent = False

    def begin(self) -> None:
        """Begin a step."""

    def last(self) -> None:
        """Note that the next micro-batch is the step's last."""
        self.missing = [n // self.micro_batches for n in self.due]

    def before_block(self, block: nn.Module) -> None:
        """Prepare for a block's forward."""

    def updated(self) -> None:
        """Note that the optimizer has run."""

    def zero(self) -> None:
        """Zero the gradients for the next step."""
        self.flat.zero_()
        self.records, self.traffic = [], Traffic()
        self.missing = list(self.due)

    def added(self, p: nn.Parameter) -> None:
        """Count one micro-batch's gradient of `p`, and reduce its bucket if it was the last one missing."""
        bucket = self.bucket_of.get(id(p))
        if bucket is None:
            return
        self.missing[bucket] -= 1
        if self.missing[bucket] == 0 and not self.silent:
            self._reduce(self.slices[bucket])

    def _reduce(self, x: Tensor) -> None:
        if not self.by_one_rank:
            self._send("all_reduce", x, partial(dist.all_reduce, x))
            return
        assert self.group is not None
        root = dist.get_global_rank(self.group, 0)
        self._send("reduce", x, partial(dist.reduce, x, root))
        self._wait()  # gloo runs collectives that are under way together in any order
        self._send("broadcast", x, partial(dist.broadcast, x, root))

    def _send(self, op: str, x: Tensor, call: Callable[..., Any]) -> None:
        start = time.perf_counter_ns()
        work = call(group=self.group, async_op=True)
        sent = Sent(op, self.group, x.nbytes)
        self.traffic.sent.append(sent)
        index, records = len(self.records), self.records
        records.append(Record(op.upper(), self.stage, -1, start, start))

        def done(_: object) -> None:
            records[index] = records[index]._replace(end_ns=time.perf_counter_ns())

        if x.device.type == "cpu":  # on a GPU the callback runs when the work is queued, not when it is done
            work.get_future().add_done_callback(done)
        self.works.append((work, sent, start))

    def finish(self) -> None:
        """Reduce the remaining gradients and wait for all."""
        if self.group is not None and not self.bucket_of and not self.silent:
            self._reduce(self.flat)
        waited = self._wait()
        if waited and self.flat.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
            end = time.perf_counter_ns()
            self.records = [r._replace(end_ns=end) for r in self.records]

    def _wait(self) -> bool:
        waited = bool(self.works)
        for work, sent, start in self.works:
            self.traffic.wait(work, sent, start)
        self.works = []
        return waited

    def whole_gradients(self) -> dict[int, Tensor]:
        """Return all gradients by id of their parameter, for the proof."""
        return {id(p): gradient(p) for p in self.params}

    def whole_parameters(self) -> dict[int, Tensor]:
        """Return all parameters by their id."""
        return {id(p): p.detach() for p in self.params}
