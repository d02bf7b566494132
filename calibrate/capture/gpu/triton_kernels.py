"""Records the Triton kernels that the code itself starts, `kernel[grid](x, y, n)`, which need a GPU to run.

What such a kernel computes is not known. So one that is started is an operator of its own, priced by its bytes alone:
it reads each tensor that its code loads from, and writes each that its code stores to, once and in full. Autotuning and
heuristics choose its constants; they start it once.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._pytree import tree_leaves

from calibrate.capture.recorder import Recorder

NAMESPACE = "triton"
# triton.language and its descriptors' methods (3.8: language/core.py)
LOADS = ("load", "load_tensor_descriptor", "gather")
STORES = ("store", "store_tensor_descriptor", "scatter")
ATOMIC = "atomic_"
ADDRESS = ("pointer", "desc")  # what their first argument is called
LANGUAGE = ("tl", "language")  # how code calls triton.language


class Touched(NamedTuple):
    """The names of a kernel's parameters behind which its code loads and stores."""

    loaded: frozenset[str]
    stored: frozenset[str]


@contextmanager
def triton_kernels(recorder: Recorder, written: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Record the kernels that start within the block; without Triton there are none.

    `written`: is told each tensor that a kernel may have written.
    """
    if find_spec("triton") is None:
        yield
        return
    from triton.runtime.jit import KernelInterface

    def at(self: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: _start(recorder, written, _innermost(self), args, kwargs)

    def choose_none(self: Any, device: object) -> None:
        self.idx, self.prev_idx = -1, -1  # what torch makes of None: the tensors' device is the CPU here

    with patch.object(KernelInterface, "__getitem__", at), patch.object(torch.cuda.device, "__init__", choose_none):
        yield


def _innermost(kernel: Any) -> Any:
    """Return the kernel that autotuning and heuristics hold as `fn`."""
    return _innermost(kernel.fn) if hasattr(kernel.fn, "fn") else kernel


def _start(
    recorder: Recorder,
    written: Callable[[torch.Tensor], None],
    kernel: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    tensors = [(name, x) for name, value in given.items() for x in _tensors(value)]
    if any(isinstance(x, FunctionalTensor) for _, x in tensors):  # a script's whole numbers are real ones
        raise NotImplementedError(f"a graph cannot hold the Triton kernel {kernel.__name__}, which its code starts")
    touched = _touched(kernel)
    stores = [x for name, x in tensors if name in touched.stored]
    loads = [x for name, x in tensors if name in touched.loaded or name not in touched.stored]
    recorder.add(f"{NAMESPACE}.{kernel.__name__}", loads, stores)
    for x in stores:
        written(x)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an argument; a descriptor that the host makes has one as its `base`."""
    return [x for x in tree_leaves(getattr(value, "base", value)) if isinstance(x, torch.Tensor)]


@lru_cache(maxsize=256)
def _touched(kernel: Any) -> Touched:
    """Read off a kernel's code behind which parameters it loads and stores, also in functions that it calls."""
    tree = kernel.parse()
    names = set(kernel.arg_names)
    sources = _sources(tree, names)
    loaded: set[str] = set()
    stored: set[str] = set()
    for call in (x for x in ast.walk(tree) if isinstance(x, ast.Call)):
        called = _called(call)
        if (function := _function(kernel, call)) is not None:
            inner = _touched(function)
            for name, value in _given(function, call):
                loaded |= sources(value) if name in inner.loaded else set()
                stored |= sources(value) if name in inner.stored else set()
        if called in LOADS or called.startswith(ATOMIC):
            loaded |= sources(_address(call))
        if called in STORES or called.startswith(ATOMIC):
            stored |= sources(_address(call))
    return Touched(frozenset(loaded & names), frozenset(stored & names))


def _sources(tree: ast.AST, names: set[str]) -> Callable[[ast.AST], set[str]]:
    """Return what says from which of the parameters `names` an address comes."""
    behind = {name: {name} for name in names}

    def sources(node: ast.AST) -> set[str]:
        if isinstance(node, ast.Name):
            return behind.get(node.id, set())
        if isinstance(node, ast.Call) and _called(node) in LOADS:
            return set()  # a value, no address
        return set().union(*map(sources, ast.iter_child_nodes(node)))

    assigned = [x for x in ast.walk(tree) if isinstance(x, ast.Assign | ast.AugAssign | ast.AnnAssign) and x.value]
    pairs = [pair for x in assigned if x.value for pair in _pairs(x, x.value)]
    for _ in range(3):  # what a loop changes is used above, too
        for target, value in pairs:
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    behind[name.id] = behind.get(name.id, set()) | sources(value)
    return sources


def _pairs(x: ast.Assign | ast.AugAssign | ast.AnnAssign, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Return targets with their values, one by one where both are as many."""
    for target in x.targets if isinstance(x, ast.Assign) else [x.target]:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            yield from zip(target.elts, value.elts, strict=True)
        else:
            yield target, value


def _function(kernel: Any, call: ast.Call) -> Any:
    """Return the function of Triton that a kernel calls by its name; None for others, and for itself."""
    found = kernel.fn.__globals__.get(call.func.id) if isinstance(call.func, ast.Name) else None
    return found if found is not kernel and hasattr(found, "arg_names") and hasattr(found, "parse") else None


def _given(function: Any, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Return the arguments of a call with the names of the function's parameters."""
    yield from zip(function.arg_names, call.args, strict=False)
    yield from ((x.arg, x.value) for x in call.keywords if x.arg)


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _address(call: ast.Call) -> ast.AST:
    """Return the address of a load or a store: its first argument, or the descriptor whose method it is."""
    function = call.func
    if isinstance(function, ast.Attribute) and getattr(function.value, "id", "") not in LANGUAGE:
        return function.value
    named = (x.value for x in call.keywords if x.arg in ADDRESS)
    return call.args[0] if call.args else next(named, ast.Constant(None))
