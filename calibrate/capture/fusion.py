"""Decides which operators of a compiled graph become one kernel.

The rule follows Inductor's scheduler (torch/_inductor/scheduler.py, `can_fuse_vertical`). Pointwise operators,
reductions and operators that only move elements join the kernel of an input, if both run over equally many elements or
over as many as the kernel's reduction leaves. So a norm or a softmax is one kernel with the pointwise operators around
it. All reductions of a kernel leave equally many elements. A kernel holds at most `MOST` operators, and none that would
wait for the kernel's own result. Matmuls, attention, scatters and sorts are kernels of their own. Kernels that share
only an input (Inductor's horizontal fusion) are not merged.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOST = 64  # Inductor's max_fusion_size
REDUCTIONS = _names("sum mean amax amin max min var var_mean any all prod argmax argmin")
MOVES = _names(
    "clone cat stack where full full_like scalar_tensor arange iota embedding gather index constant_pad_nd "
    "slice_scatter select_scatter convert_element_type _to_copy zeros_like ones_like copy copy_ native_dropout rev "
    "inductor_random _low_memory_max_pool_with_offsets _low_memory_max_pool_offsets_to_indices"
)
VIEWS = _names(
    "view permute t transpose expand slice select unsqueeze squeeze alias detach _unsafe_view reshape as_strided split "
    "split_with_sizes unbind diagonal getitem view_as_real view_as_complex lift_fresh broadcast_in_dim "
    "inductor_lookup_seed"  # a kernel reads its seed itself
)


@dataclass(slots=True)
class Kernel:
    """Nodes of the graph that run as one kernel, numbers `first` to `last`.

    `space`: elements that they run over; 0 for a node that nothing may join. `left`: elements that their reduction
    leaves.
    """

    first: int
    last: int
    nodes: list[Node] = field(default_factory=list)
    space: int = 0
    left: int = 0
    reduces: bool = False


def kernels_of(graph: Graph) -> list[Kernel]:
    """Return the kernels and views of a graph in an order in which they can run."""
    place: dict[Node, Kernel] = {}
    kernels: list[Kernel] = []
    number = {node: i for i, node in enumerate(graph.nodes)}
    for index, node in enumerate(graph.nodes):
        if node.op != "call_function":
            continue
        kernel = _joined(node, place)
        if kernel is None:
            kernel = Kernel(index, index, space=_space(node))
            kernels.append(kernel)
        kernel.nodes.append(node)
        kernel.last = index
        if _name(node) in REDUCTIONS:
            kernel.left, kernel.reduces = _elements(node), True
        place[node] = kernel
        for other in {id(place[x]): place[x] for x in node.all_input_nodes if x in place}.values():
            if _can_merge(kernel, other, place):
                kernel.nodes = sorted([*other.nodes, *kernel.nodes], key=number.__getitem__)
                kernel.first, kernel.reduces = min(kernel.first, other.first), kernel.reduces or other.reduces
                kernel.left = kernel.left or other.left
                place.update(dict.fromkeys(other.nodes, kernel))
                kernels = [k for k in kernels if k is not other]
    return _in_order(kernels, place)


def _can_merge(kernel: Kernel, other: Kernel, place: dict[Node, Kernel]) -> bool:
    """Return whether a node's kernel and the kernel of its input can be merged."""
    if other is kernel or not kernel.space or kernel.space != other.space:
        return False
    if len(kernel.nodes) + len(other.nodes) > MOST:
        return False
    if kernel.reduces and other.reduces and kernel.left != other.left:
        return False
    return not (_waits_for(_outside(kernel, place), other, place) or _waits_for(_outside(other, place), kernel, place))


def _outside(kernel: Kernel, place: dict[Node, Kernel]) -> list[Node]:
    """Return the nodes of other kernels that a kernel reads."""
    read = {x for n in kernel.nodes for x in n.all_input_nodes}
    return [x for x in read if x in place and place[x] is not kernel]


def is_view(node: Node) -> bool:
    """Return whether a node is a view, which moves no data."""
    return _name(node) in VIEWS


def _joined(node: Node, place: dict[Node, Kernel]) -> Kernel | None:
    """Return the kernel of an input that a node can join; None if there is none."""
    inputs = [x for x in node.all_input_nodes if x in place]
    space = _space(node)
    for x in sorted(inputs, key=lambda x: -place[x].first):
        kernel = place[x]
        if not kernel.space or len(kernel.nodes) >= MOST:
            continue
        fits = is_view(node) or space in (kernel.space, kernel.left)
        if kernel.reduces and _name(node) in REDUCTIONS and _elements(node) != kernel.left:
            continue
        if fits and (space or is_view(node)) and not _waits_for(inputs, kernel, place):
            return kernel
    return None


def _waits_for(inputs: list[Node], kernel: Kernel, place: dict[Node, Kernel]) -> bool:
    """Return whether one of the inputs depends on the kernel's result through another kernel."""
    stack = list({id(place[x]): place[x] for x in inputs if place[x] is not kernel}.values())
    seen = {id(k) for k in stack}
    while stack:
        for node in stack.pop().nodes:
            for x in node.all_input_nodes:
                before = place.get(x)
                if before is kernel:
                    return True
                if before is not None and before.last > kernel.first and id(before) not in seen:
                    seen.add(id(before))
                    stack.append(before)
    return False


def _in_order(kernels: list[Kernel], place: dict[Node, Kernel]) -> list[Kernel]:
    """Sort kernels so that each follows those whose results it reads, earlier ones first."""
    number = {id(k): i for i, k in enumerate(kernels)}
    needs = [
        {number[id(place[x])] for n in k.nodes for x in n.all_input_nodes if x in place} - {i}
        for i, k in enumerate(kernels)
    ]
    after: list[list[int]] = [[] for _ in kernels]
    for i, before in enumerate(needs):
        for b in before:
            after[b].append(i)
    missing = [len(x) for x in needs]
    ready = [i for i, n in enumerate(missing) if not n]
    heapq.heapify(ready)
    out: list[Kernel] = []
    while ready:
        i = heapq.heappop(ready)
        out.append(kernels[i])
        for a in after[i]:
            missing[a] -= 1
            if not missing[a]:
                heapq.heappush(ready, a)
    assert len(out) == len(kernels), "kernels wait for each other"
    return out


def _space(node: Node) -> int:
    """Return the elements that a node runs over; 0 for a view and for a node that is a kernel of its own."""
    name = _name(node)
    if name in REDUCTIONS:
        return max((_elements(x) for x in node.all_input_nodes), default=0)
    tags = getattr(node.target, "tags", ())
    return _elements(node) if name in MOVES or torch.Tag.pointwise in tags else 0


def _elements(node: Node) -> int:
    value = node.meta.get("val")
    tensors = value if isinstance(value, tuple | list) else (value,)
    return max((prod(x.shape) for x in tensors if isinstance(x, torch.Tensor)), default=0)


def _name(node: Node) -> str:
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    return str(schema.name.split("::")[1]) if schema is not None else getattr(target, "__name__", "")
