"""Model FLOPs: what a token needs whatever the layout, the numerator of MFU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.models.layers import layer_specs, spec_counts
from sim.models.layers.compressed import CompressedAttention
from sim.models.layers.sparse_latent import SparseLatentAttention
from sim.models.parameters import prediction_layer

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig


def model_flops_per_token(model: ModelConfig, seq_len: int, causal_half: bool = True, frozen: bool = False) -> float:
    """6·(parameters of matmuls) + 12·layers·heads·head_dim·seq_len, the second halved when causal.

    4 in place of 6 where the weights are `frozen`: no weight gradient (those of adapters are not counted).

    Matmul parameters: the output layer's count, the embedding look-up's not; of experts those active. The
    attention term is the PaLM paper's (Chowdhery 2022, appendix B); MLA's query-key and value widths take the
    place of 2·head_dim. A window's layers count the keys that a query sees in the mean, state-space layers the matmuls
    over chunks, three times those of forward.
    """
    specs = (*layer_specs(model), *[prediction_layer(model)] * model.mtp_layers)
    mixers = [spec.attention for spec in specs if spec.attention is not None]
    flops = {x: x.core_flops(seq_len, causal_half) for x in {*mixers}}  # few differ, so each is asked once
    attention = sum([flops[x] for x in mixers])
    return (4.0 if frozen else 6.0) * matmul_params_per_token(model) + attention


def indexer_gradient_flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Return what of `model_flops_per_token` is for the gradients of indexers."""
    specs = (*layer_specs(model), *[prediction_layer(model)] * model.mtp_layers)
    indexed = [
        spec.attention for spec in specs if isinstance(spec.attention, SparseLatentAttention | CompressedAttention)
    ]
    return sum([a.indexer_gradient_flops(seq_len) for a in indexed])


def packed_flops_per_token(
    model: ModelConfig, documents: tuple[tuple[int, float], ...], seq_len: int, causal_half: bool, frozen: bool
) -> float:
    """`model_flops_per_token` of packed sequences. `documents`: lengths, and how many documents have each. A token
    attends within its own document; padding has no attention."""
    matmuls = (4.0 if frozen else 6.0) * matmul_params_per_token(model)
    attention = 0.0
    for length, number in documents:
        attention += number * length * (model_flops_per_token(model, length, causal_half, frozen) - matmuls)
    return matmuls + attention / seq_len


def matmul_params_per_token(model: ModelConfig) -> float:
    """Weights that a token is multiplied by: attention, MLP or its active experts and router, output (and MTP)."""
    output = model.hidden * model.vocab
    module = 2 * model.hidden**2 + prediction_layer(model).active_elements + output
    layers = sum(n * spec.active_elements for spec, n in spec_counts(model).items())
    return float(layers + output + model.mtp_layers * module)
