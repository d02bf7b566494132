"""Reads torch's collective operators: kind, group, and bytes as nccl-tests counts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.utils._pytree import tree_leaves

from sim.core.collectives import POINT_TO_POINT, collective_kind
from sim.inputs.script_program import Collective

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
SHARE = ("all_gather", "gather")  # their bytes are the input's times the number of ranks
INPUT = ("input", "input_tensors", "inputs", "input_tensor", "tensor", "tensors", "input_list")


def collective_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Collective:
    """Return the collective that an operator starts.

    Raises:
        NotImplementedError: if it is unknown how many bytes the operator moves.
    """
    name = func._schema.name.split("::")[1].rstrip("_")
    values = {
        a.name: kwargs.get(a.name, args[i] if i < len(args) else None) for i, a in enumerate(func._schema.arguments)
    }
    kind = collective_kind(name)
    if kind is None:
        raise NotImplementedError(f"the collective {func} cannot be captured")
    group = group_of(values)
    ranks = tuple(dist.get_process_group_ranks(group))
    given = next((values[key] for key in INPUT if values.get(key) is not None), ())
    size = sum(x.numel() * x.element_size() for x in tree_leaves(given) if isinstance(x, torch.Tensor))
    if kind == "barrier":
        size = 0
    if kind in SHARE:
        size *= len(ranks)
    if kind in POINT_TO_POINT:
        me, peer = dist.get_rank(), ranks[values["dst" if kind == "send" else "src"]]
        ranks = (me, peer) if kind == "send" else (peer, me)
    return Collective(kind, str(group.group_name), ranks, size)


def group_of(values: Mapping[str, Any]) -> Any:
    """Find the process group among an operator's arguments, where it is a group or a group's name."""
    for key in ("process_group", "group_name", "group"):
        value = values.get(key)
        if isinstance(value, str):
            by_name: Any = torch._C._distributed_c10d._resolve_process_group
            return by_name(value)
        if value is not None:
            return value if isinstance(value, ProcessGroup) else ProcessGroup.unbox(value)
    raise NotImplementedError("a collective without a process group cannot be captured")


def is_asynchronous(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator of `c10d` is asynchronous."""
    for i, a in enumerate(func._schema.arguments):
        if a.name in ("async_op", "asyncOp"):
            return bool(kwargs.get(a.name, args[i] if i < len(args) else True))
    return True  # sends and receives, whose caller waits for the work
