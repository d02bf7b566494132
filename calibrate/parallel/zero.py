"""ZeRO: data-parallel ranks shard states that they would otherwise all keep.

- ZeRO-1 shards optimizer states: each rank updates its shard, then the updated parameters are gathered;
- ZeRO-2 also shards gradients: they are reduced after every micro-batch, each rank keeps the sum of its shard, and the
  rest is freed. With `accumulate_unsharded` they are kept whole and reduced once a step;
- ZeRO-3 (FSDP, `fsdp.py`) also shards parameters: a block's parameters are gathered while the block before it
  computes, and freed after the block.

(Rajbhandari et al. 2020, arXiv 1910.02054; Zhao et al. 2023, PyTorch FSDP, arXiv 2304.11277.) One rank of n keeps 1/n
of a flat, padded buffer. A reduce-scatter gives it the sum of its part of the gradients, and an all-gather collects the
parts of the parameters. With fewer shards than ranks (hybrid sharding) an all-reduce sums the shards of the replicas,
with every reduction or, with `all_reduce_once`, with the step's last (torch's FSDP2, `set_requires_all_reduce`).

Documentation: docs/data_parallel.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrate.bundled_model.linear import WeightGrads, gradient
from calibrate.parallel.comm import all_gather, reduce_scatter
from calibrate.parallel.data import Sent, Sync, Traffic, distinct_parameters, hook_gradients, make_buckets
from calibrate.parallel.pipeline import Record
from calibrate.parallel.running import Running


@dataclass(frozen=True, slots=True)
class Sharding:
    """The ranks that shard together, and the ranks with the same shard. A group of one rank is None."""

    group: dist.ProcessGroup | None = None
    shards: int = 1
    rank: int = 0  # number of this rank's shard
    replicas: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True)
class Shared:
    """The sharding of a stage's parameters: experts (ids in `experts`) over other ranks than all others.

    Parameters with ids in `alone` have a unit of their own: matrices that blocks or pipeline ranks share. So their
    shards are the same wherever they are held (Megatron-Core, `_does_param_require_new_bucket`).
    """

    sharding: Sharding
    expert_sharding: Sharding = Sharding()
    experts: frozenset[int] = frozenset()
    alone: frozenset[int] = frozenset()

    def groups(self, params: Sequence[nn.Parameter]) -> list[tuple[list[nn.Parameter], Sharding]]:
        """Group `params`, in their order, by the ranks that shard them; empty groups are left out."""
        routed = [p for p in params if id(p) in self.experts]
        alone = [([p], self.sharding) for p in params if id(p) in self.alone]
        dense = [p for p in params if id(p) not in self.experts | self.alone]
        return [g for g in ((dense, self.sharding), (routed, self.expert_sharding), *alone) if g[0]]


class Unit:
    """Parameters that are gathered and reduced together: a bucket, or (ZeRO-3) a block.

    `weights` is the flat, padded buffer of the parameters. `shard` is this rank's part of it, which the optimizer
    updates, and `shard.grad` the reduced gradients of that part. `kept` is the flat buffer of gradients that are kept
    whole. `held_back` is a shard of gradients of the micro-batches so far that its replicas have not summed yet.
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
        self.held_back: Tensor | None = None
        self.bytes = self.weights.untyped_storage().nbytes()

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Return views of a flat buffer, shaped as the parameters, without the padding."""
        parts = flat[: self.elements].split([p.numel() for p in self.params])
        return [x.view(p.shape) for x, p in zip(parts, self.params, strict=True)]

    def own(self, flat: Tensor) -> Tensor:
        """Return this rank's part of a flat buffer."""
        return flat[self.sharding.rank * self.share :][: self.share]

    def own_gradient(self, p: nn.Parameter, row: int = 0) -> Tensor:
        """Return the shard's part of the reduced gradient of `p` from a row on, flat; it may be empty."""
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
        """Move the shard to memory of its own, so that the rest can be freed."""
        grad = self.shard.grad
        self.shard = nn.Parameter(self.shard.detach().clone())
        self.shard.grad = grad
        self.free()

    def free(self) -> None:
        """Free the gathered parameters' memory; views of it, also autograd's, are valid again after a `gather`."""
        self.weights.untyped_storage().resize_(0)

    @torch.no_grad()
    def gather(self) -> dist.Work | None:
        """Start gathering the shards of all ranks into `weights`."""
        if self.weights.untyped_storage().nbytes() == 0:
            self.weights.untyped_storage().resize_(self.bytes)
        if self.sharding.group is None:
            self.own(self.weights).copy_(self.shard)
            return None
        work: dist.Work = all_gather(self.weights, self.shard.detach(), group=self.sharding.group, async_op=True)
        return work

    def take_gradients(self) -> Tensor:
        """Return the gradients in one padded buffer; unless they are kept whole, the parameters' `.grad` is cleared."""
        if self.kept is not None:
            return self.kept
        flat = torch.zeros_like(self.weights)
        for p, place in zip(self.params, self.pieces(flat), strict=True):
            if p.grad is not None:
                place.copy_(p.grad)
                p.grad = None
        return flat


class Sharded:
    """The common part of ZeRO-1, -2 and -3 on one stage: units, their gathers and their reductions.

    `silent`: communicate nothing, so that blocks can be timed by themselves. `replicas_once`: only a step's last
    reduction of a unit goes on to the replicas.
    """

    def __init__(self, units: Sequence[Unit], stage: int, replicas_once: bool) -> None:
        self.units, self.stage, self.replicas_once = units, stage, replicas_once
        self.silent = False
        self.records: list[Record] = []
        self.traffic = Traffic()
        self.gathers: dict[int, Running | None] = {}
        self.reducing: tuple[Unit, Tensor, Running | None, bool] | None = None

    def owned(self) -> list[nn.Parameter]:
        """Return the parameters that this rank's optimizer updates."""
        return [u.shard for u in self.units]

    def owned_gradients(self) -> list[Tensor]:
        """Return the reduced gradients of `owned`, flat."""
        return [gradient(u.shard) for u in self.units]

    def reduced(self) -> list[tuple[dist.ProcessGroup | None, int]]:
        """Return the groups that sum reduce-scattered gradients by all-reduce, and how many elements each sums."""
        return [(u.sharding.replicas, u.share) for u in self.units]

    def copied_gradient(self, p: nn.Parameter) -> Tensor:
        """Return the gradient of `p`, a unit of its own, which all ranks with a copy of `p` have to sum.

        If gradients are kept whole, it is the whole one, of which this rank's part is reduced; else this rank's part.
        """
        unit = self._unit_of(p)
        return gradient(unit.shard) if unit.kept is None else unit.kept

    def own_gradient(self, p: nn.Parameter, row: int = 0) -> Tensor:
        """Return this rank's part of the reduced gradient of `p` from a row on, flat."""
        return self._unit_of(p).own_gradient(p, row)

    def _unit_of(self, p: nn.Parameter) -> Unit:
        return next(u for u in self.units if any(q is p for q in u.params))

    def state(self) -> list[Tensor]:
        """Return the tensors that hold this rank's parameters, to save and restore them."""
        return [u.weights for u in self.units]

    def silence(self) -> None:
        """Stop communicating."""
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
        """Wait for a unit's parameters, if they are being gathered."""
        work, self.gathers[i] = self.gathers.get(i), None
        if work is not None:
            work.wait()

    def reduce(self, unit: Unit, last: bool = True) -> None:
        """Start reducing a unit's gradients; the sum of this rank's part is added to its shard's gradient.

        `last`: nothing adds to them in this step any more. One reduction runs at a time, so that at most two units'
        gradients are in memory.
        """
        self.settle()
        flat, sharding = unit.take_gradients(), unit.sharding
        if sharding.group is None or self.silent:
            self.reducing = unit, unit.own(flat), None, last
            return
        mine = torch.empty_like(unit.shard) if unit.kept is None else unit.own(flat)
        work = self._start(
            Sent("reduce_scatter", sharding.group, flat.nbytes),
            lambda: reduce_scatter(mine, flat, group=sharding.group, async_op=True),
        )
        self.reducing = unit, mine, work, last

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the reduction under way, if there is one."""
        if self.reducing is None:
            return
        (unit, mine, work, last), self.reducing = self.reducing, None
        if work is not None:
            work.wait()
        replicas = unit.sharding.replicas
        if replicas is not None and not self.silent:
            if unit.held_back is not None:
                mine.add_(unit.held_back)
            if self.replicas_once and not last:
                unit.held_back = mine
                return
            unit.held_back = None
            sent = Sent("all_reduce", replicas, mine.nbytes)
            if added := self._start(sent, lambda: dist.all_reduce(mine, group=replicas, async_op=True)):
                added.wait()
        if unit.kept is None:
            gradient(unit.shard).add_(mine)

    def zero(self) -> None:
        """Zero the gradients for the next step."""
        self.records, self.traffic = [], Traffic()
        for u in self.units:
            gradient(u.shard).zero_()
            if u.kept is not None:
                u.kept.zero_()

    def whole_gradients(self) -> dict[int, Tensor]:
        """Gather all gradients, by id of their parameter, for the proof. Collective."""
        return self._whole([gradient(u.shard) for u in self.units])

    def whole_parameters(self) -> dict[int, Tensor]:
        """Gather all parameters, by their id. Collective."""
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
        """Start a communication and record its start and end."""
        index, begin = len(self.records), time.perf_counter_ns()
        self.records.append(Record(sent.op.upper(), self.stage, -1, begin, begin))
        work = start()
        if work is None:
            return None
        running = Running(self.records, index, self.traffic, sent, work)
        self.traffic.sent.append(sent)
        on_cpu = self.units[0].weights.device.type == "cpu"  # on a GPU work counts as done once it is queued
        return running.watched() if on_cpu else running


class ShardedOptimizer(Sharded):
    """ZeRO-1 and -2: units are buckets, which are reduced as soon as all of their gradients are complete.

    `each`: reduce after every micro-batch (ZeRO-2), else once a step. `replicas_once`: see `Sharded`. `gather_ahead`:
    gather the updated parameters during the next step's first forward, else right after the optimizer.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        shared: Shared,
        sync: Sync,
        each: bool,
        replicas_once: bool,
        gather_ahead: bool,
        stage: int,
        store: WeightGrads | None,
    ) -> None:
        params = distinct_parameters(blocks)[::-1]  # in the order of the backward
        buckets, units = [], []
        for group, sharding in shared.groups(params):
            sizes = [p.numel() * p.element_size() for p in group]
            own = [[group[i] for i in members] for members in make_buckets(sizes, sync.limit_bytes)]
            buckets += own
            units += [Unit(members, sharding) for members in own]
        super().__init__(units, stage, replicas_once)
        self.each, self.gather_ahead = each, gather_ahead
        self.hooked = each or not sync.after_backward
        self.bucket_of = {id(p): i for i, members in enumerate(buckets) for p in members}
        uses = hook_gradients(blocks, store, self.added) if self.hooked else {}
        self.micro_batches = 1 if each else sync.micro_batches
        self.due = [self.micro_batches * sum(uses.get(id(p), 1) for p in members) for members in buckets]
        self.missing = list(self.due)
        self.reductions = sync.micro_batches if each else 1  # of a bucket, in a step
        self.left = [self.reductions] * len(self.units)
        if not each:
            for u in self.units:
                u.keep_gradients()

    def added(self, p: nn.Parameter) -> None:
        """Count one micro-batch's gradient of `p`, and reduce its bucket if it was the last one missing."""
        i = self.bucket_of.get(id(p))
        if i is None:
            return
        self.missing[i] -= 1
        if self.missing[i] == 0:
            self.missing[i] = self.due[i]
            self.left[i] -= 1
            self.reduce(self.units[i], self.left[i] == 0)

    def begin(self) -> None:
        """Begin a step: start gathering the parameters that the last step updated, first block first."""
        self.left = [self.reductions] * len(self.units)
        if self.gather_ahead:
            self.gathers = {}
            for i in reversed(range(len(self.units))):
                self.gather(i)

    def last(self) -> None:
        """Note that the next micro-batch is the step's last."""
        self.missing = [n // self.micro_batches for n in self.due]
        self.left = [1] * len(self.units)

    def before_block(self, block: nn.Module) -> None:
        """Wait for the parameters of a block."""
        if self.gathers:
            for i in sorted({self.bucket_of[id(p)] for p in block.parameters()}):
                self.arrived(i)

    def finish(self) -> None:
        """Reduce the remaining gradients and wait for all."""
        if not self.hooked:
            for u in self.units:
                self.reduce(u)
        self.settle()

    def updated(self) -> None:
        """Gather the parameters that the optimizer has updated, unless the next step does."""
        if self.gather_ahead:
            return
        self.gathers = {}
        for i in range(len(self.units)):
            self.gather(i)
            self.arrived(i)
