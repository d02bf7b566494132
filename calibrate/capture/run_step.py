"""Runs a step on fake tensors and records it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings, filterwarnings

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from calibrate.capture.compiled.regions import code_compiled, compiled_regions
from calibrate.capture.gpu.autocast import DTYPES, CudaOperators, autocast_noted, user_autocast
from calibrate.capture.gpu.flex_attention import flex_attention_fused
from calibrate.capture.gpu.host_copies import HostCopies, saved_tensors_copied
from calibrate.capture.gpu.modes_in_backward import kept_in_backward
from calibrate.capture.gpu.optimizers import capturable_here, kernels_of_gpu, many_at_once
from calibrate.capture.gpu.places import MadeSeen, Places
from calibrate.capture.gpu.triton_kernels import triton_kernels
from calibrate.capture.recorder import Recorder, parts_of
from calibrate.capture.running_module import watched
from calibrate.capture.step import Step
from calibrate.capture.step_checks import checked_loss, without_gradients
from calibrate.capture.values.answers import numbers_shown
from calibrate.capture.values.counts_read import counts_read
from calibrate.capture.values.known_values import ROUTED, KnownValues
from calibrate.capture.values.masks_read import masks_kept, masks_read
from calibrate.capture.values.matchings import matched_in_turn
from sim.core.errors import InputError
from sim.models.captured.waits import READ


def record(make: Callable[[], Step], device: str = "cuda", balanced: bool = False) -> tuple[Step, Recorder]:
    """Make the step on fake tensors, run it once in its steady state, and record it.

    As in every step but a training's first, optimizer states exist before it, and so does what the model makes in its
    first forward alone, as masks that it keeps: a forward runs before. Gradients do not exist (`set_to_none`, torch's
    default). `device`: cuda or cpu, whose kernels are captured. `balanced`: routers choose experts in turn.
    """
    on_gpu = device == "cuda"
    with (
        code_compiled(),
        capturable_here(),
        kernels_of_gpu(lambda: on_gpu),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.device("cpu"),
        casts_in_place(),
        fake_weights(),
    ):
        known = KnownValues(balanced)
        step = _made(make, known, balanced)
        operators = CudaOperators(DTYPES[step.autocast] if step.autocast else None, on_gpu)
        recorder = Recorder(step.model, operators, device)
        with known:
            _give_states(step, recorder.places)
        with (
            user_autocast(operators) if on_gpu else nullcontext(),
            _recorded(step, recorder, operators, known, on_gpu),
            compiled_regions(recorder) as regions,
        ):
            regions.tracing = step.compiled  # which makes one graph of all
            run = _first_run(step, recorder, device)
            without_gradients(step)
            _mark_lasting(recorder, step)
            recorder.phase = "forward"
            result = _forward(run, step, operators, device)
            kept = len(recorder.rows)
            if step.optimizer is not None:
                _train(result, step, step.optimizer, recorder)
            recorder.phase = ""
    if step.optimizer is not None:
        _name_activations(recorder, kept)
    if step.compiled or regions.compiled:
        never_collected()
    recorder.notes += regions.notes()
    return step, recorder


def _made(make: Callable[[], Step], known: KnownValues, balanced: bool) -> Step:
    """Make the step on fake tensors; InputError if it is none that can be captured."""
    with known, flex_attention_fused(known), autocast_noted():
        step = make()
    step.facts.update(ROUTED if balanced else {})
    if step.compiled and step.optimizer is None:
        raise InputError(
            "compiled: found true; a Step without an optimizer, which is a forward alone, is captured eager"
        )
    return step


@contextmanager
def _recorded(
    step: Step, recorder: Recorder, operators: CudaOperators, known: KnownValues, on_gpu: bool
) -> Iterator[None]:
    """Let the recorder see every operator, and answer what the step asks of fake tensors' values."""
    offload = saved_tensors_copied(HostCopies(recorder, Places(), lambda: on_gpu))
    with (
        many_at_once(),
        lists_read_at_once(recorder),
        numbers_shown(),
        counts_read(lambda x: recorder.add(READ, [x], [])),
        nullcontext() if step.compiled else offload,
        nullcontext() if step.compiled else known,  # a graph that is traced has no real tensors
        masks_kept() if step.compiled else masks_read(known),
        matched_in_turn(),
        flex_attention_fused(known),
        triton_kernels(recorder, known.forget_filled),
        recorder,
        nullcontext() if step.compiled else MadeSeen(recorder.places),
        operators,
        kept_in_backward(operators),
        watched(recorder.modules),
    ):
        yield


def _name_activations(recorder: Recorder, forward_rows: int) -> None:
    """Call what the forward, the first rows, makes and the backward still has activations."""
    for life in recorder.lives:
        if life.kind == "temporary" and life.born < forward_rows and (life.died > forward_rows or life.died < 0):
            life.kind = "activation"


def _train(loss: Any, step: Step, optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    """Run what follows the forward of a training step: backward, clipping, optimizer."""
    recorder.phase = "backward"
    checked_loss(loss).backward()
    for p in step.model.parameters():
        if p.grad is not None:
            recorder.mark(p.grad, "gradient")
    _without_needless_states(recorder, optimizer)
    recorder.phase = "clip"
    if step.clip_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(step.model.parameters(), step.clip_grad_norm, foreach=True)
    recorder.phase = "optimizer"
    with MadeSeen(recorder.places):
        optimizer.step()


def never_collected() -> None:
    """Exclude all present objects from Python's garbage collection.

    AOTAutograd leaves fake tensors in cycles. If the collector frees them, torch 2.13 corrupts the heap (glibc:
    "corrupted double-linked list").
    """
    gc.freeze()
    gc.enable()


def autocast_of(step: Step, device: str) -> AbstractContextManager[object]:
    """Return torch's own autocast on this device with the step's dtype."""
    return torch.autocast(device, DTYPES[step.autocast]) if step.autocast else nullcontext()


def gradients_of(step: Step) -> AbstractContextManager[object]:
    """Return what the forward runs under: a forward alone records nothing for a backward."""
    return nullcontext() if step.optimizer is not None else torch.no_grad()


@contextmanager
def lists_read_at_once(recorder: Recorder) -> Iterator[None]:
    """Let `Tensor.tolist` be one copy from a GPU, and nothing on a CPU; a fake tensor reads number by number."""
    number_by_number = FakeTensor.tolist

    def read(self: FakeTensor) -> Any:
        with recorder.paused():
            values = number_by_number(self)
        if recorder.device != "cpu":
            recorder.add(READ, [self], [])
        return values

    with patch.object(FakeTensor, "tolist", read):
        yield


def _first_run(step: Step, recorder: Recorder, device: str) -> Callable[[], Any]:
    """Return the step's loss after a run that is not recorded: it makes what the model keeps; a compiled one traces."""
    if not step.compiled:
        _forward(step.loss, step, recorder.operators, device)
        return step.loss
    from calibrate.capture.compiled.step import CompiledLoss

    loss = CompiledLoss(step, recorder)
    gc.disable()  # see `never_collected`
    recorder.operators.compiled = True
    with catch_warnings():
        filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # Inductor's passes read constants
        torch.autograd.backward(_forward(loss, step, recorder.operators, device))
    step.model.zero_grad(set_to_none=True)
    return loss


def _forward(run: Callable[[], Any], step: Step, operators: CudaOperators, device: str) -> Any:
    """Return the loss of one forward under the device's autocast, which frees its cast weights at the end."""
    operators.active = operators.on_gpu
    with nullcontext() if operators.on_gpu else autocast_of(step, device), gradients_of(step):
        result = run()
    operators.active = False
    operators.forget()
    return result


def casts_in_place() -> AbstractContextManager[object]:
    """Let `module.to(dtype)` replace the data of fake parameters.

    Torch swaps parameters with new ones, which fails while the fake mode refers to them (torch/nn/modules/module.py,
    `_apply`).
    """

    def take(tensor: torch.Tensor, other: torch.Tensor) -> None:
        tensor.data = other.data

    return patch.object(torch.utils, "swap_tensors", take)


@contextmanager
def fake_weights() -> Iterator[None]:
    """Let fake weights be filled and deep copied.

    `trunc_normal_` draws again until it reads that no value is out of range. torch's deep copy of a fake tensor has a
    second storage, which operators see.
    """

    def fill(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        with torch.no_grad():
            return tensor.normal_()

    def copied(self: torch.Tensor, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            new = self.detach().clone()
            new = torch.nn.Parameter(new) if isinstance(self, torch.nn.Parameter) else new
            memo[id(self)] = new.requires_grad_(self.requires_grad)
            new.grad = None if self.grad is None else copied(self.grad, memo)
        return memo[id(self)]

    with (
        patch.object(torch.nn.init, "_no_grad_trunc_normal_", fill),
        patch.object(FakeTensor, "__deepcopy__", copied, create=True),
    ):
        yield


def _give_states(step: Step, places: Places) -> None:
    """Let the optimizer make its states."""
    if step.optimizer is None:
        return
    for x in _numbers_on_host(step.optimizer):
        places.put_on_host(x)
    updated = [p for group in step.optimizer.param_groups for p in group["params"]]
    for p in dict.fromkeys([*step.model.parameters(), *updated]):
        if p.requires_grad:
            p.grad = torch.zeros_like(p)
    with MadeSeen(places):
        step.optimizer.step()
    step.optimizer.zero_grad(set_to_none=True)
    step.model.zero_grad(set_to_none=True)  # of parameters that the optimizer does not have


def _numbers_on_host(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's learning rates on the host, and counts that it makes before its first step, as Adagrad."""
    groups = [g for g in optimizer.param_groups if not (g.get("fused") or g.get("capturable"))]
    updated = {p for g in groups for p in g["params"]}
    rates = [g.get("lr") for g in groups]
    counts = [state.get("step") for p, state in optimizer.state.items() if p in updated]
    return [x for x in (*rates, *counts) if isinstance(x, torch.Tensor) and x.dim() == 0]


def _without_needless_states(recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
    """Count no optimizer states of parameters that the loss does not depend on; a real optimizer makes none."""
    for p, state in optimizer.state.items():
        if p.grad is None:
            for x in parts_of(state):
                recorder.lives[recorder.storage(x)].bytes = 0


def _mark_lasting(recorder: Recorder, step: Step) -> None:
    for name, p in step.model.named_parameters():
        recorder.mark(p, "parameter" if p.requires_grad and step.optimizer is not None else "frozen parameter")
        recorder.lives[recorder.storage(p)].module = name
    for name, b in step.model.named_buffers():
        recorder.mark(b, "buffer")
        recorder.lives[recorder.storage(b)].module = name
    for state in step.optimizer.state.values() if step.optimizer is not None else ():
        for x in parts_of(state):
            if recorder.device != "cpu" and recorder.places.on_host(x):
                recorder.mark(x, "host")
            elif x.dim() > 0:
                recorder.mark(x, "optimizer state")
