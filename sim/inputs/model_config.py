"""The shape of a transformer, as a scenario's `model` says it."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from sim.core.dtypes import StorageDtype
from sim.core.quantization import PARTS, Part, Quantization
from sim.inputs.attention_config import (
    BlockIndexerConfig,
    CompressedAttentionConfig,
    FullAttentionConfig,
    IndexerConfig,
    MlaConfig,
)
from sim.inputs.embedding_config import LayerEmbeddingConfig, NgramEmbeddingConfig
from sim.inputs.input_source import OneOf, UserInput, as_tuple
from sim.variants.activations import ACTIVATIONS
from sim.variants.model_code import MODEL_CODE

Activation = Annotated[str, OneOf(ACTIVATIONS)]
Code = Annotated[str, OneOf(MODEL_CODE)]
Quantizations = Annotated[
    Quantization | Annotated[tuple[Quantization, ...], Field(min_length=1, max_length=10_000)],
    BeforeValidator(as_tuple),
]
MAX_POSITIONS = 100_000_000
MAX_LAYERS = 10_000


class Imbalance(UserInput):
    """Uneven routing: expert popularity falls as rank^-zipf, drawn with `seed`."""

    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    zipf: float = Field(default=1.0, ge=0, le=10)


def _imbalance_form(value: Any) -> str:
    return "<mapping>" if isinstance(value, (dict, Imbalance)) else "<name>"


class MoeConfig(UserInput):
    """Mixture of experts in every layer after the first `dense_layers`, or each `every`-th. `ffn`: inner size of one.

    `shared_experts` experts of the same size see every token, or one of `shared_ffn`; `shared_gate`: what they give is
    weighted by a number that each token gets (Qwen2-MoE). `router_fp32`: the router multiplies in fp32.
    `zero_experts`: further choices of the router that give a token itself (LongCat-Flash, arXiv 2509.01322).
    `activation`: of routed experts, where it is not the model's (Hunyuan 4). `latent`: numbers of a token that routed
    experts take and give, if a projection makes it narrower for them (Nemotron 3 Super, arXiv 2512.20856, section 2.2).
    `capacity_factor` null: no token is dropped; `pad_to_capacity`: experts with fewer are filled up to it. `groups`:
    experts are chosen among those of a token's `top_groups` best groups, and each copy is sent by itself;
    `max_nodes_per_token` limits the choice as well.
    """

    experts: int = Field(ge=1, le=100_000)
    top_k: int = Field(ge=1, le=100_000)
    ffn: int = Field(ge=1, le=10_000_000)
    shared_experts: int = Field(default=0, ge=0, le=1_000)
    shared_ffn: int | None = Field(default=None, ge=1, le=100_000_000)
    shared_gate: bool = False
    zero_experts: int = Field(default=0, ge=0, le=100_000)
    activation: Activation | None = None
    latent: int | None = Field(default=None, ge=1, le=10_000_000, description="null: hidden")
    router_bias: bool = False
    router_fp32: bool = False
    dense_layers: int = Field(default=0, ge=0, le=MAX_LAYERS)
    every: int = Field(default=1, ge=1, le=MAX_LAYERS)
    capacity_factor: float | None = Field(default=None, gt=0, le=1_000)
    pad_to_capacity: bool = False
    imbalance: Annotated[
        Annotated[Literal["balanced"], Tag("<name>")] | Annotated[Imbalance, Tag("<mapping>")],
        Discriminator(_imbalance_form),
    ] = "balanced"
    max_nodes_per_token: int | None = Field(default=None, ge=1, le=1_000_000)
    groups: int | None = Field(default=None, ge=1, le=100_000)
    top_groups: int | None = Field(default=None, ge=1, le=100_000)

    @property
    def chooses_groups(self) -> bool:
        """Tell whether a token's groups or nodes are chosen before its experts."""
        return self.groups is not None or self.max_nodes_per_token is not None

    @property
    def choices(self) -> int:
        """Experts that the router chooses from, those that compute nothing included."""
        return self.experts + self.zero_experts

    @property
    def copies(self) -> float:
        """Copies of a token that experts compute: `top_k`, less what falls to zero experts where all are as popular."""
        return self.top_k * self.experts / self.choices

    @property
    def shared_width(self) -> int:
        """Inner size of all shared experts together."""
        return self.ffn * self.shared_experts if self.shared_ffn is None else self.shared_ffn


class CheckpointModules(UserInput):
    """Parts of layers that a checkpoint keeps in another format than its usual one: one format, or one for each layer,
    repeated. `attention`: all matrices of attention or of a recurrent layer; `mlp`: of dense MLPs."""

    attention: Quantizations | None = None
    mlp: Quantizations | None = None
    shared_experts: Quantizations | None = None
    experts: Quantizations | None = None

    @property
    def formats(self) -> tuple[Quantization, ...]:
        """All of them."""
        given = [getattr(self, part) for part in PARTS]
        listed = [one if isinstance(one, tuple) else (one,) for one in given if one is not None]
        return tuple(dict.fromkeys(name for names in listed for name in names))

    def format_of(self, part: Part, layer: int) -> Quantization | None:
        """The format of a part of layer `layer` (from 0); None: the usual one."""
        found: Quantization | tuple[Quantization, ...] | None = getattr(self, part)
        return found[layer % len(found)] if isinstance(found, tuple) else found


class StateSpaceConfig(UserInput):
    """Layers with a state in place of keys and values: Mamba 2 (arXiv 2405.21060) and 1 (2312.00752), the gated
    delta rule (2412.06464), Kimi's with a decay a channel (2510.26692), lightning attention (2401.04658), LFM2's gated
    convolutions (2511.23404), whose `heads` are channels, with `head_dim` and `state` 1.

    A head turns `head_dim` numbers a token into as many, through a state of `state`·`head_dim`; `groups` of heads share
    what writes and reads it. A causal convolution of `conv_kernel` tokens comes before, a norm with a gate after it.
    `chunk`: tokens that are computed at once; `rank` (mamba1): of the matrix that makes steps, with `inner_norms`
    (Jamba) on steps, B and C. `state_dtype`: of states that serving keeps; null: as activations.
    """

    kind: Literal["mamba2", "mamba1", "gated_delta", "kda", "kda_whole", "lightning", "short_conv"] = "mamba2"
    heads: int = Field(ge=1, le=1_000_000)
    head_dim: int = Field(ge=1, le=65_536)
    state: int = Field(ge=1, le=65_536)
    groups: int = Field(default=1, ge=1, le=1_000_000)
    conv_kernel: int = Field(default=4, ge=0, le=1_024)
    conv_bias: bool = True
    chunk: int = Field(default=256, ge=1, le=65_536)
    bias: bool = False
    gated_norm: bool = True
    rank: int | None = Field(default=None, ge=1, le=1_000_000)
    inner_norms: bool = False
    state_dtype: StorageDtype | None = None


# Keys that real runs and emitted flags know. Any other key is a variation as soon as it is given.
_KNOWN = {
    *("layers", "hidden", "heads", "kv_heads", "mla", "head_dim", "ffn", "vocab", "norm", "bias", "qkv_bias"),
    *("tied_embeddings", "dropout", "positions", "max_positions", "trained_positions", "mtp_layers"),
    *("moe", "checkpoint_quantization", "checkpoint_cache", "checkpoint_modules", "checkpoint_group_size"),
    *("left_out", "unread", "program"),
}
_KNOWN_OF_EXPERTS = {
    *("experts", "top_k", "ffn", "shared_experts", "router_fp32", "dense_layers", "capacity_factor", "pad_to_capacity"),
    *("imbalance", "max_nodes_per_token", "groups", "top_groups"),
}
_KNOWN_VALUES = {
    "mlp": ("gelu", "swiglu", "relu2"),
    "attention_pattern": (("full",),),
    "qk_norm": (False, True),
}


def _variations(config: UserInput, known: set[str]) -> dict[str, object]:
    fields = type(config).model_fields
    values = {name: getattr(config, name) for name in fields if name not in known}
    return {k: v for k, v in values.items() if v not in _KNOWN_VALUES.get(k, (fields[k].get_default(),))}


def _head_dim(data: dict[str, Any]) -> int:
    mla = data.get("mla")
    if mla is not None:
        return int(mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    return max(1, int(data["hidden"] // data["heads"]))


AttentionKind = Literal[
    "full",
    "sliding",
    "chunked",
    "selected",
    "reused",
    "state_space",
    "beside",
    "compressed",
    "compressed_sparse",
    "none",
]
COMPRESSED = ("compressed", "compressed_sparse")
LOCAL = ("sliding", "chunked", *COMPRESSED)
STATEFUL = ("state_space", "beside")


def _attention_pattern(data: dict[str, Any]) -> tuple[AttentionKind, ...]:
    if data.get("window") is not None:
        return ("sliding",)
    return ("full",) if data.get("state_space") is None else ("state_space",)


def _written_once(pattern: tuple[AttentionKind, ...]) -> tuple[AttentionKind, ...]:
    """The shortest pattern that repeats to the same layers: [full, full] is [full]."""
    n = len(pattern)
    return next(pattern[:k] for k in range(1, n + 1) if n % k == 0 and pattern[:k] * (n // k) == pattern)


class ModelConfig(UserInput):
    """A decoder-only transformer. Sizes are whole, before any parallel split.

    `head_dim` is the size of a query or key head (with `mla`: its two parts together), `v_head_dim` that of a value
    head where it differs (MiMo V2).
    `bias`: linear layers and layernorm have biases; `norm_bias`, `attention_bias`: these differ in it (Falcon's layer
    norms, GPT-J's attention), `attention_out_bias`: its output projection alone does (GPT-Neo); `head_bias`: the output
    matrix has one too (Phi 2); `qkv_bias`: only the query, key and value projections (Qwen2); `norm_weights` false:
    norms only normalize (OLMo); `embedding_norm`: the embedding's result passes a norm (BLOOM); `qk_norm`: an RMS
    norm with `head_dim` weights on queries and on keys (Qwen3), or a layer norm (Persimmon; `by_head`: each head with
    weights of its own, Command R+), or without weights where they have rope (Llama 4's L2 norm), or over all heads at
    once (OLMo 2); `value_norm`: one without weights on values (Gemma 4). `norm_position`: before attention and MLP,
    after them (OLMo 2), both (Gemma 2), `by_kind`: after them in layers with attention, before them in layers with a
    state (OLMo Hybrid), or `behind_experts`: before them, and behind experts too (A.X K1). `dropout`: of what attention
    and MLP give; `attention_dropout`: of attention's probabilities, where it differs (OPT).
    `sinks`: a learned score of every query head that takes part of its softmax (gpt-oss). `no_rope_every`: every
    n-th layer has no rope.
    `attention_pattern` repeats over the layers: a query sees all keys before it, the last `window`, or those of its own
    chunk of `window` tokens (Llama 4), or the keys that a `block_indexer` selects (MiniMax M3); or the layer has a
    state (`state_space`), attention and a state `beside` it (Falcon-H1), or neither; or the query sees the last
    `window` and compressed keys before them (`compressed_attention`). `mlp_pattern` repeats over the layers too.
    `attention_gate`: a sigmoid of a second query projection multiplies the attention's result (Qwen3-Next), or one of
    each head (`per_head`: LFM3). `parallel_block`: attention and MLP read one norm, or (`two_norms`, GPT-NeoX) each its
    own norm of the same input, and both are added to the stream (Command R). `norm_in_fp32`: norms' weights multiply
    before the cast back (Gemma). `attention_softcap`, `logit_softcap`: scores and logits pass c·tanh(x / c) (Gemma 2).
    `merged_projections`: query, key and value are one matrix, gate and up another, in the model's own code (Phi 3);
    `separate_qkv`: they are three although the MLP has no gate (OPT), where GPT-2 has one. `code`: the family whose own
    code in Transformers computes the layers (`sim.variants.model_code`). `rope_share`: of a head's width, if it gets
    rope apart and is joined to the rest (GLM-4.5, Phi 3). `scaled_rope`: queries and keys with rope are multiplied by a
    factor other than 1 (YaRN, in gpt-oss). `hyper_connections`: the residual stream is so many streams (DeepSeek V4):
    attention and MLP read a sum of them, their result is added to each, and the streams are mixed, by weights that each
    token computes from its streams. `hyper_connection_kind`: they are not mixed (independent: Hunyuan 4), or a gate of
    each number, through matrices of rank `hyper_connection_rank`, takes the place of weights and norms (gated: Qwen 4).
    `shared_kv_layers`: so many last layers attend to keys and values of the last layer of their kind before them, and
    have an MLP of `shared_kv_ffn` (Gemma 4 E2B); `layer_embedding`: each layer adds an embedding of its own.
    `mtp_repeated`: all prediction modules are one, which runs `mtp_layers` times (Nemotron 3 Super).
    `norm_gate_rank`: behind norms before attention and before experts stands a gate of low rank (A.X K2).
    `max_positions` 0 stands for the workload's sequence length until a scenario fills it in. `trained_positions` is
    `max_position_embeddings` of the model's config.json, which no workload changes: serving engines go by it. Where it
    is left out, a table of learned positions whose size is stated says it.
    """

    layers: int = Field(ge=1, le=MAX_LAYERS)
    hidden: int = Field(ge=1, le=10_000_000)
    heads: int = Field(ge=1, le=1_000_000)
    kv_heads: int = Field(default_factory=lambda data: data["heads"], ge=1, le=1_000_000, description="null: heads")
    mla: MlaConfig | None = None
    indexer: IndexerConfig | None = None
    block_indexer: BlockIndexerConfig | None = None
    compressed_attention: CompressedAttentionConfig | None = None
    head_dim: int = Field(default_factory=_head_dim, ge=1, le=1_000_000, description="null: hidden / heads")
    v_head_dim: int | None = Field(default=None, ge=1, le=65_536, description="null: head_dim")
    ffn: int = Field(
        default_factory=lambda data: 4 * data["hidden"], ge=1, le=100_000_000, description="null: 4 * hidden"
    )
    vocab: int = Field(ge=1, le=100_000_000)
    mlp: Activation = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    bias: bool = True
    norm_bias: bool | None = Field(default=None, description="null: bias")
    attention_bias: bool | None = Field(default=None, description="null: bias")
    attention_out_bias: bool | None = Field(default=None, description="null: attention_bias")
    head_bias: bool = False
    qkv_bias: bool = False
    norm_weights: bool = True
    embedding_norm: bool = False
    qk_norm: Literal[False, True, "layernorm", "by_head", "l2"] = False
    qk_norm_over: Literal["head", "all_heads"] = "head"
    value_norm: bool = False
    norm_position: Literal["pre", "post", "both", "by_kind", "behind_experts"] = "pre"
    norm_in_fp32: bool = False
    norm_gate_rank: int | None = Field(default=None, ge=1, le=1_000_000)
    sinks: bool = False
    attention_softcap: float | None = Field(default=None, gt=0, le=1e6)
    logit_softcap: float | None = Field(default=None, gt=0, le=1e6)
    merged_projections: bool = False
    separate_qkv: bool = False
    code: Code | None = Field(default=None, description="null: as Llama's")
    tied_embeddings: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)
    attention_dropout: float | None = Field(default=None, ge=0, lt=1)
    positions: Literal["none", "learned", "rope"] = "none"
    rope_share: float | None = Field(default=None, gt=0, le=1)
    scaled_rope: bool = False
    no_rope_every: int | None = Field(default=None, ge=1, le=MAX_LAYERS)
    max_positions: int = Field(
        default=0, ge=1, le=MAX_POSITIONS, description="null: seq_len", json_schema_extra={"default": None}
    )
    trained_positions: int | None = Field(
        default=None, ge=1, le=MAX_POSITIONS, description="of the model's config.json; null: unknown"
    )
    window: int | None = Field(default=None, ge=1, le=100_000_000)
    full_attention: FullAttentionConfig | None = None
    state_space: StateSpaceConfig | None = None
    attention_pattern: Annotated[
        tuple[AttentionKind, ...], BeforeValidator(as_tuple), AfterValidator(_written_once)
    ] = Field(
        default_factory=_attention_pattern,
        min_length=1,
        max_length=10_000,
        description="null: sliding with window, else state_space with it, else full",
    )
    mlp_pattern: Annotated[tuple[Literal["dense", "experts", "none"], ...] | None, BeforeValidator(as_tuple)] = Field(
        default=None, min_length=1, max_length=10_000, description="null: as moe says"
    )
    attention_gate: Literal[False, True, "per_head", "latent"] = False
    hyper_connections: int = Field(default=1, ge=1, le=64)
    hyper_connection_kind: Literal["mixed", "independent", "gated"] = "mixed"
    hyper_connection_rank: int | None = Field(default=None, ge=1, le=1_000_000)
    ngram_embedding: NgramEmbeddingConfig | None = None
    layer_embedding: LayerEmbeddingConfig | None = None
    shared_kv_layers: int = Field(default=0, ge=0, le=MAX_LAYERS)
    shared_kv_ffn: int | None = Field(default=None, ge=1, le=100_000_000, description="null: ffn")
    parallel_block: Literal[False, True, "two_norms"] = False
    mtp_layers: int = Field(default=0, ge=0, le=1_000)
    mtp_repeated: bool = False
    moe: MoeConfig | None = None
    checkpoint_quantization: Quantization = Field(
        default="none", description="how the published weights are stored, which serving engines go by"
    )
    checkpoint_cache: Literal["fp8"] | None = Field(
        default=None,
        description="how the checkpoint keeps keys and values, which TensorRT-LLM and vLLM since 0.14 go by",
    )
    checkpoint_modules: CheckpointModules | None = None
    checkpoint_group_size: int | None = Field(
        default=None, ge=1, le=1_000_000, description="weights that share a 16-bit scale in int4_weight_only; null: 128"
    )
    left_out: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = Field(
        default=(), max_length=100, description="parts of the model's config.json that are not simulated"
    )
    unread: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = Field(
        default=(), max_length=10_000, description="keys of the model's config.json that nothing reads"
    )
    program: str | None = Field(default=None, description="a captured program, which takes the place of all other keys")

    @property
    def variations(self) -> dict[str, object]:
        """Keys that make layers unlike those of GPT, Llama and DeepSeek: real runs and emitted flags lack them."""
        of_experts = {} if self.moe is None else _variations(self.moe, _KNOWN_OF_EXPERTS)
        return _variations(self, _KNOWN) | {f"moe.{key}": value for key, value in of_experts.items()}

    @property
    def norm_vectors(self) -> int:
        """Vectors of `hidden` numbers that one norm learns: weights, and biases of a layernorm."""
        biased = self.bias if self.norm_bias is None else self.norm_bias
        return int(self.norm_weights) + (self.norm == "layernorm" and biased)

    @property
    def biased_attention(self) -> bool:
        """Tell whether all projections of attention have biases."""
        return self.bias if self.attention_bias is None else self.attention_bias

    @property
    def biased_attention_out(self) -> bool:
        """Tell whether the output projection of attention has biases."""
        return self.biased_attention if self.attention_out_bias is None else self.attention_out_bias

    @property
    def longest(self) -> int:
        """Positions that the model was made for, whatever it is used with; 0 where that is unknown."""
        return self.trained_positions or 0

    def padded_vocab(self, tp: int, multiple: int | None = None) -> int:
        """Vocabulary entries after padding to a multiple of 128·tp, as Megatron-LM does, or to another."""
        multiple = multiple or 128 * tp
        return -(-self.vocab // multiple) * multiple

    def is_moe_layer(self, layer: int) -> bool:
        """Tell whether transformer layer `layer` (from 0) has experts in place of a dense MLP."""
        return self.mlp_kind(layer) == "experts"

    def mlp_kind(self, layer: int) -> Literal["dense", "experts", "none"]:
        """Return the kind of MLP of layer `layer` (from 0)."""
        if self.mlp_pattern is not None:
            return self.mlp_pattern[layer % len(self.mlp_pattern)]
        moe = self.moe
        routed = moe is not None and layer >= moe.dense_layers and (layer + 1) % moe.every == 0
        return "experts" if routed else "dense"

    def attention_kind(self, layer: int) -> AttentionKind:
        """Return what kind of attention layer `layer` (from 0) has."""
        return self.attention_pattern[layer % len(self.attention_pattern)]

    @property
    def may_have_experts(self) -> bool:
        """Tell whether parameters may be experts': a captured program does not say."""
        return self.moe is not None or self.program is not None

    @property
    def has_dense_layers(self) -> bool:
        """Tell whether any layer has a dense MLP of `ffn`."""
        return any(self.mlp_kind(layer) == "dense" for layer in range(self.layers))
