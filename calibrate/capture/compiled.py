"""Captures a step as `torch.compile` would run it: AOTAutograd's joint graph, split by the min-cut partition, fused.

Torch's own partitioner decides what is saved for the backward. Which operators become one kernel is this project's rule
(`fusion.py`). The model and its loss are one graph; the optimizer is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from calibrate.capture.fusion import Kernel, is_view, kernels_of
from calibrate.capture.recorder import RecordedOperator, Recorder, describe
from calibrate.capture.step import Step


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


class CompiledLoss:
    """The step's compiled loss, with a compiled backward. The first call traces it."""

    def __init__(self, step: Step, recorder: Recorder) -> None:
        self.step, self.recorder = step, recorder
        # Buffers too: a batch norm counts in them, and a trace may write into its inputs alone.
        self.parameters = {**dict(step.model.named_parameters()), **dict(step.model.named_buffers())}
        self.run = aot_function(
            self._loss_of,
            fw_compiler=self._compiler,
            bw_compiler=self._compiler,
            partition_fn=_partition,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,  # in the graph, as for Inductor, which fuses the last copies
        )

    def __call__(self) -> torch.Tensor:
        """Compute the loss of one micro-batch."""
        with patch("torch._dynamo.utils.assert_no_fake_params_or_buffers", lambda *_: None):  # they are fake here
            loss: torch.Tensor = self.run(*self.parameters.values())
        return loss

    def _loss_of(self, *parameters: torch.Tensor) -> torch.Tensor:
        """Compute the step's loss as a function of the parameters."""
        # AOTAutograd calls this more than once, in some releases with the same tensors. A cast that one trace has
        # cached is unknown to the next.
        self.recorder.operators.forget()
        model = self.step.model
        given = dict(zip(self.parameters, parameters, strict=True))
        # Otherwise a second name of a tied parameter keeps the old tensor, whose part of the gradient is not computed.
        with torch.nn.utils.stateless._reparametrize_module(model, given, tie_weights=True), ZerosTraced():
            loss: torch.Tensor = self.step.loss()
        return loss

    def _compiler(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        kernels = kernels_of(gm.graph)

        def run(args: list[Any]) -> Any:
            return self._execute(gm, kernels, args)

        run._boxed_call = True  # type: ignore[attr-defined]  # torch frees the inputs that the list alone holds
        return run

    def _execute(self, graph: GraphModule, kernels: list[Kernel], args: list[Any]) -> Any:
        """Run the graph, and free each value after the last kernel that reads it."""
        values: dict[Node, Any] = {}
        inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
        values.update(zip(inputs, args, strict=True))
        args.clear()
        values.update({n: getattr(graph, str(n.target)) for n in graph.graph.nodes if n.op == "get_attr"})
        result = next(n for n in graph.graph.nodes if n.op == "output")
        kept = set(result.all_input_nodes)
        last = {x: i for i, kernel in enumerate(kernels) for n in kernel.nodes for x in (n, *n.all_input_nodes)}
        freed: dict[int, list[Node]] = {}
        for node, i in last.items():
            freed.setdefault(i, []).append(node)
        for i, kernel in enumerate(kernels):
            self._kernel(kernel, values, kept)
            for node in freed.get(i, ()):
                if node not in kept:
                    del values[node]
        return tree_map_only(Node, values.__getitem__, result.args[0])

    def _kernel(self, kernel: Kernel, values: dict[Node, Any], kept: set[Node]) -> None:
        """Run a kernel's nodes; nodes of a fused kernel and views are not recorded one by one."""
        alone = len(kernel.nodes) == 1 and not kernel.space
        recorder, phase = self.recorder, self.recorder.phase
        if not alone or is_view(kernel.nodes[0]):
            recorder.phase = ""
        members = set(kernel.nodes)
        read = [x for x in {x: None for n in kernel.nodes for x in n.all_input_nodes} if x not in members]
        tensors = [values[x] for x in read]
        try:
            for node in kernel.nodes:
                target: Any = node.target
                given, named = tree_map_only(Node, values.__getitem__, (node.args, node.kwargs))
                values[node] = target(*given, **named)
        finally:
            recorder.phase = phase
        written = [n for n in kernel.nodes if n in kept or any(u not in members for u in n.users)]
        if phase and kernel.space:
            _record(recorder, kernel, tensors, [values[n] for n in written])


def _record(recorder: Recorder, kernel: Kernel, read: list[Any], written: list[Any]) -> None:
    name = "inductor.reduction" if kernel.reduces else "inductor.pointwise"
    inputs, outputs = (
        _once(recorder, [x for x in tree_leaves(t) if isinstance(x, torch.Tensor)]) for t in (read, written)
    )
    recorder.rows.append(RecordedOperator(name, *recorder._place(), inputs, outputs, 1))


def _once(recorder: Recorder, tensors: list[torch.Tensor]) -> list[tuple[Any, int]]:
    """Return tensors with their storages' numbers; of views that together exceed their storage only the largest."""
    by_storage: dict[int, list[torch.Tensor]] = {}
    for x in tensors:
        by_storage.setdefault(recorder.storage(x), []).append(x)
    found = []
    for number, views in by_storage.items():
        if sum(x.nbytes for x in views) > recorder.lives[number].bytes:
            views = [max(views, key=lambda x: x.nbytes)]
        found += [(describe(x), number) for x in views]
    return found
