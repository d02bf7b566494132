"""Knows which tensors lie in the host's memory, since all tensors of a capture are on the CPU (`cuda_device.py`).

In the host's memory are: what the code makes without a device or on "cpu", what functions of torch make of such tensors
alone, and copies from the GPU. All else lies on the GPU, so a capture without host tensors has no copies. A tensor's
`device` tells nothing: it is the CPU for both.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from calibrate.capture.values.known_values import PLAIN, tensors_in
from sim.core.json_values import is_integer


class Places:
    """The storages that lie in the host's memory.

    `making`: what a function of torch that runs now makes of no tensor lies there.
    """

    def __init__(self) -> None:
        self.making = False
        self._host: dict[int, bool] = {}  # by address of a living storage: whether its memory is pinned

    def on_host(self, x: torch.Tensor) -> bool:
        """Return whether a tensor lies in the host's memory."""
        return is_plain(x) and x.untyped_storage()._cdata in self._host

    def is_pinned(self, x: torch.Tensor) -> bool:
        """Return whether a tensor lies in the host's pinned memory."""
        return is_plain(x) and self._host.get(x.untyped_storage()._cdata, False)

    def put_on_host(self, x: torch.Tensor, pinned: bool = False) -> None:
        """Note that a tensor's storage lies in the host's memory; memory that is pinned stays so."""
        if not is_plain(x):
            return
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._host:
            weakref.finalize(storage, self._host.pop, key, None)
        self._host[key] = pinned or self._host.get(key, False)

    def put_on_gpu(self, x: torch.Tensor) -> None:
        """Note that a tensor's storage lies in the GPU's memory."""
        if is_plain(x):
            self._host.pop(x.untyped_storage()._cdata, None)

    def see(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note where the result of a function of torch lies; its arguments are as the code gave them."""
        made = tensors_in(out)
        for x in made if made and self.makes_on_host(args, kwargs) else ():
            self.put_on_host(x, bool(kwargs.get("pin_memory")))

    def makes_on_host(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a function of torch with these arguments, as the code gave them, makes tensors of the host."""
        device = kwargs.get("device")
        if kwargs.get("pin_memory"):
            return True
        if device is None:
            return all(self.on_host(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        return named_place(device) is False


class MadeSeen(TorchFunctionMode):
    """Notes where what torch's functions make lies, within code that names the GPU by the device of its tensors.

    So do torch's optimizers, which count steps on the host, unless the count is of a fused kernel or a CUDA graph, and
    models, which may make a single number there (`torch.sqrt(torch.tensor(64.0))`).
    """

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # The code of a step names no device. So what it makes is the GPU's, but for single numbers.
        # A device that is given by its place (`x.to(y.device)`) is a tensor's, which may be the GPU.
        single = all(x.dim() == 0 for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        if single and not any(isinstance(x, torch.device) for x in args):
            self.places.see(args, kwargs or {}, out)
        return out


def is_plain(x: torch.Tensor) -> bool:
    """Return whether a tensor has a storage of its own; a subclass (DTensor), and one within `vmap`, holds others."""
    return type(x) in PLAIN and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def named_place(device: Any) -> bool | None:
    """Return true for the GPU, false for the host, None for neither.

    A `torch.device` of the CPU may be that of any tensor, also of one on the GPU, so it names no place.

    >>> named_place("cuda:1"), named_place("cpu"), named_place(torch.device("cpu")), named_place(torch.float32)
    (True, False, None, None)
    """
    if is_integer(device):
        return True
    if isinstance(device, str | torch.device):
        kind = str(device).partition(":")[0]
        return True if kind == "cuda" else False if kind == "cpu" and isinstance(device, str) else None
    return None
