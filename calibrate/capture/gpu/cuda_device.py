"""Emulates a CUDA device for scripts on a machine without one: `cuda` is the CPU, with CUDA's operators and streams.

Fake tensors on a device that torch cannot open fail in autograd's engine, so all tensors stay on the CPU. Once the
script asks for CUDA (a device, nccl), operators are those of a GPU (`CudaOperators`) and optimizers process many
tensors in one kernel. A tensor's `is_cuda` is still false.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.parallel.distributed
from torch.distributed import device_mesh
from torch.distributed.fsdp import _flat_param as flat
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, dataloader

from calibrate.capture.gpu.autocast import CudaOperators, user_autocast
from calibrate.capture.gpu.device_queue import Queue, StreamModule
from calibrate.capture.gpu.gpu_facts import CAPABILITY, MEMORY_BYTES, PROPERTIES
from calibrate.capture.gpu.host_copies import HostCopies, host_copies_recorded
from calibrate.capture.gpu.places import Places, named_place
from calibrate.capture.recorder import parts_of

CPU = torch.device("cpu")
OF_DATA = ("tensor", "as_tensor")
NOTHING = (
    "set_device empty_cache manual_seed manual_seed_all reset_peak_memory_stats init _lazy_init ipc_collect "
    "reset_max_memory_allocated set_rng_state set_per_process_memory_fraction set_device_index set_device_idx "
    "empty_host_cache reset_accumulated_memory_stats"
)
NONE_YET = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved"


class CudaDevice(TorchFunctionMode):
    """Replaces `cuda` by the CPU in all arguments of torch's functions. `used`: the script has asked for CUDA.

    `default`: the device that the script has set for tensors without one; None if it has set none.
    """

    def __init__(self, operators: CudaOperators) -> None:
        super().__init__()
        self.operators = operators
        self.used = False
        self.places = Places()
        self.copies: HostCopies | None = None
        self.default: torch.device | None = None

    def use(self) -> None:
        """Note that the script uses CUDA."""
        self.used = self.operators.on_gpu = self.operators.active = True

    def on_cpu(self, device: Any) -> Any:
        """Return the device to use for one that the script names."""
        text = str(device)
        if text == "cuda" or text.startswith("cuda:"):
            self.use()
        elif not text.startswith("cpu:"):  # fake tensors on "cpu" and "cpu:0" would not meet
            return device
        return CPU if isinstance(device, torch.device) else "cpu"

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__deepcopy__":  # its memory of what is copied must stay the same object
            return func(*args, **kwargs)
        if self.default is not None and kwargs.get("device") is None and func in _device_constructors():
            kwargs = {**kwargs, "device": self.default}
        said = args, kwargs
        args, kwargs = tree_map_only(torch.device, self.on_cpu, (args, kwargs))
        if isinstance(kwargs.get("device"), str | int):
            kwargs = {**kwargs, "device": self.on_cpu(_named(kwargs["device"]))}
        at = {"to": 1, "_parse_to": 0}.get(name, len(args))  # positional argument that may be a device
        if at < len(args) and isinstance(args[at], str | int):
            args = (*args[:at], self.on_cpu(_named(args[at])), *args[at + 1 :])
        outer, self.places.making = self.places.making, self.places.makes_on_host(*said)
        try:
            out = func(*args, **{key: value for key, value in kwargs.items() if key != "pin_memory"})
        finally:
            self.places.making = outer
        if name in OF_DATA and self.copies is not None and named_place(said[1].get("device")):
            return self.copies.of_data(out, bool(args) and isinstance(args[0], torch.Tensor))
        self.places.see(*said, out)
        return out


def _named(device: str | int) -> str:
    return f"cuda:{device}" if isinstance(device, int) else device


@contextmanager
def cuda_device(device: CudaDevice, copies: HostCopies, queue: Queue, local_rank: int, count: int) -> Iterator[None]:
    """Let `torch.cuda` and `torch.accelerator` find `count` GPUs; this process uses GPU `local_rank`."""
    device.copies = copies
    with ExitStack() as stack:
        for name, value in _device_functions(queue, local_rank, count).items():
            for module in (torch.cuda, torch.accelerator):
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, value))
        for name, value in _graphs(copies.recorder.notes).items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        modules, loaders = _of_modules(device, copies), _of_loaders(queue, device.places)
        for patched in (*modules, *loaders, *_of_distribution(device, copies), *_of_scalers(queue)):
            stack.enter_context(patched)
        stack.enter_context(host_copies_recorded(copies, device.use))
        stack.enter_context(_autocast_of_either(device))
        stack.enter_context(_default_of_tensors(device))
        stack.enter_context(device)
        yield


@contextmanager
def _default_of_tensors(device: CudaDevice) -> Iterator[None]:
    """Let `device` know what the script sets as the device of tensors. torch's own mode would run after `device`."""

    def set_default(where: Any = None) -> None:
        device.default = torch.device(_named(where)) if isinstance(where, str | int) else where

    with patch.multiple(torch, set_default_device=set_default, get_default_device=lambda: device.default or CPU):
        yield


def _device_functions(queue: Queue, local_rank: int, count: int) -> dict[str, Any]:
    """Return replacements for functions of `torch.cuda` and `torch.accelerator`, by their names."""
    return {
        **{name: _answering(None) for name in NOTHING.split()},
        **{name: _answering(0) for name in NONE_YET.split()},
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: count,
        "current_device": lambda: local_rank,
        "current_device_index": lambda: local_rank,
        "current_device_idx": lambda: local_rank,
        "device_index": lambda *_: nullcontext(),
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "get_device_name": lambda *_: PROPERTIES.name,
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_properties": lambda *_: PROPERTIES,
        "is_bf16_supported": lambda *_, **__: True,
        "mem_get_info": lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
        "get_memory_info": lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
        "memory_stats": lambda *_, **__: defaultdict(int),
        "memory_stats_as_nested_dict": lambda *_, **__: {},
        "memory_summary": lambda *_, **__: "",
        "get_rng_state": lambda *_: torch.get_rng_state(),
        **StreamModule(queue).attributes,
    }


class NoGraph:
    """A CUDA graph, which would hold kernels that run later."""

    def __init__(self, *_: object, **__: object) -> None:
        raise NotImplementedError(
            "CUDA graphs cannot be captured: leave out torch.cuda.graph and replay, so that the same kernels run in "
            "the step; a graph saves the host's time alone"
        )


def _graphs(notes: list[str]) -> dict[str, Any]:
    """Return replacements for what makes CUDA graphs, by their names in `torch.cuda`."""

    def graphed(callables: Any, *_: object, **__: object) -> Any:
        note = "make_graphed_callables: its kernels are captured as if the host issued each; a graph saves that time"
        notes.extend([] if note in notes else [note])
        return callables

    return {"CUDAGraph": NoGraph, "graph": NoGraph, "make_graphed_callables": graphed}


def _of_modules(device: CudaDevice, copies: HostCopies) -> list[Any]:
    """Return patches that keep a module's parameters on the CPU, and note where they would lie."""
    swap: Any = torch.utils.swap_tensors
    move: Any = torch.nn.Module.to

    def to(self: Any, *words: Any, **more: Any) -> Any:
        # A function of torch, so `device` replaces cuda.
        where, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*words, **more)
        to_gpu = copies.place_of(more.get("device", words[0] if words else None))
        if to_gpu is not None:
            copies.move_module(self, to_gpu, non_blocking)
        if where != CPU:
            return move(self, *words, **more)
        # The module stays on the CPU, and torch cannot swap a fake parameter with itself.
        self = self if dtype is None else move(self, dtype)
        return self if memory_format is None else move(self, memory_format=memory_format)

    def to_cuda(self: Any, *_: object) -> Any:
        device.use()
        copies.move_module(self, to_gpu=True)
        return self

    def to_cpu(self: Any) -> Any:
        copies.move_module(self, to_gpu=False)
        return self

    def swapped(tensor: torch.Tensor, other: torch.Tensor) -> None:
        try:
            swap(tensor, other)
        except RuntimeError:  # the fake mode holds a reference to the tensor
            tensor.data = other.data

    return [
        patch.object(torch.utils, "swap_tensors", swapped),
        patch.multiple(torch.nn.Module, to=to, cuda=to_cuda, cpu=to_cpu),
        # It tells torch's allocator alone which stream reads a tensor.
        patch.object(torch.Tensor, "record_stream", lambda *_: None),
        patch.object(torch._C, "_get_accelerator", lambda *_: torch.device("cuda")),
    ]


def _of_loaders(queue: Queue, places: Places) -> list[Any]:
    """Return patches with which a DataLoader's workers are this process, and their operators are not recorded.

    Its batches lie in the host's memory, if workers or pinned memory say so.
    """
    load, batches = DataLoader.__init__, dataloader._SingleProcessDataLoaderIter
    begin, fetch = batches.__init__, batches._next_data

    def without_workers(self: Any, *words: Any, **more: Any) -> None:
        load(self, *words, **more)
        # No fake tensor passes from one process to another.
        self.has_workers, self.num_workers = self.num_workers > 0, 0

    def began(self: Any, loader: Any) -> None:
        begin(self, loader)
        # Nor does one pass to a thread that copies it to pinned memory.
        self.has_workers, self.pins, self._pin_memory = loader.has_workers, loader.pin_memory, False

    def apart(self: Any) -> Any:
        recording = queue.recording
        queue.recording = recording and not self.has_workers  # workers' operators are not this process's
        try:
            batch = fetch(self)
        finally:
            queue.recording = recording
        for x in tree_leaves(batch) if self.has_workers or self.pins else ():
            if isinstance(x, torch.Tensor):
                places.put_on_host(x, self.pins)
        return batch

    return [
        patch.object(DataLoader, "__init__", without_workers),
        patch.multiple(batches, __init__=began, _next_data=apart),
    ]


def _of_distribution(device: CudaDevice, copies: HostCopies) -> list[Any]:
    """Return patches for DDP, FSDP1 and meshes of devices."""
    distributed = torch.nn.parallel.distributed.DistributedDataParallel
    start, mesh = distributed.__init__, device_mesh.DeviceMesh.__init__

    def on_its_device(self: Any, module: Any, *_: object, **more: Any) -> None:
        start(self, module, **{k: v for k, v in more.items() if k not in ("device_ids", "output_device")})

    def of_cpus(self: Any, device_type: str, *words: Any, **more: Any) -> None:
        mesh(self, device.on_cpu(device_type), *words, **more)

    return [
        patch.object(distributed, "__init__", on_its_device),
        patch.object(device_mesh.DeviceMesh, "__init__", of_cpus),
        # FSDP1 wants its parameters there.
        patch.object(torch.distributed.fsdp._init_utils, "_get_compute_device", lambda *_: CPU),
        # It asks the address of memory, which fake tensors have not.
        patch.object(flat, "_data_ptr_allocated", lambda x: x.untyped_storage().size() > 0),
        *_of_fsdp2(device, copies),
    ]


def _of_fsdp2(device: CudaDevice, copies: HostCopies) -> list[Any]:
    """Return patches for what FSDP2 puts on the GPU, and for what its `CPUOffloadPolicy` keeps on the host."""
    move, reduce = _fsdp_init._move_states_to_device, group.foreach_reduce  # type: ignore[attr-defined]
    gathered: Any = FSDPParam.all_gather_inputs

    def inputs(self: Any) -> Any:
        own = self.device
        self.device = torch.device("cuda") if self.offload_to_cpu and device.used else own
        try:
            return gathered.fget(self)
        finally:
            self.device = own

    def moved(params: Any, buffers: Any, where: Any) -> None:
        move(params, buffers, where)
        for x in parts_of([params, buffers]) if device.used else ():
            device.places.put_on_gpu(x)

    def reduced(*words: Any, **more: Any) -> Any:
        copies.cpu_is_host = True  # it copies a shard of the gradients to `torch.device("cpu")`
        try:
            return reduce(*words, **more)
        finally:
            copies.cpu_is_host = False

    return [
        patch.object(FSDPParam, "all_gather_inputs", property(inputs)),
        patch.object(_fsdp_init, "_move_states_to_device", moved),
        patch.object(group, "foreach_reduce", reduced),
    ]


def _of_scalers(queue: Queue) -> list[Any]:
    """Return a patch for loss scaling, where the host waits for the device."""

    def stepped(_: object, optimizer: Any, state: object, *words: Any, **more: Any) -> Any:
        queue.host_wait()  # a real scaler reads here whether a gradient overflowed
        return optimizer.step(*words, **more)

    return [patch.object(torch.amp.GradScaler, "_maybe_opt_step", stepped)]


def _answering(value: Any) -> Callable[..., Any]:
    """Return a new function that returns `value`; dynamo's tables refuse one function under several names."""
    return lambda *_, **__: value


@contextmanager
def _autocast_of_either(device: CudaDevice) -> Iterator[None]:
    """Let `torch.autocast("cuda")` follow CUDA's lists and `torch.autocast("cpu")` torch's own."""
    kind = torch.amp.autocast_mode.autocast
    own = kind.__init__, kind.__enter__, kind.__exit__
    asked = {name: getattr(torch, name) for name in ("is_autocast_enabled", "get_autocast_dtype")}
    with user_autocast(device.operators):
        cuda = kind.__init__, kind.__enter__, kind.__exit__
        of_cuda = {name: getattr(torch, name) for name in asked}

        def begin(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, **more: Any) -> None:
            self.on_cuda = device_type == "cuda"
            if self.on_cuda and enabled:  # checkpointing enters it disabled on any device
                device.use()
            (cuda if self.on_cuda else own)[0](self, device_type, dtype, enabled, **more)

        def enter(self: Any) -> Any:
            return (cuda if self.on_cuda else own)[1](self)

        def leave(self: Any, *words: Any) -> Any:
            return (cuda if self.on_cuda else own)[2](self, *words)

        def of(name: str) -> Callable[..., Any]:
            return lambda where="cuda": (asked if where == "cpu" else of_cuda)[name](where)

        with ExitStack() as stack:
            stack.enter_context(patch.multiple(kind, __init__=begin, __enter__=enter, __exit__=leave))
            for name in asked:
                stack.enter_context(patch.object(torch, name, of(name)))
            yield
