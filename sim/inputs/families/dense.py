"""Hugging Face's keys of each family of decoders without experts, as a scenario's `model`. Only numbers are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from sim.inputs.input_source import show, show_items
from sim.inputs.recorded import decided, renamed, without

Config = dict[str, Any]


class NotExpressibleError(Exception):
    """The config asks for something that a scenario's model has no key for."""


class Family(Struct, frozen=True):
    """A family that is read as another one, with differences.

    `defaults`: its own values of keys that a config leaves out. `only`: the values of keys that can be simulated, of
    which the first stands for a key that is left out. `own`: keys of the model beside or in place of the other's.
    `pattern`: the kinds of its attention where `sliding_window` is given and `layer_types` is not.
    """

    read: Callable[[Config], Config]
    defaults: Config = {}
    only: dict[str, tuple[Any, ...]] = {}
    own: Config = {}
    pattern: tuple[str, ...] = ()

    def __call__(self, config: Config) -> Config:
        for key, allowed in self.only.items():
            require(config, key, allowed)
        whole = self.defaults | config
        found = self.read(whole) | self.own
        return found | window(whole, "sliding_window", [*self.pattern]) if self.pattern else found


def require(config: Config, key: str, allowed: tuple[Any, ...]) -> None:
    """Refuse a config whose `key` is there and none of `allowed`."""
    if config.get(key, allowed[0]) not in allowed:
        words = " or ".join(show_items(value) for value in allowed)
        raise NotExpressibleError(f"{key}: found {show_items(config[key])}; only {words} can be simulated")


def one_group(config: Config) -> None:
    """Refuse routers that choose among groups of experts first."""
    require(config, "n_group", (1, None))
    decided(config, "topk_group")


def window(config: Config, size: str, pattern: list[str]) -> Config:
    """Layers with local attention: `layer_types` where the config has them, else the family's own `pattern`."""
    if config.get(size) is None:
        return {}
    types = config.get("layer_types")
    if types is None:
        kinds = pattern
    else:
        decided(config, "sliding_window_pattern", "_sliding_window_pattern", "max_window_layers")
        known = {"full_attention": "full", "sliding_attention": "sliding", "chunked_attention": "chunked"}
        if unknown := [t for t in types if t not in known]:
            raise NotExpressibleError(f"layer_types: found {show(unknown[0])}; can be simulated: {', '.join(known)}")
        kinds = [known[t] for t in types]
    return {"window": config[size], "attention_pattern": kinds} if set(kinds) != {"full"} else {}


def llama(config: Config) -> Config:
    require(config, "hidden_act", ("silu", "swish"))
    bias, attention_bias = bool(config.get("mlp_bias")), bool(config.get("attention_bias"))
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "ffn": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "mlp": "swiglu",
        "norm": "rmsnorm",
        "bias": bias,
        "attention_bias": None if attention_bias == bias else attention_bias,
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "positions": "rope",
        **drops(None, config.get("attention_dropout")),
    }


def drops(hidden: Any, attention: Any) -> Config:
    """Probabilities of dropping numbers of what attention and MLP give, and of attention's probabilities."""
    hidden, attention = hidden or 0.0, attention or 0.0
    return {"dropout": hidden, "attention_dropout": None if attention == hidden else attention}


def rope_share(config: Config, default: float) -> float:
    """`partial_rotary_factor`, which configs of Transformers 5 keep among the rope's parameters."""
    found = (config.get("rope_parameters") or {}).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return float(default if found is None else found)


def cohere(config: Config) -> Config:
    """Command R: attention and MLP on one layer norm without bias; one matrix for embedding and output. Command R+ also
    norms each head, with weights of its own."""
    found = llama({"tie_word_embeddings": True} | config)
    if config.get("use_qk_norm"):
        found["qk_norm"] = "by_head"
    return found | {"norm": "layernorm", "parallel_block": True, "norm_in_fp32": True, "code": "cohere"}


def rope_in_windows_alone(config: Config, found: Config, step: int) -> Config:
    """Layers with windows and rope, each `step`-th one all tokens without rope."""
    found |= window(config, "sliding_window", ["sliding"] * (step - 1) + ["full"])
    if "attention_pattern" not in found:
        return found
    kinds = [found["attention_pattern"][i % len(found["attention_pattern"])] for i in range(found["layers"])]
    if [kind == "full" for kind in kinds] != [(i + 1) % step == 0 for i in range(found["layers"])]:
        raise NotExpressibleError(f"layer_types: can be simulated: full attention in each {step}-th layer")
    return found | {"no_rope_every": step}


def _cohere2(config: Config) -> Config:
    """Command R7B: windows with rope, each fourth layer all tokens without it."""
    step = config.get("sliding_window_pattern") or 4
    return rope_in_windows_alone({"sliding_window": 4096} | config, cohere(config), step)


def _exaone4(config: Config) -> Config:
    """EXAONE 4: norms after attention and MLP; windows as in Command R7B, in the larger model alone."""
    return exaone_windows(config, llama(config) | {"qk_norm": True, "norm_position": "post"})


def exaone_windows(config: Config, found: Config) -> Config:
    """Windows with rope, and all tokens without it at the end of each `sliding_window_pattern` (4, or "LLLG")."""
    step = config.get("sliding_window_pattern", 4)
    return rope_in_windows_alone(config, found, len(step) if isinstance(step, str) else step or 4)


def qwen_window(config: Config, pattern: list[str] | None = None) -> Config:
    """Windows where `use_sliding_window` turns them on: in the layers of `pattern`, or from layer `max_window_layers`
    on."""
    if not config.get("use_sliding_window", False):
        decided(config, "sliding_window", "max_window_layers", "layer_types")
        return {}
    layers, whole = config["num_hidden_layers"], config.get("max_window_layers", 28)
    last = ["full"] * min(whole, layers) + ["sliding"] * max(0, layers - whole)
    return window({"sliding_window": 4096} | config, "sliding_window", last if pattern is None else pattern)


def qwen2(config: Config) -> Config:
    decided(config, "attention_bias")  # the code has biases of query, key and value in any case
    return llama(config | {"attention_bias": False}) | {"qkv_bias": True} | qwen_window(config)


def qwen3(config: Config, head_dim: int | None = 128) -> Config:
    """Qwen 3; `head_dim`: the family's own where the config has none, None for hidden / heads."""
    require(config, "use_qk_norm", (True, None))
    return llama({"head_dim": head_dim} | config) | {"qk_norm": True} | qwen_window(config)


def _seed_oss(config: Config) -> Config:
    bias, out = config.get("attention_bias", True), config.get("attention_out_bias", False)
    found = llama({"head_dim": 128} | config | {"attention_bias": False})
    found |= drops(config.get("residual_dropout", 0.1), config.get("attention_dropout", 0.1))
    return found | {"qkv_bias": bias, "attention_out_bias": True if out else None}


def ernie(config: Config) -> Config:
    require(config, "use_bias", (False, None))
    return llama({"tie_word_embeddings": True} | config) | {"code": "ernie4_5"}


def hunyuan(config: Config) -> Config:
    require(config, "use_qk_norm", (True,))
    require(config, "use_cla", (False, None))  # keys and values of one layer in the next ones too
    require(config, "use_mla", (False, None))
    return llama(config) | {"qk_norm": True}


def _smollm3(config: Config) -> Config:
    """SmolLM 3: Llama's layers, each fourth one without rope."""
    require(config, "use_sliding_window", (False, None))
    decided(config, "layer_types", "sliding_window")
    step, ropes = config.get("no_rope_layer_interval", 4), config.get("no_rope_layers")
    return llama({"tie_word_embeddings": True} | config) | {"no_rope_every": no_rope_step(step, ropes)}


def no_rope_step(step: int, ropes: list[int] | None) -> int:
    """The period of layers without rope; `ropes`: 1 for each layer with it, where the config has such a list."""
    if ropes and [bool(x) for x in ropes] != [(i + 1) % step != 0 for i in range(len(ropes))]:
        raise NotExpressibleError(f"no_rope_layers: can be simulated: none in each {step}-th layer")
    return step


def _arcee(config: Config) -> Config:
    require(config, "hidden_act", ("relu2",))
    return llama(config | {"hidden_act": "silu"}) | {"mlp": "relu2", "separate_qkv": True}


def gelu_named(config: Config, key: str, default: str = "gelu_new") -> str:
    """The activation without a gate that `key` names; `default`: the family's own, that of GPT-2's kin.

    `gelu` and `gelu_pytorch_tanh` are one kernel of torch, the others are formulas that Transformers writes out.
    """
    require(config, key, ("gelu_new", "gelu", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu"))
    name = config.get(key, default)
    return "gelu" if name == "gelu_pytorch_tanh" else str(name)


def _starcoder2(config: Config) -> Config:
    require(config, "use_bias", (True,))
    own = {
        "mlp": gelu_named(config, "hidden_act", "gelu_pytorch_tanh"),
        "norm": "layernorm",
        "bias": True,
        "separate_qkv": True,
    }
    found = llama({"tie_word_embeddings": True} | config | {"hidden_act": "silu"}) | own
    return found | drops(config.get("residual_dropout"), config.get("attention_dropout"))


def _phi3(config: Config) -> Config:
    dropped = drops(config.get("resid_pdrop"), config.get("attention_dropout"))
    return llama(config) | dropped | {"merged_projections": True, "rope_share": rope_share(config, 1.0), "code": "phi3"}


def _glm(config: Config) -> Config:
    """GLM-4: biases in query, key and value alone; rope over half of each head."""
    bias = config.get("attention_bias", True)
    found = llama({"head_dim": 128} | config | {"attention_bias": False})
    return found | {"qkv_bias": bias, "rope_share": rope_share(config, 0.5), "code": "glm"}


def _gemma(config: Config) -> Config:
    """Gemma: GeGLU, embedding and output one matrix."""
    require(config, "use_bidirectional_attention", (False, None))
    for key in ("hidden_act", "hidden_activation"):
        require(config, key, ("gelu_pytorch_tanh", "gelu", None))
    found = llama({"head_dim": 256, "tie_word_embeddings": True} | config | {"hidden_act": "silu"})
    return found | {"mlp": "geglu", "norm_in_fp32": True, "code": "gemma"}


def _gemma2(config: Config) -> Config:
    """Gemma 2 and 3: norms on both sides of attention and MLP."""
    found = _gemma(config) | {"norm_position": "both"}
    found |= {"attention_softcap": config.get("attn_logit_softcapping")}
    return found | {"logit_softcap": config.get("final_logit_softcapping")}


def _vaultgemma(config: Config) -> Config:
    """VaultGemma: Gemma 2 with norms before attention and MLP only."""
    return _gemma2(config) | {"norm_position": "pre"}


def _gemma3(config: Config) -> Config:
    """Gemma 3; its released configs leave out what is as in Transformers' Gemma3TextConfig."""
    pattern = ["sliding"] * (config.get("sliding_window_pattern", 6) - 1) + ["full"]
    own = {"sliding_window": 4096, "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}
    whole = own | config
    return _gemma2(whole) | {"qk_norm": True} | window(whole, "sliding_window", pattern)


def _gemma4(config: Config) -> Config:
    """Gemma 4: layers without a window have sizes of their own, and their values may be their keys; experts stand
    beside an MLP for all tokens. E2B and E4B have embeddings for each layer, and last layers with queries alone."""
    require(config, "use_bidirectional_attention", (None, "vision"))  # of pictures alone
    plain = without(config, "use_bidirectional_attention")
    if config.get("layer_types") is None:  # the last layer sees all tokens, whatever its number (Gemma4TextConfig)
        kinds = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(config["num_hidden_layers"])]
        plain["layer_types"] = [*kinds[:-1], "full_attention"]
    found = _gemma3({"sliding_window": 512, "vocab_size": 262144} | plain) | {"value_norm": True, "code": "gemma4"}
    if "attention_pattern" in found:
        found["full_attention"] = _gemma4_full(config, [*found["attention_pattern"]])
    found |= _gemma4_small(config)
    if not config.get("enable_moe_block"):
        return found
    moe = {"experts": config["num_experts"], "top_k": config["top_k_experts"], "ffn": config["moe_intermediate_size"]}
    left_out = ["norms of the MLP's and the experts' inputs and results", "the router's norm and scales"]
    return found | {"moe": moe | {"shared_ffn": config["intermediate_size"]}, "left_out": left_out}


def _gemma4_small(config: Config) -> Config:
    """Read what E2B and E4B have and the others do not."""
    width, shared = config.get("hidden_size_per_layer_input", 256), config.get("num_kv_shared_layers", 0)
    found: Config = {"shared_kv_layers": shared or None}
    if not width:
        decided(config, "vocab_size_per_layer_input")
    else:
        found["layer_embedding"] = {"width": width, "vocab": config.get("vocab_size_per_layer_input", 262144)}
    if shared and config.get("use_double_wide_mlp"):
        found["shared_kv_ffn"] = 2 * config["intermediate_size"]
    return found


def _gemma4_full(config: Config, kinds: list[str]) -> Config:
    """Sizes of Gemma 4's layers without a window; Transformers 5 writes them for each layer (`per_layer_config`), whose
    numbers have leading zeros ("05") in its later releases, and no layer whose sizes are those of all others
    (gemma4/configuration_gemma4.py: Gemma4TextConfig.__post_init__)."""
    equal = bool(config.get("attention_k_eq_v", False))
    kv_heads = config.get("num_global_key_value_heads") if equal else None
    sizes = {"head_dim": config.get("global_head_dim", 512), "num_key_value_heads": kv_heads}
    if (written := config.get("per_layer_config")) is not None:
        each = {int(number): sizes for number, sizes in written.items()}
        own = [each.get(i, {}) for i in range(config["num_hidden_layers"]) if kinds[i % len(kinds)] == "full"]
        others = [number for number in each if kinds[number % len(kinds)] != "full"]
        if others or any(one != own[0] for one in own):
            raise NotExpressibleError("per_layer_config: can be simulated: equal sizes of all full_attention layers")
        decided(config, "per_layer_config", "global_head_dim", "num_global_key_value_heads")
        sizes = {"head_dim": None, "num_key_value_heads": None, **own[0]}
    return {"kv_heads": sizes["num_key_value_heads"], "head_dim": sizes["head_dim"], "values_are_keys": equal}


def _helium(config: Config) -> Config:
    """Helium: Llama's layers, whose `attention_bias` is of queries, keys and values alone."""
    require(config, "head_dim", (config["hidden_size"] // config["num_attention_heads"],))  # its output matrix's rows
    return llama(config | {"attention_bias": False}) | {
        "qkv_bias": bool(config.get("attention_bias")),
        "code": "helium",
    }


def _exaone(config: Config) -> Config:
    """EXAONE 3: Llama's layers, under names of its own where the config is not Transformers'."""
    names = {"num_layers": "num_hidden_layers", "activation_function": "hidden_act"}
    return llama(renamed(config, names))


def _stablelm(config: Config) -> Config:
    """StableLM: layer norms with biases, linear layers without, rope over a quarter of each head. StableLM 2 12B also
    norms each head, with weights of its own."""
    found = llama(config) | {"norm": "layernorm", "norm_bias": True, "qkv_bias": config.get("use_qkv_bias", False)}
    found |= {
        "parallel_block": config.get("use_parallel_residual", False),
        **drops(config.get("hidden_dropout"), config.get("attention_dropout")),
    }
    found |= {"qk_norm": "by_head", "code": "stablelm"} if config.get("qk_layernorm") else {}
    return found | {"rope_share": rope_share(config, 0.25)}


def _hyperclovax(config: Config) -> Config:
    """HyperCLOVA X: Granite's layers, with norms on both sides of attention and MLP."""
    position = "both" if config.get("use_post_norm", True) else "pre"
    return llama(config) | {"norm_position": position, "code": "granite"}


def dense_latent(config: Config) -> Config:
    """Latent attention and a dense MLP (MiniCPM 3, Youtu)."""
    require(config, "attention_bias", (False, None))
    found = llama({"tie_word_embeddings": True} | config) | {"kv_heads": None, "head_dim": None}
    return found | {"mla": latent(config)}


def latent(config: Config) -> Config:
    """The sizes of latent attention."""
    required = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    found = {"q_lora_rank": config.get("q_lora_rank"), **{key: config[key] for key in required}}
    require(config, "qk_head_dim", (found["qk_nope_head_dim"] + found["qk_rope_head_dim"], None))
    return found


def _olmo(config: Config) -> Config:
    """OLMo: layer norms without weights; the later 7B clamps queries, keys and values."""
    found = llama(config) | _OLMO
    return found | ({} if config.get("clip_qkv") is None else {"code": "olmo_clipped"})


_SLIDING = ("sliding",)
_WINDOW = {"sliding_window": 4096}
_MISTRAL = Family(llama, _WINDOW, own={"code": "mistral"}, pattern=_SLIDING)
_OLMO2 = {"qk_norm": True, "qk_norm_over": "all_heads", "norm_position": "post", "norm_in_fp32": True, "code": "olmo"}
_OLMO: Config = {"norm": "layernorm", "norm_weights": False, "norm_in_fp32": True, "code": "olmo"}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
FAMILIES: dict[str, Callable[[Config], Config]] = {
    "llama": llama,
    "internlm3": Family(llama, {"head_dim": 128}, {"qkv_bias": (False, None), "bias": (False, None)}),
    "helium": Family(_helium, {"head_dim": 128}, own={"norm_in_fp32": True}),
    "granite": Family(llama, own={"code": "granite"}),
    "granite_swa": Family(
        llama,
        {"sliding_window": 128, "tie_word_embeddings": True},
        own={"sinks": True, "code": "granite_swa"},
        pattern=("full", *_SLIDING * 3),
    ),
    "hyperclovax": _hyperclovax,
    "iquestcoder": Family(llama, {"head_dim": 128}),
    "minicpm3": Family(
        dense_latent, {"q_lora_rank": 768}, own={"code": "granite"}
    ),  # whose branches are scaled as well
    "youtu": Family(dense_latent, {"q_lora_rank": 1536}, own={"code": "youtu"}),
    "olmo": _olmo,
    "stablelm": _stablelm,
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "ministral3": Family(llama, {"head_dim": 128}, own={"code": "ministral3"}, pattern=_SLIDING),
    "qwen2": qwen2,
    "qwen3": qwen3,
    "seed_oss": _seed_oss,
    "ernie4_5": Family(ernie, {"head_dim": 128}),
    "hunyuan_v1_dense": hunyuan,
    "smollm3": _smollm3,
    "arcee": _arcee,
    "cwm": Family(llama, {"head_dim": 128, "sliding_window": 8192}, pattern=("full", *_SLIDING * 3)),
    "starcoder2": Family(_starcoder2, pattern=_SLIDING),
    "phi3": Family(_phi3, pattern=_SLIDING),
    "olmo2": Family(llama, own=_OLMO2),
    "olmo3": Family(llama, _WINDOW, own=_OLMO2, pattern=(*_SLIDING * 3, "full")),
    "exaone": _exaone,
    "exaone4": Family(_exaone4, _WINDOW),
    "glm": _glm,
    "glm4": Family(_glm, own={"norm_position": "both"}),
    "cohere": cohere,
    "cohere2": _cohere2,
    "gemma": _gemma,
    "vaultgemma": Family(_vaultgemma, _WINDOW | _CAPS, pattern=("sliding", "full")),
    "gemma2": Family(_gemma2, _WINDOW | _CAPS, pattern=("sliding", "full")),  # soft caps of configs that leave them out
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
    "gemma4_unified_text": Family(_gemma4, {"hidden_size_per_layer_input": 0, "sliding_window": 1024}),
}
