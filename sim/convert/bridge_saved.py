"""What Megatron-Bridge writes into a saved run's YAML beside plain values, and what such a whole config says.

Objects stand there as `{_target_: torch.bfloat16, _call_: false}`, and enumerations as `{_target_: …AttnBackend,
_args_: [1]}` (src/megatron/bridge/utils/yaml_utils.py; core/transformer/enums.py of Megatron-LM).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.convert.megatron_model import SIZES as OF_FLAGS
from sim.convert.megatron_older import GRAPHS
from sim.inputs.model_input import load_model

ENUM = "AttnBackend"
BACKENDS = {1: "flash", 2: "fused", 3: "unfused", 4: "local", 5: "auto"}
DTYPES = {"torch.bfloat16": "bf16", "torch.float32": "fp32", "torch.float16": "fp16"}


def plain(value: Any) -> Any:
    """A value that a flag can have, of one or of an object; None for all else.

    >>> plain({"_target_": "torch.bfloat16", "_call_": False}), plain("AttnBackend.flash"), plain({"a": 1})
    ('bf16', 'flash', None)
    """
    if isinstance(value, str):
        return value.removeprefix(f"{ENUM}.")
    if not isinstance(value, dict):
        return value
    target, arguments = str(value.get("_target_", "")), value.get("_args_")
    if target.endswith(ENUM) and isinstance(arguments, list) and arguments:
        return BACKENDS.get(arguments[0])
    return DTYPES.get(target, target) if target and not arguments and value.get("_call_") is False else None


def with_activation(merged: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that the function `activation_func` stands for; SwiGLU's, which a gate alone means, needs none."""
    name = str(merged.get("activation_func", "")).rpartition(".")[2]
    if "gelu" in name and merged.get("gated_linear_unit"):
        return {"quick_geglu": True}
    return {"squared_relu": True} if "squared_relu" in name else {}


# `GPTModelProvider`'s keys (src/megatron/bridge/models/gpt_provider.py), and ours.
SIZES = {flag.replace("-", "_"): ours for flag, ours in OF_FLAGS.items()}
OF_ATTENTION = {"qk_layernorm": "qk_norm", "add_qkv_bias": "qkv_bias"}
SINKS = {"learnable": True, "vanilla": False}
SIZES_OF_EXPERTS = {"num_moe_experts": "experts", "moe_ffn_hidden_size": "ffn", "moe_router_topk": "top_k"}


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
