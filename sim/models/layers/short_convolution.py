"""Short gated convolutions in attention's place (LFM2, arXiv 2511.23404, section 2).

A projection makes B, C and x of each token; B·x passes a short causal convolution of each channel by itself, its result
times C the output projection (`Lfm2ShortConv` in transformers/models/lfm2/modeling_lfm2.py). The convolution is
causal_conv1d's kernel, which takes channels last, so that nothing is copied. No price of it was compared with a
measured kernel.

Serving keeps of a sequence, however long it is, the last `conv_kernel` − 1 inputs of the convolution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from sim.core.program import ModelPart, Program, Saved
from sim.models.dims import Dims, Shard, ceil_div
from sim.models.layers.matrix import Matrix
from sim.models.linear import linear
from sim.models.operators import F, I, Operator, W, elementwise_op, memory_op
from sim.models.serving.operators import ServingDims, served_linear

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario


class ShortConvolution(Struct, frozen=True):
    """Sizes of the whole model. `channels`: width of B, C and x; `bias`: of both projections."""

    part: ClassVar = ModelPart.STATE_SPACE

    hidden: int
    channels: int
    conv_kernel: int
    conv_bias: bool
    bias: bool

    def width(self, tp: int) -> int:
        """Return the channels of one rank."""
        return ceil_div(self.channels, tp)

    def matrices(self, tp: int = 1) -> tuple[Matrix, ...]:
        """Projections on one of `tp` ranks."""
        width = self.width(tp)
        return (
            Matrix("state_in", self.hidden, (3 * width,), "column", self.bias),
            Matrix("state_out", width, (self.hidden,), "row", self.bias),
        )

    def other_parameters(self, tp: int = 1) -> int:
        """Taps and biases of the convolution."""
        return self.width(tp) * (self.conv_kernel + self.conv_bias)

    def key(self, seq_len: int) -> str:
        """All sizes, which stand beside those of the model's attention."""
        return f" {self!r}"

    def core_flops(self, seq_len: int, causal_half: bool) -> float:
        """Model FLOPs of a token outside matrices: two for each tap forward, and twice as much backward."""
        return 3.0 * 2.0 * self.conv_kernel * self.channels

    def train(self, scenario: Scenario, d: Dims, shard: Shard) -> tuple[Operator, ...]:
        """Projection to B, C and x; B·x; convolution; its result times C; output projection."""
        first, last = self.matrices(d.tp)
        return (
            linear(d, first.linear(d.tokens)),
            self._products(d),
            self._convolution(d),
            self._gate(d, "output_gate"),
            linear(d, last.linear(d.tokens)),
        )

    def _products(self, d: Dims) -> Operator:
        """B·x, which keeps the projection's result for both products; backward the gradients of B, C and x become one
        tensor (torch.chunk), two accesses each, where no kernel writes them there.

        torch.cat writes it in channels' order, though all three lie in tokens' order, and another kernel brings it to
        tokens' order for the projection's matmuls.
        """
        n = d.tokens * self.width(d.tp)
        size = n * d.act_bytes
        gate = self._gate(d, "input_gate")
        joined: Program = ()
        if not d.framework.fuses_activation:
            apart = memory_op("chunks_backward", I, "copy", 3 * n, 6 * size, d.act)
            turned = memory_op("chunks_backward_turned", I, "permute", 3 * n, 6 * size, d.act)
            joined = tuple(replace(i, single_elements=3.0 * n) for i in (apart, turned))
        saved = (Saved("projected input", 3 * size),)
        return Operator("input_gate", gate.forward, (*gate.backward, *joined), saved, backward_bytes=3 * size)

    def _gate(self, d: Dims, name: str) -> Operator:
        """One product of two tensors; backward each factor's gradient, which one kernel or two make. Each factor is a
        third of the projection's rows, so that torch's kernels move one number at a time."""
        n, e, fused = d.tokens * self.width(d.tp), d.act_bytes, d.framework.fuses_activation
        accesses, kernels = (5, 1) if fused else (6, 2)
        forward = elementwise_op(name, F, n, 3, e, d.act)
        backward = memory_op(f"{name}_backward", I, "elementwise", n, accesses * e * n, d.act, kernels)
        if not fused:
            forward = replace(forward, single_elements=float(n))
            backward = replace(backward, single_elements=2.0 * n)
        return Operator(name, (forward,), (backward,), backward_bytes=3 * n * e)

    def _convolution(self, d: Dims) -> Operator:
        """The convolution: kept are its input, and its result, which C's gradient is made of."""
        n, e = d.tokens * self.width(d.tp), d.act_bytes
        saved = (Saved("convolution's input", n * e), Saved("convolved", n * e))
        return Operator(
            "convolution",
            (elementwise_op("convolution", F, n, 2, e, d.act),),
            (
                elementwise_op("convolution_backward", I, n, 2, e, d.act),
                elementwise_op("convolution_wgrad", W, n, 2, e, d.act),
            ),
            saved,
            params=self.other_parameters(d.tp),
            backward_bytes=2 * n * e,
        )

    def sequence_bytes(self, d: ServingDims, length: float) -> float:
        """Kept inputs of a sequence on one rank, however long it is."""
        return (self.conv_kernel - 1) * self.width(d.tp) * d.act_bytes

    def expanded_width(self, tp: int) -> int:
        """Numbers of a token between the projections, on one rank: B, C, x, what is convolved and its result."""
        return 5 * self.width(tp)

    def serve(self, d: ServingDims, tokens: int) -> Program:
        """Projections and products, which depend on the number of tokens alone."""
        first, last = self.matrices(d.tp)
        n = tokens * self.width(d.tp)
        gates = (elementwise_op(name, F, n, 3, d.act_bytes, d.act) for name in ("input_gate", "output_gate"))
        return (*served_linear(d, first, tokens), *gates, *served_linear(d, last, tokens))

    def prefill(self, d: ServingDims, batch: int, q_len: int, kv_len: int) -> Program:
        """`batch` prompt chunks of `q_len` tokens, which begin from kept inputs: what came before costs nothing."""
        return (elementwise_op("convolution", F, batch * q_len * self.width(d.tp), 2, d.act_bytes, d.act),)

    def decode(self, d: ServingDims, batch: int, kv_len: int, queries: int = 1) -> Program:
        """`queries` new tokens of each of `batch` sequences: the kept inputs are read, moved by one and written."""
        n = batch * queries * self.width(d.tp)
        return (elementwise_op("convolution_update", F, n, 2 * self.conv_kernel, d.act_bytes, d.act),)
