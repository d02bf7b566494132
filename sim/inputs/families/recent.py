"""Hugging Face's keys of families that Transformers 5.24 has first, as a scenario's `model`. Only numbers are read.

Sources: Transformers 5.24, models/flint/modular_flint.py, models/lara_mini/modular_lara_mini.py,
models/cohere_compass/modular_cohere_compass.py, models/beam/modular_beam.py.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.inputs.families.dense import Config, NotExpressibleError, cohere, llama, require, rope_in_windows_alone, window
from sim.inputs.families.experts import router
from sim.inputs.families.linear_attention import gated_delta
from sim.inputs.input_source import show
from sim.inputs.recorded import decided

IN_WINDOWS_ALONE = {"full_attention": {"rope": False}}  # rope
LARA_KINDS = {"linear_attention": "state_space", "sliding_attention": "sliding", "full_attention": "full"}


def _flint(config: Config) -> Config:
    """Flint: Qwen 3's attention with sinks, windows in most layers, experts beside a shared one, first layers dense."""
    require(config, "decoder_sparse_step", (1, None))
    count, given = config["num_hidden_layers"], config.get("mlp_only_layers")
    dense = [0, 1] if given is None else given
    if dense != list(range(len(dense))):
        raise NotExpressibleError(f"mlp_only_layers: found {show(given)}; can be simulated: the first layers")
    types = ["full" if i < 2 or i % 4 == 1 or i == count - 1 else "sliding" for i in range(count)]
    whole = {"head_dim": 128, "sliding_window": 513} | config
    moe = router(config, "num_experts") | {
        "shared_ffn": config["shared_expert_intermediate_size"],
        "dense_layers": len(dense),
        "router_fp32": True,
    }
    own = {"qk_norm": True, "norm_in_fp32": True, "sinks": True, "moe": moe, "code": "flint"}
    windows = window(whole, "sliding_window", types)
    found = llama(whole) | own | windows
    return found | (IN_WINDOWS_ALONE if "full" in windows.get("attention_pattern", ()) else {})


def _lara_mini(config: Config) -> Config:
    """Lara Mini: the gated delta rule, windows and all tokens in turn; experts beside a shared one in every layer."""
    types = config.get("layer_types")
    if types is None:
        names = ["linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention"]
        types = [names[i % len(names)] for i in range(config["num_hidden_layers"])]
    if unknown := [name for name in types if name not in LARA_KINDS]:
        raise NotExpressibleError(f"layer_types: found {show(unknown[0])}; can be simulated: {', '.join(LARA_KINDS)}")
    whole = {"head_dim": 128, "tie_word_embeddings": True} | config
    whole |= {"intermediate_size": config["moe_intermediate_size"]}  # no layer is dense
    shared = {"shared_ffn": config["shared_expert_intermediate_size"], "router_fp32": True}
    found = llama(whole) | {"qk_norm": True, "norm_in_fp32": True, "moe": router(config, "num_experts") | shared}
    found |= {"attention_pattern": [LARA_KINDS[name] for name in types]}
    if "linear_attention" in types:
        found["state_space"] = gated_delta(config)
    if "sliding_attention" in types:
        found["window"] = config.get("sliding_window", 512)
        found |= IN_WINDOWS_ALONE if "full_attention" in types else {}
    require(config, "norm_topk_prob", (True,))
    return found | {"code": "lara_mini"}


def _cohere_compass(config: Config) -> Config:
    """North (Cohere): the decoder as Command R7B, windows where the config says so."""
    found = cohere(config) | {"code": None}  # its rope is Llama's
    types, ropes = config.get("layer_types"), config.get("rope_parameters") or {}
    if types is None or "sliding_attention" not in types:
        decided(config, "sliding_window", "sliding_window_pattern")
        return found
    if ropes.get("full_attention", ropes) is None:
        return rope_in_windows_alone(config, found, config.get("sliding_window_pattern") or 4)
    return found | window(config, "sliding_window", [])


def _beam(config: Config) -> Config:
    """Beam (Reflection): windows with rope, all tokens in each sixth layer and the last, gated attention with norms of
    each head, norms on both sides; the first layers dense, then DeepSeek's experts without a shared one."""
    require(config, "attention_bias", (False, None))
    require(config, "hidden_act", ("silu", None))
    count, kinds = config["num_hidden_layers"], config.get("mlp_layer_types")
    dense = min(3, count) if kinds is None else next((i for i, kind in enumerate(kinds) if kind == "sparse"), count)
    if kinds is not None and "dense" in kinds[dense:]:
        raise NotExpressibleError(f"mlp_layer_types: found {show(kinds)}; can be simulated: the first layers dense")
    ropes = config.get("rope_parameters") or {"sliding_attention": {}, "full_attention": None}
    require({"rope_parameters": ropes.get("full_attention")}, "rope_parameters", (None,))
    decided(config, "rope_parameters")
    types = ["full" if (i + 1) % 6 == 0 or i == count - 1 else "sliding" for i in range(count)]
    groups = config.get("topk_group", 4) if config.get("n_group", 8) != 1 else None
    moe = router(config, "num_experts") | {"dense_layers": dense, "router_fp32": True, "max_nodes_per_token": groups}
    own = {"qk_norm": True, "attention_gate": True, "norm_position": "both", "norm_in_fp32": True, "moe": moe}
    cap = config.get("final_logit_softcapping", 30.0)
    whole = {"head_dim": 128, "sliding_window": 512} | config
    windows = window(whole, "sliding_window", types)
    found = llama(whole) | own | windows | {"logit_softcap": cap, "code": "beam"}
    return found | (IN_WINDOWS_ALONE if "full" in windows.get("attention_pattern", ()) else {})


FAMILIES: dict[str, Callable[[Config], Config]] = {
    "beam": _beam,
    "cohere_compass_text": _cohere_compass,
    "flint": _flint,
    "lara_mini": _lara_mini,
}
