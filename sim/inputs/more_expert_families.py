"""Hugging Face's keys of further families with experts, as a scenario's `model`. Only numbers are read."""

from __future__ import annotations

from collections.abc import Callable

from sim.inputs.expert_families import FAMILIES as WITH_EXPERTS
from sim.inputs.expert_families import dense_layers, latent, router
from sim.inputs.families import Config, NotExpressibleError, llama, require, rope_share, window


def _longcat_flash(config: Config) -> Config:
    """LongCat-Flash (arXiv 2509.01322): a layer of its config is two here, each latent attention and a dense MLP; the
    first one's MLP stands beside experts, which every token sees as if it were a shared one.

    Its report adds what experts give behind the second MLP, so that their messages go beside that layer (section 2.2).
    """
    require(config, "attention_bias", (False, None))
    require(config, "zero_expert_type", ("identity", None))
    layers = 2 * config["num_layers"] if "num_layers" in config else config["num_hidden_layers"]
    ffn = config["ffn_hidden_size" if "ffn_hidden_size" in config else "intermediate_size"]
    whole = {**config, "num_hidden_layers": layers, "intermediate_size": ffn}
    moe = router(config, "n_routed_experts", "expert_ffn_hidden_size", "moe_topk") | {
        "shared_ffn": ffn,
        "zero_experts": config.get("zero_expert_num") or 0,
        "router_bias": config.get("router_bias", False),
        "router_fp32": True,
    }
    return llama(whole) | {
        "kv_heads": None,
        "head_dim": None,
        "mla": latent(config),
        "moe": moe,
        "mlp_pattern": ["experts", "dense"],
        "left_out": ["experts' messages beside the next layer", "the factors on queries and latents"],
    }


def _sarvam_moe(config: Config) -> Config:
    """Sarvam 30B: GLM-4.5's layers with rope over whole heads, which its code still joins to an empty rest."""
    own = {"qk_norm": config.get("use_qk_norm", True), "rope_share": rope_share(config, 1.0)}
    return WITH_EXPERTS["glm4_moe"](_named_as_deepseek(config)) | own


def _sarvam_mla(config: Config) -> Config:
    """Sarvam 105B: DeepSeek V3's layers."""
    require(config, "n_group", (1, None))
    return WITH_EXPERTS["deepseek_v3"](_named_as_deepseek({"first_k_dense_replace": 1, "n_group": 1, **config}))


def _named_as_deepseek(config: Config) -> Config:
    """The config under the names of Transformers; the first ones on the Hub have others."""
    names = {
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "use_qkv_bias": "attention_bias",
        "num_mtp_layers": "num_nextn_predict_layers",
    }
    return {names.get(key, key): value for key, value in config.items()}


def _laguna(config: Config) -> Config:
    """Laguna (Poolside): a gate on attention's heads, layers without a window with another number of them, experts
    beside a shared one."""
    require(config, "gating", (True, "per-head"))  # per element it is a softplus in fp32
    require(config, "moe_apply_router_weight_on_input", (False, None))
    require(config, "attention_bias", (False, None))  # the gates have none
    moe = router(config, "num_experts") | {
        "shared_ffn": config["shared_expert_intermediate_size"],
        "dense_layers": dense_layers({"first_k_dense_replace": 1, **config}),
    }
    whole = {"head_dim": 128, "sliding_window": 512, **config}
    found = llama(whole) | {"moe": moe, "qk_norm": True, "rope_share": 1.0, "attention_gate": "per_head"}
    found |= window(whole, "sliding_window", ["full"])
    return found | _laguna_heads(config, found)


def _laguna_heads(config: Config, found: Config) -> Config:
    """The query heads of layers with windows, and of those without."""
    each = config.get("num_attention_heads_per_layer")
    if each is None:
        return {}
    kinds = found.get("attention_pattern", ["full"])
    heads = {kind: {n for i, n in enumerate(each) if kinds[i % len(kinds)] == kind} for kind in {*kinds}}
    if any(len(numbers) != 1 for numbers in heads.values()):
        raise NotExpressibleError("num_attention_heads_per_layer: can be simulated: one number for each of layer_types")
    whole, local = (next(iter(heads.get(kind, {None}))) for kind in ("full", "sliding"))
    if local is None or whole in (None, local):
        return {"heads": local or whole}
    return {"heads": local, "full_attention": {"heads": whole}}


FAMILIES: dict[str, Callable[[Config], Config]] = {
    "longcat_flash": _longcat_flash,
    "laguna": _laguna,
    "sarvam_moe": _sarvam_moe,
    "sarvam_mla": _sarvam_mla,
}
