"""Lets Inductor decide which kernels a compiled graph becomes: its lowering and its scheduler, as for a GPU.

Tensors are fake, so no GPU is needed. No code is generated: a kernel is what Inductor's scheduler made one node of,
with the elements that it reads and writes of each buffer (torch/_inductor/graph.py, scheduler.py, dependencies.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._inductor import ir, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.dependencies import MemoryDep
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from calibrate.capture.compiled.checkpoints import computed_again
from calibrate.capture.gpu.gpu_facts import CAPABILITY, PROPERTIES

GPU = torch.device("cuda", 0)
ATEN = torch.ops.aten
MATMULS = {
    "extern_kernels.mm": ATEN.mm.default,
    "extern_kernels.bmm": ATEN.bmm.default,
    "extern_kernels.addmm": ATEN.addmm.default,
    "extern_kernels.baddbmm": ATEN.baddbmm.default,
}


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a buffer: a tensor of this size and these strides that begins at `offset`."""

    buffer: str
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Access(NamedTuple):
    """The number of elements of a buffer that a kernel reads or writes."""

    buffer: str
    elements: int


class Kernel(NamedTuple):
    """A kernel that Inductor generates. `again`: it computes only what a checkpoint left to the backward."""

    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    reduces: bool
    again: bool = False


class Call(NamedTuple):
    """A call of one of torch's own operators, whose result is `buffer`. Its tensors are `View`s.

    `again`: a checkpoint left it to the backward.
    """

    buffer: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    again: bool = False


class Part(NamedTuple):
    """A tensor of a call's result, by its indices there. Nothing runs."""

    buffer: str
    of: str
    indices: tuple[int, ...]


class Schedule(NamedTuple):
    """The kernels that a graph's call runs.

    `inputs`: names of the buffers that are given, then of constants of the graph. `buffers`: the others, each as a view
    of itself, or of the buffer in which it lies. `outputs`: views of buffers; what is no tensor stays what it is.
    """

    inputs: tuple[str, ...]
    constants: tuple[torch.Tensor, ...]
    buffers: dict[str, View]
    steps: tuple[Kernel | Call | Part, ...]
    outputs: tuple[Any, ...]


def fake_mode_of(inputs: Sequence[Any]) -> FakeTensorMode:
    """Return the mode in which fake tensors were made; at least one of the inputs is one."""
    mode = detect_fake_mode(inputs)
    assert mode is not None, "a step is captured on fake tensors"
    return mode


def scheduled(graph: GraphModule, inputs: Sequence[Any]) -> Schedule:
    """Return what Inductor makes of a graph of ATen operators on fake tensors of the CPU, as if they were on a GPU."""
    mode = fake_mode_of(inputs)
    with ExitStack() as stack:
        for context in (_disable_current_modes(), torch._C.DisableTorchFunction(), _as_a_gpu(), torch.no_grad()):
            stack.enter_context(context)
        stack.enter_context(mode)
        graph, constants = _moved(graph)
        given = [_on_gpu(x) for x in (*inputs, *constants)]
        view_to_reshape(graph)
        with enable_python_dispatcher():
            FakeTensorProp(graph, mode=mode).propagate_dont_convert_inputs(*given)
        stack.enter_context(V.set_fake_mode(mode))
        post_grad_passes(graph, False)
        graph.recompile()
        lowering = GraphLowering(graph, example_inputs=given)
        stack.enter_context(V.set_graph_handler(lowering))
        stack.enter_context(V.set_debug_handler(DebugContext()))
        lowering.run(*given)
        lowering._update_scheduler()
        steps = [step for node in lowering.scheduler.nodes for step in _steps(node)]
        buffers = {b.get_name(): _buffer(b) for b in lowering.buffers if _is_tensor(b)}
        outputs = tuple(_view(x) if isinstance(x, ir.IRNode) else x for x in lowering.graph_outputs or ())
        return Schedule(tuple(lowering.graph_input_names), constants, buffers, tuple(steps), outputs)


@contextmanager
def _as_a_gpu() -> Iterator[None]:
    """Answer Inductor's questions about the GPU, which this machine need not have."""
    facts = DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=PROPERTIES.multi_processor_count,
        cc=10 * CAPABILITY[0] + CAPABILITY[1],
        major=PROPERTIES.major,
        regs_per_multiprocessor=PROPERTIES.regs_per_multiprocessor,
        max_threads_per_multi_processor=PROPERTIES.max_threads_per_multi_processor,
        warp_size=PROPERTIES.warp_size,
    )
    with ExitStack() as stack:
        stack.enter_context(patch.object(scheduler, "has_triton", lambda *_: True))
        stack.enter_context(patch.object(torch.cuda, "is_available", lambda: False))  # else fake tensors start CUDA
        stack.enter_context(patch.object(torch.cuda, "get_device_properties", lambda *_: PROPERTIES))
        stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda *_: CAPABILITY))
        stack.enter_context(patch.object(DeviceProperties, "create", staticmethod(lambda _: facts)))
        yield


def _on_gpu(x: Any) -> Any:
    """Return a fake tensor like `x` on the GPU."""
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=GPU)


def _moved(graph: GraphModule) -> tuple[GraphModule, tuple[torch.Tensor, ...]]:
    """Return a copy of a graph that makes its tensors on the GPU, and its constants, which become its last inputs."""
    graph = copy.deepcopy(graph)
    nodes = list(graph.graph.nodes)
    last = [n for n in nodes if n.op == "placeholder"][-1:]
    constants = []
    for node in nodes:
        node.args, node.kwargs = tree_map_only(torch.device, lambda _: GPU, (node.args, dict(node.kwargs)))
        if node.op == "get_attr":
            constants.append(getattr(graph, str(node.target)))
            with graph.graph.inserting_after(last[0]) if last else graph.graph.inserting_before(nodes[0]):
                last = [graph.graph.placeholder(f"constant_{node.name}")]
            node.replace_all_uses_with(last[0])
            graph.graph.erase_node(node)
    return graph, tuple(constants)


def _steps(node: Any) -> list[Kernel | Call | Part]:
    """Return what a node of the scheduler runs."""
    if isinstance(node, scheduler.NopKernelSchedulerNode):
        return []
    if isinstance(node, scheduler.ExternKernelSchedulerNode):
        return [_outside(node.node)]
    parts = [n for n in node.get_nodes() if isinstance(n, scheduler.SchedulerNode)]
    read, written, added = (_elements(parts, which) for which in ("reads", "writes", "adds"))
    reads = [Access(name, n) for name, n in read.items() if name not in written]
    writes = [Access(name, n) for name, n in written.items() if _is_read_outside(node, name)]
    reads += [Access(name, n) for name, n in added.items()]
    return [Kernel(tuple(reads), tuple(writes), node.is_reduction(), all(_again(n.node) for n in parts))]


def _again(node: Any) -> bool:
    """Return whether a checkpoint left all operators of a node of Inductor's to the backward."""
    return all(computed_again(n) for n in node.get_origins() if n.op == "call_function")


def _is_read_outside(node: Any, name: str) -> bool:
    """Return whether another kernel, or who called the graph, reads what a kernel writes."""
    mine = set(node.get_nodes())
    return any(user.node not in mine for user in node.scheduler.name_to_buf[name].users)


def _elements(parts: Sequence[Any], which: str) -> dict[str, int]:
    """Return by buffer how many elements loops read, write, or add to by atomic operations, which read them too.

    They are at most all, also where an index decides which.
    """
    found: dict[str, int] = {}
    for part in parts:
        loops = prod(int(n) for ranges in part.get_ranges() for n in ranges)
        for access in part.read_writes.reads if which == "reads" else part.read_writes.writes:
            if isinstance(access, MemoryDep) and (which != "adds" or access.mode == "atomic_add"):
                size = int(V.graph.get_numel(access.name))
                own = loops if access.is_indirect() else int(access.get_numel())
                found[access.name] = min(size, found.get(access.name, 0) + own)
    return found


def _outside(node: Any) -> Call | Part:
    """Return the call of an operator that Inductor generates no kernel for."""
    name = node.get_name()
    if isinstance(node, ir.MultiOutput):
        source: Any = node.inputs[0]
        return Part(name, source.get_name(), tuple(int(i) for _, i in node.indices))
    given = [_view(x) for x in tree_leaves(node.inputs)]
    if node.python_kernel_name in MATMULS:
        return Call(name, MATMULS[node.python_kernel_name], tuple(given), {}, _again(node))
    called = _called(node)
    tensors = [x for x in tree_leaves((called.args, dict(called.kwargs))) if _makes_tensor(x)]
    # Inductor adds a convolution's bias itself.
    views = dict(zip(tensors, [*given, *[None] * (len(tensors) - len(given))], strict=False))
    args, kwargs = tree_map_only(Node, lambda n: views.get(n, n.meta["val"]), (called.args, dict(called.kwargs)))
    args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
    return Call(name, called.target, args, kwargs, _again(node))


def _called(node: Any) -> Node:
    """Return the node of the graph whose operator a kernel of torch's own runs."""
    own = getattr(node, "op_overload", None)
    last = (node.python_kernel_name or "").split(".")
    nodes: list[Node] = [
        n for n in (node.get_origin_node(), *node.origins) if n is not None and n.op == "call_function"
    ]
    for n in nodes:
        if n.target is own or _schema_name(n) in last:
            return n
    return nodes[0]


def _schema_name(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return str(schema.name.split("::")[1]) if schema is not None else ""


def _makes_tensor(x: Any) -> bool:
    return isinstance(x, Node) and isinstance(x.meta.get("val"), torch.Tensor)


def _is_tensor(buffer: Any) -> bool:
    return isinstance(buffer.maybe_get_layout(), ir.Layout) and not isinstance(buffer.layout, ir.NoneLayout)


def _buffer(buffer: Any) -> View:
    """Return where a buffer lies: in itself, or in another one that it changes or is a part of."""
    layout = buffer.layout
    if isinstance(layout, ir.MutationLayoutSHOULDREMOVE):
        return _of(layout.get_buffer().get_name(), layout.real_layout())
    if isinstance(layout, ir.NonOwningLayout):
        return _of(layout.view.get_name(), layout, layout.view.get_layout().offset)
    return _of(buffer.get_name(), layout)


def _view(node: Any) -> Any:
    """Return a tensor of Inductor's as the part of a buffer that it is; a number or None stays itself."""
    if isinstance(node, ir.NoneAsConstantBuffer):
        return None
    if isinstance(node, ir.ShapeAsConstantBuffer):
        return int(node.expr)
    return _of(node.get_name(), node.get_layout())


def _of(buffer: str, layout: Any, offset: Any = None) -> View:
    size, stride = (tuple(int(n) for n in x) for x in (layout.size, layout.stride))
    return View(buffer, layout.dtype, size, stride, int(layout.offset if offset is None else offset))
