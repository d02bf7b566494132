"""Hugging Face's keys of families built like GPT-2: layer norms and an MLP without a gate. Only numbers are read."""

from __future__ import annotations

from collections.abc import Callable

from sim.inputs.families.dense import (
    Config,
    Family,
    NotExpressibleError,
    drops,
    gelu_named,
    llama,
    require,
    rope_share,
)
from sim.inputs.input_source import show
from sim.inputs.recorded import decided


def _gpt2(config: Config) -> Config:
    """GPT-2; in StarCoder's (gpt_bigcode) the query heads share one key and one value (`multi_query`)."""
    require(config, "add_cross_attention", (False, None))
    decided(config, "n_ctx", "num_key_value_heads")  # former names, of n_positions and of multi_query
    return {
        "layers": config["n_layer"],
        "hidden": config["n_embd"],
        "heads": config["n_head"],
        "ffn": config.get("n_inner"),
        "mlp": gelu_named(config, "activation_function"),
        "vocab": config["vocab_size"],
        "tied_embeddings": config.get("tie_word_embeddings", True),
        "kv_heads": 1 if config.get("multi_query", False) else None,
        **drops(config.get("resid_pdrop", 0.1), config.get("attn_pdrop", 0.1)),
        "positions": "learned",
        "max_positions": config["n_positions"],
        "code": "gpt2",
    }


def _gpt_neo(config: Config) -> Config:
    """GPT-Neo: GPT-2's layers with windows in each second one; queries, keys and values are three without biases."""
    layers = _named(config, "num_layers", "num_hidden_layers")
    kinds = [kind for names, count in config.get("attention_types") or [] for _ in range(count) for kind in names]
    kinds = kinds or ["global", "local"] * (layers // 2)
    decided(config, "attention_layers")
    if {*kinds} - {"global", "local"}:
        raise NotExpressibleError(f"attention_types: found {show(kinds[0])}; can be simulated: global, local")
    found = {
        "layers": layers,
        "hidden": config["hidden_size"],
        "heads": _named(config, "num_heads", "num_attention_heads"),
        "ffn": config.get("intermediate_size"),
        "mlp": gelu_named(config, "activation_function"),
        "vocab": config["vocab_size"],
        "attention_bias": False,
        "attention_out_bias": True,
        "separate_qkv": True,
        "code": "gpt_neo",
        "tied_embeddings": config.get("tie_word_embeddings", True),
        **drops(config.get("resid_dropout"), config.get("attention_dropout")),
        "positions": "learned",
        "max_positions": config["max_position_embeddings"],
    }
    if "local" not in kinds:
        return found
    pattern = ["sliding" if kind == "local" else "full" for kind in kinds]
    return found | {"window": config.get("window_size", 256), "attention_pattern": pattern}


def _opt(config: Config) -> Config:
    """OPT: GPT-2's layers with ReLU; its table of positions has two more rows."""
    require(config, "activation_function", ("relu",))
    require(config, "do_layer_norm_before", (True,))
    require(config, "enable_bias", (True,))
    require(config, "layer_norm_elementwise_affine", (True,))
    require(config, "_remove_final_layer_norm", (False, None))
    require(config, "word_embed_proj_dim", (config["hidden_size"], None))
    own = {"ffn": config["ffn_dim"], "mlp": "relu", "code": "opt"}
    own |= drops(config.get("dropout", 0.1), config.get("attention_dropout"))
    return _of_fairseq(config) | own | _learned_from_2(config)


def _biogpt(config: Config) -> Config:
    """BioGPT: OPT's layers with GELU, and GPT-2's softmax (transformers/models/biogpt/modeling_biogpt.py:
    BioGptDecoderLayer, eager_attention_forward)."""
    own = {"ffn": config["intermediate_size"], "mlp": gelu_named(config, "hidden_act"), "code": "gpt2"}
    own |= drops(config.get("hidden_dropout_prob", 0.1), config.get("attention_probs_dropout_prob", 0.1))
    return _of_fairseq(config) | own | _learned_from_2(config)


def _xglm(config: Config) -> Config:
    """XGLM: OPT's layers with GELU, and sines of positions (transformers/models/xglm/modeling_xglm.py: XGLMModel)."""
    require(config, "add_cross_attention", (False, None))
    names = {"num_hidden_layers": "num_layers", "hidden_size": "d_model", "num_attention_heads": "attention_heads"}
    named = {ours: config[theirs] for ours, theirs in names.items() if theirs in config}
    own = {"ffn": config["ffn_dim"], "mlp": gelu_named(config, "activation_function", "gelu")}
    own |= drops(config.get("dropout", 0.1), config.get("attention_dropout", 0.1)) | {
        "positions": "none",
        "code": "xglm",
    }
    return _of_fairseq(config | named) | own | {"trained_positions": config.get("max_position_embeddings")}


def _of_fairseq(config: Config) -> Config:
    """What OPT, BioGPT and XGLM share."""
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "vocab": config["vocab_size"],
        "tied_embeddings": config.get("tie_word_embeddings", True),
        "separate_qkv": True,
    }


def _learned_from_2(config: Config) -> Config:
    """A table of positions with two rows before that of the first position."""
    return {"positions": "learned", "max_positions": config["max_position_embeddings"] + 2}


def _gpt_neox(config: Config) -> Config:
    """GPT-NeoX, Pythia: rope over a quarter of each head; two norms of one input where the residual is parallel."""
    require(config, "attention_bias", (True,))
    return {
        "mlp": gelu_named(config, "hidden_act", "gelu"),
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "ffn": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "tied_embeddings": config.get("tie_word_embeddings", False),
        **drops(config.get("hidden_dropout"), config.get("attention_dropout")),
        "positions": "rope",
        "rope_share": rope_share(config, config.get("rotary_pct", 0.25)),
        "parallel_block": config.get("use_parallel_residual", True) and "two_norms",
        "code": "gpt_neox",
    }


def _named(config: Config, *names: str) -> int:
    """The value of the first of `names` that the config has: configs of one family differ in a size's name."""
    return int(next((config[name] for name in names if config.get(name) is not None), 0) or config[names[0]])


def _bloom(config: Config) -> Config:
    """BLOOM (arXiv 2211.05100): GPT's layers with ALiBi in place of positions, and a norm behind the embedding."""
    require(config, "apply_residual_connection_post_layernorm", (False,))
    return {
        "layers": _named(config, "n_layer", "num_hidden_layers"),
        "hidden": _named(config, "hidden_size", "n_embed"),
        "heads": _named(config, "n_head", "num_attention_heads"),
        "vocab": config["vocab_size"],
        "tied_embeddings": config.get("tie_word_embeddings", True),
        **drops(config.get("hidden_dropout"), config.get("attention_dropout")),
        "embedding_norm": True,
        "mlp": "gelu_bloom",
        "code": "bloom",
        "trained_positions": config.get("seq_length"),
    }


def _falcon(config: Config) -> Config:
    """Falcon (arXiv 2311.16867): attention and MLP on one norm, or on two in the larger models; layer norms alone have
    biases. Falcon 7B has one key and value; the larger models have `num_kv_heads`."""
    require(config, "activation", ("gelu",))
    heads = _named(config, "num_attention_heads", "n_head")
    grouped = config.get("new_decoder_architecture", False)
    norms = config.get("num_ln_in_parallel_attn") or (2 if grouped else 1)  # any other number than 2 is one
    parallel = grouped or config.get("parallel_attn", True)
    one_key = config.get("multi_query", True)
    require(config, "apply_residual_connection_post_layernorm", (False,))
    decided(config, *(("parallel_attn", "multi_query") if grouped else ("num_kv_heads",)))
    return {
        "layers": _named(config, "num_hidden_layers", "n_layer"),
        "hidden": config["hidden_size"],
        "heads": heads,
        "kv_heads": config.get("num_kv_heads") if grouped else 1 if one_key else None,
        "ffn": config.get("ffn_hidden_size"),
        "vocab": config["vocab_size"],
        "bias": config.get("bias", False),
        "norm_bias": True,
        "tied_embeddings": config.get("tie_word_embeddings", True),
        **drops(config.get("hidden_dropout"), config.get("attention_dropout")),
        "positions": "none" if config.get("alibi", False) else "rope",
        "parallel_block": ("two_norms" if norms == 2 else True) if parallel else False,
        "code": "falcon" if grouped or one_key else "falcon_rw",
    }


def _mpt(config: Config) -> Config:
    """MPT: GPT's layers without biases, ALiBi in place of positions."""
    attention = config.get("attn_config") or {}
    require(config, "no_bias", (True,))
    require(config, "norm_type", ("low_precision_layernorm", "layernorm"))
    decided(config, "learned_pos_emb")  # ALiBi's place
    for key, allowed in (("alibi", True), ("qk_ln", False), ("prefix_lm", False)):
        require(attention, key, (allowed,))
    return {
        "layers": config["n_layers"],
        "hidden": config["d_model"],
        "heads": config["n_heads"],
        "kv_heads": attention.get("kv_n_heads"),
        "ffn": config.get("expansion_ratio", 4) * config["d_model"],
        "vocab": config["vocab_size"],
        "bias": False,
        "tied_embeddings": config.get("tie_word_embeddings", True),
        **drops(config.get("resid_pdrop"), attention.get("attn_pdrop")),
        "code": "mpt" if attention.get("clip_qkv") is None else "mpt_clipped",
        "trained_positions": config.get("max_seq_len"),
    }


def _gptj(config: Config) -> Config:
    """GPT-J: attention and MLP on one norm, attention without biases, rope over `rotary_dim` of a head."""
    hidden, heads = config["n_embd"], config["n_head"]
    decided(config, "n_ctx")
    return {
        "layers": config["n_layer"],
        "hidden": hidden,
        "heads": heads,
        "ffn": config.get("n_inner"),
        "mlp": gelu_named(config, "activation_function"),
        "vocab": config["vocab_size"],
        "attention_bias": False,
        "head_bias": True,
        "tied_embeddings": config.get("tie_word_embeddings", False),
        **drops(config.get("resid_pdrop"), config.get("attn_pdrop")),
        "positions": "rope",
        "rope_share": config.get("rotary_dim", 64) / (hidden // heads),
        "parallel_block": True,
        "code": "gptj",
        "trained_positions": config.get("n_positions"),
    }


def _phi(config: Config) -> Config:
    """Phi 1 to 2: biases everywhere, attention and MLP on one norm, rope over a part of each head."""
    own = {
        "qk_norm": "layernorm" if config.get("qk_layernorm", False) else False,
        "mlp": gelu_named(config, "hidden_act"),
        "norm": "layernorm",
        "bias": True,
        "head_bias": True,
        "separate_qkv": True,
    }
    found = llama(config | {"hidden_act": "silu"}) | own
    dropped = drops(config.get("resid_pdrop"), config.get("attention_dropout"))
    share = {"rope_share": rope_share(config, 0.5), **dropped}
    return found | share | {"parallel_block": True}


def _persimmon(config: Config) -> Config:
    """Persimmon: squared ReLU, biases everywhere, layer norms of queries and keys, rope over half of each head."""
    require(config, "hidden_act", ("relu2",))
    found = llama(config | {"hidden_act": "silu"}) | {"norm": "layernorm", "bias": True, "attention_bias": None}
    found |= {
        "kv_heads": None,
        "head_dim": None,
        "qk_norm": "layernorm" if config.get("qk_layernorm", True) else False,
        "mlp": "relu2",
        "code": "persimmon",
    }
    dropped = drops(config.get("hidden_dropout"), config.get("attention_dropout"))
    return found | {"rope_share": rope_share(config, 0.5), **dropped}


def _nemotron(config: Config) -> Config:
    """Nemotron 3 and 4 (arXiv 2402.16819), Minitron: squared ReLU, layer norms with biases, linear layers without."""
    require(config, "hidden_act", ("relu2",))
    found = llama(config | {"hidden_act": "silu"}) | {"mlp": "relu2", "norm": "layernorm", "norm_bias": True}
    return found | {"separate_qkv": True, "rope_share": rope_share(config, 0.5), "code": "nemotron"}


def _jais2(config: Config) -> Config:
    """Jais 2: layer norms, biases everywhere, squared ReLU."""
    require(config, "hidden_act", ("relu2",))
    for key in ("attention_bias", "mlp_bias"):
        require(config, key, (True,))
    found = llama({"attention_bias": True, "mlp_bias": True} | config | {"hidden_act": "silu"})
    return found | {"mlp": "relu2", "norm": "layernorm", "separate_qkv": True}


def _apertus(config: Config) -> Config:
    """Apertus (arXiv 2509.14233): Llama's layers with xIELU and norms of queries and keys."""
    require(config, "hidden_act", ("xielu",))
    require(config, "output_vocab_size", (None, config["vocab_size"]))
    own = {"mlp": "xielu", "qk_norm": True, "separate_qkv": True}
    return llama(config | {"hidden_act": "silu"}) | own


def _nanochat(config: Config) -> Config:
    """nanochat: squared ReLU, norms without weights, one of them behind the embedding."""
    require(config, "hidden_act", ("relu2",))
    own = {"mlp": "relu2", "separate_qkv": True, "qk_norm": True, "norm_weights": False, "embedding_norm": True}
    return llama(config | {"hidden_act": "silu"}) | own | {"logit_softcap": config.get("final_logit_softcapping", 15.0)}


FAMILIES: dict[str, Callable[[Config], Config]] = {
    "gpt2": _gpt2,
    "gpt_bigcode": Family(_gpt2, {"multi_query": True, "activation_function": "gelu_pytorch_tanh"}),
    "gpt_neox": _gpt_neox,
    "gptj": Family(_gptj, own={"separate_qkv": True}),
    "codegen": Family(_gptj, own={"code": "codegen"}),
    "gpt_neo": _gpt_neo,
    "opt": _opt,
    "biogpt": _biogpt,
    "xglm": _xglm,
    "bloom": _bloom,
    "falcon": _falcon,
    "mpt": _mpt,
    "phi": _phi,
    "persimmon": _persimmon,
    "nemotron": _nemotron,
    "jais2": _jais2,
    "apertus": _apertus,
    "apertus1p5_text": _apertus,
    "nanochat": _nanochat,
}
