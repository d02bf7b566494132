"""Data parallelism: every rank computes on its own sequences, and gradients are summed over the ranks.

`after_backward`: one all-reduce when all is computed. `per_parameter`: one for each parameter as soon as
its gradient is complete. `bucketed`: one for each bucket of consecutive parameters, last layer first
(PyTorch DDP, Li et al. 2020, arXiv 2006.15704). The gradients live in one flat buffer, so a bucket is a
slice and nothing is copied. With accumulation a gradient is complete when every micro-batch has added to
it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrate.model import Linear, WeightGrads
from calibrate.parallel.pipeline import Record


def flat_gradients(params: Sequence[nn.Parameter]) -> Tensor:
    """One zeroed buffer whose slices are the `.grad` of `params`, in this order."""
    flat = torch.zeros(sum(p.numel() for p in params), dtype=params[0].dtype, device=params[0].device)
    at = 0
    for p in params:
        p.grad = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    return flat


def make_buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Consecutive items in buckets of at least `limit` bytes each (the last may be smaller).

    A bucket is closed as soon as it reaches the limit, as DDP does; so a parameter larger than the limit
    does not stand alone if smaller ones came before it.

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


class DataParallel:
    """Sums the gradients of one stage's blocks over the ranks of `group`; the loss is scaled beforehand."""

    def __init__(
        self, blocks: Sequence[nn.Module], group: dist.ProcessGroup | None, size: int, sync: str,
        bucket_bytes: int, micro_batches: int, stage: int, store: WeightGrads | None,
    ) -> None:
        params = list({id(p): p for block in blocks for p in block.parameters()}.values())[::-1]
        self.params, self.group, self.size, self.stage = params, group, size, stage
        self.flat = flat_gradients(params)
        self.works: list[dist.Work] = []
        self.records: list[Record] = []
        self.micro_batches = micro_batches
        self.slices: list[Tensor] = [self.flat]
        self.bucket_of: dict[int, int] = {}
        self.missing: list[int] = []
        if size > 1 and sync != "after_backward":
            limit = bucket_bytes if sync == "bucketed" else 0
            self._make_slices(limit)
            self._add_hooks(blocks, store)

    def _make_slices(self, limit: int) -> None:
        sizes = [p.numel() * p.element_size() for p in self.params]
        self.buckets = make_buckets(sizes, limit)
        self.slices, at = [], 0
        for b, members in enumerate(self.buckets):
            n = sum(self.params[i].numel() for i in members)
            self.slices.append(self.flat[at : at + n])
            at += n
            self.bucket_of.update({id(self.params[i]): b for i in members})

    def _add_hooks(self, blocks: Sequence[nn.Module], store: WeightGrads | None) -> None:
        """Autograd tells when a gradient was added to; split linear layers tell through their store."""
        split = {
            id(p) for block in blocks for x in block.modules()
            if isinstance(x, Linear) and x.store is not None for p in x.parameters()
        }
        for p in self.params:
            if id(p) not in split:
                p.register_post_accumulate_grad_hook(self.added)
        if store is not None:
            store.listeners.append(self.added)

    def zero(self) -> None:
        """Gradients to zero, for the next step."""
        self.flat.zero_()
        self.records = []
        if self.bucket_of:
            self.missing = [len(members) * self.micro_batches for members in self.buckets]

    def added(self, p: nn.Parameter) -> None:
        """One micro-batch's gradient of `p` was added; reduce its bucket if that was the last one missing."""
        bucket = self.bucket_of.get(id(p))
        if bucket is None:
            return
        self.missing[bucket] -= 1
        if self.missing[bucket] == 0:
            self._reduce(self.slices[bucket])

    def _reduce(self, x: Tensor) -> None:
        start = time.perf_counter_ns()
        work = dist.all_reduce(x, group=self.group, async_op=True)
        index = len(self.records)
        self.records.append(Record("ALL_REDUCE", self.stage, -1, start, start))

        def done(_: object) -> None:
            self.records[index] = self.records[index]._replace(end_ns=time.perf_counter_ns())

        work.get_future().add_done_callback(done)
        self.works.append(work)

    def finish(self) -> None:
        """Reduce what has not been, and wait for all."""
        if self.size > 1 and not self.bucket_of:
            self._reduce(self.flat)
        for work in self.works:
            work.wait()
        if self.works and self.flat.device.type == "cuda":
            torch.cuda.synchronize()
        self.works = []
