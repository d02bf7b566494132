"""Several residual streams with a gate for each number (Qwen 4's gated residual).

A norm of each stream with weights of its own; two matrices of low rank with a SiLU between them make a gate of each
number of all streams, a sigmoid; a branch's input is the mean of the gated streams. One number of each stream, twice a
sigmoid, says how much of the branch's result it gets. No other norm stands before a branch, and after the last layer a
mean of gated streams is the output matrix's input (`Qwen4ExpTextGatedResidual` in
transformers/models/qwen4_exp/modeling_qwen4_exp.py).

Bytes for each of the n·hidden numbers of a token, besides norm and matrices. Gates: in one kernel the gates' input and
the streams read, their mean written (2e + e/n); in separate operators sigmoid (2e), product (3e), mean (e + e/n).
Backward: both read, and both gradients written (4e + e/n); separately mean (e + e/n), product (5e), sigmoid (3e) and
the sum of the streams' gradients (3e). The result's spread: in one kernel the streams read and written (2e + e/n);
separately product (e + e/n) and sum (3e). Backward: the streams' gradient read (e + 2e/n); separately both factors'
products (2e + e/n) and sums (2e + e/n). Fused where hyper-connections are (`Framework.fuses_hyper_connections`): an
assumption, as no such kernel for training is known.
"""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.program import NeededBy, Saved
from sim.models.dims import Dims
from sim.models.linear import linear
from sim.models.norm import norm
from sim.models.operators import F, I, Linear, Operator, memory_op


def stream_norms(d: Dims, name: str) -> Operator:
    """A norm of each stream, with weights of its own."""
    width = d.streams.width
    made = norm(d, name, "rmsnorm", d.rows * d.streams.number, d.hidden, d.streams.number)
    return replace(made, tensors=(width,))


def gated_sum(d: Dims, name: str, injects: bool) -> tuple[Operator, ...]:
    """The branch `name`'s input, a mean of gated streams, and where it `injects` the streams' shares of its result."""
    s = d.streams
    down = Linear(f"{name}_gates_down", d.rows, s.width, (s.rank,))
    up = Linear(f"{name}_gates_up", d.rows, s.rank, (s.width,))
    share = Linear(f"{name}_shares", d.rows, s.width, (s.number,), save_input=False)
    low, e = d.rows * s.rank, d.act_bytes
    middle = Operator(
        f"{name}_gates_silu",
        (memory_op(f"{name}_gates_silu", F, "elementwise", low, 3 * e * low, d.act, 2),),
        (memory_op(f"{name}_gates_silu_backward", I, "elementwise", low, 5 * e * low, d.act, 2),),
        (Saved(f"{name} gates of low rank", e * low),),
    )
    shares = (linear(d, share), _shares(d, name)) if injects else ()
    return (
        stream_norms(d, f"{name}_streams_norm"),
        linear(d, down),
        middle,
        linear(d, up),
        _gated_mean(d, name),
        *shares,
    )


def _gated_mean(d: Dims, name: str) -> Operator:
    e, n = d.act_bytes, d.streams.number
    elements, fused = float(d.rows * d.streams.width), d.framework.fuses_hyper_connections
    ahead, kernels = (2 * e + e / n, 1) if fused else (6 * e + e / n, 3)
    back, back_kernels = (4 * e + e / n, 1) if fused else (12 * e + e / n, 5)
    gates = "gates" if fused else "sigmoid of the gates"
    return Operator(
        f"{name}_streams",
        (memory_op(f"{name}_streams", F, "elementwise", elements, ahead * elements, d.act, kernels),),
        (memory_op(f"{name}_streams_backward", I, "elementwise", elements, back * elements, d.act, back_kernels),),
        (Saved(f"{name} {gates}", elements * e, NeededBy.INPUT_GRAD),),
        forward_bytes=elements * e,
        backward_bytes=2 * elements * e,
    )


def _shares(d: Dims, name: str) -> Operator:
    """Division, sigmoid and doubling of a number of each stream; both results are kept."""
    n = d.rows * d.streams.number
    size = n * d.act_bytes
    return Operator(
        f"{name}_shares_sigmoid",
        (memory_op(f"{name}_shares_sigmoid", F, "elementwise", n, 6 * size, d.act, 3),),
        (memory_op(f"{name}_shares_sigmoid_backward", I, "elementwise", n, 7 * size, d.act, 3),),
        (Saved(f"{name} shares", 2 * size),),
    )


def gated_spread(d: Dims, name: str) -> Operator:
    """The branch's result times each stream's share, added to the streams; the result is kept."""
    e, n = d.act_bytes, d.streams.number
    elements, fused = float(d.rows * d.streams.width), d.framework.fuses_hyper_connections
    ahead, kernels = (2 * e + e / n, 1) if fused else (4 * e + e / n, 2)
    back, back_kernels = (e + 2 * e / n, 1) if fused else (4 * e + 2 * e / n, 4)
    label = f"{name}_residual"
    return Operator(
        label,
        (memory_op(label, F, "elementwise", elements, ahead * elements, d.act, kernels),),
        (memory_op(f"{label}_backward", I, "elementwise", elements, back * elements, d.act, back_kernels),),
        (Saved(f"{name} result", elements / n * e),),
        forward_bytes=elements * e,
        backward_bytes=2 * elements * e,
    )
