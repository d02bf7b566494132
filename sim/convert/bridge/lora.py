"""LoRA of Megatron-Bridge's `peft` and of NeMo's `model.peft`.

Names and defaults: src/megatron/bridge/peft/lora.py, and nemo/collections/nlp/parts/peft_config.py
(`get_target_modules`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.core.errors import InputError
from sim.inputs.input_source import show

RANK = 32
QKV, OUT, UP, DOWN = "qkv", "attention_out", "mlp_up", "mlp_down"
OF_BRIDGE = {"linear_qkv": (QKV,), "linear_proj": (OUT,), "linear_fc1": (UP,), "linear_fc2": (DOWN,)}
OF_NEMO = {
    "attention_qkv": (QKV,),
    "attention_dense": (OUT,),
    "mlp_fc1": (UP,),
    "mlp_fc2": (DOWN,),
    "attention": (QKV, OUT),
    "mlp": (UP, DOWN),
    "all": (QKV, OUT, UP, DOWN),
}
KINDS = ("lora", "LoRA")  # NeMo's scheme, and the last part of a class's name
NONE = (None, "", "none", "null", "None")


def lora_of(file: Path, data: Mapping[str, Any]) -> dict[str, Any] | None:
    """`training.lora`; None where all parameters are trained.

    Raises:
        InputError: for adapters that are no LoRA, and modules that it is not simulated on.
    """
    own = data["model"].get("peft")
    if isinstance(own, dict) and (scheme := own.get("peft_scheme")) not in NONE:
        _require(file, "model.peft.peft_scheme", scheme)
        tuning = own.get("lora_tuning") or {}
        found = _lora(file, tuning.get("adapter_dim", RANK), tuning.get("target_modules", ["attention_qkv"]), OF_NEMO)
        return found | _dropout(tuning.get("adapter_dropout"))
    peft = data.get("peft")
    if peft in NONE or peft == {}:
        return None
    if not isinstance(peft, dict):
        _require(file, "peft", peft)
        return _lora(file, RANK, [*OF_BRIDGE], OF_BRIDGE)
    _require(file, "peft._target_", str(peft.get("_target_", KINDS[1])).rpartition(".")[2])
    found = _lora(file, peft.get("dim", RANK), peft.get("target_modules") or [*OF_BRIDGE], OF_BRIDGE)
    return found | _dropout(peft.get("dropout"))


def modules_of(file: Path, rank: int, modules: list[str]) -> dict[str, Any]:
    """The rank, and the layers that Megatron-Bridge's names of modules mean, where these are not all.

    Raises:
        InputError: for modules that LoRA is not simulated on.
    """
    return _lora(file, rank, modules, OF_BRIDGE)


def _dropout(value: Any) -> dict[str, Any]:
    return {"dropout": value} if value else {}


def _require(file: Path, key: str, kind: object) -> None:
    if kind not in KINDS:
        raise InputError(f"{file}: {key}: found {show(kind)}; can be converted: LoRA, or training of all parameters")


def _lora(file: Path, rank: Any, modules: Any, names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """The rank, and the layers where these are not all."""
    unknown = [name for name in modules if name not in names] if isinstance(modules, list) else [modules]
    if unknown:
        raise InputError(f"{file}: target_modules: found {show(unknown[0])}; can be converted: {', '.join(names)}")
    found = {layer for name in modules for layer in names[name]}
    targets = [layer for layer in (QKV, OUT, UP, DOWN) if layer in found]
    return {"rank": rank, **({"targets": targets} if len(targets) < len(OF_BRIDGE) else {})}
