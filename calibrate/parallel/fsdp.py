"""ZeRO-3 as in PyTorch's FSDP: parameters are sharded too, and a block's parameters are gathered while it computes.

A stage gathers a block's parameters while the block before it computes, and frees them afterwards, in the forward and
again in the backward. If `reshard_after_forward` is false, they stay for the backward, which frees them, or (with a
pipeline, or where gradients are reduced once a step) until the step's end. Gradients are reduced block by block, last
block first, while the next block's backward runs. (Rajbhandari et al. 2020, arXiv 1910.02054, section 5.3; Zhao et al.
2023, PyTorch FSDP, arXiv 2304.11277.) Units, gathers and reductions are in `zero.py`.

Documentation: docs/data_parallel.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from calibrate.bundled_model.linear import WeightJob
from calibrate.bundled_model.model import Embedding, Head
from calibrate.parallel.data import Sync
from calibrate.parallel.pipeline import Stage
from calibrate.parallel.zero import Sharded, Shared, Unit


class ShardedParameters(Sharded):
    """ZeRO-3: a block's parameters are gathered before each forward and backward, and freed after it.

    A block has one unit for its dense parameters and one for its experts. A matrix that two blocks share is a unit of
    both. It is reduced once the first block, whose backward comes last, has added to it.

    Without `reshard` parameters stay from a forward to its backward, or (`stays`) from the first forward to the step's
    end. `each`: gradients are reduced after every micro-batch, else after the last; `replicas_once`: see `Sharded`.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        shared: Shared,
        sync: Sync,
        each: bool,
        replicas_once: bool,
        kept: tuple[bool, bool],
        stage: int,
    ) -> None:
        units: list[Unit] = []
        at: dict[int, int] = {}  # id of a unit's first parameter: the unit
        self.units_of: list[list[int]] = []  # units of each block
        self.completes: list[list[int]] = []  # for each block the units to which its backward adds last
        for b in blocks:
            first = len(units)
            groups = shared.groups(list(b.parameters())[::-1])
            for params, sharding in groups:
                if id(params[0]) not in at:
                    at[id(params[0])] = len(units)
                    units.append(Unit(params, sharding))
            self.units_of.append([at[id(params[0])] for params, _ in groups])
            self.completes.append(list(range(first, len(units))))
        super().__init__(units, stage, replicas_once)
        self.each = each
        self.reshard, self.stays = kept
        self.sync = sync
        self.missing = [sync.micro_batches] * len(blocks)
        for u in self.units:
            u.keep_only_shard()

    def state(self) -> list[Tensor]:
        """Return the shards, to save and restore them."""
        return [u.shard.detach() for u in self.units]

    def silence(self) -> None:
        """Gather all parameters, then stop communicating."""
        for i in range(len(self.units_of)):
            self.fetch(i)
            self.ready(i)
        self.begin()
        self.silent = True

    def speak(self) -> None:
        """Free the gathered parameters and communicate again."""
        self.settle()
        self.silent = False
        self._release_all()

    def fetch(self, i: int) -> None:
        """Start gathering block i, if it exists and is not gathered."""
        for u in self.units_of[i] if 0 <= i < len(self.units_of) else ():
            self.gather(u)

    def ready(self, i: int) -> None:
        """Wait for block i's parameters."""
        for u in self.units_of[i]:
            self.arrived(u)

    def done(self, i: int, last_use: bool = False) -> None:
        """Free block i's parameters after its computation, unless they stay; `last_use`: the micro-batch's backward."""
        if self.reshard:
            self.release(self.units_of[i])
        elif last_use and not self.stays:
            self.release(self.completes[i])

    def release(self, units: Sequence[int]) -> None:
        """Free the parameters of units."""
        for u in units:
            if not self.silent and u in self.gathers:
                self.arrived(u)
                del self.gathers[u]
                self.units[u].free()

    def _release_all(self) -> None:
        for i in range(len(self.units_of)):
            self.release(self.units_of[i])

    def graded(self, i: int) -> None:
        """Reduce block i's gradients after a micro-batch's backward: after each, or after the last."""
        self.missing[i] -= 1
        if self.each or self.missing[i] == 0:
            for u in self.completes[i]:
                self.reduce(self.units[u], self.missing[i] == 0)

    def begin(self) -> None:
        """Begin a step."""
        self.missing = [self.sync.micro_batches] * len(self.units_of)

    def last(self) -> None:
        """Note that the next micro-batch is the step's last."""
        self.missing = [1] * len(self.units_of)

    def before_block(self, block: nn.Module) -> None:
        """Do nothing, as `ShardedStage` gathers its blocks itself."""

    def finish(self) -> None:
        """Wait for the last reductions and free the gathered parameters."""
        self.settle()
        self._release_all()

    def updated(self) -> None:
        """Do nothing, as the next forward gathers the updated parameters."""


@dataclass(slots=True)
class ShardedStage(Stage):
    """A stage under ZeRO-3, with an autograd graph for each block, so that parameters can be gathered and freed."""

    sharded: ShardedParameters = field(kw_only=True)

    def forward(self, micro_batch: int, x: Tensor, targets: Tensor) -> Tensor:
        """Run the blocks one after the other; the next block's parameters are gathered while one computes."""
        inputs, edges = [], []
        self.sharded.fetch(0)
        for i, block in enumerate(self.blocks):
            self.sharded.fetch(i + 1)
            self.sharded.ready(i)
            self.before_block(block, micro_batch)
            x = x if isinstance(block, Embedding) else x.detach().requires_grad_()
            inputs.append(x)
            x = block(x, targets) * self.scale if isinstance(block, Head) else block(x)
            edges.append(torch.autograd.graph.get_gradient_edge(x))
            self.sharded.done(i)
        if x.ndim == 0:
            self.losses[micro_batch] = x.detach()
        self.flight[micro_batch] = (inputs, edges)
        return x.detach()

    def backward(self, micro_batch: int, grad: Tensor | None) -> Tensor | None:
        """Run the backward, last block first, reducing each block's gradients during the next block's backward."""
        inputs, edges = self.flight.pop(micro_batch)
        self.sharded.fetch(len(edges) - 1)
        while edges:
            i, x = len(edges) - 1, inputs.pop()
            self.sharded.fetch(i - 1)
            self.sharded.ready(i)
            torch.autograd.backward(edges.pop(), grad)
            grad = x.grad
            self.sharded.done(i, last_use=True)
            self.after_block(i)
        return grad

    def backward_input(self, micro_batch: int, grad: Tensor | None) -> Tensor | None:
        """Compute only the input's gradient; each block leaves its linear layers' jobs for `backward_weight`."""
        inputs, edges = self.flight.pop(micro_batch)
        jobs: list[list[WeightJob]] = [[] for _ in edges]
        embedded = None
        self.sharded.fetch(len(edges) - 1)
        for i in reversed(range(len(edges))):
            self.sharded.fetch(i - 1)
            self.sharded.ready(i)
            if isinstance(self.blocks[i], Embedding):
                embedded = edges[i]
            else:
                self.store.deferred = jobs[i]
                torch.autograd.backward(edges[i], grad)
                grad = inputs[i].grad
            edges[i] = None
            self.sharded.done(i, last_use=True)
        self.store.deferred = None
        self.deferred[micro_batch] = (jobs, embedded, grad)
        return grad

    def backward_weight(self, micro_batch: int) -> None:
        """Compute the weight gradients that `backward_input` left, last block first."""
        jobs, embedded, grad = self.deferred.pop(micro_batch)
        while jobs:
            i = len(jobs) - 1
            self.store.run(jobs.pop())
            if isinstance(self.blocks[i], Embedding):
                torch.autograd.backward(embedded, grad)
            self.after_block(i)
