"""Compiles a function as `torch.compile` would: AOTAutograd's joint graph, split by the min-cut partition, fused.

Torch's own partitioner decides what is saved for the backward, and Inductor which operators become one kernel
(`inductor.py`). Nothing is computed: a call of the compiled function records its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from calibrate.capture.compiled.alike import Schedules
from calibrate.capture.compiled.inductor import Access, Call, Kernel, Part, Schedule, View, fake_mode_of
from calibrate.capture.compiled.refused import NotAnInput, NotOneGraph
from calibrate.capture.recorder import RecordedOperator, Recorder, describe
from calibrate.capture.script.collectives import NAMESPACES


def compiled_function(
    function: Callable[..., Any], recorder: Recorder, schedules: Schedules | None = None, graphed: bool = False
) -> Callable[..., Any]:
    """Return `function`, of tensors alone, with compiled forward and backward graphs. The first call traces it.

    `schedules`: those of the capture's other functions, whose graphs may be the same. `graphed`: each graph is a CUDA
    graph (torch/_inductor/cudagraph_trees.py).
    """
    schedules = schedules or Schedules()

    def compiler(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        _check(gm)
        schedule = schedules.of(gm, example_inputs)

        def run(args: list[Any]) -> Any:
            of_cuda = recorder.one_graph() if graphed else nullcontext()
            with torch._C.DisableTorchFunction(), of_cuda:  # all of a graph's tensors lie on the GPU
                return _Run(schedule, recorder, args).run()

        run._boxed_call = True  # type: ignore[attr-defined]  # torch frees the inputs that the list alone holds
        return run

    compiled = aot_function(
        function,
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=_partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,  # in the graph, as for Inductor, which fuses the last copies
    )

    def call(*tensors: Any) -> Any:
        with patch("torch._dynamo.utils.assert_no_fake_params_or_buffers", lambda *_: None):  # they are fake here
            return compiled(*tensors)

    return call


def _check(graph: GraphModule) -> None:
    """Refuse a graph whose kernels would not be those of the code.

    Raises:
        NotAnInput: if a tensor that needs a gradient is a constant of the graph.
        NotOneGraph: if it runs a collective.
    """
    nodes = list(graph.graph.nodes)
    constants = [getattr(graph, str(node.target)) for node in nodes if node.op == "get_attr"]
    if missing := list({id(x): x for x in constants if isinstance(x, torch.Tensor) and x.requires_grad}.values()):
        raise NotAnInput(missing)
    for node in nodes:
        if getattr(node.target, "namespace", "") in NAMESPACES:
            raise NotOneGraph(f"it runs the collective {node.target}")


def _partition(joint: GraphModule, inputs: Sequence[Any], **how: Any) -> tuple[GraphModule, GraphModule]:
    """Run Inductor's passes over the joint graph, then its partition (torch/_inductor/compile_fx.py, `partition_fn`).

    The passes also change memory: one computes the loss's gradient by a comparison, where its decomposition scatters
    into zeros [tokens, vocabulary]. Another replaces dropout's random numbers by those of a seed, which it makes under
    the fake mode that Inductor's compiler sets.
    """
    with V.set_fake_mode(detect_fake_mode(inputs)):
        joint = joint_graph_passes(joint)
    parts: tuple[GraphModule, GraphModule] = min_cut_rematerialization_partition(
        joint, inputs, compiler="inductor", **how
    )
    return parts


class ZerosTraced(TorchFunctionMode):
    """Makes zeros that the traced code may write into.

    The batch is no input of the graph. So zeros that are made of it (a decoder's shifted tokens) are constants to the
    trace, and torch refuses to write what is traced into a constant.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "new_zeros":
            return func(*args, **kwargs)
        x, *size = args
        return torch.zeros(*size, **{"dtype": x.dtype, "device": x.device, **kwargs})


class Instead(TorchFunctionMode):
    """Gives torch's functions other tensors in place of some, which the traced code holds itself."""

    def __init__(self, others: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.others = others  # by id

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, lambda x: self.others.get(id(x), x), (args, kwargs or {}))
        return func(*args, **kwargs)


class _Run:
    """One call of a compiled graph on fake tensors. Each buffer is freed after the last step that uses it."""

    def __init__(self, schedule: Schedule, recorder: Recorder, args: list[Any]) -> None:
        self.schedule, self.recorder = schedule, recorder
        self.mode = fake_mode_of(args)
        self.values: dict[str, Any] = dict(zip(schedule.inputs, [*args, *schedule.constants], strict=True))
        args.clear()

    def run(self) -> list[Any]:
        """Run all steps, and return the graph's results."""
        steps, outputs = self.schedule.steps, self.schedule.outputs
        kept = {name for x in outputs if isinstance(x, View) for name in self._with_bases(x.buffer)}
        last = {name: i for i, step in enumerate(steps) for name in self._used(step)}
        freed: list[list[str]] = [[] for _ in steps]
        for name in last.keys() - kept:
            freed[last[name]].append(name)
        for name in self.values.keys() - last.keys() - kept:
            del self.values[name]
        for step, names in zip(steps, freed, strict=True):
            self._step(step)
            for name in names:
                self.values.pop(name, None)
        return [self._view(x) if isinstance(x, View) else x for x in outputs]

    def _used(self, step: Kernel | Call | Part) -> Iterator[str]:
        """Yield the buffers that a step reads or writes."""
        if isinstance(step, Kernel):
            names = [x.buffer for x in (*step.reads, *step.writes)]
        elif isinstance(step, Part):
            names = [step.buffer, step.of]
        else:
            names = [step.buffer, *(x.buffer for x in _views(step))]
        for name in names:
            yield from self._with_bases(name)

    def _with_bases(self, name: str) -> Iterator[str]:
        """Yield a buffer and those in which it lies."""
        yield name
        where = self.schedule.buffers.get(name)
        if where is not None and where.buffer != name:
            yield from self._with_bases(where.buffer)

    def _step(self, step: Kernel | Call | Part) -> None:
        if isinstance(step, Kernel):
            self._record(step)
        elif isinstance(step, Part):
            found = self.values[step.of]
            for i in step.indices:
                found = found[i]
            self.values[step.buffer] = found
        else:
            args, kwargs = tree_map_only(View, self._view, (step.args, step.kwargs))
            with self.recorder.recomputing() if step.again else nullcontext():
                self.values[step.buffer] = step.target(*args, **kwargs)

    def _record(self, kernel: Kernel) -> None:
        recorder = self.recorder
        if not recorder.records():
            return
        name = "inductor.reduction" if kernel.reduces else "inductor.pointwise"
        inputs, outputs = ([self._described(x) for x in accesses] for accesses in (kernel.reads, kernel.writes))
        with recorder.recomputing() if kernel.again else nullcontext():
            recorder.append(RecordedOperator(name, *recorder.place(), inputs, outputs, 1))

    def _described(self, access: Access) -> tuple[Any, int]:
        """Return what a kernel reads or writes of a buffer, and the number of its storage."""
        x = self._tensor(access.buffer)
        dtype, shape, strides = describe(x)
        if access.elements < x.numel():
            shape, strides = (access.elements,), ()
        return (dtype, shape, strides), self.recorder.storage(x)

    def _tensor(self, name: str) -> torch.Tensor:
        """Return a buffer's tensor, which is allocated at its first use."""
        found = self.values.get(name)
        if found is None:
            where = self.schedule.buffers[name]
            if where.buffer != name:
                found = self._view(where)
            else:
                with self.recorder.paused(), self.mode:
                    found = torch.empty_strided(where.size, where.stride, dtype=where.dtype)
            self.values[name] = found
        x: torch.Tensor = found
        return x

    def _view(self, view: View) -> torch.Tensor:
        x = self._tensor(view.buffer)
        if (x.dtype, *map(tuple, (x.shape, x.stride()))) == (view.dtype, view.size, view.stride) and not view.offset:
            return x
        with self.recorder.paused(), self.mode:
            x = x if x.dtype == view.dtype else x.view(view.dtype)
            return x.as_strided(view.size, view.stride, x.storage_offset() + view.offset)


def _views(call: Call) -> list[View]:
    return [x for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, View)]
