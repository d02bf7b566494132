"""DeepSeek-V3's multi-token prediction module as a draft while serving (2024, sections 2.2 and 5.4.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.core.program import Program
from sim.models.layers import LayerSpec
from sim.models.operators import F, gemm
from sim.models.parameters import prediction_layer
from sim.models.serving.operators import ServedElements, ServingDims, served_norm

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig


class PredictionModule(LayerSpec, frozen=True):
    """Two norms, a 2h → h projection, which every rank holds whole in 16 bits (vLLM's deepseek_mtp.py: `eh_proj`), a
    layer and its final norm. Embedding and output matrix are the main model's."""

    hidden: int = 0

    def served_elements(self, d: ServingDims) -> ServedElements:
        """Return the weights on a rank, with those of the projection and the norms before it."""
        layer = LayerSpec.served_elements(self, d)
        return layer._replace(rest=layer.rest + 2 * self.hidden**2 + 3 * self.norm_elements)

    def serve_tokens(self, d: ServingDims, tokens: int) -> Program:
        """Return both norms and the projection, then what `LayerSpec.serve_tokens` returns."""
        norms = [served_norm(d, name, tokens) for name in ("mtp_embedding_norm", "mtp_hidden_norm")]
        project = gemm("mtp_projection", F, tokens, self.hidden, 2 * self.hidden, d.act)
        return (*norms, project, *LayerSpec.serve_tokens(self, d, tokens))


def prediction_module(model: ModelConfig) -> PredictionModule:
    """The module of a model that has one."""
    layer = prediction_layer(model)
    kept = layer.attention, layer.mlp, layer.norm_elements, layer.norm_position, layer.parallel, layer.streams
    return PredictionModule(*kept, hidden=model.hidden)
