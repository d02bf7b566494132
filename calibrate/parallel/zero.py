"""ZeRO: data-parallel ranks share out what they would otherwise all keep.

- ZeRO-1: each rank keeps the optimizer's states of its shard and updates that shard; then the updated
  parameters are gathered;
- ZeRO-2: the gradients too: they are reduced every micro-batch, each rank keeps the sum of its shard, and
  what was sent is freed (unless `accumulate_unsharded`: reduced once a step, kept whole until then);
- ZeRO-3 (FSDP, `fsdp.py`): the parameters too: a block's are gathered just before it computes, while the
  block before it still does, and freed just after.

(Rajbhandari et al. 2020, arXiv 1910.02054; Zhao et al. 2023, PyTorch FSDP, arXiv 2304.11277.) What one rank
of n keeps is 1/n of a flat, padded buffer: a reduce-scatter gives it the sum of its part of the gradients,
an all-gather puts the parts of the parameters together again. With fewer shards than ranks (hybrid
sharding) an all-reduce adds the shards of the replicas.

Documentation: docs/data_parallel.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrate.linear import WeightGrads, gradient
from calibrate.parallel.data import Sent, Sync, Traffic, distinct_parameters, hook_gradients, make_buckets
from calibrate.parallel.pipeline import Record

all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, slots=True)
class Sharding:
    """Who shards together, and who holds the same shard. A group is None where a rank would be alone in it."""

    group: dist.ProcessGroup | None = None
    shards: int = 1
    rank: int = 0  # among the shards
    replicas: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True)
class Shared:
    """How a stage's parameters are shared out: experts (ids in `experts`) over other ranks than all else.

    Parameters whose ids are in `alone` stand in a unit of their own: a matrix that blocks or pipeline ranks have
    together. So its shards lie alike wherever it is held (Megatron-Core, `_does_param_require_new_bucket`).
    """

    sharding: Sharding
    expert_sharding: Sharding = Sharding()
    experts: frozenset[int] = frozenset()
    alone: frozenset[int] = frozenset()

    def groups(self, params: Sequence[nn.Parameter]) -> list[tuple[list[nn.Parameter], Sharding]]:
        """`params`, in their order, by who shares them out; empty groups left out."""
        routed = [p for p in params if id(p) in self.experts]
        alone = [([p], self.sharding) for p in params if id(p) in self.alone]
        dense = [p for p in params if id(p) not in self.experts | self.alone]
        return [g for g in ((dense, self.sharding), (routed, self.expert_sharding), *alone) if g[0]]


class Unit:
    """Parameters that are gathered and reduced together: a bucket, or (ZeRO-3) a block.

    `weights` is the flat, padded buffer in which the parameters lie; `shard` this rank's part of it, which
    the optimizer updates, and `shard.grad` the reduced gradients of that part. `kept` is the same for
    gradients, where they stay whole.
    """

    def __init__(self, params: Sequence[nn.Parameter], sharding: Sharding) -> None:
        self.params, self.sharding = params, sharding
        self.elements = sum(p.numel() for p in params)
        self.share = -(-self.elements // sharding.shards)
        self.weights = params[0].detach().new_zeros(self.share * sharding.shards)
        for p, place in zip(params, self.pieces(self.weights), strict=True):
            place.copy_(p.detach())
            p.data, p.grad = place, None
        self.shard = nn.Parameter(self.own(self.weights))
        self.shard.grad = torch.zeros_like(self.shard)
        self.kept: Tensor | None = None
        self.bytes = self.weights.untyped_storage().nbytes()

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat buffer, shaped as the parameters; the padding is left out."""
        parts = flat[: self.elements].split([p.numel() for p in self.params])
        return [x.view(p.shape) for x, p in zip(parts, self.params, strict=True)]

    def own(self, flat: Tensor) -> Tensor:
        """This rank's part of a flat buffer."""
        return flat[self.sharding.rank * self.share :][: self.share]

    def own_gradient(self, p: nn.Parameter, row: int = 0) -> Tensor:
        """What this rank's shard has of the reduced gradient of `p` from a row on, flat; empty where it has nothing."""
        at, begin = 0, self.sharding.rank * self.share
        for q in self.params:
            if q is p:
                break
            at += q.numel()
        first = at + row * (p.numel() // p.shape[0])
        return gradient(self.shard)[max(first - begin, 0) : max(at + p.numel() - begin, 0)]

    def keep_gradients(self) -> None:
        """Keep gradients whole, in one buffer."""
        self.kept = torch.zeros_like(self.weights)
        for p, place in zip(self.params, self.pieces(self.kept), strict=True):
            p.grad = place
        self.shard.grad = self.own(self.kept)

    def keep_only_shard(self) -> None:
        """Hold the shard in memory of its own, so that the rest can be freed."""
        grad = self.shard.grad
        self.shard = nn.Parameter(self.shard.detach().clone())
        self.shard.grad = grad
        self.free()

    def free(self) -> None:
        """Give the gathered parameters' memory back; views of it (also autograd's) wait for the next `gather`."""
        self.weights.untyped_storage().resize_(0)

    @torch.no_grad()
    def gather(self) -> dist.Work | None:
        """Start to put the shards of all ranks together in `weights`."""
        if self.weights.untyped_storage().nbytes() == 0:
            self.weights.untyped_storage().resize_(self.bytes)
        if self.sharding.group is None:
            self.own(self.weights).copy_(self.shard)
            return None
        work: dist.Work = all_gather(self.weights, self.shard.detach(), group=self.sharding.group, async_op=True)
        return work

    def take_gradients(self) -> Tensor:
        """The parameters' gradients in one padded buffer; unless they are kept whole, the parameters lose them."""
        if self.kept is not None:
            return self.kept
        flat = torch.zeros_like(self.weights)
        for p, place in zip(self.params, self.pieces(flat), strict=True):
            if p.grad is not None:
                place.copy_(p.grad)
                p.grad = None
        return flat


@dataclass(slots=True)
class Running:
    """A communication under way, and its place among the records."""

    records: list[Record]
    index: int
    traffic: Traffic
    sent: Sent
    work: dist.Work
    tells: bool = False

    def watched(self) -> Running:
        """Have its end recorded when it happens; gloo's reduce-scatter cannot tell, so there it is the wait's end."""
        try:
            self.work.get_future().add_done_callback(lambda _: self.ended())
            self.tells = True
        except RuntimeError:
            pass
        return self

    def ended(self) -> None:
        """Record the end: now."""
        self.records[self.index] = self.records[self.index]._replace(end_ns=time.perf_counter_ns())

    def wait(self) -> None:
        """Wait for it."""
        self.traffic.wait(self.work, self.sent, self.records[self.index].start_ns)
        if not self.tells:
            self.ended()


class Sharded:
    """What ZeRO-1, -2 and -3 have in common, on one stage: units, their gathers and their reductions.

    `silent`: everything but the communication, for timing blocks by themselves.
    """

    def __init__(self, units: Sequence[Unit], stage: int) -> None:
        self.units, self.stage = units, stage
        self.silent = False
        self.records: list[Record] = []
        self.traffic = Traffic()
        self.gathers: dict[int, Running | None] = {}
        self.reducing: tuple[Unit, Tensor, Running | None] | None = None

    def owned(self) -> list[nn.Parameter]:
        """What this rank's optimizer updates."""
        return [u.shard for u in self.units]

    def owned_gradients(self) -> list[Tensor]:
        """The reduced gradients of `owned`, flat."""
        return [gradient(u.shard) for u in self.units]

    def reduced(self) -> list[tuple[dist.ProcessGroup | None, int]]:
        """Who sums gradients by all-reduce after they were scattered, and how many elements."""
        return [(u.sharding.replicas, u.share) for u in self.units]

    def copied_gradient(self, p: nn.Parameter) -> Tensor:
        """What ranks that hold `p` too have to sum, `p` standing alone: its whole gradient (of which this rank's part
        is reduced) where gradients stay whole, else this rank's part.
        """
        (unit,) = (u for u in self.units if any(q is p for q in u.params))
        return gradient(unit.shard) if unit.kept is None else unit.kept

    def own_gradient(self, p: nn.Parameter, row: int = 0) -> Tensor:
        """This rank's part of the reduced gradient of `p` from a row on, flat."""
        return next(u for u in self.units if any(q is p for q in u.params)).own_gradient(p, row)

    def state(self) -> list[Tensor]:
        """Where all parameters lie that this rank keeps, to be saved and put back."""
        return [u.weights for u in self.units]

    def silence(self) -> None:
        """Communicate no more."""
        self.silent = True

    def speak(self) -> None:
        """Communicate again."""
        self.settle()
        self.silent = False

    def gather(self, i: int) -> None:
        """Start gathering a unit's parameters, unless that is under way."""
        if i not in self.gathers and not self.silent:
            unit = self.units[i]
            self.gathers[i] = self._start(Sent("all_gather", unit.sharding.group, unit.bytes), unit.gather)

    def arrived(self, i: int) -> None:
        """Wait for a unit's parameters, if they are on their way."""
        work, self.gathers[i] = self.gathers.get(i), None
        if work is not None:
            work.wait()

    def reduce(self, unit: Unit) -> None:
        """Send a unit's gradients off; the sum of this rank's part will be added to its shard's.

        One reduction at a time, so that no more than two units' gradients are held.
        """
        self.settle()
        flat, sharding = unit.take_gradients(), unit.sharding
        if sharding.group is None or self.silent:
            self.reducing = unit, unit.own(flat), None
            return
        mine = torch.empty_like(unit.shard) if unit.kept is None else unit.own(flat)
        work = self._start(
            Sent("reduce_scatter", sharding.group, flat.nbytes),
            lambda: reduce_scatter(mine, flat, group=sharding.group, async_op=True),
        )
        self.reducing = unit, mine, work

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the reduction under way, if there is one."""
        if self.reducing is None:
            return
        (unit, mine, work), self.reducing = self.reducing, None
        if work is not None:
            work.wait()
        replicas = unit.sharding.replicas
        if replicas is not None and not self.silent:
            sent = Sent("all_reduce", replicas, mine.nbytes)
            added = self._start(sent, lambda: dist.all_reduce(mine, group=replicas, async_op=True))
            assert added is not None
            added.wait()
        if unit.kept is None:
            gradient(unit.shard).add_(mine)

    def zero(self) -> None:
        """Gradients to zero, for the next step."""
        self.records, self.traffic = [], Traffic()
        for u in self.units:
            gradient(u.shard).zero_()
            if u.kept is not None:
                u.kept.zero_()

    def whole_gradients(self) -> dict[int, Tensor]:
        """All gradients, gathered, by id of their parameter: what a proof compares. Collective."""
        return self._whole([gradient(u.shard) for u in self.units])

    def whole_parameters(self) -> dict[int, Tensor]:
        """All parameters, gathered, by their id. Collective."""
        return self._whole([u.shard.detach() for u in self.units])

    def _whole(self, shards: Sequence[Tensor]) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        for u, shard in zip(self.units, shards, strict=True):
            flat = shard
            if u.sharding.group is not None:
                flat = shard.new_empty(u.share * u.sharding.shards)
                all_gather(flat, shard, group=u.sharding.group)
            found |= {id(p): x for p, x in zip(u.params, u.pieces(flat), strict=True)}
        return found

    def _start(self, sent: Sent, start: Callable[[], dist.Work | None]) -> Running | None:
        """Start a communication, and record it until it is done."""
        index, begin = len(self.records), time.perf_counter_ns()
        self.records.append(Record(sent.op.upper(), self.stage, -1, begin, begin))
        work = start()
        if work is None:
            return None
        running = Running(self.records, index, self.traffic, sent, work)
        self.traffic.sent.append(sent)
        on_cpu = self.units[0].weights.device.type == "cpu"  # a GPU's work counts as done once it is queued
        return running.watched() if on_cpu else running


class ShardedOptimizer(Sharded):
    """ZeRO-1 and -2: units are buckets, reduced as soon as all of a bucket's gradients are there.

    `each`: after every micro-batch (ZeRO-2), else once a step. With `gather_ahead` the updated parameters are
    gathered under the next step's first forward, else right after the optimizer.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        shared: Shared,
        sync: Sync,
        each: bool,
        gather_ahead: bool,
        stage: int,
        store: WeightGrads | None,
    ) -> None:
        params = distinct_parameters(blocks)[::-1]  # as backward reaches them
        buckets, units = [], []
        for group, sharding in shared.groups(params):
            sizes = [p.numel() * p.element_size() for p in group]
            own = [[group[i] for i in members] for members in make_buckets(sizes, sync.limit_bytes)]
            buckets += own
            units += [Unit(members, sharding) for members in own]
        super().__init__(units, stage)
        self.each, self.gather_ahead = each, gather_ahead
        self.hooked = each or not sync.after_backward
        self.bucket_of = {id(p): i for i, members in enumerate(buckets) for p in members}
        uses = hook_gradients(blocks, store, self.added) if self.hooked else {}
        self.due = [sum(uses.get(id(p), 1) for p in members) for members in buckets]
        self.micro_batches = 1 if each else sync.micro_batches
        self.due = [n * self.micro_batches for n in self.due]
        self.missing = list(self.due)
        if not each:
            for u in self.units:
                u.keep_gradients()

    def added(self, p: nn.Parameter) -> None:
        """One micro-batch's gradient of `p` was added; reduce its bucket if that was the last one missing."""
        i = self.bucket_of.get(id(p))
        if i is None:
            return
        self.missing[i] -= 1
        if self.missing[i] == 0:
            self.missing[i] = self.due[i]
            self.reduce(self.units[i])

    def begin(self) -> None:
        """A step begins: gather the parameters that the last one updated, first block first."""
        if self.gather_ahead:
            self.gathers = {}
            for i in reversed(range(len(self.units))):
                self.gather(i)

    def last(self) -> None:
        """The next micro-batch is the step's last."""
        self.missing = [n // self.micro_batches for n in self.due]

    def before_block(self, block: nn.Module) -> None:
        """Wait for the parameters of a block."""
        if self.gathers:
            for i in sorted({self.bucket_of[id(p)] for p in block.parameters()}):
                self.arrived(i)

    def finish(self) -> None:
        """Reduce what has not been, and wait for all."""
        if not self.hooked:
            for u in self.units:
                self.reduce(u)
        self.settle()

    def updated(self) -> None:
        """The optimizer has run: gather what it updated, unless the next step does."""
        if self.gather_ahead:
            return
        self.gathers = {}
        for i in range(len(self.units)):
            self.gather(i)
            self.arrived(i)
