"""DistributedDataParallel's reducer in Python, with the buckets, copies and all-reduces of torch's own.

Torch's reducer is C++ (torch/csrc/distributed/c10d/reducer.cpp) and reads its bucket tables from memory that fake
tensors do not have. This one launches the same operators. Gradients are scaled into flat buckets as they arrive. A full
bucket is all-reduced once the buckets before it are. After the backward all are waited for and copied back. The first
backward's order of gradients decides the buckets of later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks


class Bucket:
    """A flat tensor and its views, one for each parameter."""

    def __init__(self, indices: Sequence[int], parameters: Sequence[torch.Tensor]) -> None:
        self.indices = list(indices)
        chosen = [parameters[i] for i in self.indices]
        self.flat = torch.empty(sum(p.numel() for p in chosen), dtype=chosen[0].dtype, device=chosen[0].device)
        self.views: dict[int, torch.Tensor] = {}
        at = 0
        for i, p in zip(self.indices, chosen, strict=True):
            self.views[i] = self.flat.narrow(0, at, p.numel()).view(p.shape)
            at += p.numel()
        self.pending = set(self.indices)
        self.work: Any = None


class GradBucket:
    """The argument of a communication hook: `torch.distributed.GradBucket`, with the same methods."""

    def __init__(self, reducer: Reducer, bucket: Bucket) -> None:
        self.reducer, self.bucket = reducer, bucket

    def index(self) -> int:
        """Return the bucket's place among the buckets."""
        return self.reducer.buckets.index(self.bucket)

    def is_last(self) -> bool:
        """Return whether it is the last bucket of the backward."""
        return self.bucket is self.reducer.buckets[-1]

    def buffer(self) -> torch.Tensor:
        """Return the flat gradients."""
        return self.bucket.flat

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Set the flat gradients."""
        self.bucket.flat.copy_(tensor)

    def gradients(self) -> list[torch.Tensor]:
        """Return each parameter's gradient, a view of the buffer."""
        return list(self.bucket.views.values())

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters."""
        return [self.reducer.parameters[i] for i in self.bucket.indices]


class Reducer:
    """Replaces `torch.distributed.Reducer`, with the same methods and arguments."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        bucket_indices: Sequence[Sequence[int]],
        bucket_size_limits: Sequence[int],
        group: Any,
        expect_sparse_gradients: Sequence[bool],
        bucket_bytes_cap: int,
        find_unused_parameters: bool,
        gradient_as_bucket_view: bool,
        names: object = None,
        first_bucket_bytes_cap: int = 1024 * 1024,
        *_: object,
    ) -> None:
        self.parameters, self.group = list(parameters), group
        self.sparse = list(expect_sparse_gradients)
        self.limits = [first_bucket_bytes_cap, bucket_bytes_cap]
        self.find_unused, self.as_view = find_unused_parameters, gradient_as_bucket_view
        self.buckets = [Bucket(x, self.parameters) for x in bucket_indices]
        self.rebuilt = False
        self.came: list[int] = []
        self.hook: Callable[[GradBucket], Any] | None = None
        self.expecting = False
        self.unfinished = False  # a backward has begun whose gradients are not all reduced
        for i, p in enumerate(self.parameters):
            p.register_post_accumulate_grad_hook(partial(self._came, i))

    def _rebuild_buckets(self) -> bool:
        """Order the buckets once, as gradients arrived in the first backward."""
        if self.rebuilt or self.find_unused or len(self.came) != len(self.parameters):
            return False
        tensors = [self.parameters[i] for i in self.came]
        sparse = [self.sparse[i] for i in self.came]
        found, _ = _compute_bucket_assignment_by_size(tensors, self.limits, sparse, self.came)
        self.buckets = [Bucket(x, self.parameters) for x in found]
        self.rebuilt = True
        return True

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Expect a gradient for each parameter on which `outputs` depend; the others count as ready."""
        if self.unfinished:  # what torch says too
            raise RuntimeError("a parameter got no gradient: DistributedDataParallel needs find_unused_parameters=True")
        self.expecting, self.next = True, 0
        for bucket in self.buckets:
            bucket.pending, bucket.work = set(bucket.indices), None
        if self.find_unused:
            used = {id(x) for x in _leaves_under(outputs)}
            for i, p in enumerate(self.parameters):
                if id(p) not in used:
                    self._ready(i)

    def _came(self, index: int, parameter: torch.Tensor) -> None:
        if not self.expecting:
            return
        self.unfinished = True
        if not self.rebuilt and index not in self.came:
            self.came.append(index)
        self._ready(index)

    @torch.no_grad()
    def _ready(self, index: int) -> None:
        bucket = next(b for b in self.buckets if index in b.views)
        parameter, view = self.parameters[index], bucket.views[index]
        if parameter.grad is None:
            view.zero_()
        elif self.as_view and parameter.grad is view:
            if self.hook is None:
                view.div_(self.group.size())
        else:
            if self.hook is None:
                torch.mul(parameter.grad, 1.0 / self.group.size(), out=view)
            else:
                view.copy_(parameter.grad)
            if self.as_view:
                parameter.grad = view
        bucket.pending.discard(index)
        while self.next < len(self.buckets) and not self.buckets[self.next].pending:
            self._reduce(self.buckets[self.next])
            self.next += 1
            if self.next == len(self.buckets):
                if self.find_unused:
                    self.used = torch.zeros(len(self.parameters), dtype=torch.int32, device=view.device)
                    self.buckets[-1].work = (self.buckets[-1].work, self._all_reduce(self.used))
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _all_reduce(self, tensor: torch.Tensor) -> Any:
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def _reduce(self, bucket: Bucket) -> None:
        bucket.work = self._all_reduce(bucket.flat) if self.hook is None else self.hook(GradBucket(self, bucket))

    @torch.no_grad()
    def _finish(self) -> None:
        self.expecting = self.unfinished = False
        for bucket in self.buckets:
            for work in bucket.work if isinstance(bucket.work, tuple) else (bucket.work,):
                reduced = work.wait()
                if self.hook is not None and isinstance(reduced, torch.Tensor) and reduced is not bucket.flat:
                    bucket.flat.copy_(reduced)
            if self.as_view:
                continue
            for i, view in bucket.views.items():
                grad = self.parameters[i].grad
                if grad is not None:
                    grad.copy_(view)

    def __getattr__(self, name: str) -> Any:
        """Return a function that does nothing for methods that set options without effect here, or log."""
        if name.startswith(("_set_", "set_", "_push_", "_delay_", "prepare_for_forward", "_install_", "_remove_")):
            return _nothing
        raise NotImplementedError(f"DistributedDataParallel with {name.strip('_')} cannot be captured")


class Logger:
    """Replaces `torch.distributed.Logger`, and logs nothing."""

    def __init__(self, _: object) -> None:
        pass

    def __getattr__(self, _: str) -> Any:
        return _nothing


def _nothing(*_: object, **__: object) -> None:
    return None


def register_comm_hook(reducer: Reducer, state: Any, hook: Callable[[Any, GradBucket], Any]) -> None:
    """Let `hook` reduce each bucket, as `torch.distributed._register_comm_hook` does."""
    reducer.hook = partial(hook, state)


def register_builtin_comm_hook(reducer: Reducer, kind: Any) -> None:
    """Let torch's own hook reduce each bucket."""
    dtype = {"BuiltinCommHookType.FP16_COMPRESS": default_hooks.fp16_compress_hook}
    reducer.hook = partial(dtype.get(str(kind), default_hooks.allreduce_hook), reducer.group)


def broadcast_coalesced(group: Any, tensors: Sequence[torch.Tensor], buffer_bytes: int, source: int = 0) -> None:
    """Broadcast tensors in flat buffers of at most `buffer_bytes`, each of one dtype (c10d/comm.cpp)."""
    if not tensors:
        return
    found, _ = _compute_bucket_assignment_by_size(list(tensors), [buffer_bytes])
    for indices in found:
        chosen = [tensors[i] for i in indices]
        flat = torch.cat([x.detach().reshape(-1) for x in chosen])
        dist.broadcast(flat, dist.get_global_rank(group, source), group=group)
        for x, piece in zip(chosen, flat.split([x.numel() for x in chosen]), strict=True):
            x.detach().copy_(piece.view(x.shape))


def _leaves_under(outputs: Iterable[torch.Tensor]) -> Iterable[Any]:
    """Yield the tensors whose gradients the backward of `outputs` accumulates."""
    seen: set[Any] = set()
    stack = [x.grad_fn for x in outputs if x.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        stack += [following for following, _ in node.next_functions if following is not None]
