"""Records a step of a distributed script: operators, collectives, and what waits for what.

Integers that depend on no fake tensor (ranks of a mesh, shuffled indices, token ids) are computed, as scripts need
their values; others may be known too (`known_values.py`). Floats are fake. If the script reads one (`loss.item()`), it
gets `READ_AS`, and a wait of the host is recorded; `answers.py` says what comparisons give.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from calibrate.capture.gpu.autocast import CudaOperators
from calibrate.capture.gpu.device_queue import Queue
from calibrate.capture.recorder import SCALAR, RecordedOperator, Recorder
from calibrate.capture.running_module import module_hooks
from calibrate.capture.script.collectives import NAMESPACES, collective_of, is_asynchronous
from calibrate.capture.script.host_work import operator_kind
from calibrate.capture.values.alike_ranks import know_results
from calibrate.capture.values.answers import READ_AS
from calibrate.capture.values.known_values import PLAIN, REAL_BYTES, KnownValues, tensors_in
from calibrate.capture.values.masks_read import masks_read

WHOLE = ("aten::arange", "aten::randperm", "aten::randint")  # their default dtype is an integer
FSDP_KERNELS = {
    "all_gather_copy_in": "aten.cat",
    "chunk_cat": "aten._chunk_cat",
    "chunk_cat_mixed_dtype": "aten._chunk_cat",
}


class ScriptRecorder(Recorder):
    """Records the operators of all modules that run; `queue` holds collectives and waits."""

    def __init__(self, operators: CudaOperators, queue: Queue, balanced: bool = False) -> None:
        super().__init__(torch.nn.Module(), operators)
        self.queue, self.known = queue, KnownValues(balanced, queue.host_wait)
        self.row_streams: list[int] = []
        self.stage = ""  # "clip" or "optimizer" while one of them runs
        self.roots: list[torch.nn.Module] = []
        self.works: dict[int, tuple[Any, int]] = {}  # by id of a collective's work: the work and its number
        self.results: dict[int, tuple[Any, list[weakref.ref[torch.Tensor]]]] = {}  # by the same id: and its tensors
        self.started: dict[int, int] = {}  # address of a living storage: the functional collective that fills it

    def begin(self) -> None:
        """Start recording."""
        self.queue.recording = True

    def end(self) -> None:
        """Stop recording."""
        self.queue.recording = False
        self.phase = ""

    def see_phase(self) -> None:
        """Set `phase` to the phase that runs now."""
        if not self.queue.recording:
            self.phase = ""
        elif self.stage:
            self.phase = self.stage
        else:
            self.phase = "backward" if torch._C._current_graph_task_id() != -1 else "forward"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not all(t in PLAIN for t in types):
            self.see_phase()
            if self.phase and any(issubclass(t, DTensor) for t in types):
                self.queue.host_work(operator_kind(func, args, kwargs or {}, self.phase))
            return NotImplemented  # DTensor and other subclasses, which call again with the tensors that they hold
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        args, kwargs = self.known.current((args, kwargs or {}))
        self.see_phase()
        tensors = tensors_in((args, kwargs))
        fake = any(isinstance(x, FakeTensor) for x in tensors)
        if func is SCALAR:
            return self._read(tensors[0])
        if func.namespace in NAMESPACES:
            return self._collective(func, args, kwargs)
        if func.namespace == "fsdp":
            return self._fsdp(func, args, kwargs)
        if not fake and _is_of_integers(func, tensors, args, kwargs):
            with unset_fake_temporarily():
                if self.operators.active and self._on_host(tensors):
                    out = func(*args, **kwargs)
                    for x in tree_leaves(out):
                        if isinstance(x, torch.Tensor):
                            self.places.put_on_host(x)
                    return out
                if torch.Tag.dynamic_output_shape in func.tags:
                    self.queue.host_wait()  # for the size of the result
                return self._operator(func, types, args, kwargs)
        return self._operator(func, types, args, kwargs)

    def _by_host(self, read: list[torch.Tensor]) -> bool:
        # Optimizers count steps in single numbers. Other operators on the host take the time of a GPU's kernels.
        return super()._by_host(read) and all(x.dim() == 0 for x in read)

    def _on_host(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether an operator that reads these tensors runs on the host of a GPU."""
        return all(map(self.places.on_host, tensors)) if tensors else self.places.making

    def _operator(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._count()
        return out

    def _count(self) -> None:
        missing = len(self.rows) - len(self.row_streams)
        self.row_streams += [self.queue.current] * missing
        self.queue.rows = len(self.rows)

    def _read(self, x: torch.Tensor) -> Any:
        values = self.values_of(x)
        with unset_fake_temporarily():
            return values.item()

    def values_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's values, for which the host waits; floats that are unknown are `READ_AS`.

        Raises:
            ValueError: if they are unknown integers.
        """
        with unset_fake_temporarily():
            tensor = self.known.current(tensor)
            if not isinstance(tensor, FakeTensor):
                if self.operators.active and not self.places.on_host(tensor):
                    self.queue.host_wait()
                return tensor
            if self.phase != "optimizer":  # the optimizer reads its number of steps, which torch keeps on the host
                self.queue.host_wait()
            values, answer = self.known.of(tensor), self.answers.of(tensor)
            if values is not None:
                return values
            answer = self.known.ends.of(tensor) if answer is None else answer
            if answer is None and not tensor.is_floating_point():
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise ValueError(f"the code reads a value of dtype {dtype}, which depends on data{self.known.hint}")
            return torch.full(tensor.shape, READ_AS if answer is None else answer, dtype=tensor.dtype)

    def _collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.split("::")[1]
        if name == "wait_tensor":
            self.queue.wait(self.started.get(args[0].untyped_storage()._cdata, -1))
            return args[0]
        if name == "_wrap_tensor_autograd":  # waits when its result is used; torch's fake waits at once
            return AsyncCollectiveTensor(args[0])
        found = collective_of(func, args, kwargs) if self.queue.recording else None
        number = -1 if found is None else self.queue.start(found)
        out = func(*args, **kwargs)
        know_results(func, args, kwargs, out, self.known)
        if func.namespace == "c10d" and isinstance(out, tuple | list):
            work = Work.unbox(out[-1])
            self.results[id(work)] = (work, [weakref.ref(x) for x in tree_leaves(out[0])])
        if number < 0:
            return out
        if func.namespace != "c10d":
            self._fills(number, out)
        elif not is_asynchronous(func, args, kwargs):
            self.queue.wait(number)
        else:
            work = out[-1] if isinstance(out, tuple | list) else out
            unboxed = Work.unbox(work)
            self.works[id(unboxed)] = (unboxed, number)
        return out

    def _fills(self, number: int, out: Any) -> None:
        """Remember which collective fills the results' storages, until they are freed."""
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.storage(x)
                self.started[storage._cdata] = number
                weakref.finalize(storage, self.started.pop, storage._cdata, None)

    def _fsdp(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record FSDP2's copies as the ATen kernels that they launch on a device.

        An operator writes the arguments that its schema calls mutable and reads its other tensors. The exception is
        `all_gather_copy_in`, which writes this rank's part, its first result. Operators that write nothing launch
        nothing.
        """
        name = func._schema.name.split("::")[1]
        arguments = [
            (a, kwargs.get(a.name, args[i] if i < len(args) else None)) for i, a in enumerate(func._schema.arguments)
        ]
        read = [x for a, x in arguments if a.alias_info is None]
        written = [x for a, x in arguments if a.alias_info is not None]
        out = func(*args, **kwargs)
        if name == "all_gather_copy_in":
            read, written = [args[0]], [out[0]]
        if written:
            self.add(FSDP_KERNELS.get(name, f"aten.{name}"), read, written)
        return out

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record neither operators nor waits within the block."""
        before, phase, self.queue.recording = self.queue.recording, self.phase, False
        try:
            yield
        finally:
            self.queue.recording, self.phase = before, phase

    def records(self) -> bool:
        """Return whether what runs now is part of the recorded step."""
        self.see_phase()
        return super().records()

    def append(self, row: RecordedOperator) -> None:
        """Record an operator on the current stream."""
        super().append(row)
        self._count()

    def resized(self, storage: Any) -> None:
        """Forget a storage whose size changed, which is how FSDP2 frees and allocates gathered parameters."""
        number = self.storages.pop(storage._cdata, None)
        if number is not None:
            self.lives[number].died = len(self.rows)
            self.refs.pop(number, None)

    def waited(self, work: Any) -> None:
        """Let the current stream wait for a collective's work."""
        self.queue.wait(self.works.get(id(work), (None, -1))[1])

    def result_of(self, work: Any) -> list[torch.Tensor]:
        """Return the tensors of a collective's work."""
        found = self.results.get(id(work), (None, []))[1]
        return [x for ref in found if (x := ref()) is not None]

    def enter_module(self, module: torch.nn.Module) -> bool:
        """Name the modules of an outermost module when it first runs; return whether it does."""
        if self.modules.stack or id(module) in self.modules.names:
            return False
        self.roots.append(module)
        for name, inner in module.named_modules():
            self.modules.names.setdefault(id(inner), name)
        return True


def _is_of_integers(func: Any, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator on real tensors makes integers that are few enough to compute."""
    if not tensors:
        dtype, size = kwargs.get("dtype"), args[0] if args and isinstance(args[0], list | tuple) else ()
        small = math.prod(n for n in size if isinstance(n, int)) * 8 <= REAL_BYTES
        if dtype is None:
            return small and func._schema.name in WHOLE and not any(isinstance(x, float) for x in args)
        return small and not (dtype.is_floating_point or dtype.is_complex)
    whole = not any(x.is_floating_point() or x.is_complex() for x in tensors)
    return whole and sum(x.numel() * x.element_size() for x in tensors) <= REAL_BYTES


@contextmanager
def modules_followed(recorder: ScriptRecorder) -> Iterator[None]:
    """Let the recorder know which module runs."""
    operators, modules = recorder.operators, recorder.modules

    def enter(module: torch.nn.Module, inputs: object) -> None:
        if recorder.enter_module(module):
            masks.enter_context(masks_read(recorder.known))  # the script has imported Transformers by now
        modules.enter(module, inputs)

    def leave(module: torch.nn.Module, *_: object) -> None:
        modules.leave(module)
        if not modules.stack and operators.dtype is None:  # autocast's cache lives as long as autocast
            operators.forget()

    with ExitStack() as masks, module_hooks(enter, leave):
        yield
