"""Keeps what Inductor made of a graph for later graphs of the same operators, as those of equal layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten

from calibrate.capture.compiled.checkpoints import computed_again
from calibrate.capture.compiled.inductor import Schedule, scheduled

CONSTANTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Schedules:
    """Schedules of one capture by all that decides on them: `operators_of` a graph.

    Graphs with constants are scheduled each by itself, since a schedule holds those of its graph.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Schedule] = {}

    def of(self, graph: GraphModule, inputs: Sequence[Any]) -> Schedule:
        """Return the schedule of a graph: of the first one that has the same operators."""
        key = operators_of(graph, inputs)
        if key is None:
            return scheduled(graph, inputs)
        if key not in self._made:
            self._made[key] = scheduled(graph, inputs)
        return self._made[key]


def operators_of(graph: GraphModule, inputs: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return a graph's operators with their arguments, and sizes, strides and dtypes of all tensors.

    None for a graph with constants, or with arguments of other kinds than tensors and plain values.
    """
    nodes = list(graph.graph.nodes)
    places = {node: i for i, node in enumerate(nodes)}
    found: list[Any] = [tuple(map(_shown, inputs))]
    for node in nodes:
        leaves, tree = tree_flatten((node.args, dict(node.kwargs)))
        if node.op == "get_attr" or not all(isinstance(x, (Node, *CONSTANTS)) for x in leaves):
            return None
        arguments = tuple(("node", places[x]) if isinstance(x, Node) else (type(x), repr(x)) for x in leaves)
        made, kind = tree_flatten(node.meta.get("val"))
        target = node.target if node.op == "call_function" else node.op
        tag = node.meta.get("partitioner_tag"), computed_again(node)
        found.append((target, str(tree), arguments, str(kind), tuple(map(_shown, made)), tag))
    return tuple(found)


def _shown(x: Any) -> tuple[Any, ...]:
    """Return what a schedule may depend on of a tensor or a number."""
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad
    return type(x), repr(x)
