"""Drafts that read the model's hidden states: EAGLE (Li et al. 2024, arXiv 2401.15077) and EAGLE-3 (2025, arXiv
2503.01840), as vLLM 0.33 runs them (model_executor/models/llama_eagle.py, llama_eagle3.py).

EAGLE's layer gets the hidden state and the embedding of the next token through a 2h -> h matrix (`fc`) in every step.
EAGLE-3's `fc` takes the states of several of the model's layers once, in the pass over the tokens that were checked
(`combine_hidden_states`); its first layer's query, key and value read the normed embedding and state side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import asdict, replace

from sim.core.program import Program
from sim.models.layers import LayerSpec, layer_specs
from sim.models.layers.grouped_query import GroupedQueryAttention
from sim.models.layers.matrix import Matrix
from sim.models.operators import F, gemm, memory_op
from sim.models.serving.operators import ServedElements, ServingDims, served_norm

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig


class SideBySide(GroupedQueryAttention, frozen=True):
    """Attention whose query, key and value read two vectors of the hidden size."""

    def qkv_and_out(self, tp: int) -> tuple[Matrix, Matrix]:
        """The matrices of attention over one vector, with twice the inputs of query, key and value."""
        qkv, out = GroupedQueryAttention.qkv_and_out(self, tp)
        return replace(qkv, inputs=2 * self.hidden), out


class DraftLayer(LayerSpec, frozen=True):
    """A draft's first layer. `inputs_of_fc`: its matrix in front, which every rank holds whole in 16 bits
    (ReplicatedLinear); `joins_states`: this pass multiplies by it; `wide`: attention reads embedding and state apart.

    Taken as there: EAGLE's norms before attention and at the end, which it lacks (8 KB of weights of an 8B's draft).
    """

    hidden: int = 0
    inputs_of_fc: int = 0
    joins_states: bool = True
    wide: bool = False

    def served_elements(self, d: ServingDims) -> ServedElements:
        """Return the weights on a rank, with those of the matrix in front and of EAGLE-3's norm of the states."""
        layer = LayerSpec.served_elements(self, d)
        return layer._replace(rest=layer.rest + self.inputs_of_fc * self.hidden + self.wide * self.norm_elements)

    def serve_tokens(self, d: ServingDims, tokens: int) -> Program:
        """Return the matrix in front, the norm and the copy that joins embedding and state, then the layer."""
        n = tokens * self.hidden
        joined = memory_op("draft_join", F, "elementwise", 2 * n, 4 * n * d.act_bytes, d.act)
        norm = (served_norm(d, "draft_embedding_norm", tokens),) if self.wide else ()
        project = (gemm("draft_fc", F, tokens, self.hidden, self.inputs_of_fc, d.act),) if self.joins_states else ()
        return (*project, *norm, joined, *LayerSpec.serve_tokens(self, d, tokens))


def draft_layers(draft: ModelConfig, states: int, width: int, joins_states: bool = True) -> tuple[LayerSpec, ...]:
    """The layers of a draft that reads `states` hidden states of a model, each `width` wide.

    `joins_states`: in a pass over tokens that the model has checked; false: in one over a token of its own.
    """
    first, *others = layer_specs(draft)
    kept = {name: value for name, value in asdict(first).items() if name != "attention"}
    attention, wide = first.attention, states > 1
    if wide and isinstance(attention, GroupedQueryAttention):
        attention = SideBySide(**asdict(attention))
    inputs = states * width if wide else 2 * draft.hidden
    own = DraftLayer(attention, **kept, hidden=draft.hidden, inputs_of_fc=inputs, joins_states=joins_states, wide=wide)
    if not wide:
        own = replace(own, joins_states=True)
    return (own, *others)
