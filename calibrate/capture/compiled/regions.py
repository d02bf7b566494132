"""Captures what the code itself gives to `torch.compile`: each such function, or module's forward, is one graph.

Dynamo, which finds the graphs of a real run, would compile kernels for the CPU and run them on fake tensors, which have
no memory. So AOTAutograd traces the function itself, once for each set of shapes, dtypes and other arguments. What
Dynamo would cut into several graphs cannot be traced so, and runs eagerly.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch
from warnings import catch_warnings, filterwarnings

import torch
from torch._guards import detect_fake_mode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from calibrate.capture.compiled.refused import NotAnInput, NotOneGraph
from calibrate.capture.failure import reason
from calibrate.capture.recorder import Recorder
from calibrate.capture.running_module import module_hooks
from calibrate.capture.values.known_values import PLAIN
from calibrate.capture.values.masks_read import masks_kept

if TYPE_CHECKING:
    from calibrate.capture.compiled.alike import Schedules

CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.memory_format)
SHARDED = (FSDPModule, FullyShardedDataParallel)  # modules whose hooks gather parameters
REASON_LETTERS = 160
GRAPHED = ("reduce-overhead", "max-autotune")  # modes with CUDA graphs (torch/_inductor/__init__.py: list_mode_options)
GRAPHS_OPTION = "triton.cudagraphs"
IN_GRAPHS = "CUDA graphs launch the kernels, so that the host takes time for each graph alone"


class Compiled:
    """What `torch.compile` makes of a function, or of the forward of `module`. Outside a capture it runs eagerly.

    `modules`: whose parameters and buffers it may use; None before its first call. `loose`: parameters that it uses
    besides. `graphed`: torch puts its kernels into CUDA graphs.
    """

    def __init__(
        self, function: Callable[..., Any], module: torch.nn.Module | None = None, graphed: bool = False
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self.graphed = graphed
        self.function, self.module = function, module
        self.name = getattr(function, "__qualname__", "") if module is None else type(module).__name__
        self.modules = None if module is None else list(module.modules())
        self.loose: list[torch.Tensor] = []
        self.methods: dict[int, Compiled] = {}  # of a function in a class, by id of the instance, which they hold

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, in a capture as a compiled graph."""
        if not ACTIVE or ACTIVE[-1].tracing or not ACTIVE[-1].recorder.operators.on_gpu:
            return self.function(*args, **kwargs)
        return ACTIVE[-1].call(self, args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Compiled:
        """Return the method of `instance`, as a function in a class does."""
        if instance is None:
            return self
        if id(instance) not in self.methods:
            module = instance if isinstance(instance, torch.nn.Module) else None
            self.methods[id(instance)] = Compiled(MethodType(self.function, instance), module, self.graphed)
        return self.methods[id(instance)]

    def parts(self) -> list[torch.nn.Module]:
        """Return the modules that are compiled one by one in place of this code; [] if it is one graph.

        Dynamo breaks graphs where FSDP's hooks run, and cuts those of a model in DistributedDataParallel into its
        buckets (torch/_dynamo/backends/distributed.py, `DDPOptimizer`), so that gradients of the last layers are
        reduced while others are computed. A bucket has 25 MiB; here each member of a list of modules is a graph.
        """
        inside = [m for m in self.modules or () if m is not self.module]
        sharded = [m for m in inside if isinstance(m, SHARDED)]
        if sharded or not DistributedDataParallel._get_active_ddp_module():
            return [m for m in sharded if not any(isinstance(x, SHARDED) for x in m.modules() if x is not m)]
        lists = [m for m in self.modules or () if isinstance(m, torch.nn.ModuleList | torch.nn.Sequential)]
        nested = {id(x) for m in lists for x in m.modules() if x is not m}
        return [x for m in lists if id(m) not in nested for x in m]


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a call of compiled code gets: `leaves` of its arguments in the tree `spec`, and `slots` of its modules.

    A slot is the mapping of a module's parameters or buffers, and a name in it.
    """

    leaves: list[Any]
    spec: TreeSpec
    slots: list[tuple[dict[str, Any], str]]

    def tensors(self) -> list[torch.Tensor]:
        """Return each tensor once, those of the modules first."""
        held = [where[name] for where, name in self.slots]
        return list({id(x): x for x in (*held, *self.leaves) if isinstance(x, torch.Tensor)}.values())

    def key(self) -> tuple[Any, ...]:
        """Return what decides which graph the call has; other objects than tensors and constants by identity."""
        return repr(self.spec), *(_kind(x) for x in (*self.tensors(), *self.leaves))

    def others(self) -> list[Any]:
        """Return the arguments that the key holds by identity."""
        return [x for x in self.leaves if not isinstance(x, (torch.Tensor, *CONSTANTS))]


class Traced(NamedTuple):
    """A compiled call, of tensors alone. `result`, `spec`: its result's leaves, `...` for each tensor, and their tree.

    `loose`: tensors that it gets after those of `Arguments`.
    """

    run: Callable[..., Any]
    result: list[Any]
    spec: TreeSpec
    loose: tuple[torch.Tensor, ...]


class Regions:
    """The compiled code of one capture. `eager`: why some of it runs eagerly, by its name; `compiled`: the others, of
    which those in `graphed` have CUDA graphs."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.compiled: set[str] = set()
        self.graphed: set[str] = set()
        self.eager: dict[str, str] = {}
        self.tracing = False
        self._traced: dict[Any, Traced | None] = {}  # None: runs eagerly
        self._schedules: Schedules | None = None
        self._held: list[Any] = []  # whose identity is part of a key

    def call(self, code: Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what compiled code returns for these arguments."""
        if code.modules is None:
            return self._first_call(code, args, kwargs)
        if parts := code.parts():
            for part in parts:
                _compile(part, graphed=code.graphed)
            return code.function(*args, **kwargs)
        slots = [(where, name) for m in code.modules for where in (m._parameters, m._buffers) for name in where]
        arguments = Arguments(*tree_flatten((args, kwargs), is_leaf=_is_mask), slots)
        setting = torch.is_grad_enabled(), self.recorder.operators.dtype, *(m.training for m in code.modules)
        key = id(code), setting, arguments.key()
        if key not in self._traced:
            self._held += [code, *arguments.others()]
            self._traced[key] = self._try(code, arguments)
        traced = self._traced[key]
        if traced is None:
            return code.function(*args, **kwargs)
        made = iter(traced.run(*arguments.tensors(), *traced.loose))
        return tree_unflatten([next(made) if x is ... else x for x in traced.result], traced.spec)

    def _first_call(self, code: Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function eagerly, and note the modules that it calls. A step runs once before it is recorded."""
        found: dict[int, torch.nn.Module] = {}

        def enter(module: torch.nn.Module, *_: object) -> None:
            found[id(module)] = module

        with module_hooks(enter, lambda *_: None):
            out = code.function(*args, **kwargs)
        code.modules = list(found.values())
        if self.recorder.records():
            self.eager[code.name] = "it runs once, in the recorded step; functions are traced from their second call on"
        return out

    def _try(self, code: Compiled, arguments: Arguments) -> Traced | None:
        """Trace a call; return None if it cannot be traced."""
        try:
            traced = self._trace(code, arguments)
        except NotAnInput as error:
            if {id(x) for x in error.tensors} <= {id(x) for x in code.loose}:
                self.eager[code.name] = str(error)
                return None
            code.loose += error.tensors
            return self._try(code, arguments)
        except Exception as error:
            self.eager[code.name] = str(error) if isinstance(error, NotOneGraph) else reason(error)
            return None
        self.compiled.add(code.name)
        self.graphed |= {code.name} if code.graphed else set()
        self.eager.pop(code.name, None)
        return traced

    def _trace(self, code: Compiled, arguments: Arguments) -> Traced:
        """Trace a call by running it once, unrecorded."""
        from calibrate.capture.compiled.alike import Schedules
        from calibrate.capture.compiled.checkpoints import checkpoints_marked
        from calibrate.capture.compiled.graph import Instead, ZerosTraced, compiled_function

        tensors = [*arguments.tensors(), *code.loose]
        if subclasses := sorted({type(x).__name__ for x in tensors if type(x) not in PLAIN}):
            raise NotOneGraph(f"it uses tensors of the class {subclasses[0]}")
        places = {id(x): i for i, x in enumerate(tensors)}
        # Tensors of this call may die: the graph's function holds their places, and other arguments.
        at = [places[id(x)] if isinstance(x, torch.Tensor) else None for x in arguments.leaves]
        others = [None if isinstance(x, torch.Tensor) else x for x in arguments.leaves]
        held = [(where, name, places[id(where[name])]) for where, name in arguments.slots if where[name] is not None]
        shape: dict[str, Any] = {}

        def function(*now: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self.recorder.operators.cache = {}  # what one trace has cast is unknown to the next
            mine = [x if i is None else now[i] for x, i in zip(others, at, strict=True)]
            args, kwargs = tree_unflatten(mine, arguments.spec)
            instead = Instead({id(x): now[places[id(x)]] for x in code.loose})
            with _held_by_modules(held, now), ZerosTraced(), instead, checkpoints_marked():
                out, shape["spec"] = tree_flatten(code.function(*args, **kwargs))
            shape["result"] = [... if isinstance(x, torch.Tensor) else x for x in out]
            return tuple(x for x in out if isinstance(x, torch.Tensor))

        self._schedules = self._schedules or Schedules()
        run = compiled_function(function, self.recorder, self._schedules, code.graphed)
        with self._unrecorded(tensors):
            _both_ways(run, tensors)
        return Traced(run, shape["result"], shape["spec"], tuple(code.loose))

    @contextmanager
    def _unrecorded(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let a trace see neither the recorder nor known values, and change no state of autocast."""
        operators, mode = self.recorder.operators, detect_fake_mode(tensors)
        before = operators.cache, operators.compiled
        self.tracing, operators.compiled = True, True
        gc.disable()  # see `never_collected`
        try:
            with ExitStack() as stack:
                own_hooks = saved_tensors_hooks(lambda x: x, lambda x: x)  # not those of a checkpoint around the call
                contexts = (self.recorder.paused(), _disable_current_modes(), masks_kept(), own_hooks, catch_warnings())
                for context in (*contexts, mode or nullcontext()):
                    stack.enter_context(context)
                filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # Inductor's passes read constants
                yield
        finally:
            self.tracing = False
            operators.cache, operators.compiled = before

    def notes(self) -> list[str]:
        """Say what was captured as compiled graphs, and what was not."""
        said = [f"torch.compile: captured as compiled graphs: {', '.join(sorted(self.compiled))}"] * bool(self.compiled)
        if self.graphed:
            names = ", ".join(sorted(self.graphed))
            said.append(f"torch.compile: {names}: {IN_GRAPHS}")
        for name, why in sorted(self.eager.items()):
            short = why if len(why) <= REASON_LETTERS else why[: REASON_LETTERS - 1] + "…"
            said.append(f"torch.compile: {name} is captured eagerly, because it cannot be traced as one graph: {short}")
        return said


ACTIVE: list[Regions] = []


def _is_mask(x: Any) -> bool:
    """Return whether an argument is a mask whose blocks are known, which says how many of them a kernel computes."""
    return isinstance(x, BlockMask)


def _both_ways(run: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> None:
    """Run a function and its backward, which AOTAutograd may compile when it first runs; tensors' hooks do not run."""
    like = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
    needed = [x for x in like if x.requires_grad]
    results = [x for x in run(*like) if x.requires_grad]
    if needed and results:
        torch.autograd.grad(results, needed, [torch.empty_like(x) for x in results], allow_unused=True)


@contextmanager
def _held_by_modules(
    places: Sequence[tuple[dict[str, Any], str, int]], tensors: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Let modules hold these tensors as parameters and buffers."""
    before = [(where, name, where[name]) for where, name, _ in places]
    for where, name, i in places:
        where[name] = tensors[i]
    try:
        yield
    finally:
        for where, name, x in before:
            where[name] = x


def _compile(
    model: Any = None,
    *,
    backend: Any = "inductor",
    disable: bool = False,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    graphed: bool = False,
    **_: object,
) -> Any:
    """Do as `torch.compile`; what another backend than Inductor compiles runs eagerly."""
    graphed = graphed or mode in GRAPHED or bool((options or {}).get(GRAPHS_OPTION))
    if model is None:
        return lambda f: _compile(f, backend=backend, disable=disable, graphed=graphed)
    if disable or backend != "inductor" or isinstance(model, Compiled):
        return model
    if not isinstance(model, torch.nn.Module):
        return Compiled(model, graphed=graphed)
    inner = _wrapped(model)
    if not isinstance(inner.forward, Compiled):
        inner.forward = Compiled(inner.forward, inner, graphed)
    vars(model)["_orig_mod"] = model  # code asks torch's own compiled module for the one in it; no submodule
    return model


def _wrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that DistributedDataParallel or FSDP's first version holds, else the module."""
    if isinstance(module, DistributedDataParallel):
        return _wrapped(module.module)
    if isinstance(module, FullyShardedDataParallel):
        return _wrapped(module._fsdp_wrapped_module)
    return module


def _compile_self(module: torch.nn.Module, *_: object, **how: Any) -> None:
    """Do as `Module.compile`."""
    _compile(module, **how)


@contextmanager
def code_compiled() -> Iterator[None]:
    """Let `torch.compile` make `Compiled`; what Dynamo has compiled before runs eagerly."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "compile", _compile))
        stack.enter_context(patch.object(torch.nn.Module, "compile", _compile_self))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def compiled_regions(recorder: Recorder) -> Iterator[Regions]:
    """Record the calls of compiled code as those of compiled graphs."""
    ACTIVE.append(Regions(recorder))
    try:
        yield ACTIVE[-1]
    finally:
        ACTIVE.pop()


def _kind(x: Any) -> Any:
    """Return what a compiled graph is made for: of a tensor without its data."""
    if isinstance(x, torch.Tensor):
        return type(x), x.dtype, tuple(x.shape), x.stride(), x.requires_grad
    return type(x), x if isinstance(x, CONSTANTS) else id(x)
