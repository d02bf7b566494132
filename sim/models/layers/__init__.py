"""A model as a list of layers, each an attention and an MLP. Training, serving, memory and counts all ask these.

>>> from sim.inputs.model_input import load_model
>>> specs = layer_specs(load_model("mixtral-8x7b"))
>>> len(specs), specs[0].parameters
(32, 1451270144)
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from msgspec import Struct
from msgspec.structs import asdict

from sim.core.program import Item, Program
from sim.inputs.model_config import AttentionKind
from sim.inputs.windows import Window, window_of
from sim.models.activations.kernels import is_gated
from sim.models.layer_inputs import LayerInputs, layer_inputs_of
from sim.models.layers.beside import Beside
from sim.models.layers.block_indexer import BlockIndexer
from sim.models.layers.compressed import CompressedAttention
from sim.models.layers.compressed_index import CompressedIndexer
from sim.models.layers.dense_mlp import DenseMlp
from sim.models.layers.experts import Experts
from sim.models.layers.grouped_query import GroupedQueryAttention
from sim.models.layers.indexer import Indexer
from sim.models.layers.latent import LatentAttention
from sim.models.layers.ngram_embedding import NgramEmbedding
from sim.models.layers.scans import scans
from sim.models.layers.selected_blocks import SelectedBlocksAttention
from sim.models.layers.selective_scan import SelectiveScan
from sim.models.layers.shared_keys import SharedKeysAttention
from sim.models.layers.short_convolution import ShortConvolution
from sim.models.layers.sparse_latent import SparseLatentAttention
from sim.models.layers.state_space import StateSpace
from sim.models.norm_gate import NormGate
from sim.models.serving.operators import (
    LayerFormats,
    ServedElements,
    ServingDims,
    served_add_norm,
    served_norm,
    served_spread,
    served_sum,
    served_sum_of_streams,
    sum_norms,
)
from sim.models.streams.sizes import Streams, streams_of

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig

Attention = (
    GroupedQueryAttention
    | LatentAttention
    | CompressedAttention
    | StateSpace
    | SelectiveScan
    | ShortConvolution
    | Beside
)
Mlp = DenseMlp | Experts
NormPosition = Literal["pre", "post", "both", "both_of_mlp"]
Branch = Literal["attention", "mlp"]
BRANCHES: tuple[Branch, ...] = ("attention", "mlp")


class LayerSpec(Struct, frozen=True):
    """One layer: norm, attention, residual sum, norm, MLP, residual sum; either may be missing. Equal layers are equal
    records.

    `norm_position`: pre (as said), post (the norms stand before the sums: OLMo 2), both (Gemma 2) or both for the MLP
    alone (A.X K1's experts).
    """

    attention: Attention | None
    mlp: Mlp | None
    norm_elements: int  # of one norm
    norm_position: NormPosition = "pre"
    parallel: Literal[False, True, "two_norms"] = False  # attention and MLP read one norm, or two of one input
    streams: Streams = Streams()
    ngrams: NgramEmbedding | None = None  # added to the streams before attention
    norm_gate: NormGate | None = None  # behind the norms before attention and before experts
    inputs: LayerInputs | None = None  # of a branch behind the MLP
    formats: LayerFormats | None = None  # of a served checkpoint, where they differ from its usual one

    def attention_dims(self, d: ServingDims) -> ServingDims:
        """A served rank's sizes with the format of attention's weights."""
        return d if self.formats is None else d.kept_as(self.formats.attention)

    def mlp_dims(self, d: ServingDims) -> ServingDims:
        """A served rank's sizes with the formats of the weights of the MLP, or of experts."""
        return d if self.formats is None else d.kept_as(self.formats.mlp)

    @property
    def norms(self) -> int:
        """Norms over the hidden size: one, or one on each side, of attention and MLP; one for both in parallel; none
        where streams have norms of their own."""
        if self.streams.gated:
            return 0
        if self.parallel is True:
            return 1
        behind = sum(self.norm_behind(branch) for branch in BRANCHES) if self.norm_position != "post" else 0
        return self.branches + behind

    def norm_behind(self, name: Branch) -> bool:
        """Tell whether a norm stands behind attention or the MLP, before the sum."""
        there = self.mlp is not None if name == "mlp" else self.attention is not None
        return there and (
            self.norm_position in ("post", "both") or (self.norm_position, name) == ("both_of_mlp", "mlp")
        )

    def gate_of(self, branch: Attention | Mlp | None) -> NormGate | None:
        """The gate behind the norm before attention or the MLP, if there is one."""
        return None if branch is None or isinstance(branch, DenseMlp) else self.norm_gate

    @property
    def gate_elements(self) -> int:
        """Weights of the gates behind norms."""
        gates = (self.gate_of(branch) for branch in (self.attention, self.mlp))
        return sum(gate.elements for gate in gates if gate is not None)

    @property
    def attention_parameters(self) -> int:
        """Projections, their biases and the norms inside the attention."""
        if self.attention is None:
            return 0
        return sum(m.parameters for m in self.attention.matrices()) + self.attention.other_parameters()

    @property
    def parameters(self) -> int:
        """All of the layer's parameters, experts included."""
        mlp = 0 if self.mlp is None else self.mlp.parameters
        ngrams = 0 if self.ngrams is None else self.ngrams.parameters
        norms = self.norms * self.norm_elements + self.gate_elements
        norms += 0 if self.inputs is None else self.inputs.branch_parameters
        return self.attention_parameters + mlp + norms + self.connection_parameters + ngrams

    @property
    def branches(self) -> int:
        """How many of attention and MLP the layer has."""
        return (self.attention is not None) + (self.mlp is not None)

    @property
    def connection_parameters(self) -> int:
        """Parameters of the hyper-connections of both branches."""
        return self.branches * self.streams.branch_parameters

    @property
    def active_elements(self) -> int:
        """Weights that one token is multiplied by."""
        attention = 0 if self.attention is None else sum(m.elements for m in self.attention.matrices())
        connections = self.branches * self.streams.branch_elements + self.gate_elements
        connections += 0 if self.inputs is None else self.inputs.branch_elements
        connections += 0 if self.ngrams is None else self.ngrams.matrix_elements
        return attention + connections + (0 if self.mlp is None else self.mlp.active_elements)

    def served_elements(self, d: ServingDims) -> ServedElements:
        """The layer's weights on one rank, counted as serving stores them."""
        found = ServedElements(0, 0, 0, 0) if self.mlp is None else self.mlp.served_elements(d)
        attention, rest = 0, found.rest
        in_fp32 = 2 if self.streams.in_fp32 else 1
        rest += self.norms * self.norm_elements + self.gate_elements + in_fp32 * self.connection_parameters
        if self.inputs is not None:
            rest += self.inputs.branch_parameters
        if self.ngrams is not None:
            rest += self.ngrams.matrix_elements + self.ngrams.served_rest(d.tp)
        if self.attention is not None:
            matrices = self.attention.matrices(d.tp)
            attention = sum(m.elements for m in matrices if not m.sixteen_bit)
            rest += sum(m.parameters for m in matrices) - attention + self.attention.other_parameters()
        return found._replace(attention=attention, rest=rest)

    def serve_routed(self, d: ServingDims, tokens: int) -> Program:
        """The part of `serve_tokens` that replicas share: their experts."""
        return () if self.mlp is None else self.mlp.routed(self.mlp_dims(d), tokens)

    def serve_exchange(self, d: ServingDims, tokens: int) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
        """The messages to experts on other ranks, and those back; empty where there are none."""
        return ((), ()) if self.mlp is None else self.mlp.exchange(d, tokens)

    def serve_tokens(self, d: ServingDims, tokens: int) -> Program:
        """All of the layer that depends on an iteration's number of tokens alone, be they prompts' or decodes'."""
        if self.streams.number > 1:
            return self._serve_streams(d, tokens)
        items: list[Item] = []
        plain = self.norm_position == "pre" and self.parallel is False
        if self.attention is not None:
            before = d.experts_sum_norms or isinstance(self.mlp, DenseMlp)  # the layer before ends alike
            summed = plain and before and sum_norms(d, tokens)
            items += [] if summed else [served_add_norm(d, "attention_norm", tokens)]
            items += _gated(d, "attention_norm", tokens, self.gate_of(self.attention))
            items += self.attention.serve(self.attention_dims(d), tokens)
            items += served_sum(d, "attention_out", tokens)
        if self.norm_position != "post":
            items += [served_norm(d, f"{name}_post_norm", tokens) for name in BRANCHES if self.norm_behind(name)]
        if self.mlp is not None:
            summed = plain and self.attention is not None and sum_norms(d, tokens)
            items += [] if summed or self.parallel is True else [served_add_norm(d, "mlp_norm", tokens)]
            items += _gated(d, "mlp_norm", tokens, self.gate_of(self.mlp))
            items += self.mlp.serve(self.mlp_dims(d), tokens)
            items += served_sum(d, "mlp_down", tokens)
        last = () if self.inputs is None else self.inputs.serve_branch(tokens, d.act, d.act_bytes)
        return (*items, *last)

    def _serve_streams(self, d: ServingDims, tokens: int) -> Program:
        items: list[Item] = [] if self.ngrams is None else [*self.ngrams.serve(d, tokens)]
        for name, out, branch, own in (
            ("attention", "attention_out", self.attention, self.attention_dims(d)),
            ("mlp", "mlp_down", self.mlp, self.mlp_dims(d)),
        ):
            if branch is not None:
                items += served_sum_of_streams(d, f"{name}_streams", tokens, self.streams, self.streams.weights)
                items += [*branch.serve(own, tokens), *served_sum(d, out, tokens)]
                items.append(served_spread(d, f"{name}_residual", tokens))
        return tuple(items)


def _gated(d: ServingDims, name: str, tokens: int, gate: NormGate | None) -> Program:
    return () if gate is None else gate.serve(d, name, tokens)


def attention_spec(model: ModelConfig, layer: int = 0) -> Attention | None:
    """The attention of layer `layer`, counted from 0 over the model."""
    kind = model.attention_kind(layer)
    if kind == "none":
        return None
    if kind == "state_space":
        return _state_space(model)
    if model.compressed_attention is not None:
        return _compressed(model, kind)
    attention = _attention(model, layer)
    if kind != "beside":
        return attention
    state_space = _state_space(model)
    assert isinstance(attention, GroupedQueryAttention)
    assert isinstance(state_space, StateSpace)
    return Beside(attention, state_space)


def _attention(model: ModelConfig, layer: int) -> GroupedQueryAttention | LatentAttention:
    c = model.mla
    if c is None:
        return _grouped(model, layer)
    ranks, widths = (c.q_lora_rank, c.kv_lora_rank), (c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim)
    x = model.indexer
    sizes = (model.hidden, model.heads, *ranks, *widths, model.attention_gate, model.sinks, _has_rope(model, layer))
    if x is None:
        return LatentAttention(*sizes)
    selects = model.attention_kind(layer) != "reused"
    return SparseLatentAttention(*sizes, indexer=Indexer(x.heads, x.head_dim, x.top_k), selects=selects)


def _has_rope(model: ModelConfig, layer: int) -> bool:
    """Tell whether rope rotates the queries and keys of a layer."""
    own = model.full_attention if model.attention_kind(layer) == "full" else None
    without = (own is not None and not own.rope) or (model.no_rope_every and (layer + 1) % model.no_rope_every == 0)
    return model.positions == "rope" and not without


def _grouped(model: ModelConfig, layer: int) -> GroupedQueryAttention:
    # one matrix in GPT-2's code, three in Llama's
    merged = model.merged_projections or not (is_gated(model.mlp) or model.separate_qkv)
    own, gate = model.full_attention if model.attention_kind(layer) == "full" else None, model.attention_gate
    assert gate != "latent", "refused by sim.inputs.rules.model"
    rope = _has_rope(model, layer)
    found = GroupedQueryAttention(
        model.hidden,
        model.heads if own is None or own.heads is None else own.heads,
        model.kv_heads if own is None or own.kv_heads is None else own.kv_heads,
        model.head_dim if own is None or own.head_dim is None else own.head_dim,
        values_are_keys=own is not None and own.values_are_keys,
        value_norm=model.value_norm,
        bias=model.biased_attention,
        out_bias=model.biased_attention_out,
        qkv_bias=model.qkv_bias,
        qk_norm=False if model.qk_norm == "l2" and not rope else model.qk_norm,
        qk_norm_over=model.qk_norm_over,
        norm_weights=model.norm_weights,
        sinks=model.sinks if own is None or own.sinks is None else own.sinks,
        v_head_dim=model.v_head_dim,
        gate=gate,
        softcap=model.attention_softcap is not None,
        rope_share=model.rope_share,
        scaled_rope=model.scaled_rope,
        rope=rope,
        projections=1 if merged else 3,
        window=window_of(model, layer),
    )
    if layer >= model.layers - model.shared_kv_layers:
        return SharedKeysAttention(**asdict(found))
    x = model.block_indexer
    if x is None or model.attention_kind(layer) != "selected":
        return found
    indexer = BlockIndexer(x.heads, x.head_dim, x.top_k, x.block, x.pools)
    return SelectedBlocksAttention(**asdict(found), indexer=indexer)


def _compressed(model: ModelConfig, kind: AttentionKind) -> CompressedAttention:
    c, x = model.compressed_attention, model.indexer
    assert c is not None
    assert model.window is not None
    sizes = (c.rope_head_dim, c.q_lora_rank, c.output_groups, c.output_rank, Window(model.window))
    rate = {"compressed": c.rate, "compressed_sparse": c.sparse_rate}.get(kind)
    indexed = x is not None and kind == "compressed_sparse"
    indexer = CompressedIndexer(x.heads, x.head_dim, x.top_k, c.sparse_rate) if x is not None and indexed else None
    return CompressedAttention(model.hidden, model.heads, model.head_dim, *sizes, rate, indexer)


def _state_space(model: ModelConfig) -> StateSpace | SelectiveScan | ShortConvolution:
    c = model.state_space
    assert c is not None
    if c.kind == "short_conv":
        return ShortConvolution(model.hidden, c.heads, c.conv_kernel, c.conv_bias, c.bias)
    if c.rank is not None:
        own = (c.conv_kernel, c.conv_bias, c.inner_norms, c.state_dtype)
        return SelectiveScan(model.hidden, c.heads * c.head_dim, c.state, c.rank, *own)
    sizes = (c.heads, c.head_dim, c.state, c.groups, c.conv_kernel, c.chunk)
    return StateSpace(model.hidden, scans()[c.kind], *sizes, c.conv_bias, c.bias, c.gated_norm, c.state_dtype)


def mlp_spec(model: ModelConfig, layer: int) -> Mlp | None:
    """The MLP of layer `layer`, counted from 0 over the model."""
    if model.mlp_kind(layer) == "none":
        return None

    def dense(ffn: int, activation: str = model.mlp, hidden: int = model.hidden) -> DenseMlp:
        return DenseMlp(hidden, ffn, activation, model.bias, model.merged_projections)

    moe = model.moe
    if moe is None or not model.is_moe_layer(layer):
        shared = layer >= model.layers - model.shared_kv_layers
        return dense(model.shared_kv_ffn or model.ffn if shared else model.ffn)
    one = dense(moe.ffn, moe.activation or model.mlp, moe.latent or model.hidden)
    return Experts(model.hidden, moe, one, dense(moe.shared_width) if moe.shared_width else None)


def ngrams_of(model: ModelConfig, layer: int) -> NgramEmbedding | None:
    """The embedding of n-grams of layer `layer`, counted from 0 over the model."""
    c = model.ngram_embedding
    if c is None or layer + 1 not in c.layers:
        return None
    rows = c.rows[c.layers.index(layer + 1)]
    return NgramEmbedding(streams_of(model), rows, c.heads, c.width, c.size, c.conv_kernel)


def norm_gate_of(model: ModelConfig) -> NormGate | None:
    """The gate behind norms, if the model has one."""
    return None if model.norm_gate_rank is None else NormGate(model.hidden, model.norm_gate_rank)


def norm_elements(model: ModelConfig) -> int:
    """Parameters of one norm over the hidden size."""
    return model.hidden * model.norm_vectors


def norm_position(model: ModelConfig, layer: int) -> NormPosition:
    """Where the norms of layer `layer`, counted from 0 over the model, stand."""
    if model.norm_position == "behind_experts":
        return "both_of_mlp" if model.mlp_kind(layer) == "experts" else "pre"
    if model.norm_position != "by_kind":
        return model.norm_position
    return "pre" if model.attention_kind(layer) == "state_space" else "post"


@lru_cache(maxsize=64)
def layer_specs(model: ModelConfig) -> tuple[LayerSpec, ...]:
    """The layers in order, without prediction layers; equal layers are one object."""
    specs: dict[LayerSpec, LayerSpec] = {}
    norms = norm_elements(model)
    blocks = (model.parallel_block, streams_of(model))
    gate, inputs = norm_gate_of(model), layer_inputs_of(model)
    layers = (
        LayerSpec(
            *(attention_spec(model, i), mlp_spec(model, i), norms, norm_position(model, i), *blocks),
            ngrams=ngrams_of(model, i),
            norm_gate=gate,
            inputs=inputs,
        )
        for i in range(model.layers)
    )
    return tuple([specs.setdefault(spec, spec) for spec in layers])


@lru_cache(maxsize=64)
def spec_counts(model: ModelConfig) -> dict[LayerSpec, int]:
    """The distinct layers in order of appearance, and how many of the model's layers each is."""
    return dict(Counter(layer_specs(model)))


@lru_cache(maxsize=64)
def layer_kinds(model: ModelConfig) -> tuple[int, ...]:
    """The number of each layer's spec among the distinct ones, in order of appearance."""
    numbers: dict[LayerSpec, int] = {}
    return tuple([numbers.setdefault(spec, len(numbers)) for spec in layer_specs(model)])
