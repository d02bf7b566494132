"""What Megatron-Bridge writes into a saved run's YAML beside plain values, and what such a whole config says.

Objects stand there as `{_target_: torch.bfloat16, _call_: false}`, and enumerations as `{_target_: …AttnBackend,
_args_: [1]}`, alone or in a list (src/megatron/bridge/utils/yaml_utils.py; core/transformer/enums.py of Megatron-LM).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.convert.megatron.model import SIZES as OF_FLAGS
from sim.convert.megatron.older import GRAPHS
from sim.inputs.model_input import load_model

ENUM = "AttnBackend"
PARTS = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
ENUMS: dict[str, tuple[str, ...]] = {  # their words, from number 1 on
    ENUM: ("flash", "fused", "unfused", "local", "auto"),
    "CudaGraphModule": PARTS,
    "CudaGraphScope": ("full_iteration", *PARTS),  # before core 0.18
}
DTYPES = {"torch.bfloat16": "bf16", "torch.float32": "fp32", "torch.float16": "fp16"}


def plain(value: Any) -> Any:
    """A value that a flag can have, of one or of an object; None for all else.

    >>> plain({"_target_": "torch.bfloat16", "_call_": False}), plain("AttnBackend.flash"), plain({"a": 1})
    ('bf16', 'flash', None)
    """
    if isinstance(value, str):
        return value.removeprefix(f"{ENUM}.")
    if isinstance(value, list):
        return [item if (word := _word(item)) is None else word for item in value]
    if not isinstance(value, dict):
        return value
    if (word := _word(value)) is not None:
        return word
    target, arguments = str(value.get("_target_", "")), value.get("_args_")
    return DTYPES.get(target, target) if target and not arguments and value.get("_call_") is False else None


def _word(value: Any) -> str | None:
    """An enumeration's word; None for all else."""
    arguments = value.get("_args_") if isinstance(value, dict) else None
    if not isinstance(arguments, list) or len(arguments) != 1 or type(number := arguments[0]) is not int:
        return None
    words = ENUMS.get(str(value.get("_target_", "")).rpartition(".")[2], ())
    return words[number - 1] if 1 <= number <= len(words) else None


def with_activation(merged: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that the function `activation_func` stands for; SwiGLU's, which a gate alone means, needs none."""
    name = str(merged.get("activation_func", "")).rpartition(".")[2]
    if "gelu" in name and merged.get("gated_linear_unit"):
        return {"quick_geglu": True}
    return {"squared_relu": True} if "squared_relu" in name else {}


# `GPTModelProvider`'s keys (src/megatron/bridge/models/gpt_provider.py), and ours.
SIZES = {flag.replace("-", "_"): ours for flag, ours in OF_FLAGS.items()} | {"vocab_size": "vocab"}
OF_ATTENTION = {"qk_layernorm": "qk_norm", "add_qkv_bias": "qkv_bias"}
NO_TEXT = "NullTokenizer"
# Of `tokenizer`, since 0.5 (training/tokenizers/config.py: `TokenizerConfig`).
OF_PADDING = (
    *("tensor_model_parallel_size", "make_vocab_size_divisible_by", "pad_vocab_size", "use_tokenizer_vocab_size"),
)
SINKS = {"learnable": True, "vanilla": False}
REPEATED = "mtp_use_repeated_layer"
SIZES_OF_EXPERTS = {
    "num_moe_experts": "experts",
    "moe_ffn_hidden_size": "ffn",
    "moe_router_topk": "top_k",
    "moe_latent_size": "latent",
}


def model_with_own_sizes(name: str, section: Mapping[str, Any], whole: bool) -> str | dict[str, Any]:
    """The model that `hf_model_id` or the user names, with the sizes that the file has in place of its own; `whole`:
    what the file leaves out, there is none of."""
    named = load_model(name)
    own: dict[str, Any] = _other_sizes(section, named, SIZES)
    if named.moe is not None:
        experts = _other_sizes(section, named.moe, SIZES_OF_EXPERTS) | _capacity(section)
        own |= {"moe": experts} if experts else {}
    if (whole or "mtp_num_layers" in section) and (predicted := section.get("mtp_num_layers") or 0) != named.mtp_layers:
        own["mtp_layers"] = predicted
    if section.get(REPEATED) and int(section.get("mtp_num_layers") or named.mtp_layers) > 1:
        own["mtp_repeated"] = True
    return {"preset": name, **own} if own else name


def attention_overrides(section: Mapping[str, Any], name: str, windows: Mapping[str, Any]) -> dict[str, Any]:
    """What an override of a recipe says of attention otherwise than the model that the user names; `windows`: of
    `window_size`, as `model_of` reads it."""
    named = load_model(name)
    given = {key: section[key] for key in OF_ATTENTION if isinstance(section.get(key), bool)}
    found: dict[str, Any] = {OF_ATTENTION[key]: value for key, value in given.items()}
    if named.mla is not None:
        found.pop("qk_norm", None)  # norms of the latents
    if (softmax := section.get("softmax_type")) in SINKS:
        found["sinks"] = SINKS[softmax]
    found = {key: value for key, value in found.items() if value != bool(getattr(named, key))}
    return found | (dict(windows) if windows.get("window") != named.window else {})


def with_vocabulary(data: dict[str, Any]) -> dict[str, Any]:
    """The sections with one size of the vocabulary: the model's, where it has one, as it stands. A tokenizer without
    text (`NullTokenizer`) replaces it by its own where `use_tokenizer_vocab_size` says so (megatron/bridge/training/
    setup.py of 0.6: `_validate_and_set_vocab_size`). How the tokenizer pads for itself is no layout of the model."""
    tokenizer, model = data.get("tokenizer"), data["model"]
    if not isinstance(tokenizer, dict):
        return data
    replaces = tokenizer.get("use_tokenizer_vocab_size") and tokenizer.get("tokenizer_type") == NO_TEXT
    if replaces and type(size := tokenizer.get("vocab_size")) is int:
        model = {**model, "vocab_size": size}
    of_model = ("tokenizer_type", "vocab_size") if type(model.get("vocab_size")) is int else ()
    tokenizer = {key: value for key, value in tokenizer.items() if key not in (*OF_PADDING, *of_model)}
    return {**data, "model": model, "tokenizer": tokenizer}


def _capacity(section: Mapping[str, Any]) -> dict[str, Any]:
    """The most tokens of an expert, and whether one with fewer is padded; nothing, where tokens are not dropped (a
    number below 0 is as good as none: core/transformer/transformer_config.py)."""
    factor = section.get("moe_expert_capacity_factor")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or factor < 0:
        return {}
    padded = bool(section.get("moe_pad_expert_input_to_capacity"))
    return {"capacity_factor": factor} | ({"pad_to_capacity": True} if padded else {})


def _other_sizes(section: Mapping[str, Any], named: object, keys: Mapping[str, str]) -> dict[str, int]:
    """Sizes by our keys that differ from the named model's."""
    given = {ours: section[key] for key, ours in keys.items() if type(section.get(key)) is int}
    return {ours: size for ours, size in given.items() if size != getattr(named, ours)}


# Switches of CUDA graphs that releases of 2025 had, as values of `cuda_graph_impl`.
FORMER_GRAPHS = {key.replace("-", "_"): impl for key, impl in GRAPHS.items()}


def with_graphs(merged: Mapping[str, Any]) -> dict[str, Any]:
    """The value of `cuda_graph_impl` that a former switch stands for."""
    impl = next((impl for key, impl in FORMER_GRAPHS.items() if merged.get(key)), None)
    return {"cuda_graph_impl": impl} if impl and merged.get("cuda_graph_impl") in (None, "none") else {}


def runs_as_recipes(data: Mapping[str, Any], merged: Mapping[str, Any]) -> bool:
    """Whether a whole config has what the record of framework megatron_bridge says: NVIDIA's scripts set it
    (scripts/performance), and recipes alone do not."""
    checks = data.get("rerun_state_machine")
    in_loss = checks.get("check_for_nan_in_loss", True) if isinstance(checks, dict) else True
    unchecked = not in_loss and merged.get("check_for_nan_in_grad") is False
    fused_rope = bool(merged.get("apply_rope_fusion")) or not merged.get("multi_latent_attention")
    return unchecked and bool(merged.get("average_in_collective")) and fused_rope
