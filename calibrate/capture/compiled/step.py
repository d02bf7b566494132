"""Captures a step as `torch.compile` would run it. Model and loss are one graph; the optimizer is not compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from calibrate.capture.compiled.checkpoints import checkpoints_marked
from calibrate.capture.compiled.graph import ZerosTraced, compiled_function
from calibrate.capture.recorder import Recorder
from calibrate.capture.step import Step


class CompiledLoss:
    """The step's compiled loss, with a compiled backward. The first call traces it."""

    def __init__(self, step: Step, recorder: Recorder) -> None:
        self.step, self.recorder = step, recorder
        # Buffers too: a batch norm counts in them, and a trace may write into its inputs alone.
        self.parameters = {**dict(step.model.named_parameters()), **dict(step.model.named_buffers())}
        self.run = compiled_function(self._loss_of, recorder)

    def __call__(self) -> torch.Tensor:
        """Compute the loss of one micro-batch."""
        loss: torch.Tensor = self.run(*self.parameters.values())[0]
        return loss

    def _loss_of(self, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the step's loss as a function of the parameters, and what the compiled model returns beside it.

        A model that computes its own loss returns logits too. The backward takes a gradient of them, for which autograd
        makes zeros (torch/_functorch/_aot_autograd/runtime_wrappers.py: `CompiledFunction`).
        """
        # AOTAutograd calls this more than once, in some releases with the same tensors. A cast that one trace has
        # cached is unknown to the next.
        self.recorder.operators.forget()
        model = self.step.model
        given = dict(zip(self.parameters, parameters, strict=True))
        # Otherwise a second name of a tied parameter keeps the old tensor, whose part of the gradient is not computed.
        returned: list[Any] = []
        hook = model.register_forward_hook(lambda *call: returned.extend(tree_leaves(call[-1])))
        given_to_model = torch.nn.utils.stateless._reparametrize_module(model, given, tie_weights=True)
        with hook, given_to_model, ZerosTraced(), checkpoints_marked():
            loss: torch.Tensor = self.step.loss()
        if not any(x is loss for x in returned):
            return (loss,)
        beside = (x for x in returned if isinstance(x, torch.Tensor) and x.requires_grad and x is not loss)
        return (loss, *beside)
