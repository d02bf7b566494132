"""An embedding of each token for every layer (Gemma 4 E2B and E4B).

Beside the embedding stands a table with `width` numbers of a token for each layer. The embedding's result is projected
to as many numbers, which pass a norm of `width`, and both are added. Each layer has a third branch behind its MLP: a
matrix from the stream to `width` numbers, GELU, their product with the layer's own, a matrix back, a norm
(`Gemma4TextDecoderLayer`, `Gemma4TextModel.project_per_layer_inputs` in
transformers/models/gemma4/modeling_gemma4.py). The matrices are whole on every rank; the table is split over tp by
tokens, as the embedding is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from sim.core.program import Program
from sim.models.activations.kernels import activation
from sim.models.dims import Dims, ceil_div
from sim.models.elementwise import branch_sum, residual
from sim.models.linear import linear
from sim.models.norm import norm, stream_norm
from sim.models.operators import F, I, Linear, Operator, W, gemm, memory_op

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig


class LayerInputs(Struct, frozen=True):
    """Sizes of the whole model: `vocab` rows of `width` numbers for each of `layers`."""

    hidden: int
    layers: int
    width: int
    vocab: int

    @property
    def table_elements(self) -> int:
        """Numbers of the table."""
        return self.vocab * self.layers * self.width

    @property
    def projection_elements(self) -> int:
        """Weights that the embedding's result is multiplied by."""
        return self.hidden * self.layers * self.width

    @property
    def branch_elements(self) -> int:
        """Weights of both matrices of one layer's branch."""
        return 2 * self.hidden * self.width

    @property
    def branch_parameters(self) -> int:
        """Both matrices and the norm of one layer's branch."""
        return self.branch_elements + self.hidden

    def made(self, d: Dims) -> tuple[Operator, ...]:
        """Return the operators that make all layers' inputs [rows, layers, width] of the embedding's result, once a
        micro-batch; the table's look-up is not among them. Their whole backward is weight gradient."""
        rows, n, e = d.rows * self.layers, d.rows * self.layers * self.width, d.act_bytes
        accesses, kernels = (3, 1) if d.framework.fuses_chains else (9, 4)  # scale, sum, scale, and one more backward
        project = Linear("layer_inputs", d.rows, self.hidden, (self.layers * self.width,))
        normed = norm(d, "layer_inputs_norm", "rmsnorm", rows, self.width)
        together = Operator(
            "layer_inputs_sum",
            (memory_op("layer_inputs_sum", F, "elementwise", n, accesses * e * n, d.act, kernels),),
            (memory_op("layer_inputs_sum_backward", I, "elementwise", n, accesses * e * n, d.act, kernels),),
            forward_bytes=n * e,
            backward_bytes=2 * n * e,
        )
        parts = (linear(d, project), normed, together)
        return tuple(replace(p, backward=tuple(replace(item, phase=W) for item in p.backward)) for p in parts)

    def branch(self, m: ModelConfig, d: Dims) -> tuple[Operator, ...]:
        """One layer's branch: gate, product with the layer's inputs, projection, norm, and the sum with the stream."""
        gate = Linear("layer_input_gate", d.rows, self.hidden, (self.width,))
        project = Linear("layer_input_projection", d.rows, self.width, (self.hidden,))
        return (
            branch_sum(d),
            linear(d, gate),
            activation(d, "geglu", d.rows * self.width),
            linear(d, project),
            stream_norm(m, d, "layer_input_norm"),
            residual(d, "layer_input_residual", False),
        )

    def served_table(self, tp: int) -> int:
        """Elements of the weights on one rank that make the layers' inputs: its part of the table, projection, norm."""
        return ceil_div(self.table_elements, tp) + self.projection_elements + self.width

    def serve_made(self, tokens: int, act: str, element_bytes: float) -> Program:
        """Look-up, projection, norm and sum in one kernel; `act`: dtype of activations."""
        width = self.layers * self.width
        n = tokens * width
        return (
            memory_op("layer_inputs_embedding", F, "embedding", n, 2 * n * element_bytes, act),
            gemm("layer_inputs", F, tokens, width, self.hidden, act),
            memory_op("layer_inputs_norm", F, "norm", n, 3 * n * element_bytes, act),
        )

    def serve_branch(self, tokens: int, act: str, element_bytes: float) -> Program:
        """Gate, product, projection, and norm and sum in one kernel; `act`: dtype of activations."""
        n, low, e = tokens * self.hidden, tokens * self.width, element_bytes
        return (
            gemm("layer_input_gate", F, tokens, self.width, self.hidden, act),
            memory_op("layer_input_geglu", F, "elementwise", low, 3 * low * e, act),
            gemm("layer_input_projection", F, tokens, self.hidden, self.width, act),
            memory_op("layer_input_norm", F, "elementwise", n, 4 * n * e, act),
        )


def layer_inputs_of(model: ModelConfig) -> LayerInputs | None:
    """The embeddings of each layer, if the model has them."""
    c = model.layer_embedding
    return None if c is None else LayerInputs(model.hidden, model.layers, c.width, c.vocab or model.vocab)
