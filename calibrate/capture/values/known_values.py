"""Knows the values of fake tensors that depend on no weight and no activation.

Shapes may depend on such values, as the rows of an expert on a router's choices. A fake tensor has a shape alone. So an
operator whose inputs are all known runs a second time, on real tensors, unless they are large.

A router's choices depend on weights. If they are balanced, they are made without them: row r of a top-k among n takes
the numbers r·k, r·k + 1, … modulo n. Then each expert gets equally many tokens, or one more than others. Megatron-LM
balances likewise with --moe-router-force-load-balancing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from calibrate.capture.values.answers import READ_AS
from calibrate.capture.values.text_ends import TextEnds

PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
REAL_BYTES = 1 << 26  # operators on larger tensors are not computed
CHOICES = {"topk": 2, "sort": 1, "max": 1, "argmax": 1, "multinomial": -1}  # place of the dimension among arguments
RANGES = ("arange", "linspace", "logspace")  # made of numbers alone
WHOLE = ("randint", "randperm")  # whole numbers that chance draws, such as token ids
DRAWN = 0.999  # a single number that chance draws, as a part of its range; a layer is left out at small ones
# Code that asks whether all of more elements than this are true checks its data, as `isfinite(x).all()` does.
CHECKS = {"all": 1, "_is_all_true": 0}
ASK_FOR_ERRORS = (F.gaussian_nll_loss.__code__,)  # whose variances are not to be negative
ROUTING_HELPS = "if it depends on a router's choices alone, --routing balanced makes it known"
UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)
ROUTED = {"routing": "balanced"}  # how a file says it
Number = bool | int | float
FILLS: dict[str, Callable[[tuple[Any, ...]], Number]] = {  # the number that all elements get
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), lambda _: 0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), lambda _: 1),
    **dict.fromkeys(("full", "full_like"), lambda args: args[1]),
    "new_full": lambda args: args[2],
    "scalar_tensor": lambda args: args[0],
}


class KnownValues(TorchDispatchMode):
    """Runs operators on fake tensors, and on real ones where their inputs are known.

    `balanced`: choices of the largest are made in turn. `host_waits` is called where the host waits for the device,
    because it reads a value or needs it for a shape.
    """

    def __init__(self, balanced: bool = False, host_waits: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.balanced, self.host_waits = balanced, host_waits
        self._chose = False  # the code has chosen the largest of something, as routers do
        self._drawn = 0  # how often whole numbers were drawn
        # By address of a living fake storage: its values, or the number that all its elements are.
        self._known: dict[int, torch.Tensor | Number] = {}
        # By address of a living real storage that unknown values were written into: the fake tensor in its place.
        self._replaced: dict[int, torch.Tensor] = {}
        self.ends = TextEnds(self._fill)

    @property
    def hint(self) -> str:
        """`; ` and what makes an unknown value known, where that may help; else nothing."""
        return f"; {ROUTING_HELPS}" if self._chose and not self.balanced else ""

    def of(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor's values; None if they are unknown."""
        if not isinstance(x, FakeTensor):
            return None if self.is_replaced(x) else x
        storage = x.untyped_storage()
        found = self._known.get(storage._cdata)
        with unset_fake_temporarily():
            if found is not None and not isinstance(found, torch.Tensor):
                found = self._known[storage._cdata] = torch.full((_elements(x),), found, dtype=x.dtype)
            if found is None or found.dtype != x.dtype:
                return None
            return found.as_strided(x.shape, x.stride(), x.storage_offset())

    def knows(self, x: torch.Tensor) -> bool:
        """Return whether the values of a fake tensor are known, and run no operator for that."""
        found = self._known.get(x.untyped_storage()._cdata)
        return found is not None and (not isinstance(found, torch.Tensor) or found.dtype == x.dtype)

    def put(self, x: torch.Tensor, values: torch.Tensor | Number) -> None:
        """Set the values of a fake tensor; its views have them too."""
        storage = x.untyped_storage()
        if isinstance(values, torch.Tensor):
            with unset_fake_temporarily():
                own = values.untyped_storage()
                places = [(t.stride(), t.storage_offset(), t.untyped_storage().nbytes()) for t in (x, values)]
                flat = torch.empty(0, dtype=x.dtype)
                if places[0] == places[1]:
                    flat.set_(own)
                else:
                    flat.resize_(_elements(x)).as_strided(x.shape, x.stride(), x.storage_offset()).copy_(values)
            values = flat
        if storage._cdata not in self._known:
            weakref.finalize(storage, self._known.pop, storage._cdata, None)
        self._known[storage._cdata] = values

    def forget(self, x: torch.Tensor) -> None:
        """Note that a tensor was written with unknown values."""
        self._known.pop(x.untyped_storage()._cdata, None)
        self.ends.forget(x)

    def forget_filled(self, x: torch.Tensor) -> None:
        """Note that a kernel may have written into a tensor; it does so into one that was filled with one number, and
        into a real one."""
        if not isinstance(x, FakeTensor):
            self.replace(x)
        elif not isinstance(self._known.get(x.untyped_storage()._cdata), torch.Tensor):
            self.forget(x)

    def replace(self, x: torch.Tensor) -> None:
        """Note that unknown values were written into a real tensor, which still has those from before."""
        storage = x.untyped_storage()
        if storage._cdata not in self._replaced:
            weakref.finalize(storage, self._replaced.pop, storage._cdata, None)
            mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
            with _disable_current_modes():  # a script's whole numbers would be real again
                meta = torch.empty(_elements(x), dtype=x.dtype, device="meta")
                self._replaced[storage._cdata] = FakeTensor(mode, meta, torch.device("cpu"))

    def is_replaced(self, x: torch.Tensor) -> bool:
        """Return whether unknown values were written into a real tensor, or a view of one."""
        return type(x) in PLAIN and bool(self._replaced) and x.untyped_storage()._cdata in self._replaced

    def current(self, tree: Any) -> Any:
        """Return arguments with fake tensors for the real ones that unknown values were written into."""
        return tree_map_only(torch.Tensor, self._current, tree) if self._replaced else tree

    def _current(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, FakeTensor) or not self.is_replaced(x):
            return x
        whole = self._replaced[x.untyped_storage()._cdata].view(x.dtype)
        return whole.as_strided(x.shape, x.stride(), x.storage_offset())

    def _fill(self, x: torch.Tensor) -> Number | None:
        """Return the number that all elements of a tensor are, if it was filled with one."""
        found = self._known.get(x.untyped_storage()._cdata)
        if not isinstance(found, torch.Tensor):
            return found
        with unset_fake_temporarily():
            same = bool((found == found[0]).all()) if found.numel() else False
            return found[0].item() if same else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not all(t in PLAIN for t in types):
            return func(*args, **kwargs)  # a subclass, which calls again with the tensors that it holds
        args, kwargs = self.current((args, kwargs))
        if func.namespace != "aten":
            return self._unknown(func, "", args, kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name in FILLS:
            out = func(*args, **kwargs)
            if isinstance(out, FakeTensor) and _bytes(out) <= REAL_BYTES:
                self.put(out, FILLS[name](args))
            return out
        real = self._real(func, name, args, kwargs)
        return self._unknown(func, name, args, kwargs) if real is None else self._twice(func, name, args, kwargs, real)

    def _real(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return an operator's arguments with real tensors; None if its result is unknown or they are large."""
        inputs = tensors_in((args, kwargs))
        drawn = torch.Tag.nondeterministic_seeded in func.tags and (name != "multinomial" or self.balanced)
        if name in WHOLE:
            return args, {key: x for key, x in kwargs.items() if key != "generator"}
        if drawn or not (inputs or name in RANGES) or _without_numbers(kwargs):
            return None
        fake = [x for x in inputs if isinstance(x, FakeTensor)]
        if any(x.untyped_storage()._cdata not in self._known for x in fake) or sum(map(_bytes, inputs)) > REAL_BYTES:
            return None
        values = [self.of(x) for x in inputs]
        if any(x is None for x in values):
            return None
        rest = iter(values)
        return tree_map_only(torch.Tensor, lambda _: next(rest), (args, kwargs))

    def _twice(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], real: Any) -> Any:
        """Run an operator on fake tensors and on real ones, whose shapes are taken if fake ones have none."""
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
            with self._seeded(name):
                return _run(func, name, args, kwargs)  # on real tensors, which a second run would change again
        try:
            out = _run(func, name, args, kwargs)
        except UNKNOWN:
            with unset_fake_temporarily():
                values = _run(func, name, *real)
            self.host_waits()
            out = tree_map_only(torch.Tensor, _like, values)
        else:
            new = [x for x in tensors_in(out) if isinstance(x, FakeTensor)]
            if not func._schema.is_mutable and (not new or sum(map(_bytes, new)) > REAL_BYTES):
                return out
            with unset_fake_temporarily(), self._seeded(name):
                values = _run(func, name, *real)
        for x, value in zip(tensors_in(out), tensors_in(values), strict=True):
            if x.untyped_storage()._cdata not in self._known:  # else it is a view, or was written in place
                self.put(x, value)
        return out

    def _seeded(self, name: str) -> AbstractContextManager[object]:
        """Return what the drawing of numbers runs under: each draws others, and a second capture the same."""
        if name not in WHOLE:
            return nullcontext()
        self._drawn += 1
        stack = ExitStack()
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(self._drawn)
        return stack

    def _unknown(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "masked_select" and self.of(args[1]) is not None:
            return self._selected(*args)
        if name == "_ctc_loss" and isinstance(args[3], torch.Tensor) and self.of(args[3]) is not None:
            return self._ctc_loss(*args[:4])
        if name == "_local_scalar_dense" and args[0].is_floating_point():
            return READ_AS
        ended = self.ends.of(args[0]) if name in ("all", "_local_scalar_dense") else None
        if ended is not None and name != "all":
            return ended
        self._chose = self._chose or name in CHOICES
        answer = self.ends.answer(name, args)
        try:
            out = _run(func, name, self._without_masks(args) if name == "index" else args, kwargs)
        except UNKNOWN as error:
            error.add_note(self.hint)
            raise
        # Other ranks' integers are this rank's own (alike_ranks.py).
        of_fakes = func.namespace == "aten" and any(isinstance(x, FakeTensor) for x in tensors_in((args, kwargs)))
        for i, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                for x in tensors_in(kwargs.get(argument.name, args[i] if i < len(args) else None)):
                    self.forget(x)
                    if of_fakes and not isinstance(x, FakeTensor):
                        self.replace(x)
        if name in ("rand", "uniform_") and out.numel() == 1:
            low, high = (*args[1:3], *(0.0, 1.0)[len(args[1:3]) :]) if name == "uniform_" else (0.0, 1.0)
            self.put(out, low + DRAWN * (high - low))
        if answer is not None:
            self.ends.note(out, answer)
        if ended is not None and out.numel() == 1:
            self.put(out, ended)
        elif name in CHECKS and args[0].numel() > CHECKS[name] and out.numel() == 1:
            self.put(out, 1)
        elif name == "any" and _asks_for_errors(sys._getframe(1)):
            self.put(out, 0)
        if self.balanced and name in CHOICES:
            self._choose(CHOICES[name], args, kwargs, out)
        return out

    def _choose(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Set the places that a choice returns, each row's after those of the row before."""
        dim = kwargs.get("dim", args[place] if 0 < place < len(args) else None if place == 1 else -1)
        candidates = args[0].numel() if dim is None else args[0].size(dim)
        for chosen in (y for y in tensors_in(out) if y.dtype == torch.int64):
            shape = list(chosen.shape)
            with unset_fake_temporarily():
                numbers = torch.arange(chosen.numel()).remainder(candidates)
                if dim is None or len(shape) < args[0].dim():  # one place of each row
                    values = numbers.view(shape)
                else:
                    shape.append(shape.pop(dim))
                    values = numbers.view(shape).movedim(-1, dim)
            self.put(chosen, values)

    def _without_masks(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of an indexing, with the places of what is true instead of known masks."""
        indices: list[Any] = []
        for x in args[1]:
            mask = self.of(x) if x is not None and x.dtype == torch.bool else None
            if mask is None:
                indices.append(x)
                continue
            self.host_waits()
            with unset_fake_temporarily():
                places = mask.nonzero(as_tuple=True)
            indices += map(_like, places)
        return args[0], indices

    def _selected(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.host_waits()
        known = self.of(mask)
        with unset_fake_temporarily():
            assert known is not None
            n = int(known.expand(torch.broadcast_shapes(x.shape, mask.shape)).sum())
        return x.new_empty(n)

    def _ctc_loss(
        self, log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return losses [batch] and alphas [batch, frames, 2 · longest target + 1] (ATen/native/LossCTC.cpp)."""
        known = self.of(target_lengths)
        with unset_fake_temporarily():
            assert known is not None
            longest = int(known.max())
        frames, batch = log_probs.shape[:2]
        return log_probs.new_empty(batch), log_probs.new_empty(batch, frames, 2 * longest + 1)


def _run(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator; a CPU has no histogram of integers, which a GPU has."""
    if name == "histc" and not args[0].is_floating_point():
        return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def _asks_for_errors(frame: FrameType | None) -> bool:
    """Tell whether a loss of torch asks whether any of its numbers is none that it takes."""
    while frame is not None and frame.f_code not in ASK_FOR_ERRORS:
        frame = frame.f_back
    return frame is not None


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors among the leaves of a tree of arguments or results."""
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def _without_numbers(kwargs: dict[str, Any]) -> bool:
    """Return whether an operator makes a tensor on torch's device `meta`, as code that loads weights later does."""
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"


def _elements(x: torch.Tensor) -> int:
    """Return the number of elements of a tensor's storage."""
    return x.untyped_storage().nbytes() // x.element_size()


def _like(x: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor with a real one's layout."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
