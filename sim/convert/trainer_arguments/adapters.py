"""LoRA of fine-tuning configs that are Transformers' `TrainingArguments` with keys of their own: TRL's `ModelConfig`,
LLaMA-Factory's arguments, Axolotl's YAML."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

from sim.convert.settings import Settings
from sim.core.errors import InputError
from sim.inputs.input_source import show
from sim.inputs.model_config import ModelConfig
from sim.inputs.training_config import ALL_TARGETS


class _Switch(NamedTuple):
    """Hold a trainer's way to ask for adapters: the `key` and those of its values (`words`) that do, the key of the
    `rank`, its `default`, the default `dropout`, and the modules that have adapters where the file names none."""

    key: str
    words: tuple[str, ...]
    rank: str
    default: int
    dropout: float = 0.0
    modules: tuple[str, ...] = ("all",)


# Where its user names no modules: TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING of peft/utils/constants.py, of
# Llama, Mistral, Qwen, Gemma and most others; what others have there is a layer of queries, keys and values, too.
PEFT_MODULES = ("q_proj", "v_proj")
SWITCHES = (
    # trl/trainer/model_config.py, whose `lora_target_modules` is None.
    _Switch("use_peft", ("true",), "lora_r", 16, 0.05, PEFT_MODULES),
    _Switch("lora_enable", ("true",), "lora_r", 64, 0.05),  # LLaVA's llava/train/train.py
    _Switch("use_lora", ("true",), "lora_r", 64, 0.05),  # finetune.py of QwenLM/Qwen
    _Switch("finetuning_type", ("lora",), "lora_rank", 8),  # llamafactory/hparams/finetuning_args.py
    _Switch("tuner_type", ("lora",), "lora_rank", 8, 0.05),  # swift/arguments/tuner_args.py
    _Switch("adapter", ("lora", "qlora"), "lora_r", 8),  # Axolotl, which always states the rank; peft's default
)
# By the module's name in Llama and models like it, GPT-2, GPT-J, GPT-NeoX, OPT, BLOOM, Falcon, ChatGLM, Phi, MPT,
# Baichuan and InternLM (transformers/models, and the maps of peft/utils/constants.py).
TARGETS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn"), "qkv"),
    **dict.fromkeys(("Wqkv", "wqkv", "W_pack"), "qkv"),
    **dict.fromkeys(("o_proj", "out_proj", "dense", "wo"), "attention_out"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "dense_h_to_4h", "c_fc", "fc_in", "fc1"), "mlp_up"),
    **dict.fromkeys(("down_proj", "dense_4h_to_h", "fc_out", "fc2"), "mlp_down"),
}
TWO_TARGETS = {"c_proj": ("attention_out", "mlp_down")}  # GPT-2's, of both
PATTERN = re.compile(r"[\\()\[\]*+|^$?]")  # what no module's name has
# Before a layer's module in its full name, which a pattern must match as a whole.
STEMS = (
    *(f"{stem}.layers" for stem in ("model", "model.language_model", "language_model.model", "language_model")),
    *("model.text_model.layers", "gpt_neox.layers", "transformer.h", "transformer.blocks"),
)
LAYERS = tuple(map(str, range(8)))  # of which a pattern may mean some
PARTS = ("self_attn", "mlp", "attn", "attention", "self_attention")
SOME = ("unfrozen_parameters", "lisa_n_layers", "spectrum_top_fraction")  # Axolotl's: layers, drawn anew or by a scan
RANK = "lora_r"  # of TRL's ModelConfig, and of scripts that make adapters without being asked
UNASKED = f"{RANK} without use_peft: all parameters are trained, as by TRL; add use_peft if the script makes adapters"
ALL = ("all", "ALL", "all-linear")
MODULES = ("lora_target_modules", "lora_target", "target_modules")
OF_EXPERTS = (
    "lora: without adapters of experts, which have no module for them in Transformers since release 5, and of MLPs "
    "beside them (shared experts, dense layers)"
)
# Axolotl's: experts are quantized as they are loaded (monkeypatch/moe_quant.py), or are linear layers, which
# bitsandbytes quantizes as it does others (loaders/patch_manager.py: `llama4_linearized_experts`).
QUANTIZED_EXPERTS = ("quantize_moe_experts", "llama4_linearized_experts")
OF_LATENTS = "lora: without adapters of latent attention's queries, keys and values"
WITHOUT_EFFECT = ("lora_alpha", "lora_target_linear", "rslora")


def adapters(s: Settings) -> dict[str, Any] | None:
    """`training.lora`, or nothing where all parameters are trained.

    Raises:
        InputError: where other parts alone are trained.
    """
    found = next((switch for switch in SWITCHES if str(s.take(switch.key)).lower() in switch.words), None)
    if found is None:
        _refuse_parts(s)
        s.notes += [UNASKED] if s.values.get(RANK) else []
        return None
    s.taken.update(WITHOUT_EFFECT)
    lora: dict[str, Any] = {"rank": s.size(found.rank, found.default)}
    if dropout := s.number("lora_dropout", found.dropout):
        lora["dropout"] = dropout
    if targets := _targets(s, found.modules):
        lora["targets"] = targets
    eight, four, bits = s.flag("load_in_8bit"), s.flag("load_in_4bit"), str(s.take("quantization_bit"))
    if four or bits == "4" or (s.values.get("adapter") == "qlora" and not eight):
        lora["weights"] = "nf4"
    elif eight or bits == "8":
        lora["weights"] = "int8"
    if [key for key in QUANTIZED_EXPERTS if s.flag(key)] and "weights" in lora:
        lora["quantized_experts"] = True
    return lora


def adapters_within(s: Settings, lora: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """The adapters without those that a model's experts and latent attention do not get.

    PEFT finds modules by name. Experts are parameters without a module of their own in Transformers since release 5,
    and the matrices of latent attention's queries, keys and values are not called `q_proj`, `k_proj` and `v_proj`.

    Raises:
        InputError: where no adapters are left.
    """
    given = [*lora.get("targets", ALL_TARGETS)]
    latent = model.mla is not None or model.compressed_attention is not None
    left = [t for t in given if not (model.moe and t.startswith("mlp")) and not (latent and t == "qkv")]
    if left == given:
        return lora
    if model.moe and (lost := {"mlp_up", "mlp_down"} & {*given}):
        s.notes.append(OF_EXPERTS)
        given = [t for t in given if t not in lost]
    if latent and "qkv" in given:
        s.notes.append(OF_LATENTS)
    if not left:
        raise InputError(
            f"{s.file}: lora_target_modules: name no module that is simulated with adapters beside frozen "
            "experts and latent attention: attention's output"
        )
    return lora | {"targets": left}


def _refuse_parts(s: Settings) -> None:
    """Refuse training of parts of a model that are no LoRA: LLaMA-Factory's `freeze` and `oft`, Axolotl's other
    adapters, `unfrozen_parameters` (utils/freeze.py: `freeze_layers_except`) and their kin."""
    if some := next((key for key in SOME if s.values.get(key)), None):
        raise InputError(f"{s.file}: {some}: trains some of the parameters; can be converted: full training, and LoRA")
    for key in ("finetuning_type", "adapter", "tuner_type"):
        word = s.values.get(key)
        if word not in (None, "", "full", False):
            raise InputError(f"{s.file}: {key}: found {show(word)}; can be converted: full training, and LoRA")


def _targets(s: Settings, default: tuple[str, ...]) -> list[str]:
    """Our names of the adapted layers, in order; nothing for all.

    Axolotl's `lora_target_linear` adds every linear layer to those that are named (loaders/adapter.py:
    `_build_peft_lora_config`).

    Raises:
        InputError: where none of the modules that are named is known.
    """
    key, given = next(((key, value) for key in MODULES if (value := s.take(key))), ("", list(default)))
    if s.flag("lora_target_linear"):
        return []
    if isinstance(given, str) and given not in ALL and PATTERN.search(given):
        words = _matched(given) or [given]
    else:
        words = given if isinstance(given, list) else str(given).replace(",", " ").split()
    if any(word in ALL for word in words):
        return []
    found = layers_of(words)
    unknown = [str(word) for word in words if not layers_of([word])]
    if not found:
        known = ", ".join([*ALL[-1:], *TARGETS, *TWO_TARGETS])
        raise InputError(f"{s.file}: {key}: found {show(', '.join(map(str, words)))}; none of them is known: {known}")
    s.notes += [f"lora: without the modules {', '.join(unknown)}"] if unknown else []
    if not key:
        s.notes.append(f"lora: adapters of {' and '.join(default)}, PEFT's default: lora_target_modules names others")
    return found


def layers_of(modules: Iterable[object]) -> list[str]:
    """Our names, in order, of the layers that have modules with these names, which may begin with those of the parts
    around them (`self_attn.q_proj`). A layer counts where one of its matrices does.

    >>> layers_of(["v_proj", "c_proj", "lm_head"])
    ['qkv', 'attention_out', 'mlp_down']
    """
    names = [name if part in ("", *PARTS) else "" for part, _, name in (str(word).rpartition(".") for word in modules)]
    ours = {layer for name in names for layer in TWO_TARGETS.get(name, (TARGETS.get(name),))}
    return [layer for layer in dict.fromkeys(TARGETS.values()) if layer in ours]


def _matched(pattern: str) -> list[str]:
    """The names of modules that a pattern means, which must match a module's full name (peft/tuners/tuners_utils.py:
    `check_target_module_exists`)."""
    try:
        matches = re.compile(pattern).fullmatch
    except re.error:
        return []
    names = (*TARGETS, *TWO_TARGETS)
    return [name for name in names if any(matches(".".join(place)) for place in product(STEMS, LAYERS, PARTS, [name]))]
