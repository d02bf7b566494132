"""A model as a list of layers, each an attention and an MLP. Training, serving, memory and counts all ask these.

>>> from sim.inputs.model_input import load_model
>>> specs = layer_specs(load_model("mixtral-8x7b"))
>>> len(specs), specs[0].parameters
(32, 1451270144)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from sim.core.program import Item, Program
from sim.models.elementwise import GATED
from sim.models.layers.dense_mlp import DenseMlp
from sim.models.layers.experts import Experts
from sim.models.layers.grouped_query import GroupedQueryAttention
from sim.models.layers.latent import LatentAttention
from sim.models.layers.matrix import Matrix
from sim.models.operators import F, memory_op
from sim.models.served import ServingDims, served_add_norm, served_linear, served_norm, served_sum
from sim.models.window import Window

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig

Attention = GroupedQueryAttention | LatentAttention
Mlp = DenseMlp | Experts


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: norm, attention, residual sum, norm, MLP, residual sum. Equal layers are equal records.

    `norm_position`: pre (as said), post (the norms stand before the sums: OLMo 2) or both (Gemma 2).
    """

    attention: Attention
    mlp: Mlp
    norm_elements: int  # of one norm
    norm_position: Literal["pre", "post", "both"] = "pre"

    @property
    def norms(self) -> int:
        """Norms over the hidden size: two, or one on each side of attention and MLP."""
        return 4 if self.norm_position == "both" else 2

    @property
    def attention_parameters(self) -> int:
        """Projections, their biases and the norms inside the attention."""
        return sum(m.parameters for m in self.attention.matrices()) + self.attention.norm_elements()

    @property
    def parameters(self) -> int:
        """All of the layer's parameters, experts included."""
        return self.attention_parameters + self.mlp.parameters + self.norms * self.norm_elements

    @property
    def active_elements(self) -> int:
        """Weights that one token is multiplied by."""
        return sum(m.elements for m in self.attention.matrices()) + self.mlp.active_elements

    def served_elements(self, tp: int, ep: int, expert_tp: int) -> tuple[int, int]:
        """Elements on one rank: of weights that serving may quantize, and of what stays in 16 bits."""
        matrices = self.attention.matrices(tp)
        weights, rest = self.mlp.served_elements(tp, ep, expert_tp)
        rest += sum(m.parameters - m.elements for m in matrices)
        rest += self.attention.norm_elements() + self.norms * self.norm_elements
        return weights + sum(m.elements for m in matrices), rest

    def serve_routed(self, d: ServingDims, tokens: int) -> Program:
        """The part of `serve_tokens` that replicas share: their experts."""
        return self.mlp.routed(d, tokens)

    def serve_tokens(self, d: ServingDims, tokens: int) -> Program:
        """All of the layer that depends on an iteration's number of tokens alone, be they prompts' or decodes'."""
        out, width = self.attention.matrices(d.tp)[-1], tokens * self.attention.rotated_width(d.tp)
        items: list[Item] = [served_add_norm(d, "attention_norm", tokens)]
        for matrix in self.attention.projected(d.tp):
            items += served_linear(d, matrix, tokens)
        items.append(memory_op("rope_cache", F, "elementwise", width, 2 * width * d.act_bytes, d.act))
        items += served_linear(d, out, tokens)
        items += served_sum(d, "attention_out", tokens)
        if self.norm_position == "both":
            items += [served_norm(d, name, tokens) for name in ("attention_post_norm", "mlp_post_norm")]
        items.append(served_add_norm(d, "mlp_norm", tokens))
        return (*items, *self.mlp.serve(d, tokens), *served_sum(d, "mlp_down", tokens))


def attention_spec(model: ModelConfig, layer: int = 0) -> Attention:
    """The attention of layer `layer`, counted from 0 over the model."""
    c = model.mla
    if c is None:
        return GroupedQueryAttention(
            model.hidden,
            model.heads,
            model.kv_heads,
            model.head_dim,
            bias=model.bias,
            qkv_bias=model.qkv_bias,
            qk_norm=model.qk_norm,
            qk_norm_over=model.qk_norm_over,
            sinks=model.sinks,
            rope=model.positions == "rope" and not (model.no_rope_every and (layer + 1) % model.no_rope_every == 0),
            projections=3 if model.mlp in GATED else 1,  # as Llama's code has it, and GPT's
            window=window_of(model, layer),
        )
    return LatentAttention(
        model.hidden, model.heads, c.q_lora_rank, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    )


def window_of(model: ModelConfig, layer: int) -> Window | None:
    """The window of layer `layer` by `model.attention_pattern`, which repeats over the layers."""
    kind = model.attention_pattern[layer % len(model.attention_pattern)]
    return None if model.window is None or kind == "full" else Window(model.window, kind == "chunked")


def mlp_spec(model: ModelConfig, layer: int) -> Mlp:
    """The MLP of layer `layer`, counted from 0 over the model."""

    def dense(ffn: int) -> DenseMlp:
        return DenseMlp(model.hidden, ffn, model.mlp, model.bias)

    moe = model.moe
    if moe is None or not model.is_moe_layer(layer):
        return dense(model.ffn)
    return Experts(moe, dense(moe.ffn), dense(moe.shared_width) if moe.shared_width else None)


def norm_elements(model: ModelConfig) -> int:
    """Parameters of one norm over the hidden size: weights, and biases for a layernorm with `bias`."""
    return model.hidden * (2 if model.norm == "layernorm" and model.bias else 1)


@lru_cache(maxsize=64)
def layer_specs(model: ModelConfig) -> tuple[LayerSpec, ...]:
    """The layers in order, without prediction layers; equal layers are one object."""
    specs: dict[LayerSpec, LayerSpec] = {}
    norms = norm_elements(model)
    layers = (
        LayerSpec(attention_spec(model, i), mlp_spec(model, i), norms, model.norm_position) for i in range(model.layers)
    )
    return tuple([specs.setdefault(spec, spec) for spec in layers])


@lru_cache(maxsize=64)
def layer_kinds(model: ModelConfig) -> tuple[int, ...]:
    """The number of each layer's spec among the distinct ones, in order of appearance."""
    numbers: dict[LayerSpec, int] = {}
    return tuple([numbers.setdefault(spec, len(numbers)) for spec in layer_specs(model)])


__all__ = [
    "Attention",
    "LayerSpec",
    "Matrix",
    "Mlp",
    "attention_spec",
    "layer_kinds",
    "layer_specs",
    "mlp_spec",
    "norm_elements",
]
