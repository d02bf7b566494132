"""A scenario's `model`: a preset's name, a Hugging Face config, either with overrides, or a full mapping."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.core.files import read_text
from sim.inputs.input_source import Source, file_named, is_folder, nearest, show, validate
from sim.inputs.model_config import ModelConfig
from sim.inputs.overrides import merge
from sim.inputs.rules.model import check_model
from sim.inputs.yaml_input import MAX_BYTES, KeyPath, parse_yaml
from sim.variants.frameworks.records import framework_of

if TYPE_CHECKING:
    from sim.inputs.training_config import Training

MODEL_FILE = "config.json"  # Hugging Face's name of it
_FOLDER = Path(__file__).parents[1] / "presets" / "models"


@cache
def model_presets() -> tuple[str, ...]:
    """Names of the shipped models."""
    return tuple(sorted(path.name.removesuffix(".yaml") for path in _FOLDER.glob("*.yaml")))


def preset_text(name: str) -> str:
    """A shipped model's file."""
    return (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def load_model(name: str) -> ModelConfig:
    """A shipped model, or one from a Hugging Face `config.json`."""
    return resolve_model(name, Source("model", {}), ())


def preset_name(model: ModelConfig) -> str:
    """The shipped model that equals `model`, or nothing: of several, the one with its positions. Only files with its
    layers and hidden size are parsed."""
    words = (f"layers: {model.layers}\n", f"hidden: {model.hidden}\n")
    alike = [name for name in model_presets() if all(word in preset_text(name) for word in words)]
    found = [name for name in alike if _with_its_positions(load_model(name), model) == model]
    exact = (name for name in found if load_model(name).max_positions == model.max_positions)
    return next(exact, found[0] if found else "")


def _with_its_positions(preset: ModelConfig, model: ModelConfig) -> ModelConfig:
    """The preset as `model` is used: rotary positions have no table, and not every framework trains all of it."""
    own: dict[str, Any] = {"trained_positions": model.trained_positions}
    own |= {"left_out": model.left_out, "unread": model.unread}
    own["mtp_layers"] = min(preset.mtp_layers, model.mtp_layers)
    if preset.positions != "learned":
        own["max_positions"] = model.max_positions
    return preset.model_copy(update=own)


def resolve_model(value: Any, source: Source, path: KeyPath) -> ModelConfig:
    """The model that `value` describes, checked for itself (not against any workload or layout)."""
    given: Any = {"preset": value} if isinstance(value, str) else value
    if not isinstance(given, dict):
        raise source.error(path, f"found {show(value)}; must be a preset's name, a path or a mapping")
    data = dict(given)
    if data.get("program") is not None:
        from sim.inputs.captured_input import captured_config

        return captured_config(data, source, path)
    preset = data.pop("preset", None)
    if preset is not None:
        data = merge(_base(preset, source, path), data)
    model = validate(ModelConfig, data, source, path)
    check_model(model, source, path)
    # Before a workload fills in `max_positions`: what is stated here is the model's own table.
    if model.positions == "learned" and model.max_positions and "trained_positions" not in data:
        model = model.model_copy(update={"trained_positions": model.max_positions})
    return model


def as_trained(model: ModelConfig, training: Training | None) -> ModelConfig:
    """The model without its modules of multi-token prediction if the framework trains none."""
    if training is None or not model.mtp_layers or framework_of(training).trains_prediction_layers:
        return model
    return model.model_copy(update={"mtp_layers": 0})


def with_positions(model: ModelConfig, seq_len: int) -> ModelConfig:
    """The model with positions for `seq_len` tokens where it says no number."""
    return model if model.max_positions else model.model_copy(update={"max_positions": seq_len})


def _base(preset: Any, source: Source, path: KeyPath) -> dict[str, Any]:
    if not isinstance(preset, str):
        raise source.error((*path, "preset"), f"found {show(preset)}; must be a preset's name or a path")
    if preset in model_presets():
        return _preset(preset)
    from sim.inputs import hub, huggingface  # a preset's name does without

    preset = hub.without_site(preset)
    hub_id = preset.removeprefix(hub.PREFIX)
    found: Path | None = None
    if hub_id != preset:
        of_hub = hub.config_of(hub_id)
        if isinstance(of_hub, str):
            return _preset(of_hub)
        found = of_hub
    elif preset:
        found = file_named(preset, source, MODEL_FILE)
    if found is None and hub.is_id(hub_id):
        raise source.error(path, f"found {show(preset)}; {hub.what_to_write(hub_id, model_presets())}")
    if found is not None:
        return huggingface.model_from_config(found)
    if preset and is_folder(preset, source):
        raise source.error(path, f"found {show(preset)}; is a folder without config.json, Hugging Face's")
    if preset.endswith(".json") or "/" in preset or "\\" in preset:
        raise source.error(path, f"found {show(preset)}; no such file (a Hugging Face config.json was expected)")
    others = "(`stepsim models` lists them); a folder or file with a Hugging Face config.json may be named, too"
    raise source.error(path, f"found {show(preset)}; no such model preset{nearest(preset, model_presets())} {others}")


@cache  # a step whose changes are tried is read some five times
def _preset(name: str) -> dict[str, Any]:
    """A shipped model's mapping, which nobody changes; a file with `preset: OTHER` holds what differs, or nothing."""
    path = _FOLDER / f"{name}.yaml"
    data, _ = parse_yaml(read_text(path, MAX_BYTES), str(path))
    assert isinstance(data, dict), path
    other = data.pop("preset", None)
    return data if other is None else merge(_preset(other), data)
