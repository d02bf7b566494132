"""Notes in a capture each call of the Python that DTensor and FSDP2 run besides operators (`sim.core.host_work`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, _api, _dispatch, _redistribute

from calibrate.capture.gpu.device_queue import Queue

CONVERSIONS = (_api._FromTorchTensor, _api._ToTorchTensor, _redistribute.Redistribute)


PHASES = {"forward": "", "backward": "_backward", "clip": "_optimizer", "optimizer": "_optimizer"}


def operator_kind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], phase: str) -> str:
    """Return the kind of an operator of DTensors; `phase` as the recorder names it."""
    for i, argument in enumerate(func._schema.arguments):
        value = kwargs.get(argument.name, args[i] if i < len(args) else None)
        if str(argument.type) == "Tensor" and value is not None and not isinstance(value, DTensor):
            return "dtensor_mixed_operator"
    return f"dtensor_operator{PHASES[phase]}"


@contextmanager
def host_work_noted(queue: Queue) -> Iterator[None]:
    """Note conversions and changes of placements of DTensors, and FSDP2's hooks."""
    note = queue.host_work

    def noting(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def noted(*words: Any, **more: Any) -> Any:
            note(kind)
            return function(*words, **more)

        return noted

    def moving(function: Callable[..., Any]) -> Callable[..., Any]:
        def moved(tensor: Any, now: Any, wanted: Any, *words: Any, **more: Any) -> Any:
            if now.placements != wanted.placements and not all(p.is_replicate() for p in now.placements):
                note("dtensor_redistribute")
            return function(tensor, now, wanted, *words, **more)

        return moved

    def hook(function: Callable[..., Any], end: str) -> Callable[..., Any]:
        def hooked(group: Any, *words: Any, **more: Any) -> Any:
            note(f"fsdp2_group{end}")
            for _ in group.fsdp_params:
                note(f"fsdp2_parameter{end}")
            return function(group, *words, **more)

        return hooked

    with ExitStack() as stack:
        for kind in CONVERSIONS:
            for name, end in (("forward", ""), ("backward", "_backward")):
                changed = staticmethod(noting(getattr(kind, name), f"dtensor_conversion{end}"))
                stack.enter_context(patch.object(kind, name, changed))
        for module in (_api, _dispatch, _redistribute):
            moved = moving(module.redistribute_local_tensor)
            stack.enter_context(patch.object(module, "redistribute_local_tensor", moved))
        for name, end in (("pre_forward", ""), ("post_backward", "_backward")):
            stack.enter_context(patch.object(FSDPParamGroup, name, hook(getattr(FSDPParamGroup, name), end)))
        yield
