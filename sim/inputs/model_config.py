"""The shape of a transformer, as a scenario's `model` says it, and its exact number of parameters."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Discriminator, Field, Tag

from sim.inputs.input_source import Written


class Imbalance(Written):
    """Uneven routing: expert popularity falls as rank^-zipf, drawn with `seed`."""

    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    zipf: float = Field(default=1.0, ge=0, le=10)


def _imbalance_form(value: Any) -> str:
    return "<mapping>" if isinstance(value, (dict, Imbalance)) else "<name>"


class MoeConfig(Written):
    """Mixture of experts in every layer after the first `dense_layers`. `ffn`: inner size of one expert.

    `shared_experts` experts of the same size see every token. `capacity_factor` null: no token is dropped.
    """

    experts: int = Field(ge=1, le=100_000)
    top_k: int = Field(ge=1, le=100_000)
    ffn: int = Field(ge=1, le=10_000_000)
    shared_experts: int = Field(default=0, ge=0, le=1_000)
    dense_layers: int = Field(default=0, ge=0, le=10_000)
    capacity_factor: float | None = Field(default=None, gt=0, le=1_000)
    imbalance: Annotated[
        Annotated[Literal["balanced"], Tag("<name>")] | Annotated[Imbalance, Tag("<mapping>")],
        Discriminator(_imbalance_form),
    ] = "balanced"
    max_nodes_per_token: int | None = Field(default=None, ge=1, le=1_000_000)


class MlaConfig(Written):
    """Multi-head latent attention (arXiv 2405.04434). `q_lora_rank` null: queries are not compressed."""

    q_lora_rank: int | None = Field(default=None, ge=1, le=1_000_000)
    kv_lora_rank: int = Field(ge=1, le=1_000_000)
    qk_nope_head_dim: int = Field(ge=1, le=65_536)
    qk_rope_head_dim: int = Field(ge=1, le=65_536)
    v_head_dim: int = Field(ge=1, le=65_536)


def _head_dim(data: dict[str, Any]) -> int:
    mla = data.get("mla")
    if mla is not None:
        return int(mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    return max(1, int(data["hidden"] // data["heads"]))


class ModelConfig(Written):
    """A decoder-only transformer. Sizes are whole, before any parallel split.

    `head_dim` is the size of a query or key head (with `mla`: its two parts together).
    `bias`: linear layers and layernorm have biases; `qkv_bias`: only the query, key and value projections
    (Qwen2); `qk_norm`: an RMS norm with `head_dim` weights on queries and on keys (Qwen3).
    `max_positions` 0 stands for the workload's sequence length until a scenario fills it in.
    """

    layers: int = Field(ge=1, le=10_000)
    hidden: int = Field(ge=1, le=10_000_000)
    heads: int = Field(ge=1, le=1_000_000)
    kv_heads: int = Field(default_factory=lambda data: data["heads"], ge=1, le=1_000_000, description="null: heads")
    mla: MlaConfig | None = None
    head_dim: int = Field(default_factory=_head_dim, ge=1, le=1_000_000, description="null: hidden / heads")
    ffn: int = Field(
        default_factory=lambda data: 4 * data["hidden"], ge=1, le=100_000_000, description="null: 4 * hidden"
    )
    vocab: int = Field(ge=1, le=100_000_000)
    mlp: Literal["gelu", "swiglu", "relu2"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    bias: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)
    positions: Literal["none", "learned", "rope"] = "none"
    max_positions: int = Field(
        default=0, ge=1, le=100_000_000, description="null: seq_len", json_schema_extra={"default": None}
    )
    mtp_layers: int = Field(default=0, ge=0, le=1_000)
    moe: MoeConfig | None = None

    def padded_vocab(self, tp: int) -> int:
        """Vocabulary entries after padding to a multiple of 128·tp, as Megatron-LM does."""
        multiple = 128 * tp
        return -(-self.vocab // multiple) * multiple

    def is_moe_layer(self, layer: int) -> bool:
        """Whether transformer layer `layer` (from 0) has experts in place of a dense MLP."""
        return self.moe is not None and layer >= self.moe.dense_layers

    @property
    def moe_layers(self) -> int:
        """How many of the layers have experts (prediction layers not counted)."""
        return 0 if self.moe is None else max(0, self.layers - self.moe.dense_layers)


class ParameterCount(NamedTuple):
    """Numbers of parameters with the vocabulary unpadded.

    `total` is the sum of embedding, positions, head, attention, mlp, router, shared_experts, experts and
    norms: the main model. `active` is what one token uses of it. `mtp` stands apart (multi-token-prediction
    modules, without the embedding and head that they share with the main model). Not counted: load-balancing
    biases of routers (DeepSeek-V3 keeps one per expert, which no gradient trains).
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
    mtp: int


def attention_parameters(model: ModelConfig) -> int:
    """Parameters of one layer's attention: projections, their biases, inner norms; not its input norm."""
    h = model.hidden
    if model.mla is not None:
        return _mla_parameters(model, model.mla)
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    count = h * (queries + 2 * keys) + queries * h
    if model.bias or model.qkv_bias:
        count += queries + 2 * keys
    if model.bias:
        count += h
    return count + (2 * model.head_dim if model.qk_norm else 0)


def _mla_parameters(model: ModelConfig, mla: MlaConfig) -> int:
    """DeepSeek-V2 (arXiv 2405.04434), section 2.1: down- and up-projections, an RMS norm on each latent."""
    h, heads = model.hidden, model.heads
    query_out = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    rank = mla.q_lora_rank
    query = h * query_out if rank is None else h * rank + rank + rank * query_out
    latent = h * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank
    up = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return query + latent + up + heads * mla.v_head_dim * h


def mlp_parameters(model: ModelConfig, ffn: int) -> int:
    """Parameters of one MLP (or expert) of inner size `ffn`: two matrices, three for swiglu, biases."""
    inner = 2 * ffn if model.mlp == "swiglu" else ffn
    return model.hidden * (inner + ffn) + (inner + model.hidden if model.bias else 0)


def norm_parameters(model: ModelConfig) -> int:
    """Parameters of one norm over the hidden size: weights, and biases for a layernorm with `bias`."""
    return model.hidden * (2 if model.norm == "layernorm" and model.bias else 1)


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Exact parameter counts of a model, before padding and sharding.

    For a GPT (gelu, layernorm, biases, tied embeddings, no position table) the total is
    N = h·v + L·(12h² + 13h) + 2h.

    >>> gpt = ModelConfig(layers=12, hidden=768, heads=12, vocab=50257, tied_embeddings=True)
    >>> count_parameters(gpt).total == 768 * 50257 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768
    True
    """
    moe, sparse = model.moe, model.moe_layers
    norm, attention = norm_parameters(model), attention_parameters(model)
    embedding = model.vocab * model.hidden
    expert = mlp_parameters(model, moe.ffn) if moe else 0
    per_layer = {
        "router": model.hidden * moe.experts if moe else 0,
        "shared_experts": mlp_parameters(model, moe.ffn * moe.shared_experts) if moe and moe.shared_experts else 0,
        "experts": expert * moe.experts if moe else 0,
    }
    parts = {
        "embedding": embedding,
        "positions": model.max_positions * model.hidden if model.positions == "learned" else 0,
        "head": 0 if model.tied_embeddings else embedding,
        "attention": model.layers * attention,
        "mlp": (model.layers - sparse) * mlp_parameters(model, model.ffn),
        **{name: sparse * count for name, count in per_layer.items()},
        "norms": (2 * model.layers + 1) * norm,
    }
    total = sum(parts.values())
    idle = sparse * expert * max(0, moe.experts - moe.top_k) if moe else 0
    # A prediction module (arXiv 2412.19437, 2.2): a layer, two input norms, a 2h -> h matrix, an output norm.
    mlp = sum(per_layer.values()) if moe else mlp_parameters(model, model.ffn)
    module = attention + mlp + 2 * norm + 2 * model.hidden**2 + 3 * norm
    return ParameterCount(
        total=total,
        active=total - idle,
        **parts,
        mtp=model.mtp_layers * module,
    )
