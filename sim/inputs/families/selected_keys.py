"""Hugging Face's keys of families whose grouped queries attend to chosen blocks of keys. Only numbers are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sim.inputs.families.dense import Config, NotExpressibleError, llama, require, rope_share
from sim.inputs.families.experts import dense_layers, router
from sim.inputs.families.linear_attention import qwen3_5_moe
from sim.inputs.input_source import show
from sim.inputs.recorded import decided, without

_MOST_ROWS, _MOST_HEADS = 10**9, 1_000  # of tables, so that their prime numbers are found in seconds
UNTRAINED_INDEXER = "the loss that trains the indexer"
_M3_TYPES = {"full_attention": "full", "minimax_m3_sparse": "selected"}
# Keys of the first config, in `sparse_attention_config`, and Transformers' names and defaults of them.
_M3_INDEX = {
    "sparse_num_index_heads": ("index_n_heads", 4),
    "sparse_index_dim": ("index_head_dim", 128),
    "sparse_block_size": ("index_block_size", 128),
    "sparse_topk_blocks": ("index_topk_blocks", 16),
    "sparse_local_block": ("index_local_blocks", 1),
}


def _minimax_m3(config: Config) -> Config:
    """MiniMax M3's decoder: grouped queries, in most layers over chosen blocks; experts beside a shared one."""
    layers, first = config["num_hidden_layers"], config.get("sparse_attention_config") or {}
    types, signs, routed = config.get("layer_types"), first.get("sparse_attention_freq"), config.get("moe_layer_freq")
    if types is None:
        types = ["minimax_m3_sparse" if sign else "full_attention" for sign in signs or [0] * layers]
    if unknown := [kind for kind in types if kind not in _M3_TYPES]:
        raise NotExpressibleError(f"layer_types: found {show(unknown[0])}; can be simulated: {', '.join(_M3_TYPES)}")
    require(config, "hidden_act", ("silu", "swigluoai"))
    require(config, "attention_output_gate", (False, None))
    require(config, "qk_norm_type", ("per_head", None))
    require(config, "use_qk_norm", (True, None))
    require(config, "use_gemma_norm", (True, None))
    require(config, "n_shared_experts", (1, None))
    require(config, "moe_intermediate_size", (config["intermediate_size"], None))
    kinds = config.get("mlp_layer_types")
    if kinds is None and routed is not None:
        kinds = ["sparse" if here else "dense" for here in routed]
    moe = router(config, "num_local_experts", "intermediate_size") | {
        "shared_ffn": config.get("shared_intermediate_size", 3072),
        "dense_layers": dense_layers({"mlp_layer_types": kinds}),
    }
    dense = config.get("dense_intermediate_size", 12288)
    whole = {"head_dim": 128} | config | {"intermediate_size": dense, "hidden_act": "silu"}
    share = rope_share(config, config.get("rotary_dim", 64) / whole["head_dim"])
    decided(config, "rotary_dim", "first_k_dense_replace")
    found = llama(whole) | {
        "mlp": "clamped_swiglu",
        "norm_in_fp32": True,
        "qk_norm": True,
        "rope_share": share,
        "attention_pattern": [_M3_TYPES[kind] for kind in types[:layers]],
        "moe": moe,
        "code": "minimax_m3",
    }
    for key, allowed in (("use_sparse_attention", True), ("sparse_score_type", "max"), ("sparse_init_block", 0)):
        require(first, key, (allowed,))
    require(first, "sparse_disable_index_value", (signs, None))  # no layer's indexer has values
    if "selected" in found["attention_pattern"]:
        return found | _m3_indexer(config, first)
    decided(config, *(key for key, _ in _M3_INDEX.values()))
    decided(first, *_M3_INDEX)
    return found


def _m3_indexer(config: Config, first: Config) -> Config:
    """Sizes of the indexer, by the keys of `first` where the config has them."""
    found: list[Any] = [first.get(name, config.get(key, default)) for name, (key, default) in _M3_INDEX.items()]
    heads, width, block, blocks, local = map(int, found)
    if not 1 <= local <= blocks:
        allowed = f"1 to index_topk_blocks ({blocks})"
        raise NotExpressibleError(f"index_local_blocks: found {show(local)}; can be simulated: {allowed}")
    own = {"heads": heads, "head_dim": width, "top_k": blocks * block, "block": block, "pools": "scores"}
    return {"block_indexer": own, "left_out": [UNTRAINED_INDEXER]}


_QSA = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
_QWEN_4_TYPES = {"linear_attention": "state_space", "indexed_attention": "selected", "full_attention": "selected"}


def _qwen4(config: Config) -> Config:
    """Qwen 4: Qwen3.5's layers between four gated streams; attention over chosen blocks, embeddings of n-grams."""
    require(config, "attention_bias", (False, None))
    interval = config.get("full_attention_interval", 4)
    types = config.get("layer_types") or ["linear_attention"] * (interval - 1) + ["indexed_attention"]
    if unknown := [kind for kind in types if kind not in _QWEN_4_TYPES]:
        allowed = ", ".join(_QWEN_4_TYPES)
        raise NotExpressibleError(f"layer_types: found {show(unknown[0])}; can be simulated: {allowed}")
    found = qwen3_5_moe(without(config, "layer_types")) | {
        "norm_in_fp32": True,
        "attention_pattern": [_QWEN_4_TYPES[kind] for kind in types],
        "hyper_connections": config.get("hc_count", 4),
        "hyper_connection_kind": "gated",
        "hyper_connection_rank": config.get("hc_lowrank", 320),
        "left_out": [UNTRAINED_INDEXER],
    }
    if "state_space" not in found["attention_pattern"]:
        del found["state_space"]
    if "selected" in found["attention_pattern"]:
        heads, shared, width, budget, block = (config[key] for key in _QSA)
        require({"indexer_kv_heads": shared}, "indexer_kv_heads", (1,))
        found["block_indexer"] = {"heads": heads, "head_dim": width, "top_k": budget, "block": block, "pools": "keys"}
    layers = sorted({*(config.get("ple_layer_ids") or [])})
    return found | {"ngram_embedding": _ngrams(config, layers)} if layers else found


def _ngrams(config: Config, layers: list[int]) -> Config:
    """Qwen 4's embeddings of n-grams: each head of each table has as many rows as the next prime number from
    `ngram_vocab_size_base` on, and a table is padded."""
    size, start = config.get("ngram_size", 3), config.get("ngram_vocab_size_base", 20_000_000)
    heads, unit = (size - 1) * config.get("heads_per_ngram", 8), config.get("make_ngram_vocab_size_divisible_by", 128)
    if start > _MOST_ROWS or heads * len(layers) > _MOST_HEADS:
        most = f"at most {_MOST_ROWS:,} rows of {_MOST_HEADS:,} heads in all layers"
        raise NotExpressibleError(f"ngram_vocab_size_base: found {show(start)}; can be simulated: {most}")
    found: list[int] = []
    number = start
    while len(found) < heads * len(layers):
        found += [number] if _is_prime(number) else []
        number += 1
    rows = [sum(found[i * heads : (i + 1) * heads]) for i in range(len(layers))]
    return {
        "layers": layers,
        "rows": [-(-each // unit) * unit for each in rows],
        "heads": heads,
        "width": config.get("ple_embed_dim") or config["hidden_size"],
        "size": size,
        "conv_kernel": config.get("ple_conv_kernel_size", 4),
    }


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


FAMILIES: dict[str, Callable[[Config], Config]] = {
    "minimax_m3_vl_text": _minimax_m3,
    "qwen4_exp_text": _qwen4,
}
