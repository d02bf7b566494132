"""A scenario's `model`: a preset's name, a Hugging Face config, either with overrides, or a full mapping."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from sim.core.files import read_text
from sim.inputs.captured_input import captured_config
from sim.inputs.input_source import Source, nearest, show, validate
from sim.inputs.model_config import LOCAL, STATEFUL, ModelConfig
from sim.inputs.overrides import merge
from sim.inputs.yaml_input import MAX_BYTES, KeyPath, parse_yaml

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SUFFIX = re.compile(r"-(instruct|base|chat|hf|it|fp8)\b.*")
_FOLDER = Path(__file__).parents[1] / "presets" / "models"


@cache
def model_presets() -> tuple[str, ...]:
    """Names of the shipped models."""
    return tuple(sorted(path.name.removesuffix(".yaml") for path in _FOLDER.glob("*.yaml")))


def load_model(name: str) -> ModelConfig:
    """A shipped model, or one from a Hugging Face `config.json`."""
    return resolve_model(name, Source("model", {}), ())


def preset_name(model: ModelConfig) -> str:
    """The shipped model that equals `model`, or nothing. Only files with its layers and hidden size are parsed."""
    words = (f"layers: {model.layers}\n", f"hidden: {model.hidden}\n")
    for name in model_presets():
        text = (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
        if all(word in text for word in words) and _with_its_positions(load_model(name), model) == model:
            return name
    return ""


def _with_its_positions(preset: ModelConfig, model: ModelConfig) -> ModelConfig:
    """The preset for the sequences that `model` is used with: rotary positions have no table."""
    if preset.positions == "learned":
        return preset
    return preset.model_copy(update={"max_positions": model.max_positions})


def resolve_model(value: Any, source: Source, path: KeyPath) -> ModelConfig:
    """The model that `value` describes, checked for itself (not against any workload or layout)."""
    given: Any = {"preset": value} if isinstance(value, str) else value
    if not isinstance(given, dict):
        raise source.error(path, f"found {show(value)}; must be a preset's name, a path or a mapping")
    data = dict(given)
    if data.get("program") is not None:
        return captured_config(data, source, path)
    preset = data.pop("preset", None)
    if preset is not None:
        data = merge(_base(preset, source, path), data)
    model = validate(ModelConfig, data, source, path)
    _check(model, source, path)
    return model


def _base(preset: Any, source: Source, path: KeyPath) -> dict[str, Any]:
    if not isinstance(preset, str):
        raise source.error((*path, "preset"), f"found {show(preset)}; must be a preset's name or a path")
    if preset in model_presets():
        return _preset(preset)
    found = _find(preset, source) if preset else None
    if found is not None:
        from sim.inputs.huggingface import model_from_config

        return model_from_config(found)
    if _HUB_ID.fullmatch(preset) and not preset.endswith((".json", ".yaml", ".yml")):
        raise source.error(path, f"found {show(preset)}; {_hub_words(preset)}")
    if preset.endswith(".json") or "/" in preset or "\\" in preset:
        raise source.error(path, f"found {show(preset)}; no such file (a Hugging Face config.json was expected)")
    hint = nearest(preset, model_presets())
    others = "" if hint else f" (there are: {', '.join(model_presets())}; or a path to a Hugging Face config.json)"
    raise source.error(path, f"found {show(preset)}; no such model preset{hint}{others}")


def _hub_words(hub_id: str) -> str:
    """What to do with the id of a model on the Hugging Face Hub: the nearest preset, and how to fetch the config."""
    import difflib

    shipped = {name.replace("-", "").replace(".", ""): name for name in model_presets()}
    word = _SUFFIX.sub("", hub_id.partition("/")[2].lower().removeprefix("meta-"))
    found = difflib.get_close_matches(re.sub(r"[-_.]", "", word), shipped, n=1, cutoff=0.75)
    folder = hub_id.partition("/")[2]
    hint = f"the nearest shipped model is '{shipped[found[0]]}', or " if found else ""
    return (
        f"looks like a Hugging Face Hub id: {hint}fetch its config with "
        f"`hf download {hub_id} config.json --local-dir {folder}` and write model: {folder}/config.json"
    )


def _preset(name: str) -> dict[str, Any]:
    """A shipped model's mapping; a file that only holds `preset: OTHER` is a second name."""
    path = _FOLDER / f"{name}.yaml"
    data, _ = parse_yaml(read_text(path, MAX_BYTES), str(path))
    assert isinstance(data, dict), path
    return _preset(data["preset"]) if "preset" in data else data


def _find(name: str, source: Source) -> Path | None:
    for folder in dict.fromkeys((source.folder, "")):
        candidate = Path(folder, name)
        try:
            found = candidate / "config.json" if candidate.is_dir() else candidate
            if found.is_file():
                return found
        except (OSError, ValueError):  # a name too long, or with a NUL byte
            break
    return None


def _check(model: ModelConfig, source: Source, path: KeyPath) -> None:
    given = model.model_fields_set
    if "head_dim" not in given and model.mla is None and model.hidden % model.heads:
        raise source.error(
            (*path, "heads"), f"found {model.heads}; must divide hidden ({model.hidden}), or give head_dim"
        )
    if model.heads % model.kv_heads:
        raise source.error((*path, "kv_heads"), f"found {model.kv_heads}; must divide heads ({model.heads})")
    if model.mla is not None and model.kv_heads != model.heads:
        raise source.error(
            (*path, "kv_heads"), f"found {model.kv_heads}; with mla every head has its own: {model.heads}"
        )
    if model.mla is not None:
        head_dim = model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim
        if model.head_dim != head_dim:
            raise source.error(
                (*path, "head_dim"),
                f"found {model.head_dim}; with mla it is qk_nope_head_dim + qk_rope_head_dim = {head_dim}",
            )
        if model.mla.qk_rope_head_dim % 2:
            key, pairs = (*path, "mla", "qk_rope_head_dim"), "must be even: positions turn pairs of numbers"
            raise source.error(key, f"found {model.mla.qk_rope_head_dim}; {pairs}")
    if model.indexer is not None and (model.mla is None or model.mla.q_lora_rank is None):
        raise source.error((*path, "indexer"), "found an indexer; its queries come from mla.q_lora_rank: give that")
    local = any(kind in LOCAL for kind in model.attention_pattern)
    if local != (model.window is not None):
        why = "needs model.window" if local else "with model.window some layer must be sliding or chunked"
        raise source.error((*path, "attention_pattern"), f"found {list(model.attention_pattern)}; {why}")
    if local and model.mla is not None:
        raise source.error((*path, "window"), f"found {model.window}; latent attention (mla) sees all keys: null")
    _check_patterns(model, source, path)
    if model.qk_norm_over != "head" and not model.qk_norm:
        raise source.error((*path, "qk_norm_over"), f"found {show(model.qk_norm_over)}; needs qk_norm: true")
    moe = model.moe
    if moe is not None and moe.shared_ffn and moe.shared_experts:
        raise source.error((*path, "moe", "shared_ffn"), f"found {moe.shared_ffn}; give it or shared_experts, not both")
    if moe is not None and moe.shared_gate and not moe.shared_width:
        raise source.error((*path, "moe", "shared_gate"), "found true; needs shared_experts or shared_ffn")
    if moe is not None and (moe.groups is None) != (moe.top_groups is None):
        have, lacks = ("groups", "top_groups") if moe.top_groups is None else ("top_groups", "groups")
        raise source.error((*path, "moe", have), f"found without {lacks}; allowed: both or none")
    if moe is not None and moe.groups is not None and moe.top_groups is not None:
        if moe.experts % moe.groups:
            raise source.error((*path, "moe", "groups"), f"found {moe.groups}; must divide experts ({moe.experts})")
        if moe.top_groups > moe.groups:
            found = f"found {moe.top_groups}; must be at most groups ({moe.groups})"
            raise source.error((*path, "moe", "top_groups"), found)
    if moe is not None and moe.top_k > moe.experts:
        raise source.error((*path, "moe", "top_k"), f"found {moe.top_k}; must be at most experts ({moe.experts})")
    if moe is not None and moe.dense_layers > model.layers:
        raise source.error(
            (*path, "moe", "dense_layers"),
            f"found {moe.dense_layers}; must be at most layers ({model.layers})",
        )


def _check_patterns(model: ModelConfig, source: Source, path: KeyPath) -> None:
    """Each kind of layer that a pattern names is described, and what is described is in a layer."""
    stateful = any(kind in STATEFUL for kind in model.attention_pattern)
    if stateful != (model.state_space is not None):
        why = (
            "needs model.state_space" if stateful else "with model.state_space some layer must be state_space or beside"
        )
        raise source.error((*path, "attention_pattern"), f"found {list(model.attention_pattern)}; {why}")
    if "beside" in model.attention_pattern and model.mla is not None:
        raise source.error((*path, "attention_pattern"), "found 'beside'; mla is not simulated beside a state space")
    states = model.state_space
    if states is not None and states.heads % states.groups:
        raise source.error(
            (*path, "state_space", "groups"), f"found {states.groups}; must divide heads ({states.heads})"
        )
    if states is not None and (states.kind == "mamba1") != (states.rank is not None):
        why = "needs model.state_space.rank" if states.rank is None else "model.state_space.rank is for mamba1 only"
        raise source.error((*path, "state_space", "kind"), f"found {states.kind}; {why}")
    if states is not None and states.rank is not None and "beside" in model.attention_pattern:
        raise source.error((*path, "attention_pattern"), "found 'beside'; mamba1 is not simulated beside attention")
    if model.mlp_pattern is not None:
        routed = "experts" in model.mlp_pattern
        if routed != (model.moe is not None):
            why = "needs model.moe" if routed else "with model.moe some layer must have experts"
            raise source.error((*path, "mlp_pattern"), f"found {list(model.mlp_pattern)}; {why}")
        if model.moe is not None and (model.moe.dense_layers or model.moe.every > 1):
            raise source.error(
                (*path, "mlp_pattern"), "found beside moe.dense_layers or moe.every; one of them says it"
            )
    kinds = {(model.attention_kind(i), model.mlp_kind(i)) for i in range(model.layers)}
    if ("none", "none") in kinds:
        raise source.error((*path, "mlp_pattern"), "found a layer with neither attention nor MLP")
    whole = {(a, b) for a, b in kinds if a not in ("none", "state_space") and b != "none"}
    if model.parallel_block and model.moe is not None:
        raise source.error((*path, "parallel_block"), "found true; experts (model.moe) are simulated in serial blocks")
    if model.parallel_block and whole != kinds:
        raise source.error((*path, "parallel_block"), "found true; needs attention and an MLP in every layer")
    if model.parallel_block and model.norm_position != "pre":
        raise source.error(
            (*path, "parallel_block"), f"found true; needs norm_position pre, found {model.norm_position}"
        )
    if model.mtp_layers and (model.attention_kind(model.layers - 1), model.mlp_kind(model.layers - 1)) not in whole:
        raise source.error(
            (*path, "mtp_layers"), f"found {model.mtp_layers}; the last layer must have attention and an MLP"
        )
    if model.attention_gate and model.mla is not None:
        raise source.error((*path, "attention_gate"), "found true; latent attention (mla) has none")
