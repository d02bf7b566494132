"""A CUDA device for a script on a machine that has none: `cuda` is the CPU, with CUDA's operators and streams.

Fake tensors on a device that torch cannot open fail in autograd's engine, so all of them stay on the CPU. From the
first time that the script asks for CUDA (a device, nccl) its operators are those of a GPU (`CudaOperators`) and
optimizers run for many tensors at once. Code that asks a tensor whether it is on CUDA is told no.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.parallel.distributed
from torch.distributed import device_mesh
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from calibrate.capture.autocast import CudaOperators, user_autocast
from calibrate.capture.device_queue import Queue, StreamModule

CPU = torch.device("cpu")
CAPABILITY = (9, 0)
MEMORY_BYTES = 80 * 2**30
STAY = ("cuda", "pin_memory")  # methods of a tensor that copy it to where it is
NOTHING = (
    "set_device empty_cache manual_seed manual_seed_all reset_peak_memory_stats init _lazy_init ipc_collect "
    "reset_max_memory_allocated set_rng_state set_per_process_memory_fraction set_device_index set_device_idx "
    "empty_host_cache reset_accumulated_memory_stats"
)
NONE_YET = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved"


class CudaDevice(TorchFunctionMode):
    """Turns `cuda` into the CPU wherever torch's functions take a device. `used`: the script asked for it."""

    def __init__(self, operators: CudaOperators) -> None:
        super().__init__()
        self.operators = operators
        self.used = False

    def use(self) -> None:
        """From now on the script runs on CUDA."""
        self.used = self.operators.on_gpu = self.operators.active = True

    def on_cpu(self, device: Any) -> Any:
        """The device that stands for one that the script names."""
        text = str(device)
        if text == "cuda" or text.startswith("cuda:"):
            self.use()
            return CPU if isinstance(device, torch.device) else "cpu"
        return device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in STAY and args and isinstance(args[0], torch.Tensor):
            if name == "cuda":
                self.use()
            return args[0]
        args, kwargs = tree_map_only(torch.device, self.on_cpu, (args, kwargs))
        if isinstance(kwargs.get("device"), str | int):
            kwargs = {**kwargs, "device": self.on_cpu(_named(kwargs["device"]))}
        at = {"to": 1, "_parse_to": 0}.get(name, len(args))  # where a device may stand without its keyword
        if at < len(args) and isinstance(args[at], str | int):
            args = (*args[:at], self.on_cpu(_named(args[at])), *args[at + 1 :])
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def _named(device: str | int) -> str:
    return f"cuda:{device}" if isinstance(device, int) else device


@contextmanager
def cuda_device(device: CudaDevice, queue: Queue, local_rank: int, count: int) -> Iterator[None]:
    """Let `torch.cuda` and `torch.accelerator` find `count` GPUs, of which this process has one."""
    with ExitStack() as stack:
        for name, value in _device_functions(queue, local_rank, count).items():
            for module in (torch.cuda, torch.accelerator):
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, value))
        for patched in _patches(device, queue):
            stack.enter_context(patched)
        stack.enter_context(_autocast_of_either(device))
        stack.enter_context(device)
        yield


def _device_functions(queue: Queue, local_rank: int, count: int) -> dict[str, Any]:
    """What `torch.cuda` and `torch.accelerator` answer with, by the functions' names."""
    facts = SimpleNamespace(
        name="GPU", total_memory=MEMORY_BYTES, major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132
    )
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
        "get_device_name": lambda *_: facts.name,
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_properties": lambda *_: facts,
        "is_bf16_supported": lambda *_, **__: True,
        "mem_get_info": lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
        "get_memory_info": lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
        "memory_stats": lambda *_: {},
        "get_rng_state": lambda *_: torch.get_rng_state(),
        **StreamModule(queue).attributes,
    }


def _patches(device: CudaDevice, queue: Queue) -> list[Any]:
    """Methods of torch that would ask a real GPU, replaced."""
    distributed = torch.nn.parallel.distributed.DistributedDataParallel
    swap = torch.utils.swap_tensors
    start, mesh, move = distributed.__init__, device_mesh.DeviceMesh.__init__, torch.nn.Module.to

    def on_its_device(self: Any, module: Any, *_: object, **more: Any) -> None:
        start(self, module, **{k: v for k, v in more.items() if k not in ("device_ids", "output_device")})

    def to(self: Any, *words: Any, **more: Any) -> Any:
        where, dtype, *_ = torch._C._nn._parse_to(*words, **more)  # a function of torch: `device` sees it
        if where != CPU:
            return move(self, *words, **more)
        # The module is there already, and fake parameters cannot be moved to themselves.
        return self if dtype is None else move(self, dtype)

    def to_cuda(self: Any, *_: object) -> Any:
        device.use()
        return self

    def stepped(_: object, optimizer: Any, state: object, *words: Any, **more: Any) -> Any:
        queue.host_wait()  # for the news that no scaled gradient overflowed
        return optimizer.step(*words, **more)

    def swapped(tensor: torch.Tensor, other: torch.Tensor) -> None:
        try:
            swap(tensor, other)
        except RuntimeError:  # the fake mode knows the tensor
            tensor.data = other.data

    def of_cpus(self: Any, device_type: str, *words: Any, **more: Any) -> None:
        mesh(self, device.on_cpu(device_type), *words, **more)

    return [
        patch.object(torch.utils, "swap_tensors", swapped),
        patch.multiple(torch.nn.Module, to=to, cuda=to_cuda),
        patch.object(distributed, "__init__", on_its_device),
        patch.object(device_mesh.DeviceMesh, "__init__", of_cpus),
        patch.object(torch.amp.GradScaler, "_maybe_opt_step", stepped),
    ]


def _answering(value: Any) -> Callable[..., Any]:
    """A function of its own each time: dynamo's tables refuse one under several names."""
    return lambda *_, **__: value


@contextmanager
def _autocast_of_either(device: CudaDevice) -> Iterator[None]:
    """CUDA's autocast as CUDA does it, the CPU's as torch does it."""
    kind = torch.amp.autocast_mode.autocast
    own = kind.__init__, kind.__enter__, kind.__exit__
    with user_autocast(device.operators):
        cuda = kind.__init__, kind.__enter__, kind.__exit__

        def begin(self: Any, device_type: str, *words: Any, **more: Any) -> None:
            self.on_cuda = device_type == "cuda"
            if self.on_cuda:
                device.use()
            (cuda if self.on_cuda else own)[0](self, device_type, *words, **more)

        def enter(self: Any) -> Any:
            return (cuda if self.on_cuda else own)[1](self)

        def leave(self: Any, *words: Any) -> Any:
            return (cuda if self.on_cuda else own)[2](self, *words)

        with patch.multiple(kind, __init__=begin, __enter__=enter, __exit__=leave):
            yield
