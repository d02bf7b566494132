"""Hugging Face's keys of families with short gated convolutions in place of most layers' attention (LFM2, LFM3)."""

from __future__ import annotations

from collections.abc import Callable

from sim.inputs.families.dense import Config, NotExpressibleError, llama, require
from sim.inputs.families.experts import router
from sim.inputs.input_source import show
from sim.inputs.recorded import decided

_KINDS = {"conv": "state_space", "full_attention": "full", "sliding_attention": "sliding"}


def _with_convolutions(config: Config, found: Config) -> Config:
    """The layers that `layer_types` names, and the sizes of convolutions where there are any."""
    types = config.get("layer_types")
    if types is None:  # the first configs count the layers with attention
        count, full = config["num_hidden_layers"], config.get("full_attn_idxs")
        types = ["full_attention" if full is None or i in full else "conv" for i in range(count)]
    if unknown := [kind for kind in types if kind not in _KINDS]:
        raise NotExpressibleError(f"layer_types: found {show(unknown[0])}; can be simulated: {', '.join(_KINDS)}")
    found |= {"attention_pattern": [_KINDS[kind] for kind in types]}
    decided(config, "full_attn_idxs")
    if "conv" not in types:
        decided(config, "conv_L_cache", "conv_bias")
        return found
    states = {
        "kind": "short_conv",
        "heads": config["hidden_size"],
        "head_dim": 1,
        "state": 1,
        "conv_kernel": config.get("conv_L_cache", 3),
        "conv_bias": config.get("conv_bias", False),
        "bias": config.get("conv_bias", False),
        "gated_norm": False,
    }
    return found | {"state_space": states}


def _attention(config: Config) -> Config:
    """Llama's attention with norms of queries and keys."""
    tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    return llama(config | {"tie_word_embeddings": tied}) | {"qk_norm": True}


def _lfm2(config: Config) -> Config:
    """LFM2: grouped queries in some layers, convolutions in the others, a dense MLP in each.

    `intermediate_size` may count gate and up as one matrix of three thirds (`Lfm2MLP` in Transformers).
    """
    ffn = config["block_ff_dim"] if "block_ff_dim" in config else config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim", True):
        ffn, factor = int(2 * ffn / 3), config.get("block_ffn_dim_multiplier", 1.0)
        if factor is not None:
            step = config.get("block_multiple_of", 256)
            ffn = -(-int(factor * ffn) // step) * step
    return _with_convolutions(config, _attention(config | {"intermediate_size": ffn}))


def _lfm2_moe(config: Config) -> Config:
    """LFM2 with experts behind the first `num_dense_layers`."""
    moe = router(config, "num_experts") | {"dense_layers": config.get("num_dense_layers", 2)}
    return _with_convolutions(config, _attention(config) | {"moe": moe, "code": "lfm2_moe"})


def _lfm3(config: Config) -> Config:
    """LFM3: windows in a part of the attentions, whose heads have gates, and norms on both sides."""
    require(config, "attention_bias", (False, None))  # the gates have none
    types = config.get("layer_types")
    if types is None:
        own = {0: "sliding_attention", 2: "full_attention"}
        types = [own.get(i % 4, "conv") if i else "conv" for i in range(config["num_hidden_layers"])]
    found = _attention({"head_dim": 128} | config) | {
        "attention_gate": "per_head" if config.get("use_attention_gate", True) else False,
        "code": "olmo",
        "norm_position": "both" if config.get("use_sandwich_norm", True) else "pre",
    }
    if "sliding_attention" in types:
        found["window"] = config.get("sliding_window", 256)
    return _with_convolutions({"conv_L_cache": 7} | config | {"layer_types": types}, found)


FAMILIES: dict[str, Callable[[Config], Config]] = {
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "lfm3": _lfm3,
}
