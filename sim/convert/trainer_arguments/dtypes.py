"""Precision and dtypes of `TrainingArguments`: in which dtype each trainer loads a model, and what casts it afterwards.

Sources: transformers/modeling_utils.py of release 5.24 (`from_pretrained`: dtype is "auto" unless it is given);
trl/trainer/utils.py and model_config.py of 1.16 (fp32 unless it is given); llamafactory/model/adapter.py of 0.9.5
(`init_adapter` casts what is trained to fp32); accelerate/accelerator.py (`prepare_model`) and utils/fsdp_utils.py
(`fsdp2_prepare_model`) of 1.15, which cast what FSDP trains to fp32; axolotl/monkeypatch/accelerate/fsdp2.py of 0.19,
which takes the latter's place and casts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.convert.settings import ALL_IN_BF16, Settings, without_none
from sim.convert.trainer_arguments.axolotl import MARK
from sim.convert.trainer_arguments.deepspeed_settings import AUTO
from sim.convert.trainer_arguments.deepspeed_zero import note_inner
from sim.convert.trainer_arguments.llama_factory import is_llama_factory
from sim.convert.trainer_arguments.trl import is_trl

# In `bf16` and `fp16`, and in `offload_optimizer`: what changes a step and is not simulated.
UNREAD_OF_DTYPES = ("bf16_master_weights_and_grads", "bf16_optimizer_states", "fp16_master_weights_and_grads")
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"} | {name: name for name in ("fp32", "bf16", "fp16")}
FSDP_IN_FP32 = (
    "parameters are taken for fp32, whatever torch_dtype says, as Accelerate casts what FSDP trains to it; "
    "for releases that leave FSDP2's in 16 bits set training.param_dtype, grad_dtype and optimizer_dtype to bf16, and "
    "training.master_weights=false"
)
AS_IN_CHECKPOINT = (
    "parameters are taken for bf16 without copies in fp32: Transformers since release 5 loads a model in the dtype of "
    "its checkpoint, for most models bf16, unless the script names one. If it names fp32, and before release 5, set "
    "torch_dtype: float32 in the file"
)
FROZEN = "lora: frozen weights that are not quantized are taken for {}"
FOUR_BIT_OF_TRL = (
    "; TRL loads embedding, output and norms in fp32 where dtype is not given, which takes 2 bytes a number more"
)
FROZEN_OF_TRL = ", as TRL loads a model where dtype is not given"
WITHOUT_TF32 = "tf32: matmuls of fp32 are simulated without it, and so take several times as long as on tensor cores"
# By DeepSpeed's words (runtime/config.py: `get_communication_data_type`).
COMMUNICATED: dict[str, str | None] = {
    "none": None,
    "None": None,
    "fp32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
    "bfp16": "bf16",
}


def casts_shards(data: Mapping[str, Any], layout: Mapping[str, Any]) -> bool:
    """Tell whether FSDP shards parameters that were cast to fp32: Accelerate casts them, Axolotl's own FSDP2 does
    not. `data`: the file as it was written; `layout`: what `of_fsdp` made of it."""
    return layout["zero"] > 0 and (MARK not in data or layout.get("fsdp_version") == 1)


def numbers_of(s: Settings, by_deepspeed: bool, lora: Mapping[str, Any] | None, casts: bool) -> dict[str, Any]:
    """Precision and dtypes. `lora`: the adapters beside frozen weights; `casts`: see `casts_shards`."""
    on = {
        name: value.get("enabled", False) not in (False, AUTO)  # precision_config.py: off unless it says so
        if isinstance(value := s.take(name, False), dict)
        else value
        for name in ("bf16", "fp16")
    }
    for name in on:
        note_inner(s, name, s.values.get(name), UNREAD_OF_DTYPES)
    precision = "bf16" if on["bf16"] else "fp16" if on["fp16"] else "fp32"
    if precision == "fp32":
        s.notes += [WITHOUT_TF32] if s.flag("tf32") else []
        s.notes += [FROZEN.format("fp32")] if lora is not None else []
        return {"precision": precision}
    if by_deepspeed:
        s.notes += [FROZEN.format("16 bits")] if lora is not None else []
        return {"precision": precision, **_of_deepspeed(s, precision)}
    loaded = DTYPES.get(str(s.take("torch_dtype", s.take("dtype"))).removeprefix("torch."))
    kept = _trained(s, precision, loaded, casts) if lora is None else _frozen(s, loaded, lora)
    return {"precision": precision, **kept}


def _of_deepspeed(s: Settings, precision: str) -> dict[str, Any]:
    """DeepSpeed keeps 16-bit parameters, whatever dtype they are loaded in, and an fp32 copy. Gradients are added up in
    one dtype and sent in another (runtime/engine.py: `communication_data_type`)."""
    s.taken |= {"torch_dtype", "dtype"}
    types = s.take("data_types")
    sums = DTYPES.get(str(types.get("grad_accum_dtype"))) if isinstance(types, dict) else None
    sent = s.choice("communication_data_type", COMMUNICATED, "none")
    sent = sent or (precision if sums not in (None, precision) else None)
    return without_none({"grad_dtype": sums, "grad_reduce_dtype": sent})


def _trained(s: Settings, precision: str, loaded: str | None, casts: bool) -> dict[str, Any]:
    """Parameters that are all trained, in the dtype they are loaded in, or in fp32 where a trainer casts them."""
    of_checkpoint = loaded is None and not (is_trl(s) or is_llama_factory(s.values))
    loaded = "bf16" if of_checkpoint else loaded
    if casts:
        s.notes += [FSDP_IN_FP32] if loaded == precision else []
        return {"param_dtype": "fp32"}
    s.notes += [AS_IN_CHECKPOINT] if of_checkpoint else []
    if loaded != precision:
        return {"param_dtype": "fp32"}
    return ALL_IN_BF16 if precision == "bf16" else {"param_dtype": loaded, "master_weights": False}


def _frozen(s: Settings, loaded: str | None, lora: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters that adapters stand beside; quantized ones have a dtype of their own."""
    by_default = loaded is None and is_trl(s) and not is_llama_factory(s.values)
    if "weights" in lora:
        s.notes.append("lora: what is not quantized is taken for 16 bits" + FOUR_BIT_OF_TRL * by_default)
        return {}
    fp32 = loaded == "fp32" or by_default
    s.notes.append(FROZEN.format("fp32" if fp32 else "16 bits") + FROZEN_OF_TRL * (fp32 and loaded is None))
    return {"param_dtype": "fp32"} if fp32 else {}
