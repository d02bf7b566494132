"""Hugging Face's keys of families whose grouped queries attend to chosen blocks of keys. Only numbers are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.inputs.expert_families import dense_layers, router
from sim.inputs.families import Config, NotExpressibleError, llama, rope_share
from sim.inputs.input_source import show

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
    kinds = config.get("mlp_layer_types")
    if kinds is None and routed is not None:
        kinds = ["sparse" if here else "dense" for here in routed]
    moe = router(config, "num_local_experts", "intermediate_size") | {
        "shared_ffn": config.get("shared_intermediate_size", 3072),
        "dense_layers": dense_layers({"mlp_layer_types": kinds}),
    }
    dense = config.get("dense_intermediate_size", 12288)
    whole = {"head_dim": 128, **config, "intermediate_size": dense, "hidden_act": "silu"}
    share = rope_share(config, config.get("rotary_dim", 64) / whole["head_dim"])
    found = llama(whole) | {
        "mlp": "clamped_swiglu",
        "norm_in_fp32": True,
        "qk_norm": True,
        "rope_share": share,
        "attention_pattern": [_M3_TYPES[kind] for kind in types[:layers]],
        "moe": moe,
    }
    return found | _m3_indexer(config, first) if "selected" in found["attention_pattern"] else found


def _m3_indexer(config: Config, first: Config) -> Config:
    """Sizes of the indexer, by the keys of `first` where the config has them."""
    found: list[Any] = [first.get(name, config.get(key, default)) for name, (key, default) in _M3_INDEX.items()]
    heads, width, block, blocks, local = map(int, found)
    if not 1 <= local <= blocks:
        allowed = f"1 to index_topk_blocks ({blocks})"
        raise NotExpressibleError(f"index_local_blocks: found {show(local)}; can be simulated: {allowed}")
    own = {"heads": heads, "head_dim": width, "top_k": blocks * block, "block": block, "pools": "scores"}
    return {"block_indexer": own, "left_out": [UNTRAINED_INDEXER]}


FAMILIES: dict[str, Callable[[Config], Config]] = {
    "minimax_m3_vl_text": _minimax_m3,
}
