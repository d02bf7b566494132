"""The dense MLP: up projection (with a gate for SwiGLU), activation, down projection."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from sim.core.program import Item, ModelPart, Program
from sim.models.activations.kernels import activation, is_gated, promoted
from sim.models.dims import Dims, Shard, ceil_div
from sim.models.elementwise import bias_apart
from sim.models.layers.matrix import Matrix
from sim.models.linear import linear
from sim.models.operators import F, Operator, collective, memory_op
from sim.models.serving.operators import ServedElements, ServingDims, norm_quantizes, served_linear

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario
    from sim.inputs.training_config import RecomputeModule


class DenseMlp(Struct, frozen=True):
    """Sizes of the whole model. `activation`: a name of `sim.variants.activations.ACTIVATIONS`."""

    part: ClassVar = ModelPart.MLP
    module: ClassVar[RecomputeModule] = "mlp"

    hidden: int
    ffn: int
    activation: str
    bias: bool
    merged: bool = False  # gate and up are one matmul in the model's own code

    @property
    def gated(self) -> bool:
        """Tell whether a second projection of the input gates the first."""
        return is_gated(self.activation)

    def matrices(self, tp: int = 1) -> tuple[Matrix, ...]:
        """Up (and gate) and down projection on one of `tp` ranks."""
        inner = ceil_div(self.ffn, tp)
        up = (inner, inner) if self.gated else (inner,)
        return (
            Matrix("mlp_up", self.hidden, up, "column", self.bias, target="mlp_up"),
            Matrix("mlp_down", inner, (self.hidden,), "row", self.bias, target="mlp_down"),
        )

    @property
    def bias_after(self) -> bool:
        """True where the output's bias is added after the sum over tensor-parallel ranks, with the residual."""
        return self.bias

    def train(self, scenario: Scenario, d: Dims, layer: int, shard: Shard) -> tuple[Operator, ...]:
        """Up, activation, down, split over tp; norm and residual apart.

        Keeps, at 16 bits and in units of s·b·h for GELU at ffn 4h: up's input 2, GELU's input 8, down's input 8
        (Korthikanti 2022, section 4.1; the dropout mask is the residual's).
        """
        return self.projections(d)

    def projections(self, d: Dims, original: bool = False, joins_norm: bool = True) -> tuple[Operator, ...]:
        """The matmuls and the activation of a training step. `original`, `joins_norm`: of the first (`Linear`)."""
        up, down = self.matrices(d.tp)
        wide = promoted(d, self.activation) is not None
        merged = self.merged or (self.gated and d.code.merges_gate)
        first = up.linear(d.tokens, merged=merged or d.framework.merges_projections)
        # Megatron-Core's linear layers leave their bias to the activation's kernel (mlp.py: `bias_parallel`).
        apart = self.bias and d.framework.passes_biases_on and not d.framework.fuses_activation
        bias = (bias_apart(d, "mlp_up_bias", d.tokens * sum(up.outputs)),) if apart else ()
        return (
            linear(d, replace(first, original=original, joins_norm=joins_norm)),
            *bias,
            activation(d, self.activation, d.tokens * down.inputs, merged),
            linear(d, replace(down.linear(d.tokens), wide=wide)),
        )

    @property
    def parameters(self) -> int:
        """Weights and biases of the whole MLP."""
        return sum(m.parameters for m in self.matrices())

    @property
    def active_elements(self) -> int:
        """Weights that one token is multiplied by."""
        return sum(m.elements for m in self.matrices())

    def served_elements(self, d: ServingDims) -> ServedElements:
        """Weights on one rank, counted as serving stores them."""
        matrices = self.matrices(d.dense_tp or d.tp)
        elements = sum(m.elements for m in matrices)
        return ServedElements(0, elements, 0, sum(m.parameters for m in matrices) - elements)

    def widest(self, tp: int) -> float:
        """Numbers of a token between the projections, on one rank."""
        return self.ffn / tp

    def routed(self, d: ServingDims, tokens: int) -> Program:
        """Return the MLP over the tokens of all replicas whose ranks split it; nothing where each has a whole MLP.

        The ranks gather the tokens, and reduce and scatter the results (SGLang, srt/layers/communicator.py:
        ScatterMode.FULL of layers that are not sparse). `tokens`: of each replica.
        """
        if not d.dense_tp:
            return ()
        of_all = tokens * d.dense_tp // d.tp
        size = of_all * self.hidden * d.act_bytes
        return (
            collective("gather", d.token_gathering, size, F, group="experts"),
            *self.compute(replace(d, tp=d.dense_tp), of_all, "mlp"),
            collective("scatter", "all_reduce" if d.all_reduces_tokens else "reduce_scatter", size, F, group="experts"),
        )

    def exchange(self, d: ServingDims, tokens: int) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
        """Nothing: no tokens are sent to other ranks."""
        return (), ()

    def serve(self, d: ServingDims, tokens: int) -> Program:
        """The MLP's part of a layer; the sum over tp comes after it."""
        return self.routed(d, tokens) if d.dense_tp else self.compute(d, tokens, "mlp")

    def compute(self, d: ServingDims, tokens: int, name: str) -> Program:
        """Projections and activation of `tokens` on one of tp ranks."""
        up, down = self.matrices(d.tp)
        inner, reads = tokens * down.inputs, len(up.outputs) + 1
        act = memory_op(f"{name}_{self.activation}", F, "elementwise", inner, reads * inner * d.act_bytes, d.act)
        # A router reads the same input as shared experts, in 16 bits (vLLM, layers/fused_moe: one operator has both).
        normed = name != "shared" and norm_quantizes(d, tokens)
        first = served_linear(d, up, tokens, normed)
        return (*first, act, *served_linear(d, down, tokens, "activations" in d.quantizing))
