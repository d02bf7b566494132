"""Rules between the keys of a model, whatever workload it is used for.

A rule yields the problems that it finds: the key, and what is wrong with its value. The first of all is told, so a rule
may take for granted what those before it hold.
"""

from __future__ import annotations

from sim.inputs.input_source import Problems, Source, raise_first, show
from sim.inputs.model_config import COMPRESSED, LOCAL, STATEFUL, ModelConfig, StateSpaceConfig
from sim.inputs.yaml_input import KeyPath

# What other kinds of attention have, each as its default.
_NOT_BESIDE_COMPRESSED = (
    *("mla", "full_attention", "v_head_dim", "attention_gate", "qkv_bias", "qk_norm", "value_norm"),
    *("attention_softcap", "rope_share", "scaled_rope", "no_rope_every", "state_space"),
)
# What latent attention does not have, or has without being told.
_NOT_OF_LATENTS = {
    "qk_norm": "has norms of both latents, and no others",
    "value_norm": "has norms of both latents, and no others",
    "qkv_bias": "has no biases",
    "separate_qkv": "has matrices of its own",
    "rope_share": "turns mla.qk_rope_head_dim of a head",
}
_OF_ATTENTION = (
    *("v_head_dim", "attention_gate", "attention_softcap", "qkv_bias", "qk_norm", "value_norm", "sinks"),
    *("separate_qkv", "rope_share", "scaled_rope", "no_rope_every"),
)


def check_model(model: ModelConfig, source: Source, path: KeyPath) -> None:
    """Raise InputError for the first rule broken; `path`: of the model in its scenario."""
    for rule in (
        _heads,
        _latent_attention,
        _positions,
        _compressed_attention,
        _block_indexer,
        _streams,
        _ngram_embedding,
        _shared_keys,
        _window,
        _full_attention,
        _state_space,
        _mlp_pattern,
        _layers,
        _norms_and_biases,
        _experts,
    ):
        raise_first(rule(model), source, path)


def _heads(m: ModelConfig) -> Problems:
    if "head_dim" not in m.model_fields_set and m.mla is None and m.hidden % m.heads:
        yield ("heads",), f"found {m.heads}; must divide hidden ({m.hidden}), or give head_dim"
    if m.heads % m.kv_heads:
        yield ("kv_heads",), f"found {m.kv_heads}; must divide heads ({m.heads})"


def _latent_attention(m: ModelConfig) -> Problems:
    latent_queries = m.compressed_attention is not None or (m.mla is not None and m.mla.q_lora_rank is not None)
    if m.indexer is not None and not latent_queries:
        yield ("indexer",), "found an indexer; its queries come from mla.q_lora_rank: give that"
    yield from _reused(m)
    if m.mla is None:
        if m.attention_gate == "latent":
            yield ("attention_gate",), "found 'latent'; such gates come from a query's latent: needs model.mla"
        return
    if m.kv_heads != m.heads:
        yield ("kv_heads",), f"found {m.kv_heads}; with mla every head has its own: {m.heads}"
    head_dim = m.mla.qk_nope_head_dim + m.mla.qk_rope_head_dim
    if m.head_dim != head_dim:
        why = f"with mla it is qk_nope_head_dim + qk_rope_head_dim = {head_dim}"
        yield ("head_dim",), f"found {m.head_dim}; {why}"
    if m.mla.qk_rope_head_dim % 2:
        why = "must be even: positions turn pairs of numbers"
        yield ("mla", "qk_rope_head_dim"), f"found {m.mla.qk_rope_head_dim}; {why}"
    if m.v_head_dim is not None:
        yield ("v_head_dim",), f"found {m.v_head_dim}; with mla it is mla.v_head_dim: leave it out"
    if m.biased_attention and not m.bias:
        yield ("attention_bias",), "found true; latent attention (mla) has none"
    if m.attention_out_bias and not m.bias:
        yield ("attention_out_bias",), "found true; latent attention (mla) has none"
    if m.attention_gate == "latent" and m.mla.q_lora_rank is None:
        yield ("attention_gate",), "found 'latent'; such gates come from mla.q_lora_rank: give that"
    if m.sinks and m.indexer is None:
        yield ("sinks",), "found true; latent attention (mla) has them with model.indexer alone"
    if m.scaled_rope:
        yield ("scaled_rope",), "found true; latent attention (mla) scales its scores instead: leave it out"
    for key, why in _NOT_OF_LATENTS.items():
        if (given := getattr(m, key)) != ModelConfig.model_fields[key].get_default():
            yield (key,), f"found {show(given)}; latent attention (mla) {why}: leave it out"
    if "beside" in m.attention_pattern:
        yield ("attention_pattern",), "found 'beside'; mla is not simulated beside a state space"
    if m.window is not None:
        yield ("window",), f"found {m.window}; latent attention (mla) sees all keys: null"


def _positions(m: ModelConfig) -> Problems:
    """Return what is said of rope where nothing turns, or of attention where no layer has any."""
    if m.program is None and {*m.attention_pattern} <= {"state_space", "none"}:
        for key in _OF_ATTENTION:
            if (given := getattr(m, key)) != ModelConfig.model_fields[key].get_default():
                yield (key,), f"found {show(given)}; no layer has attention (model.attention_pattern): leave it out"
    for key in ("rope_share", "scaled_rope", "no_rope_every"):
        if (given := getattr(m, key)) and m.positions != "rope":
            yield (key,), f"found {show(given)}; needs positions: rope, found {m.positions}"
    if m.qk_norm == "l2" and m.positions != "rope":
        why = f"a norm of queries and keys with rope; needs positions: rope, found {m.positions}"
        yield ("qk_norm",), f"found 'l2', {why}"


def _reused(m: ModelConfig) -> Problems:
    """Return what layers need that attend to the keys that an earlier layer's indexer selected."""
    if "reused" not in m.attention_pattern:
        return
    if m.mla is None or m.indexer is None:
        yield ("attention_pattern",), "found 'reused'; needs model.mla and model.indexer"
    if m.attention_pattern[0] == "reused":
        yield ("attention_pattern",), "found 'reused' first; the first layer has no earlier one: full"
    if m.mtp_layers:
        yield ("mtp_layers",), f"found {m.mtp_layers}; not simulated with layers of kind reused: 0"


def _compressed_attention(m: ModelConfig) -> Problems:
    own, kinds = m.compressed_attention, {*m.attention_pattern}
    if own is None:
        if found := kinds & {*COMPRESSED}:
            yield ("attention_pattern",), f"found {sorted(found)}; needs model.compressed_attention"
        return
    if not kinds <= {"sliding", *COMPRESSED}:
        why = f"with compressed_attention each layer is one of {', '.join(('sliding', *COMPRESSED))}"
        yield ("attention_pattern",), f"found {list(m.attention_pattern)}; {why}"
    if ("compressed_sparse" in kinds) != (m.indexer is not None):
        why = "model.indexer and layers of kind compressed_sparse need each other"
        yield ("attention_pattern",), f"found {list(m.attention_pattern)}; {why}"
    if m.kv_heads != 1:
        yield ("kv_heads",), f"found {m.kv_heads}; with compressed_attention all heads read one: 1"
    if m.heads % own.output_groups:
        why = f"must divide heads ({m.heads})"
        yield ("compressed_attention", "output_groups"), f"found {own.output_groups}; {why}"
    if own.rope_head_dim > m.head_dim or own.rope_head_dim % 2:
        why = f"must be even and at most head_dim ({m.head_dim})"
        yield ("compressed_attention", "rope_head_dim"), f"found {own.rope_head_dim}; {why}"
    if m.biased_attention and not m.bias:
        yield ("attention_bias",), "found true; compressed attention has none"
    for key in _NOT_BESIDE_COMPRESSED:
        given, off = getattr(m, key), type(m).model_fields[key].get_default()
        if given != off:
            yield (key,), f"found {show(given)}; not simulated with compressed_attention: leave it out"


def _block_indexer(m: ModelConfig) -> Problems:
    own, kinds = m.block_indexer, {*m.attention_pattern}
    if ("selected" in kinds) != (own is not None):
        why = "model.block_indexer and layers of kind selected need each other"
        yield ("attention_pattern",), f"found {list(m.attention_pattern)}; {why}"
    if own is None:
        return
    for key in ("mla", "compressed_attention", "indexer", "window"):
        if getattr(m, key) is not None:
            yield (key,), "found beside block_indexer, which selects keys of grouped queries without a window: null"
    if "beside" in kinds:
        yield ("attention_pattern",), "found 'beside'; a state is not simulated beside selected keys"
    if own.top_k % own.block:
        yield ("block_indexer", "top_k"), f"found {own.top_k}; must be a multiple of block ({own.block})"
    if own.pools == "scores" and m.kv_heads % own.heads:
        why = f"each head chooses for whole groups of queries: must divide kv_heads ({m.kv_heads})"
        yield ("block_indexer", "heads"), f"found {own.heads}; {why}"


def _streams(m: ModelConfig) -> Problems:
    if m.hyper_connections > 1 and (m.parallel_block or m.norm_position != "pre"):
        why = "layers with hyper-connections have a norm before attention and one before the MLP"
        yield ("hyper_connections",), f"found {m.hyper_connections}; {why}: set norm_position to pre"
    gated = m.hyper_connection_kind == "gated"
    if m.hyper_connections == 1 and m.hyper_connection_kind != "mixed":
        why = f"found {show(m.hyper_connection_kind)}; needs hyper_connections above 1"
        yield ("hyper_connection_kind",), why
    if gated != (m.hyper_connection_rank is not None):
        why = "kind gated and the rank of its matrices need each other"
        yield ("hyper_connection_rank",), f"found {show(m.hyper_connection_rank)}; {why}"
    if gated and m.mtp_layers:
        yield ("mtp_layers",), f"found {m.mtp_layers}; prediction modules of gated streams are not simulated: 0"


def _ngram_embedding(m: ModelConfig) -> Problems:
    own = m.ngram_embedding
    if own is None:
        return
    if m.hyper_connections == 1:
        yield ("ngram_embedding",), "found a mapping; is added to several streams: needs hyper_connections above 1"
    if list(own.layers) != sorted({*own.layers}) or own.layers[-1] > m.layers:
        why = f"must rise, from 1 to at most model.layers ({m.layers})"
        yield ("ngram_embedding", "layers"), f"found {list(own.layers)}; {why}"
    if len(own.rows) != len(own.layers):
        why = f"must have one number for each of its layers ({len(own.layers)})"
        yield ("ngram_embedding", "rows"), f"found {list(own.rows)}; {why}"
    if own.width % own.heads:
        yield ("ngram_embedding", "width"), f"found {own.width}; heads ({own.heads}) must divide it"


def _shared_keys(m: ModelConfig) -> Problems:
    n = m.shared_kv_layers
    if m.shared_kv_ffn is not None and not n:
        yield ("shared_kv_ffn",), f"found {m.shared_kv_ffn}; needs shared_kv_layers"
    if m.layer_embedding is not None and (m.hyper_connections > 1 or m.parallel_block or m.mtp_layers):
        why = "not simulated with hyper_connections, parallel_block or mtp_layers"
        yield ("layer_embedding",), f"found a mapping; {why}"
    if not n:
        return
    kinds = [m.attention_kind(i) for i in range(m.layers)]
    own, found = {*kinds[: max(0, m.layers - n)]}, {*kinds[max(0, m.layers - n) :]}
    if not found <= own:
        why = f"layers of kind {', '.join(sorted(found - own))} have no earlier one of their kind with keys of its own"
        yield ("shared_kv_layers",), f"found {n}; {why}"
    if not found <= {"full", "sliding", "chunked"} or m.mla is not None:
        yield ("shared_kv_layers",), f"found {n}; simulated for grouped queries of kind full, sliding or chunked: 0"
    for key in ("attention_gate", "mtp_layers", "parallel_block"):
        if getattr(m, key):
            yield (key,), f"found {show(getattr(m, key))}; not simulated with shared_kv_layers: leave it out"
    if m.qk_norm_over != "head" or m.qk_norm == "layernorm":
        yield ("qk_norm",), "with shared_kv_layers only RMS norms of each head are simulated: true, over head"


def _window(m: ModelConfig) -> Problems:
    local = any(kind in LOCAL for kind in m.attention_pattern)
    if local != (m.window is not None):
        why = "needs model.window" if local else "with model.window some layer must be sliding or chunked"
        yield ("attention_pattern",), f"found {list(m.attention_pattern)}; {why}"


def _full_attention(m: ModelConfig) -> Problems:
    own = m.full_attention
    if own is None:
        return
    if m.window is None or "full" not in m.attention_pattern:
        why = "is for layers of kind full beside such with windows: give model.window and model.attention_pattern"
        yield ("full_attention",), f"found a mapping; {why}"
    heads, kv_heads = own.heads or m.heads, own.kv_heads or m.kv_heads
    if own.heads is not None and own.kv_heads is None and heads % kv_heads:
        yield ("full_attention", "heads"), f"found {heads}; kv_heads ({kv_heads}) must divide it"
    if own.kv_heads is not None and heads % kv_heads:
        yield ("full_attention", "kv_heads"), f"found {kv_heads}; must divide heads ({heads})"
    if not own.rope and m.positions != "rope":
        yield ("full_attention", "rope"), f"found false; needs positions: rope, found {m.positions}"
    if own.values_are_keys and m.merged_projections:
        yield (
            ("full_attention", "values_are_keys"),
            "found true; with merged_projections values have weights of their own",
        )


def _state_space(m: ModelConfig) -> Problems:
    states = m.state_space
    stateful = any(kind in STATEFUL for kind in m.attention_pattern)
    if stateful and states is None:
        yield ("attention_pattern",), f"found {list(m.attention_pattern)}; needs model.state_space"
    if states is None:
        return
    if not stateful:
        why = "with model.state_space some layer must be state_space or beside"
        yield ("attention_pattern",), f"found {list(m.attention_pattern)}; {why}"
    if states.heads % states.groups:
        yield ("state_space", "groups"), f"found {states.groups}; must divide heads ({states.heads})"
    if (states.kind == "mamba1") != (states.rank is not None):
        why = "needs model.state_space.rank" if states.rank is None else "model.state_space.rank is for mamba1 only"
        yield ("state_space", "kind"), f"found {states.kind}; {why}"
    if (states.rank is not None or states.kind == "short_conv") and "beside" in m.attention_pattern:
        yield ("attention_pattern",), f"found 'beside'; {states.kind} is not simulated beside attention"
    if states.inner_norms and states.kind != "mamba1":
        yield ("state_space", "inner_norms"), f"found true; is for mamba1 only, found {states.kind}"
    if states.kind == "short_conv":
        yield from _short_convolution(states)


def _short_convolution(states: StateSpaceConfig) -> Problems:
    """Refuse what a convolution of each channel by itself does not have."""
    for key in ("head_dim", "state"):
        if (found := getattr(states, key)) != 1:
            yield ("state_space", key), f"found {found}; short_conv has channels (state_space.heads) alone: 1"
    if states.conv_kernel < 1:
        yield ("state_space", "conv_kernel"), f"found {states.conv_kernel}; short_conv needs at least 1"
    if states.state_dtype is not None:
        why = "short_conv keeps inputs of its convolution alone, as activations: null"
        yield ("state_space", "state_dtype"), f"found {show(states.state_dtype)}; {why}"


def _mlp_pattern(m: ModelConfig) -> Problems:
    if m.mlp_pattern is None:
        return
    routed = "experts" in m.mlp_pattern
    if routed != (m.moe is not None):
        why = "needs model.moe" if routed else "with model.moe some layer must have experts"
        yield ("mlp_pattern",), f"found {list(m.mlp_pattern)}; {why}"
    if m.moe is not None and (m.moe.dense_layers or m.moe.every > 1):
        yield ("mlp_pattern",), "found beside moe.dense_layers or moe.every; one of them says it"


def _layers(m: ModelConfig) -> Problems:
    """Return what layers are made of, each an attention and an MLP, of which one may be missing."""
    kinds = [(m.attention_kind(i), m.mlp_kind(i)) for i in range(m.layers)]
    whole = [attention not in ("none", "state_space") and mlp != "none" for attention, mlp in kinds]
    apart = all("none" in kind for kind in kinds)
    if ("none", "none") in kinds:
        yield ("mlp_pattern",), "found a layer with neither attention nor MLP"
    block = f"found {show(m.parallel_block)}"
    if m.parallel_block and not all(whole):
        yield ("parallel_block",), f"{block}; needs attention and an MLP in every layer"
    if m.parallel_block and m.norm_position != "pre":
        yield ("parallel_block",), f"{block}; needs norm_position pre, found {m.norm_position}"
    if m.norm_gate_rank is not None:
        for key, found, allowed in (
            ("norm_position", m.norm_position, "pre"),
            ("parallel_block", m.parallel_block, False),
            ("hyper_connections", m.hyper_connections, 1),
            ("mtp_layers", m.mtp_layers, 0),
        ):
            if found != allowed:
                yield (key,), f"found {show(found)}; with norm_gate_rank only {show(allowed)} is simulated"
    if m.norm_position == "by_kind" and m.state_space is None:
        yield ("norm_position",), "found 'by_kind'; needs layers with a state (model.state_space)"
    if m.norm_position == "behind_experts" and m.moe is None:
        yield ("norm_position",), "found 'behind_experts'; needs experts (model.moe)"
    attends, computes = (
        any(kind not in ("none", "state_space") for kind, _ in kinds),
        any(k != "none" for _, k in kinds),
    )
    if m.mtp_layers and not (whole[-1] or (apart and attends and computes)):
        why = "the last layer must have attention and an MLP, or each layer be one of both"
        yield ("mtp_layers",), f"found {m.mtp_layers}; {why}"
    if m.mtp_repeated and m.mtp_layers < 2:
        yield ("mtp_repeated",), f"found true; needs mtp_layers of 2 or more, found {m.mtp_layers}"


def _norms_and_biases(m: ModelConfig) -> Problems:
    """Return what is wrong with norms of queries and keys, and with biases and matrices beside others."""
    if m.head_bias and m.tied_embeddings:
        yield ("head_bias",), "found true; an output matrix that is the embedding's (tied_embeddings) has none"
    if m.qk_norm_over != "head" and not m.qk_norm:
        yield ("qk_norm_over",), f"found {show(m.qk_norm_over)}; needs qk_norm: true"
    if m.qk_norm in ("layernorm", "by_head") and (m.norm != "layernorm" or m.qk_norm_over != "head"):
        why = f"needs norm: layernorm and qk_norm_over: head, found {m.norm} and {m.qk_norm_over}"
        yield ("qk_norm",), f"found {show(m.qk_norm)}; {why}"
    if m.norm_bias and m.norm == "rmsnorm":
        yield ("norm_bias",), "found true; an RMS norm has no bias: leave it out, or set norm to layernorm"
    if m.separate_qkv and m.merged_projections:
        yield ("separate_qkv",), "found true beside merged_projections, one matrix for all three; give one of them"


def _experts(m: ModelConfig) -> Problems:
    moe = m.moe
    if moe is None:
        return
    if moe.shared_ffn and moe.shared_experts:
        yield ("moe", "shared_ffn"), f"found {moe.shared_ffn}; give it or shared_experts, not both"
    if moe.shared_gate and not moe.shared_width:
        yield ("moe", "shared_gate"), "found true; needs shared_experts or shared_ffn"
    if moe.pad_to_capacity and moe.capacity_factor is None:
        yield ("moe", "pad_to_capacity"), "found true without capacity_factor; give both"
    if moe.groups is None and moe.top_groups is not None:
        yield ("moe", "top_groups"), "found without groups; allowed: both or none"
    if moe.groups is not None and moe.top_groups is None:
        yield ("moe", "groups"), "found without top_groups; allowed: both or none"
    if moe.groups is not None and moe.experts % moe.groups:
        yield ("moe", "groups"), f"found {moe.groups}; must divide experts ({moe.experts})"
    if moe.groups is not None and moe.top_groups is not None and moe.top_groups > moe.groups:
        yield ("moe", "top_groups"), f"found {moe.top_groups}; must be at most groups ({moe.groups})"
    allowed = moe.experts if moe.groups is None else (moe.top_groups or 1) * moe.experts // moe.groups
    if allowed < moe.top_k <= moe.experts:
        why = f"top_k ({moe.top_k}) experts are chosen from that many groups of {moe.experts // (moe.groups or 1)}"
        yield ("moe", "top_groups"), f"found {moe.top_groups}; {why}"
    if moe.top_k > moe.experts:
        yield ("moe", "top_k"), f"found {moe.top_k}; must be at most experts ({moe.experts})"
    if moe.dense_layers > m.layers:
        yield ("moe", "dense_layers"), f"found {moe.dense_layers}; must be at most layers ({m.layers})"
