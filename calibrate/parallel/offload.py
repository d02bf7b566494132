"""Activation offload: moves a block's saved activations to host memory, and back for its backward.

Torch's hooks give the saved tensors (`torch.autograd.graph.saved_tensors_hooks`, as in its `save_on_cpu`). Copies are
double-buffered as in Transformer Engine's `cpu_offload`. A block's copy starts after its forward, on a stream of its
own, and the block after the next one waits for it. A block's backward starts the copy back of the block before it. So
the activations of two blocks are on the device at a time. On a GPU host memory is pinned and the stream is a CUDA
stream. On a CPU another buffer stands for host memory and a thread for the stream.

A storage is copied once, however many saved tensors are views of it. Parameters, the model's constants and the batch's
tokens are not copied.

Documentation: docs/offload.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from calibrate.parallel.storages import resident, storages


class Copy(NamedTuple):
    """A copy of one block's activations. `kind`: offload or reload, as in the simulator's programs."""

    kind: str
    stage: int
    block: int
    bytes: int


Wait = Callable[[], list[Tensor]]  # waits for copies and returns their targets


class HostStream:
    """Copies between a rank's device and host, one after the other, beside the computation.

    `copies`: those of the last step, in the order of their start.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.copies: list[Copy] = []

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "host copies")

    @cached_property
    def _stream(self) -> Any:
        return torch.cuda.Stream()

    def copy(self, sources: Sequence[Tensor], to: Sequence[Tensor] | None) -> Wait:
        """Start copying tensors to those of `to` (None: to new host memory); call the result to wait for it."""
        if self.device == "cpu":
            pending: Future[list[Tensor]] = self._thread.submit(self._copied, sources, to)
            return pending.result
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            out, event = self._copied(sources, to), self._stream.record_event()

        def wait() -> list[Tensor]:
            torch.cuda.current_stream().wait_event(event)
            return out

        return wait

    def _copied(self, sources: Sequence[Tensor], to: Sequence[Tensor] | None) -> list[Tensor]:
        pinned = self.device != "cpu"
        out = [torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned) for x in sources] if to is None else list(to)
        for target, source in zip(out, sources, strict=True):
            target.copy_(source, non_blocking=True)
        return out


class _Place(NamedTuple):
    """The position of a saved tensor in its block's storages."""

    held: _Held
    slot: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """Return the tensor from the storages that were copied back."""
        storage = self.held.device[self.slot].untyped_storage()
        out = torch.empty(0, dtype=self.dtype, device=storage.device)
        return out.set_(storage, self.offset, self.size, self.stride)


class _Held:
    """Hold the tensors that one forward of a block saved: on the device, in host memory, or being copied."""

    def __init__(self, offload: Offload, block: int, before: _Held | None, inputs: Sequence[Tensor]) -> None:
        self.offload, self.block, self.before = offload, block, before
        self.after: weakref.ref[_Held] | None = None  # the block whose backward runs before this one's
        numbers = [x for x in inputs if not x.is_floating_point()]
        self.stays = resident([offload.blocks[block]]) | storages(numbers)
        self.input = inputs[0]
        self.slots: dict[int, int] = {}  # identity of a storage: its index in `device`
        self.device: list[Tensor] = []  # storages as tensors of bytes
        self.wait: Wait | None = None
        self.begun = False

    def pack(self, t: Tensor) -> Tensor | _Place:
        """Take a tensor that the block's forward saves; torch's hook."""
        storage = t.untyped_storage()
        if storage._cdata in self.stays:
            return t
        if storage._cdata not in self.slots:
            self.slots[storage._cdata] = len(self.device)
            self._hold([*self.device, _as_bytes(t)])
        return _Place(self, self.slots[storage._cdata], t.dtype, t.size(), t.stride(), int(t.storage_offset()))

    def send(self) -> None:
        """Start the copy to the host."""
        self._note("offload", self.device)
        self.wait = self.offload.stream.copy(self.device, None)

    def sent(self) -> None:
        """Wait for the copy and free the device's memory, that of a stage's input included.

        Others refer to a stage's input, but need only its gradient.
        """
        assert self.wait is not None  # `send` was called
        self.host = self.wait()
        if self.input.untyped_storage()._cdata in self.slots:
            self.input.untyped_storage().resize_(0)
        del self.input
        self.wait = None
        self.drop()

    def fetch(self) -> None:
        """Start the copy from the host."""
        self._hold([torch.empty_like(x, device=self.offload.stream.device) for x in self.host])
        self._note("reload", self.device)
        self.wait = self.offload.stream.copy(self.host, self.device)

    def begin(self) -> None:
        """Begin the block's backward: wait for its copy, and start that of the block before it."""
        self.begun = True
        after = self.after() if self.after is not None else None
        if after is not None:
            after.drop()
        if self.wait is None:  # a stage's last block, for which no other block has started the copy
            self.fetch()
        if self.before is not None:
            self.before.after = weakref.ref(self)
            self.before.fetch()
        assert self.wait is not None
        self.wait()

    def drop(self) -> None:
        """Free the device's memory."""
        for x in self.device:
            self.offload.on_device.pop(x.untyped_storage()._cdata, None)
        self.device = []

    def _hold(self, device: list[Tensor]) -> None:
        self.device = device
        self.offload.on_device |= storages(device)
        self.offload.grown()

    def _note(self, kind: str, tensors: Sequence[Tensor]) -> None:
        copy = Copy(kind, self.offload.stage, self.block, sum(x.nbytes for x in tensors))
        self.offload.stream.copies.append(copy)

    def __del__(self) -> None:
        self.drop()


class Offload:
    """Lets the blocks of a stage offload what they save.

    `on_device`: storages of saved tensors that are on the device now, identity → bytes; `grown` is called when storages
    are added. `silent`: everything stays on the device.
    """

    def __init__(self, blocks: Sequence[nn.Module], stream: HostStream, stage: int) -> None:
        self.blocks, self.stream, self.stage = blocks, stream, stage
        self.on_device: dict[int, int] = {}
        self.grown: Callable[[], None] = lambda: None
        self.silent = False
        self._forward: list[_Held] = []  # the blocks of this forward so far
        for i, block in enumerate(blocks):
            block.forward = partial(self._run, i, block.forward)

    def _run(self, i: int, forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        if self.silent or not torch.is_grad_enabled():
            return forward(*inputs)
        held = self._forward
        if i >= 2:
            held[i - 2].sent()
        held.append(_Held(self, i, held[-1] if held else None, inputs))
        with saved_tensors_hooks(held[i].pack, _unpack):
            y = forward(*inputs)
        held[i].send()
        if i == len(self.blocks) - 1:
            for last in held[-2:]:
                last.sent()
            self._forward = []
        return y


def _unpack(saved: Tensor | _Place) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    if not saved.held.begun:
        saved.held.begin()
    return saved.tensor()


def _as_bytes(t: Tensor) -> Tensor:
    """Return a tensor's whole storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
