"""DeepSeek's dense warm-up of an indexer (DeepSeek-V3.2-Exp, 2025, section 2.2): everything else is frozen.

The indexer's loss is each layer's own and its inputs are detached, so no gradient passes from layer to layer: nothing
but indexers has a backward, and nothing else keeps anything for one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.core.program import Block
from sim.models.flops import matmul_params_per_token
from sim.models.layers import layer_specs
from sim.models.layers.sparse_latent import SparseLatentAttention
from sim.models.lora import frozen
from sim.models.operators import Operator

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig
    from sim.inputs.scenario import Scenario


def warms_up(scenario: Scenario) -> bool:
    """Tell whether indexers alone are trained."""
    return scenario.training is not None and scenario.training.indexer == "warm_up"


def only_indexers(parts: Iterable[Operator]) -> tuple[Operator, ...]:
    """A layer's parts, of which those that learn alone have a backward."""
    return tuple(
        p if p.learns_alone else replace(frozen(p), backward=(), saved=(), backward_bytes=0.0, output_bytes=0.0)
        for p in parts
    )


def without_backward(block: Block) -> Block:
    """A piece of the model outside the layers: forward alone, all its parameters frozen."""
    params = block.params + block.expert_params + block.frozen_params
    return replace(
        block,
        backward=(),
        recompute=(),
        saved=(),
        params=0,
        tensors=(),
        expert_params=0,
        frozen_params=params,
        backward_peak_bytes=0.0,
        backward_moments=(),
        matrices=(),
        expert_matrices=(),
    )


def warm_up_flops_per_token(model: ModelConfig, seq_len: int, causal_half: bool) -> float:
    """Model FLOPs of a token: 2 for each weight forward, a third of dense attention's 6, indexers' scores of all keys
    with two gradients, and the weight gradients of their matrices."""
    flops, seen = 2.0 * matmul_params_per_token(model), seq_len * (0.5 if causal_half else 1.0)
    for spec in layer_specs(model):
        a = spec.attention
        assert isinstance(a, SparseLatentAttention)
        assert a.query_rank is not None
        flops += 2.0 * a.heads * sum(a.widths) * seen + 6.0 * a.indexer.heads * a.indexer.head_dim * seen
        flops += 2.0 * sum(m.elements for m in a.indexer.matrices(a.hidden, a.query_rank))
    return flops
