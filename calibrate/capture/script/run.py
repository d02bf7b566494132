"""Runs one rank of a distributed script on fake tensors and records its second step."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings, filterwarnings

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from calibrate.capture.compiled.regions import code_compiled, compiled_regions
from calibrate.capture.gpu.autocast import CudaOperators
from calibrate.capture.gpu.cuda_device import CudaDevice, cuda_device
from calibrate.capture.gpu.device_queue import Queue, StreamModule
from calibrate.capture.gpu.flex_attention import flex_attention_fused
from calibrate.capture.gpu.host_copies import HostCopies
from calibrate.capture.gpu.modes_in_backward import kept_in_backward
from calibrate.capture.gpu.optimizers import capturable_here, kernels_of_gpu, many_at_once
from calibrate.capture.gpu.triton_kernels import triton_kernels
from calibrate.capture.run_step import fake_weights
from calibrate.capture.script.fake_world import fake_world, set_environment
from calibrate.capture.script.host_work import host_work_noted
from calibrate.capture.script.object_messages import ObjectMessages
from calibrate.capture.script.recorder import ScriptRecorder, modules_followed
from calibrate.capture.values.answers import numbers_shown
from calibrate.capture.values.counts_read import counts_read
from calibrate.capture.values.known_values import PLAIN
from sim.core.errors import InputError

STEPS = 2


class StepsMade(BaseException):
    """Raised to end the script once its second step is recorded."""


class Steps:
    """Counts the steps of the first optimizer that steps, and records the second step.

    A step ends with this optimizer's step, so it includes the steps of other optimizers.
    """

    def __init__(self, recorder: ScriptRecorder, device: CudaDevice) -> None:
        self.recorder, self.device = recorder, device
        self.optimizer: torch.optim.Optimizer | None = None
        self.made = 0

    def before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note that an optimizer's step begins; a hook."""
        self.recorder.stage = "optimizer"
        if self.recorder.queue.recording:
            for p in _parameters(optimizer):
                if p.grad is not None:
                    self.recorder.mark(_local(p.grad), "gradient")

    def after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note that an optimizer's step has ended; a hook.

        Raises:
            StepsMade: after the last wanted step, to end the script.
        """
        self.recorder.stage = ""
        self.optimizer = self.optimizer or optimizer
        if optimizer is not self.optimizer:
            return
        self.made += 1
        if self.made >= STEPS:  # again if the script catches it and goes on
            self.recorder.end()
            raise StepsMade
        self.recorder.begin()
        self._mark_lasting()

    def _mark_lasting(self) -> None:
        assert self.optimizer is not None
        recorder = self.recorder
        for module in recorder.roots:
            for name, b in module.named_buffers():
                recorder.mark(_local(b), "buffer")
                recorder.lives[recorder.storage(_local(b))].module = name
            for name, parameter in module.named_parameters():
                recorder.mark(_local(parameter), "parameter" if parameter.requires_grad else "frozen parameter")
                recorder.lives[recorder.storage(_local(parameter))].module = name
        for state in self.optimizer.state.values():
            for x in state.values():
                if isinstance(x, torch.Tensor) and x.dim() > 0:
                    recorder.mark(_local(x), "optimizer state")
        for p in _parameters(self.optimizer):
            if p.grad is not None:
                recorder.mark(_local(p.grad), "gradient")


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _local(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a DTensor holds on this rank."""
    return getattr(x, "_local_tensor", x)


def record_script(
    words: Sequence[str],
    rank: int,
    world_size: int,
    ranks_per_node: int,
    objects: ObjectMessages | None = None,
    balanced: bool = False,
) -> tuple[Steps, ScriptRecorder]:
    """Run `words` (a script, or -m and a module, and its arguments) as one rank, and record its second step.

    `objects`: passes Python objects to other ranks; without it no other rank is captured. `balanced`: routers choose
    experts in turn.

    Raises:
        InputError: if the script ends before its second step.
    """
    queue = Queue()
    operators = CudaOperators(None, on_gpu=False)
    device = CudaDevice(operators)
    recorder = ScriptRecorder(operators, queue, balanced)
    recorder.places = device.places
    copies = HostCopies(recorder, device.places, lambda: device.used)
    steps = Steps(recorder, device)
    nodes_ranks = min(ranks_per_node, world_size)
    set_environment(rank, world_size, ranks_per_node)
    run = _runner(words)
    with (
        fake_world(recorder, rank, world_size, device.use, objects or ObjectMessages(rank, (), None)),
        _device(recorder),
        _hooks(steps),
        modules_followed(recorder),
        kept_in_backward(device, operators),
        host_work_noted(queue),
        triton_kernels(recorder, recorder.known.forget_filled),
        cuda_device(device, copies, queue, rank % nodes_ranks, nodes_ranks),
        operators,
        FakeTensorMode(allow_non_fake_inputs=True),
        recorder.known,
        recorder,
        compiled_regions(recorder) as regions,
    ):
        _run_steps(run, steps, words[0])
    recorder.notes += regions.notes()
    recorder.device = "cuda" if device.used else "cpu"
    _settle(recorder)
    return steps, recorder


def _run_steps(run: Callable[[], object], steps: Steps, name: str) -> None:
    """Run the script up to the end of its second step.

    Raises:
        InputError: if it ends before.
    """
    try:
        run()
    except SystemExit as end:
        if steps.made < STEPS:
            raise InputError(f"{name}: ended with exit code {end.code} {_count(steps.made)}") from None
    except BaseException:  # StepsMade, or what the script makes of it
        if steps.made < STEPS:
            raise
    if steps.made < STEPS:
        raise InputError(f"{name}: ended {_count(steps.made)}")


def _count(made: int) -> str:
    without = "; a forward without an optimizer: give a function whose Step has none" * (not made)
    return f"after {made} optimizer steps; capturing needs {STEPS}, and records the last{without}"


def _runner(words: Sequence[str]) -> Callable[[], object]:
    module = words[0] == "-m"
    sys.argv = list(words[1:] if module else words)
    if module:
        sys.path.insert(0, "")
        return lambda: runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    return lambda: runpy.run_path(words[0], run_name="__main__")


@contextmanager
def _device(recorder: ScriptRecorder) -> Iterator[None]:
    """Let streams and changes of storage sizes be recorded, and numbers be printed; `torch.compile` does nothing."""
    resize, tolist = torch.UntypedStorage.resize_, torch.Tensor.tolist

    def resized(self: Any, size: int) -> Any:
        recorder.resized(self)
        return resize(self, size)

    def listed(self: Any) -> Any:
        plain = type(self) in PLAIN  # a fake tensor has its own
        return tolist(recorder.values_of(self)) if plain else tolist(self)

    def array(self: Any, **_: object) -> Any:
        with _disable_current_modes():  # nothing that runs here is the script's
            return recorder.values_of(self).numpy(force=True)

    with ExitStack() as stack:
        stack.enter_context(catch_warnings())
        filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # FSDP compares storages by it
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
        stack.enter_context(numbers_shown())
        stack.enter_context(counts_read())
        stack.enter_context(patch.object(FakeTensor, "numpy", array))
        stack.enter_context(patch.object(torch.Tensor, "tolist", listed))
        stack.enter_context(patch.object(torch, "save", lambda *_, **__: None))  # fake tensors have nothing to save
        stack.enter_context(fake_weights())
        stack.enter_context(code_compiled())
        stack.enter_context(capturable_here())
        stack.enter_context(flex_attention_fused(recorder.known))
        for name, value in StreamModule(recorder.queue).attributes.items():
            if hasattr(torch.cpu, name):
                stack.enter_context(patch.object(torch.cpu, name, value))
        yield


@contextmanager
def _hooks(steps: Steps) -> Iterator[None]:
    handles = [register_optimizer_step_pre_hook(steps.before), register_optimizer_step_post_hook(steps.after)]
    clip = torch.nn.utils.clip_grad_norm_

    def clipping(*words: Any, **more: Any) -> Any:
        steps.recorder.stage = "clip"
        try:
            return clip(*words, **more)
        finally:
            steps.recorder.stage = ""

    with (
        many_at_once(),
        kernels_of_gpu(lambda: steps.device.used),
        patch.object(torch.nn.utils, "clip_grad_norm_", clipping),
        patch.object(torch.nn.utils.clip_grad, "clip_grad_norm_", clipping),
    ):
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _settle(recorder: ScriptRecorder) -> None:
    """Mark storages as activations that the forward makes and a later phase frees."""
    rows = recorder.rows
    for life in recorder.lives:
        made_forward = life.kind == "temporary" and life.born < len(rows) and rows[life.born].phase == "forward"
        if made_forward and (life.died < 0 or life.died >= len(rows) or rows[life.died].phase != "forward"):
            life.kind = "activation"
