"""Exact numbers of parameters of a model, counted over its layers' specs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from sim.models.layer_inputs import layer_inputs_of
from sim.models.layers import (
    LayerSpec,
    attention_spec,
    mlp_spec,
    norm_elements,
    norm_gate_of,
    norm_position,
    spec_counts,
)
from sim.models.layers.experts import Experts
from sim.models.streams.sizes import streams_of

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig


class ParameterCount(Struct, frozen=True):
    """Numbers of parameters with the vocabulary unpadded.

    `total` is the sum of embedding, positions, head, attention, mlp, router (with the projections around experts of
    narrower tokens), shared_experts, experts, norms, connections (hyper-connections), ngrams and layer_inputs (their
    tables, matrices and norms): the main model. `active` is what one token uses of it. `mtp` stands apart
    (multi-token-prediction modules, without the embedding and head that they share with the main model). Not counted:
    load-balancing biases of routers (DeepSeek-V3 keeps one per expert, which no gradient trains).
    """

    total: int
    active: int
    embedding: int
    positions: int
    head: int
    attention: int
    mlp: int
    router: int
    shared_experts: int
    experts: int
    norms: int
    connections: int
    ngrams: int
    layer_inputs: int
    mtp: int


def predicting_layers(model: ModelConfig) -> tuple[int, int]:
    """The layers (from 0) whose attention and whose MLP a multi-token-prediction module has: the model's last; of a
    model whose layers are one thing each, the last of each (Nemotron 3 Super, `mtp_hybrid_override_pattern: "*E"`)."""

    def last(kinds: Sequence[str], *without: str) -> int:
        return max((i for i, kind in enumerate(kinds) if kind not in without), default=model.layers - 1)

    layers = range(model.layers)
    attends = last([model.attention_kind(i) for i in layers], "none", "state_space")
    return attends, last([model.mlp_kind(i) for i in layers], "none")


def prediction_layer(model: ModelConfig) -> LayerSpec:
    """The transformer layer inside a multi-token-prediction module: of the same kinds as `predicting_layers`."""
    attends, last = predicting_layers(model)
    mlp = mlp_spec(model, last)
    rest = (norm_elements(model), norm_position(model, attends), model.parallel_block, streams_of(model))
    return LayerSpec(attention_spec(model, attends), mlp, *rest, norm_gate=norm_gate_of(model))


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Exact parameter counts of a model, before padding and sharding.

    For a GPT (gelu, layernorm, biases, tied embeddings, no position table) the total is
    N = h·v + L·(12h² + 13h) + 2h.

    >>> from sim.inputs.model_config import ModelConfig
    >>> gpt = ModelConfig(layers=12, hidden=768, heads=12, vocab=50257, tied_embeddings=True)
    >>> count_parameters(gpt).total == 768 * 50257 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768
    True
    """
    specs = spec_counts(model).items()
    dense = [(spec.mlp, n) for spec, n in specs if spec.mlp is not None and not isinstance(spec.mlp, Experts)]
    experts = [(spec.mlp, n) for spec, n in specs if isinstance(spec.mlp, Experts)]
    embedding, inputs = model.vocab * model.hidden, layer_inputs_of(model)
    parts = {
        "embedding": embedding,
        "positions": model.max_positions * model.hidden if model.positions == "learned" else 0,
        "head": (0 if model.tied_embeddings else embedding) + (model.vocab if model.head_bias else 0),
        "attention": sum(n * spec.attention_parameters for spec, n in specs),
        "mlp": sum(n * mlp.parameters for mlp, n in dense),
        "router": sum(n * mlp.router_parameters for mlp, n in experts),
        "shared_experts": sum(n * mlp.shared_parameters for mlp, n in experts),
        "experts": sum(n * mlp.expert_parameters for mlp, n in experts),
        "norms": sum(n * (spec.norms * spec.norm_elements + spec.gate_elements) for spec, n in specs)
        + ((0 if streams_of(model).gated else 1) + model.embedding_norm) * norm_elements(model),
        "connections": sum(n * spec.connection_parameters for spec, n in specs) + streams_of(model).head_parameters,
        "ngrams": sum(n * spec.ngrams.parameters for spec, n in specs if spec.ngrams is not None),
        "layer_inputs": 0 if inputs is None else inputs.served_table(1) + model.layers * inputs.branch_parameters,
    }
    total = sum(parts.values())
    idle = sum(n * round(mlp.one.parameters * max(0, mlp.moe.experts - mlp.moe.copies)) for mlp, n in experts)
    tables = [(spec.ngrams, n) for spec, n in specs if spec.ngrams is not None]
    idle += sum(n * (own.table_elements - own.width) for own, n in tables)  # a token reads a few rows
    idle += 0 if inputs is None else inputs.table_elements - inputs.layers * inputs.width
    # A prediction module (arXiv 2412.19437, 2.2): a layer, two input norms, a 2h -> h matrix, an output norm.
    module = prediction_layer(model).parameters + 2 * model.hidden**2 + 3 * norm_elements(model)
    module += streams_of(model).head_parameters
    return ParameterCount(
        total=total,
        active=total - idle,
        **parts,
        mtp=(min(1, model.mtp_layers) if model.mtp_repeated else model.mtp_layers) * module,
    )
