"""LoRA of fine-tuning configs that are Transformers' `TrainingArguments` with keys of their own: TRL's `ModelConfig`,
LLaMA-Factory's arguments, Axolotl's YAML."""

from __future__ import annotations

from typing import Any, NamedTuple

from sim.convert.settings import Settings
from sim.core.errors import InputError
from sim.inputs.input_source import show


class _Switch(NamedTuple):
    """Hold a trainer's way to ask for adapters: the `key` and those of its values (`words`) that do, the key of the
    `rank`, its `default`, and the default `dropout`."""

    key: str
    words: tuple[str, ...]
    rank: str
    default: int
    dropout: float = 0.0


SWITCHES = (
    _Switch("use_peft", ("true",), "lora_r", 16, 0.05),  # trl/trainer/model_config.py
    _Switch("lora_enable", ("true",), "lora_r", 64, 0.05),  # LLaVA's llava/train/train.py
    _Switch("use_lora", ("true",), "lora_r", 64, 0.05),  # finetune.py of QwenLM/Qwen
    _Switch("finetuning_type", ("lora",), "lora_rank", 8),  # llamafactory/hparams/finetuning_args.py
    _Switch("tuner_type", ("lora",), "lora_rank", 8, 0.05),  # swift/arguments/tuner_args.py
    _Switch("adapter", ("lora", "qlora"), "lora_r", 8),  # Axolotl, which always states the rank; peft's default
)
TARGETS = {  # by the module's name in Llama and models like it
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "qkv"),
    "o_proj": "attention_out",
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), "mlp_up"),
    "down_proj": "mlp_down",
}
ALL = ("all", "ALL", "all-linear")
MODULES = ("lora_target_modules", "lora_target", "target_modules")
WITHOUT_EFFECT = ("lora_alpha", "lora_target_linear", "rslora")


def adapters(s: Settings) -> dict[str, Any] | None:
    """`training.lora`, or nothing where all parameters are trained.

    Raises:
        InputError: where other parts alone are trained.
    """
    found = next((switch for switch in SWITCHES if str(s.take(switch.key)).lower() in switch.words), None)
    if found is None:
        _refuse_parts(s)
        return None
    s.taken.update(WITHOUT_EFFECT)
    lora: dict[str, Any] = {"rank": s.size(found.rank, found.default)}
    if dropout := s.number("lora_dropout", found.dropout):
        lora["dropout"] = dropout
    if targets := _targets(s):
        lora["targets"] = targets
    if s.flag("load_in_8bit"):
        s.notes.append("load_in_8bit: frozen weights are simulated in 16 bits")
    if s.flag("load_in_4bit") or str(s.take("quantization_bit")) == "4" or s.values.get("adapter") == "qlora":
        lora["weights"] = "nf4"
    s.notes.append("lora: frozen weights that are not quantized are taken for 16 bits")
    return lora


def _refuse_parts(s: Settings) -> None:
    """Refuse training of parts of a model that are no LoRA: LLaMA-Factory's `freeze` and `oft`, Axolotl's other
    adapters."""
    for key in ("finetuning_type", "adapter", "tuner_type"):
        word = s.values.get(key)
        if word not in (None, "", "full", False):
            raise InputError(f"{s.file}: {key}: found {show(word)}; can be converted: full training, and LoRA")


def _targets(s: Settings) -> list[str]:
    """Our names of the adapted layers, in order; nothing for all. A layer counts where one of its matrices does."""
    given = next((value for value in map(s.take, MODULES) if value), None)
    words = given if isinstance(given, list) else str(given or "all").replace(",", " ").split()
    if any(word in ALL for word in words):
        return []
    if unknown := [str(word) for word in words if word not in TARGETS]:
        s.notes.append(f"lora: without the modules {', '.join(unknown)}")
    ours = {TARGETS[word] for word in words if word in TARGETS}
    return [name for name in dict.fromkeys(TARGETS.values()) if name in ours]
