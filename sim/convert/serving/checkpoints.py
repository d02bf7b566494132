"""Checkpoints in few bits, told by their ids on the Hub, and prediction layers that shipped models leave out."""

from __future__ import annotations

import re
from typing import Any

from sim.convert.named_models import BY_NAME, known_by_name
from sim.convert.serving.names import names_of_flags
from sim.convert.settings import Settings
from sim.core.errors import InputError
from sim.inputs.hub import PREFIX, as_model, config_of, is_id
from sim.inputs.input_source import Source, file_named
from sim.inputs.model_config import ModelConfig
from sim.inputs.model_input import MODEL_FILE, load_model, model_presets, preset_name

# How publishers end the ids of checkpoints in few bits (NVIDIA, Qwen, Red Hat AI, Z.ai, Meta on the Hub).
FORMATS = {
    re.compile(r"(?i)[-_]fp8(-dynamic|-block|-kv)?$"): "fp8",
    re.compile(r"(?i)[-_](nvfp4|fp4)(-v\d)?$"): "nvfp4",
    re.compile(r"(?i)[-_](awq|gptq)([-_]int4)?$|[-_](w4a16|quantized\.w4a16|int4)$"): "int4_weight_only",
    re.compile(r"(?i)[-_]gptq[-_]int8$|[-_](quantized\.)?w8a16$"): "int8_weight_only",
    re.compile(r"(?i)[-_](quantized\.)?w8a8$"): "llm_int8",
}
EXPERTS = {"nvfp4": "nvfp4_experts"}  # of models with latent attention, which NVIDIA's checkpoints leave in 16 bits
UNSAID = (None, "modelopt", "compressed-tensors")  # values of --quantization that leave the format to the checkpoint


def described(s: Settings, served: str) -> str:
    """The model of a Hub id that nothing describes: the shipped model of the id without its ending, with the weights
    that the ending names; the id itself where that is none either."""
    hub_id = served.removeprefix(PREFIX)
    if hub_id in model_presets() or (is_id(hub_id) and config_of(hub_id) is not None):
        return served
    if file_named(hub_id, Source(str(s.file), {}), MODEL_FILE) is not None:
        return served
    if (found := known_by_name(hub_id)) is not None:
        s.notes.append(BY_NAME.format(hub_id, found.removeprefix(PREFIX)))
        return found
    for ending, stored in FORMATS.items():
        whole = ending.sub("", hub_id)
        if whole == hub_id or (found := known_by_name(whole)) is None:
            continue
        if s.values.get("quantization") in UNSAID:
            s.values = {**s.values, "quantization": stored}
        s.notes.append(
            f"{hub_id}: read as {found} with weights in few bits ({stored}), by the end of its name; --model and "
            "inference.quantization say otherwise"
        )
        return found
    return served


def weights_of(s: Settings, model: str) -> str | None:
    """The format of weights that flags say, as the checkpoint of this model has it."""
    weights = names_of_flags().weights.get(str(s.values.get("quantization")))
    if weights is None:  # which is reported as not expressed
        return None
    s.taken.add("quantization")
    known = loaded(model) if weights in EXPERTS else None
    return EXPERTS[weights] if known is not None and known.mla is not None and known.moe is not None else weights


def prefixes_of(s: Settings, model: str) -> str | None:
    """The prefix cache that flags say. Of a model with states none is simulated (vLLM keeps a state for blocks, too:
    config/cache.py, mamba_cache_mode align)."""
    known = loaded(model) if s.flag("prefixes") else None
    if known is not None and known.state_space is not None:
        s.notes.append(
            f"{s.written_as('prefixes')}: the model's states are not kept for prefixes here: no prefix cache"
        )
        return "none"
    return "gpu" if s.flag("prefixes") else "none" if s.flag("no_prefixes") else None


def with_prediction(model: str, inference: dict[str, Any], s: Settings) -> str | dict[str, Any]:
    """The model with the prediction layer of its checkpoint, where it drafts and the shipped model leaves it out."""
    speculative = inference.get("speculative")
    known = loaded(model) if speculative is not None and "draft" not in speculative else None
    if known is None or preset_name(known) not in names_of_flags().predicting:
        return as_model(model)
    s.notes.append("model.mtp_layers: 1, the prediction layer of its checkpoint, which the shipped model leaves out")
    return {"preset": as_model(model), "mtp_layers": 1}


def loaded(model: str) -> ModelConfig | None:
    """A model by name, Hub id or file; None for one that is not at hand or not expressible."""
    try:
        return load_model(as_model(model))
    except InputError:  # which the scenario's own check says
        return None
