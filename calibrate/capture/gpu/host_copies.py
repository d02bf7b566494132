"""Records copies between the host's memory and a GPU: `x.to("cuda")`, `x.cpu()`, `x.copy_(y)`, `save_on_cpu`.

Where torch casts besides, it does so on the host if the host waits for the copy, else on the GPU
(ATen/native/cuda/Copy.cu: copy_kernel_cuda). A cast on the host is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from calibrate.capture.gpu.places import Places, is_plain, named_place
from calibrate.capture.recorder import Recorder, parts_of
from sim.inputs.program_file import HostCopy

COPY = "aten._to_copy"
NAMES = ("device", "dtype", "non_blocking", "copy")  # of the arguments of `Tensor.to`
CPU = torch.device("cpu")


class HostCopies:
    """Makes and records copies. `used`: whether the code has a GPU; without one nothing is a copy."""

    def __init__(self, recorder: Recorder, places: Places, used: Callable[[], bool]) -> None:
        self.recorder, self.places, self.used = recorder, places, used
        self.cpu_is_host = False  # a `torch.device` of the CPU names the host's memory
        self._to: Callable[..., torch.Tensor] = torch.Tensor.to

    def place_of(self, where: Any) -> bool | None:
        """Return whether `where`, a device or a tensor, is on the GPU; None if it does not say."""
        if isinstance(where, torch.Tensor):
            return not self.places.on_host(where)
        found = named_place(where)
        return False if found is None and self.cpu_is_host and where == CPU else found

    def differs(self, x: torch.Tensor, to_gpu: bool) -> bool:
        """Return whether a tensor lies in the other memory."""
        return self.used() and is_plain(x) and self.places.on_host(x) == to_gpu

    def copied(
        self, x: torch.Tensor, to_gpu: bool, non_blocking: bool, dtype: torch.dtype | None = None, pinned: bool = False
    ) -> torch.Tensor:
        """Return a tensor's copy in the other memory; `pinned`: of the host's memory if that is the target."""
        cast_before = to_gpu != non_blocking
        x = self._cast(x, dtype, non_blocking) if cast_before else x
        pinned = self.places.is_pinned(x) if to_gpu else pinned
        with self.recorder.paused():
            out = self._to(x, copy=True)
        if not to_gpu:
            self.places.put_on_host(out, pinned)
        self.recorder.add(COPY, [x], [out], HostCopy(to_gpu, pinned, non_blocking))
        return out if cast_before else self._cast(out, dtype, non_blocking)

    def of_data(self, made: torch.Tensor, of_tensor: bool) -> torch.Tensor:
        """Return what `torch.tensor` or `torch.as_tensor` for the GPU made, which it makes on the host and copies."""
        if not of_tensor:
            self.places.put_on_host(made)
        if not self.differs(made, to_gpu=True):
            return made
        out = self.copied(made, to_gpu=True, non_blocking=False)
        return out if of_tensor else out.detach().requires_grad_(made.requires_grad)

    def _cast(self, x: torch.Tensor, dtype: torch.dtype | None, on_gpu: bool) -> torch.Tensor:
        if dtype is None or dtype == x.dtype:
            return x
        if on_gpu:
            return self._to(x, dtype)
        with self.recorder.paused():
            out = self._to(x, dtype)
        self.places.put_on_host(out, self.places.is_pinned(x))
        return out

    def move_module(self, module: torch.nn.Module, to_gpu: bool, non_blocking: bool = False) -> None:
        """Move a module's parameters, gradients and buffers, which keep their storages here."""
        for x in (*module.parameters(), *module.buffers()):
            for part in parts_of([x, x.grad] if x.is_leaf else [x]):
                if self.differs(part, to_gpu):
                    self.recorder.add(COPY, [part], [part], HostCopy(to_gpu, self.places.is_pinned(part), non_blocking))
                (self.places.put_on_gpu if to_gpu else self.places.put_on_host)(part)


class Methods:
    """Methods of tensors that copy between memories; `use` notes that the code asks for a GPU."""

    def __init__(self, copies: HostCopies, use: Callable[[], None]) -> None:
        self.copies, self.places, self.use = copies, copies.places, use
        self.own_to: Callable[..., Any] = torch.Tensor.to
        self.own_copy: Callable[..., Any] = torch.Tensor.copy_

    def to(self, x: Any, *words: Any, **more: Any) -> Any:
        """Do as `Tensor.to`."""
        if _within_torch(x):
            return self.own_to(x, *words, **more)
        of_tensor = bool(words) and isinstance(words[0], torch.Tensor)
        names = ("other", *NAMES[2:]) if of_tensor else NAMES
        said = {**dict(zip(names, words, strict=False)), **more}
        where = said.get("other", said.get("device"))
        to_gpu = self.copies.place_of(where)
        if to_gpu is None:
            return self.own_to(x, *words, **more)
        if to_gpu and not isinstance(where, torch.Tensor):
            self.use()
        other = said.pop("other", None)
        dtype = said.pop("dtype", None) if other is None else other.dtype
        if not self.copies.differs(x, to_gpu):
            return self.own_to(x, **{**said, "device": CPU, "dtype": dtype})
        non_blocking = bool(said.get("non_blocking"))
        out = self.copies.copied(x, to_gpu, non_blocking, dtype, pinned=non_blocking)
        form = said.get("memory_format")
        return out if form is None else self.own_to(out, memory_format=form)

    def cuda(self, x: Any, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Any:
        """Do as `Tensor.cuda`."""
        return self.to(x, "cuda", non_blocking=non_blocking, memory_format=memory_format)

    def cpu(self, x: Any, memory_format: Any = None) -> Any:
        """Do as `Tensor.cpu`."""
        return self.to(x, "cpu", memory_format=memory_format)

    def copy_(self, target: Any, source: Any, non_blocking: bool = False) -> Any:
        """Do as `Tensor.copy_`."""
        copies, to_gpu = self.copies, not self.places.on_host(target)
        plain = is_plain(target) and isinstance(source, torch.Tensor) and not _within_torch(target)
        if not (plain and copies.differs(source, to_gpu)):
            return self.own_copy(target, source, non_blocking)
        if source.dtype != target.dtype or source.shape != target.shape:
            source = copies.copied(source, to_gpu, non_blocking, target.dtype, self.places.is_pinned(target))
        else:
            pinned = self.places.is_pinned(source if to_gpu else target)
            copies.recorder.add("aten.copy_", [source], [target], HostCopy(to_gpu, pinned, non_blocking))
        with copies.recorder.paused():
            return self.own_copy(target, source)

    def pin_memory(self, x: Any, *_: object) -> Any:
        """Note that a tensor's memory is pinned; torch pins a copy."""
        self.places.put_on_host(x, pinned=True)
        return x

    def is_pinned(self, x: Any, *_: object) -> bool:
        """Return whether a tensor's memory is pinned."""
        return self.places.is_pinned(x)


def _within_torch(x: Any) -> bool:
    """Return whether torch's own code asks for a copy, while it computes shapes (device meta) or schedules kernels
    (cuda). All tensors of a captured script are on the CPU."""
    return bool(x.device.type != "cpu")


@contextmanager
def host_copies_recorded(copies: HostCopies, use: Callable[[], None]) -> Iterator[None]:
    """Let the methods of tensors that copy between memories do so; `use` notes that the code asks for a GPU.

    They are replaced on the class, since hooks of a backward run without function modes.
    """
    methods = Methods(copies, use)

    def method(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *words, **more: function(*words, **more)  # with the tensor as its first argument

    def on_host(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*words: Any, **more: Any) -> torch.Tensor:
            out = function(*words, **more)
            copies.places.put_on_host(out)
            return out

        return made

    named = (methods.to, methods.cuda, methods.cpu, methods.copy_, methods.pin_memory, methods.is_pinned)
    replaced: dict[str, Any] = {m.__name__: method(m) for m in named}
    with (
        patch.multiple(torch.Tensor, **replaced),
        patch.multiple(torch, from_numpy=on_host(torch.from_numpy), frombuffer=on_host(torch.frombuffer)),
        saved_tensors_copied(copies),
    ):
        yield


@contextmanager
def saved_tensors_copied(copies: HostCopies) -> Iterator[None]:
    """Let `save_on_cpu` copy the tensors that autograd saves, to the host and back."""

    def began(self: Any, pin_memory: bool = False, *_: object, **__: object) -> None:
        def pack(x: torch.Tensor) -> tuple[bool, torch.Tensor]:
            if not copies.differs(x, to_gpu=False):
                return False, x
            with torch.no_grad():
                return True, copies.copied(x.detach(), False, pin_memory, pinned=pin_memory)

        def unpack(packed: tuple[bool, torch.Tensor]) -> torch.Tensor:
            moved, x = packed
            return copies.copied(x, True, pin_memory) if moved else x

        saved_tensors_hooks.__init__(self, pack, unpack)

    with patch.object(save_on_cpu, "__init__", began):
        yield
