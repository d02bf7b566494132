"""LSTM, GRU and RNN as a GPU runs them: all layers and steps in one operator of cuDNN.

On a CPU they are other operators: one for each layer of an LSTM, and many for each step of a GRU or RNN. torch's fake
kernel of `aten._cudnn_rnn` has no backward, so operators of this module stand in for it. A cell of an LSTM or GRU that
the code calls step by step is two matmuls and one kernel (ATen/native/RNN.cpp: `LSTMCell`, `GRUCell`).
"""

from __future__ import annotations

from typing import Any

import torch

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_GRU_KEPT = 5  # numbers that the kernel of a GRU's cell keeps for each of its outputs (ATen/native/cuda/RNN.cu)


# They stand in for `aten._cudnn_rnn` and its backward, and are never run. `kept`: what the backward needs.
OPERATORS = torch.library.Library("calibrate", "FRAGMENT")
OPERATORS.define(
    "rnn(Tensor x, Tensor h, Tensor? c, Tensor[] weights, int directions) "
    "-> (Tensor y, Tensor last_h, Tensor last_c, Tensor kept)"
)
OPERATORS.define(
    "rnn_backward(Tensor x, Tensor y, Tensor? grad, Tensor kept, Tensor h, Tensor? c, Tensor[] weights) "
    "-> (Tensor of_x, Tensor of_h, Tensor of_c, Tensor[] of_weights)"
)


def _outputs(
    x: torch.Tensor, h: torch.Tensor, c: torch.Tensor | None, weights: list[torch.Tensor], directions: int
) -> Any:
    matrices = [w for w in weights if w.dim() == 2]
    gates = sum(w.size(0) for w in matrices[1 :: len(matrices) // h.size(0)])  # the second of a layer and direction
    cells = 0 if c is None else c.size(0) * c.size(-1)
    # cuDNN does not say what it keeps. torch's own cell keeps gates and cells (`_thnn_fused_lstm_cell`).
    kept = x.new_empty(x.shape[:-1].numel() * (gates + cells))
    outputs = x.new_empty(*x.shape[:-1], directions * h.size(-1))
    return outputs, torch.empty_like(h), x.new_empty(0) if c is None else torch.empty_like(c), kept


def _like_inputs(x: torch.Tensor, *others: Any) -> Any:
    h, c, weights = others[-3:]
    of_c = x.new_empty(0) if c is None else torch.empty_like(c)
    return torch.empty_like(x), torch.empty_like(h), of_c, [torch.empty_like(w) for w in weights]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, h, c, weights, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.has_cell = c is not None
    ctx.save_for_backward(x, output[0], output[3], h, *(() if c is None else (c,)), *weights)


def _gradients(ctx: Any, grad: torch.Tensor | None, *_: object) -> Any:
    x, y, kept, h, *rest = ctx.saved_tensors
    c = rest.pop(0) if ctx.has_cell else None
    of_x, of_h, of_c, of_weights = torch.ops.calibrate.rnn_backward(x, y, grad, kept, h, c, rest)
    return of_x, of_h, None if c is None else of_c, of_weights, None


def _gru_outputs(of_x: torch.Tensor, of_h: torch.Tensor, h: torch.Tensor, *_: torch.Tensor | None) -> Any:
    return torch.empty_like(h), h.new_empty(h.size(0), _GRU_KEPT * h.size(1))


def _gru_gradients(grad: torch.Tensor, kept: torch.Tensor, has_bias: bool) -> Any:
    rows, width = grad.size(0), 3 * grad.size(1)
    of_bias = [grad.new_empty(width) if has_bias else None for _ in range(2)]
    return grad.new_empty(rows, width), grad.new_empty(rows, width), torch.empty_like(grad), *of_bias


torch.library.register_fake("calibrate::rnn", _outputs)
torch.library.register_fake("calibrate::rnn_backward", _like_inputs)
# torch before 2.15 knows the shapes of an LSTM's cell alone.
_SHAPES = torch.library.Library("aten", "IMPL", "Meta")
for _name, _shapes in (("_thnn_fused_gru_cell", _gru_outputs), ("_thnn_fused_gru_cell_backward", _gru_gradients)):
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_name}", "Meta"):
        _SHAPES.impl(_name, _shapes)
torch.library.register_autograd("calibrate::rnn", _gradients, setup_context=_keep)


def recurrent(args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Run `torch.lstm`, `torch.gru`, `torch.rnn_tanh` or `torch.rnn_relu`, whose arguments these are.

    Packed sequences have their sizes as second argument; then there is no `batch_first`. Dropout between layers is part
    of cuDNN's operator.
    """
    packed = isinstance(args[3], list | tuple)
    x, states, weights = (args[0], *args[2:4]) if packed else args[:3]
    bidirectional = args[8] if packed else args[7]
    h, *cell = states if isinstance(states, list | tuple) else (states,)
    c = cell[0] if cell else None
    y, last_h, last_c, _ = torch.ops.calibrate.rnn(x, h, c, list(weights), 2 if bidirectional else 1)
    return (y, last_h, last_c) if cell else (y, last_h)


def lstm_cell(
    x: torch.Tensor,
    states: Any,
    of_x: torch.Tensor,
    of_h: torch.Tensor,
    bias_x: torch.Tensor | None = None,
    bias_h: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `torch.lstm_cell`."""
    h, c = states
    new_h, new_c, _ = torch.ops.aten._thnn_fused_lstm_cell(x @ of_x.t(), h @ of_h.t(), c, bias_x, bias_h)
    return new_h, new_c


def gru_cell(
    x: torch.Tensor,
    h: torch.Tensor,
    of_x: torch.Tensor,
    of_h: torch.Tensor,
    bias_x: torch.Tensor | None = None,
    bias_h: torch.Tensor | None = None,
) -> Any:
    """Run `torch.gru_cell`."""
    return torch.ops.aten._thnn_fused_gru_cell(x @ of_x.t(), h @ of_h.t(), h, bias_x, bias_h)[0]


CELLS = {"lstm_cell": lstm_cell, "gru_cell": gru_cell}
