"""Records every ATen operator of a step, and the lifetime of every storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from calibrate.capture.arguments import argument, dims_behind, window
from calibrate.capture.gpu.autocast import CudaOperators
from calibrate.capture.gpu.batch_norms import batch_norm
from calibrate.capture.gpu.composites import calls_of
from calibrate.capture.gpu.float32_products import rounds_to_tf32
from calibrate.capture.gpu.fourier import is_of_several_steps, step_by_step
from calibrate.capture.gpu.in_place import InPlace
from calibrate.capture.gpu.places import Places
from calibrate.capture.running_module import Modules
from calibrate.capture.values.answers import READ_AS, Answers
from calibrate.capture.values.known_values import PLAIN, tensors_in
from sim.inputs.program_file import HostCopy
from sim.models.captured.operators import CONTIGUOUS
from sim.models.captured.waits import READ

SHORT = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float64": "fp64",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "int64": "int64",
    "int32": "int32",
    "bool": "bool",
}
ALLOCATE = (
    "aten.empty",
    "aten.new_empty",
    "aten.empty_like",
    "aten.empty_strided",
    "aten.new_empty_strided",
    "aten._efficientzerotensor",
)
NO_KERNEL = (*ALLOCATE, "aten.lift_fresh")  # a constant of the code gets its name as a tensor
NO_OPERATOR = ("prim.device", "profiler.", "aten.sym_", "aten.is_same_size", "aten.is_pinned", "aten._has_")
CAUSAL = "is_causal"
DROPOUT = "dropout_p"
STANDS_FOR = {"calibrate.grouped_mm": "aten._grouped_mm"}  # torch's operator in whose place another is captured
# What a kernel on a GPU allocates while it runs: something as large as this argument (aten/src/ATen/native/cuda:
# SoftMax.cu, softmax_backward_cuda_out multiplies the gradient with the result first; LossCTC.cu,
# ctc_loss_backward_gpu_template has sums from the last frame on beside those from the first).
HOLDS_BESIDE = {"aten::_softmax_backward_data": 0, "aten::_ctc_loss_backward": 6}
CTC_LOSS = "aten::_ctc_loss"
ROLL = torch.ops.aten.roll.default
SCALAR = torch.ops.aten._local_scalar_dense.default
# Gradients to which torch's fake kernels give another layout: the argument whose layout real kernels give them; None:
# they are contiguous (aten/src/ATen/native: layer_norm.cpp, SoftMax.cpp, Normalization.cpp, Activation.cpp).
LAYOUTS: dict[str, int | None] = {
    "aten::native_layer_norm_backward": None,
    "aten::_log_softmax_backward_data": None,
    "aten::native_batch_norm_backward": 1,
    "aten::softplus_backward": 0,
    "aten::hardswish_backward": 0,
    "aten::elu_backward": 0,
}
# group_norm.cpp: until torch 2.14 a CPU alone keeps the channels last; since 2.15 a GPU does, too (torch/_refs:
# native_group_norm, `supports_memory_format`).
KEEPS_CHANNELS_LAST = "2.15"
LAYOUTS_ON_GPU = {} if torch.__version__ >= KEEPS_CHANNELS_LAST else {"aten::native_group_norm_backward": None}


@dataclass(slots=True)
class RecordedOperator:
    """One operator. `launches` is 0 for what takes only host time: a view, an allocation, work on the host's tensors.

    `causal`: of attention. `tf32`: a GPU rounds its fp32 numbers to tf32. `host_copy`: of a copy between the host's
    memory and the GPU's. `drops`: an attention that drops probabilities at random. `dims_behind`: the dimensions behind
    the one that it goes along. `graphed`: a CUDA graph launches it. `window`: places of a pool's window.
    """

    name: str
    phase: str
    module: str
    inputs: list[tuple[Any, int]]  # tensor, storage
    outputs: list[tuple[Any, int]]
    launches: int
    causal: bool = False
    tf32: bool = False
    host_copy: HostCopy | None = None
    drops: bool = False
    dims_behind: int = 0
    graphed: bool = False
    window: int = 0


@dataclass(slots=True)
class Life:
    """The lifetime of a storage: the row of its first use, and of the first operator after it is freed (-1: never)."""

    bytes: int
    kind: str
    born: int
    died: int = -1
    module: str = ""


class Recorder(TorchDispatchMode):
    """Records every operator below autograd. `phase`: forward, backward, clip or optimizer; "" records nothing."""

    def __init__(self, model: torch.nn.Module, operators: CudaOperators, device: str = "cuda") -> None:
        super().__init__()
        self.device = device
        self.modules = Modules({id(m): name for name, m in model.named_modules()})
        self.operators = operators
        self.phase = ""
        self.rows: list[RecordedOperator] = []
        self.lives: list[Life] = []
        self.storages: dict[int, int] = {}  # address of a living storage: its number
        self.refs: dict[int, weakref.ref[Any]] = {}
        self.last_module = ""
        self.again = False
        self.in_place = InPlace()
        self.answers = Answers()
        self.places = Places()  # what lies on the host: an optimizer's counts of steps
        self.notes: list[str] = []  # what whoever reads the file is to know

    def storage(self, tensor: torch.Tensor, kind: str = "temporary") -> int:
        """Return the number of a tensor's storage, a new one for a new storage."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        number = self.storages.get(key)
        if number is None:
            number = self.storages[key] = len(self.lives)
            self.lives.append(
                Life(storage.nbytes(), kind, len(self.rows), module=self.modules.path or self.last_module)
            )
            self.refs[number] = weakref.ref(storage, partial(self._died, key, number))
        return number

    def mark(self, tensor: torch.Tensor, kind: str) -> None:
        """Set the kind of a tensor's storage."""
        for part in parts_of(tensor):
            self.lives[self.storage(part)].kind = kind

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record no operators within the block."""
        before, self.phase = self.phase, ""
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Record what a compiled backward runs within the block as recomputed."""
        self.again = True
        try:
            yield
        finally:
            self.again = False

    @contextmanager
    def one_graph(self) -> Iterator[None]:
        """Record what runs within the block as one CUDA graph: the host launches it with its first kernel."""
        start = len(self.rows)
        try:
            yield
        finally:
            for row in [row for row in self.rows[start:] if row.launches][1:]:
                row.graphed = True

    def records(self) -> bool:
        """Return whether what runs now is part of the recorded step."""
        return bool(self.phase)

    def append(self, row: RecordedOperator) -> None:
        """Record an operator."""
        self.rows.append(row)

    def add(self, name: str, read: Any, written: Any, host_copy: HostCopy | None = None) -> None:
        """Record a kernel that reads and writes tensors; nothing outside of the recorded step."""
        if not self.records():
            return
        kinds = ["temporary", "temporary"]
        if host_copy is not None:
            kinds[0 if host_copy.to_device else 1] = "host"
        inputs, outputs = (
            [(describe(x), self.storage(x, kind)) for x in tree_leaves(t) if isinstance(x, torch.Tensor)]
            for t, kind in zip((read, written), kinds, strict=True)
        )
        self.append(RecordedOperator(name, *self.place(), inputs, outputs, 1, host_copy=host_copy))

    def _died(self, key: int, number: int, _: object) -> None:
        self.lives[number].died = len(self.rows)
        self.refs.pop(number, None)
        if self.storages.get(key) == number:
            del self.storages[key]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.phase and not all(t in PLAIN for t in types):
            return NotImplemented  # a subclass, which calls again with the tensors that it holds
        if self.phase == "backward":
            func = self.in_place.form(func, args)
        if (steps := self._steps_of(func, args, kwargs)) is not None:
            with self:
                return steps()
        before = tensors_in((args, kwargs))
        by_host = self._by_host(before)
        read = before if by_host else self._read_by_kernel(before)
        inputs = [(describe(x), self.storage(x)) for x in _read_once(func, read)] if self.phase else []
        out = self._read(args[0]) if func is SCALAR else func(*args, **kwargs)
        if not self.operators.compiled:  # a traced graph would lose what another tensor replaces
            out = _laid_out(func, args, out, LAYOUTS if self.device == "cpu" else {**LAYOUTS, **LAYOUTS_ON_GPU})
        self.in_place.ran(func, out)
        self.answers.see(func, args, out)
        if self.phase:
            self._record(func, args, kwargs, inputs, out, by_host)
        return out

    def _read_by_kernel(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that a kernel reads: it gets a single number of the host as an argument.

        ATen/native/TensorIterator.h: is_cpu_scalar; cuda/BinaryDivTrueKernel.cu and its like.
        """
        return [x for x in tensors if self.device == "cpu" or x.dim() or not self.places.on_host(x)]

    def _by_host(self, read: list[torch.Tensor]) -> bool:
        """Return whether the host computes what an operator reads, so that it starts no kernel."""
        return bool(read) and all(map(self.places.on_host, read))

    def _steps_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        """Return the calls of other operators that an operator consists of; None if it is one of its own."""
        if calls := calls_of(func, self.device):
            return lambda: calls(*args, **kwargs)
        if func is ROLL and len(args) > 2 and len(args[2]) > 1:
            return lambda: _rolled_in_turn(*args)
        if self.device != "cpu" and is_of_several_steps(func, args):
            return lambda: step_by_step(func, *args)
        return None

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Described], out: Any, on_host: bool
    ) -> None:
        """Add an operator's row, unless it is none; `on_host`: all that it reads is in the host's memory."""
        name = f"{func.namespace}.{func._schema.name.split('::')[1]}"
        # What a GPU runs is priced by other rules.
        name = STANDS_FOR.get(name, name) if self.device == "cpu" else batch_norm(func, name, args, kwargs)
        if name.startswith(NO_OPERATOR):
            return
        written = tree_leaves(out) if func._schema.returns else _changed(func, args)
        outputs = [(describe(x), self.storage(x)) for x in written if isinstance(x, torch.Tensor)]
        if self.device != "cpu" and func._schema.name == CTC_LOSS:
            self._read_lengths(args)
        if self.device != "cpu":
            self._hold_beside(func, name, args, out)
        by_host = self.device != "cpu" and on_host
        self.rows.append(
            RecordedOperator(
                name,
                *self.place(),
                inputs,
                outputs,
                0 if by_host else launches(func, name, inputs, outputs),
                bool(argument(func, args, kwargs, CAUSAL)),
                self.device != "cpu" and rounds_to_tf32(name, inputs),
                drops=bool(argument(func, args, kwargs, DROPOUT)) and "attention" in name,
                dims_behind=dims_behind(func, name, args, kwargs),
                window=window(func, name, args, kwargs),
            )
        )

    def _read_lengths(self, args: tuple[Any, ...]) -> None:
        """Record that the host reads the lengths of speech and of texts (native/LossCTC.cpp: ctc_loss)."""
        for x in args[2:4]:
            if isinstance(x, torch.Tensor) and not self.places.on_host(x):
                self.add(READ, [x], [])

    def _hold_beside(self, func: Any, name: str, args: tuple[Any, ...], out: Any) -> None:
        """Record what a kernel allocates while it runs: copies of what does not lie in its order, and results."""
        if func._schema.name in HOLDS_BESIDE:
            self._hold(args[HOLDS_BESIDE[func._schema.name]])
        results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        for x in args[: CONTIGUOUS.get(name, 0)]:
            if results and describe(x)[2] != describe(results[0])[2]:
                self._hold(x)

    def _hold(self, like: torch.Tensor) -> None:
        """Record a storage of a tensor's size that lives while the next operator runs."""
        row = len(self.rows)
        self.lives.append(Life(like.numel() * like.element_size(), "temporary", row, row + 1, self.place()[1]))

    def _read(self, x: torch.Tensor) -> Any:
        """Return the number that the code reads from a tensor: an unknown float is `READ_AS`."""
        try:
            return SCALAR(x)
        except DataDependentOutputException:
            answer = self.answers.of(x)
            if answer is None and not x.is_floating_point():
                raise
            return READ_AS if answer is None else answer

    def place(self) -> tuple[str, str]:
        """Return the phase and the module of what runs now."""
        if self.phase == "forward":
            self.last_module = self.modules.path
        elif self.phase == "backward":
            found = self.modules.path if self.modules.stack else self.modules.of_node()
            self.last_module = self.last_module if found is None else found
            if self.again:
                return "recomputed", self.last_module
            if self.modules.stack or _recomputes():
                self.modules.see(self.last_module)
                return "recomputed", self.last_module
        else:
            self.last_module = ""
        return self.phase, self.last_module


Described = tuple[tuple[str, tuple[int, ...], tuple[int, ...]], int]  # a tensor by `describe`, and its storage's number


def launches(func: Any, name: str, inputs: list[Described], outputs: list[Described]) -> int:
    """Return how many kernels torch's operator `func` starts: 1, or 0 for a view or a result without elements."""
    if name in NO_KERNEL or torch.Tag.inplace_view in func.tags or func.is_view:
        return 0
    if outputs and all(0 in shape for (_, shape, _), _ in outputs):
        return 0
    if func._schema.is_mutable:
        return 1
    read = {number for _, number in inputs}
    return int(not outputs or any(number not in read for _, number in outputs))


def _rolled_in_turn(x: torch.Tensor, shifts: list[int], dims: list[int]) -> torch.Tensor:
    """Roll one dimension after the other (TensorTransformations.h, roll_common)."""
    for shift, dim in zip(shifts, dims, strict=True):
        x = ROLL(x, [shift], [dim])
    return x


def _recomputes() -> bool:
    """Return whether code within a backward runs a forward again: the backward itself records nothing for another."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1


def _read_once(func: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that an operator reads; one over lists reads a tensor of two lists once."""
    if not func._schema.name.startswith("aten::_foreach"):
        return tensors
    return list({(x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()): x for x in tensors}.values())


def _changed(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """Return the tensors that an operator changes which returns none, as those over lists do.

    A fused optimizer may change gradients too, but only for a scaler of losses.
    """
    given = zip(func._schema.arguments, args, strict=False)
    return tree_leaves([x for a, x in given if a.is_write and a.name != "grads"])


def parts_of(tree: Any) -> list[torch.Tensor]:
    """Return the plain tensors of a structure; a subclass (quantized states or weights) consists of several."""
    found: list[torch.Tensor] = []
    for x in tree_leaves(tree):
        if isinstance(x, torch.Tensor) and is_traceable_wrapper_subclass(x):
            found += parts_of([getattr(x, name) for name in x.__tensor_flatten__()[0]])
        elif isinstance(x, torch.Tensor):
            found.append(x)
    return found


def _laid_out(func: Any, args: tuple[Any, ...], out: Any, layouts: dict[str, int | None]) -> Any:
    """Return an operator's result with its first tensor in the layout that the real kernel gives it."""
    first, *others = out if isinstance(out, tuple) else (out,)
    if func._schema.name not in layouts or first is None:
        return out
    like = layouts[func._schema.name]
    kept = first.new_empty(first.shape) if like is None else torch.empty_like(args[like])
    first = first if first.stride() == kept.stride() else kept
    return (first, *others) if isinstance(out, tuple) else first


def describe(x: torch.Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return dtype, shape, and strides; a contiguous tensor has no strides."""
    dtype = str(x.dtype).removeprefix("torch.")
    strides = () if x.is_contiguous() else tuple(int(s) for s in x.stride())
    return SHORT.get(dtype, dtype), tuple(int(n) for n in x.shape), strides
