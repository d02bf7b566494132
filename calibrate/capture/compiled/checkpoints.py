"""Lets `torch.utils.checkpoint` in compiled code mark operators of the graph, as Dynamo does.

Nothing runs twice in a trace. Torch's partition of the joint graph computes the marked operators again in the backward,
as far as it needs them (torch/_higher_order_ops/wrap.py, `TagActivationCheckpoint`; torch/_functorch/partitioners.py,
`cleanup_recompute_tags`). So the last matmul of a layer, whose result no gradient needs, is not computed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.utils.checkpoint as of
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import preserve_node_meta
from torch.utils._python_dispatch import TorchDispatchMode

from calibrate.capture.compiled.refused import NotOneGraph

GENERATOR = "_checkpoint_without_reentrant_generator"  # of the releases before torch 2.13
AGAIN = (of.CheckpointPolicy.PREFER_RECOMPUTE, of.CheckpointPolicy.MUST_RECOMPUTE)
_numbers = itertools.count()


class Marked(TorchDispatchMode):
    """Marks the operators of one checkpoint in the traced graph. What a selective policy says of an operator stays."""

    def __init__(self) -> None:
        super().__init__()
        self.number = next(_numbers)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let operators that hold graphs be traced, too."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        proxies = get_proxy_mode()
        if proxies is None:
            return func(*args, **(kwargs or {}))
        nodes = proxies.tracer.graph.nodes
        before = len(nodes)
        out = func(*args, **(kwargs or {}))
        for node in itertools.islice(reversed(nodes), len(nodes) - before):
            node.meta["ac_graph_id"] = self.number
            node.meta.setdefault("recompute", of.CheckpointPolicy.PREFER_RECOMPUTE)
        return out


def computed_again(node: Node) -> bool:
    """Return whether a node of a backward's graph is one of the forward that a checkpoint computes again."""
    return node.meta.get("partitioner_tag") == "is_forward" and node.meta.get("recompute") in AGAIN


@contextmanager
def checkpoints_marked() -> Iterator[None]:
    """Let checkpoints of both kinds, reentrant or not, run their function once and mark its operators.

    Raises (in the context):
        NotOneGraph: if the code recomputes in another way.
    """

    def marks(context_fn: Callable[[], Any]) -> Iterator[None]:
        mode, selective = Marked(), context_fn()[0]
        if hasattr(selective, "ac_graph_id"):
            selective.ac_graph_id = mode.number
        with preserve_node_meta(), mode, selective:
            yield

    def generator(function: Any, args: Any, kwargs: Any, *, context_fn: Any, **_: object) -> Iterator[None]:
        return marks(context_fn)

    def former(function: Any, preserve_rng_state: Any, context_fn: Any, *_: object, **__: object) -> Iterator[None]:
        return marks(context_fn)

    def reentrant(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        with Marked():
            return function(*args)

    def refuse(*_: object, **__: object) -> None:
        raise NotOneGraph("it recomputes activations otherwise than by torch.utils.checkpoint.checkpoint")

    present = f"{GENERATOR}_impl"
    with ExitStack() as stack:
        stack.enter_context(patch.object(of._CheckpointFrame, "__init__", refuse))
        stack.enter_context(patch.object(of.CheckpointFunction, "apply", reentrant))
        if hasattr(of, present):
            stack.enter_context(patch.object(of, present, generator))
        else:
            stack.enter_context(patch.object(of, GENERATOR, former))
        yield
