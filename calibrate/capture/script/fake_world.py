"""Emulates torch.distributed for one rank without the others, by a fake process group."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
import torch.nn.parallel.distributed
from torch._C._distributed_c10d import FakeWork, Work
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from calibrate.capture.script.ddp_reducer import (
    Logger,
    Reducer,
    broadcast_coalesced,
    register_builtin_comm_hook,
    register_comm_hook,
)
from calibrate.capture.script.object_messages import ObjectMessages
from calibrate.capture.script.recorder import ScriptRecorder


def set_environment(rank: int, world_size: int, ranks_per_node: int) -> None:
    """Set the environment variables that torchrun sets."""
    local = min(ranks_per_node, world_size)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank % local),
        LOCAL_WORLD_SIZE=str(local),
        GROUP_RANK=str(rank // local),
        GROUP_WORLD_SIZE=str(-(-world_size // local)),
        MASTER_ADDR="localhost",
        MASTER_PORT="29500",
        TORCHELASTIC_RUN_ID="capture",
    )


Change = tuple[Any, str, Any]  # a module or class, a name of it, and what the name stands for meanwhile


@contextmanager
def fake_world(
    recorder: ScriptRecorder, rank: int, world_size: int, uses_cuda: Callable[[], None], objects: ObjectMessages
) -> Iterator[None]:
    """Let `init_process_group` make a fake group of `world_size` ranks, and record waits for its collectives.

    `uses_cuda` is called if the script asks for nccl.
    """
    start = dist.init_process_group
    asked = {"backend": "gloo"}

    def init(backend: str | None = None, *_: object, **more: Any) -> None:
        asked["backend"] = backend or asked["backend"]
        if "nccl" in asked["backend"]:
            uses_cuda()
        start("fake", store=FakeStore(), rank=rank, world_size=world_size)

    changes = [
        *_of_groups(init, lambda *_, **__: asked["backend"], objects),
        *_of_works(recorder),
        *_of_wrappers(),
        *_of_functional_collectives(),
    ]
    with ExitStack() as stack:
        for target, name, value in changes:
            if hasattr(target, name):
                stack.enter_context(patch.object(target, name, value))
        yield


def _of_groups(init: Callable[..., None], backend: Callable[..., str], objects: ObjectMessages) -> Iterator[Change]:
    """Groups of ranks, and messages of objects."""
    yield device_mesh, "init_process_group", init  # by which `init_device_mesh` makes the group if the script does not
    for module in (dist, dist.distributed_c10d):
        yield module, "init_process_group", init
        yield module, "get_backend", backend
        yield module, "all_gather_object", _all_gather_object
        yield module, "gather_object", _gather_object
        yield module, "broadcast_object_list", lambda *_, **__: None
        yield module, "send_object_list", objects.send
        yield module, "recv_object_list", objects.receive
        yield module, "monitored_barrier", lambda *_, **__: None
        yield module, "new_group", _with_backend(module.new_group)


def _of_works(recorder: ScriptRecorder) -> Iterator[Change]:
    """Collectives' works, which are complete at once; waits for them are recorded."""

    def wait(self: Any, *_: object) -> bool:
        recorder.waited(self)
        return True

    def future(self: Any) -> WorkFuture:
        tensors = recorder.result_of(self)

        def result() -> list[torch.Tensor]:
            recorder.waited(self)
            return tensors

        return WorkFuture(result)

    for kind in (Work, FakeWork):
        yield kind, "wait", wait
        yield kind, "synchronize", wait
        yield kind, "is_completed", lambda _: True
        yield kind, "get_future", future


def _of_wrappers() -> Iterator[Change]:
    """Replace the functions that DistributedDataParallel and FSDP call."""
    yield _fsdp_param, "_chunk_with_empty", _Chunks
    yield dist, "Reducer", Reducer
    yield dist, "Logger", Logger
    yield dist, "_register_comm_hook", register_comm_hook
    # Hooks in bf16 ask for NCCL, which a torch that was built without CUDA lacks.
    yield DistributedDataParallel, "_check_comm_hook", lambda *_: None
    yield dist, "_register_builtin_comm_hook", register_builtin_comm_hook
    yield dist, "_broadcast_coalesced", broadcast_coalesced
    yield torch.nn.parallel.distributed, "_verify_param_shape_across_processes", lambda *_, **__: None
    yield FakeTensor, "data_ptr", _address


def _address(x: torch.Tensor) -> int:
    """Return an address of a fake tensor, whose own is always 0.

    Accelerate 1.15 finds an optimizer's parameters by theirs once FSDP2 has replaced them (accelerator.py:
    `_prepare_fsdp2`); with one address for all it would update the last parameter in place of each.
    """
    return int(x.untyped_storage()._cdata) + int(x.storage_offset()) * x.element_size()


def _of_functional_collectives() -> Iterator[Change]:
    """Functional collectives, which would wait at once otherwise."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed") and hasattr(module, "_are_we_tracing"):
            yield module, "_are_we_tracing", lambda: False


class WorkFuture:
    """The result of a collective, which is there once somebody waits for it; `then` runs after that."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self._wait: Callable[[], Any] | None = wait
        self._result: Any = None

    def wait(self) -> Any:
        """Wait for the collective and return what it or the last callback returned."""
        if self._wait is not None:
            self._result, self._wait = self._wait(), None
        return self._result

    value = wait

    def done(self) -> bool:
        """Return true, as `Work.is_completed` does."""
        return True

    def then(self, callback: Callable[[WorkFuture], Any]) -> WorkFuture:
        """Return a future with the callback's result."""

        def after() -> Any:
            self.wait()
            return callback(self)

        return WorkFuture(after)

    def add_done_callback(self, callback: Callable[[WorkFuture], Any]) -> None:
        """Run a callback with this future."""
        callback(self)


class _Chunks:
    """The pieces of `torch.chunk`, made only on access: of a thousand ranks' pieces FSDP2 uses one or two."""

    def __init__(self, tensor: torch.Tensor, pieces: int, dim: int) -> None:
        self.tensor, self.dim = tensor, dim
        self.size = -(-tensor.size(dim) // pieces)

    def __getitem__(self, index: int) -> torch.Tensor:
        begin = index * self.size
        left = self.tensor.size(self.dim) - begin
        if left <= 0:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, begin, min(self.size, left))


def _with_backend(new_group: Any) -> Any:
    def made(*words: Any, backend: Any = None, **more: Any) -> Any:
        return new_group(*words, backend="fake", **more)

    return made


def _all_gather_object(objects: list[Any], mine: Any, *_: object, **__: object) -> None:
    """Fill `objects` with this rank's object, as if all ranks had the same one."""
    objects[:] = [mine] * len(objects)


def _gather_object(mine: Any, objects: list[Any] | None = None, *_: object, **__: object) -> None:
    if objects is not None:
        objects[:] = [mine] * len(objects)
