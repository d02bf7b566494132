"""Model shapes from a Hugging Face `config.json`. Only numbers are read; no code of the model is run."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from sim.core.errors import InputError
from sim.core.files import read_text
from sim.core.json_text import parse_json
from sim.inputs.families import (
    convolutions,
    deepseek,
    dense,
    experts,
    gpt,
    hub,
    hybrids,
    linear_attention,
    pictures,
    recent,
    selected_keys,
)
from sim.inputs.families.dense import Config, NotExpressibleError
from sim.inputs.input_source import nearest, show
from sim.inputs.model_config import MAX_LAYERS, MAX_POSITIONS
from sim.inputs.recorded import Recorded, decided, same
from sim.inputs.stored_weights import stored_weights
from sim.inputs.yaml_input import one_line

FAMILIES = (
    gpt.FAMILIES
    | dense.FAMILIES
    | experts.FAMILIES
    | deepseek.FAMILIES
    | hybrids.FAMILIES
    | linear_attention.FAMILIES
    | convolutions.FAMILIES
    | selected_keys.FAMILIES
    | hub.FAMILIES
    | pictures.FAMILIES
    | recent.FAMILIES
)
_PRESETS = Path(__file__).parents[1] / "presets"
_FILE, _DEFAULTS = _PRESETS / "huggingface.yaml", _PRESETS / "huggingface_defaults.yaml"
# Sizes that Transformers' config classes fill in and configs of single models leave out too. Any other size that is
# missing is more likely a mistake.
_LEFT_OUT = ("num_key_value_heads", "max_position_embeddings", "n_positions", "max_seq_len", "model_max_length")
# Names of one size.
_SYNONYMS = (
    ("num_experts", "num_local_experts", "n_routed_experts"),
    ("num_experts_per_tok", "num_experts_per_token"),
    ("num_hidden_layers", "num_layers", "n_layer"),
)
# Others, of which configs have several at once, alike.
_ALIKE = (
    *_SYNONYMS,
    ("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
    ("num_attention_heads", "num_heads", "n_head", "n_heads"),
    ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_groups", "multi_query_group_num"),
    ("hidden_size", "n_embd", "d_model"),
    ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size"),
    ("vocab_size", "padded_vocab_size"),
    ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "experts_per_token"),
    ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "model_max_length"),
    ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", "moe_intermediate_size"),
    ("num_shared_experts", "n_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    ("num_nextn_predict_layers", "num_mtp_layers"),
)
_SIZE = re.compile("(^n|^num|size|dim|heads|layers|experts|positions|rank|dtype)(_|$)")  # keys whose values are numbers
# Wrappers that tie embeddings where their decoder's config alone says so (configuration_*.py of each in Transformers).
_TIED_BY_DECODER = re.compile("llava|hunyuan_vl|glm4v|glm_ocr|minimax_m3_vl|paddleocr_vl|qwen2(_5)?_vl|video_llama_3")

_CAPTURE = "can be captured as a program: python -m calibrate.capture config.json --out PROGRAM.json.gz"
_FUNCTION = (
    "a function that makes its step can be captured as a program: python -m calibrate.capture package.module:function "
    "--out PROGRAM.json.gz"
)
QUANTIZATION_FILE = "hf_quant_config.json"  # of NVIDIA ModelOpt
_MAX_BYTES = 16_000_000  # lists of the modules of many experts are long
_THINKER = "thinker_config"  # of Qwen's models that also speak
_DECODERS = ("text_config", "language_config", "llm_config")
# Numbers and periods of layers, of which families make lists.
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "full_attention_interval",
    "no_rope_layer_interval",
    "sliding_window_pattern",
)
_TOWER = re.compile("vision|visual|image|video|audio|speech|sound|projector|aligner|thinker|talker|token2wav")
# Classes without an output matrix over the vocabulary; ChatGLM's own code has one in a class that is called a model.
_OTHER_END = re.compile(
    "For(Sequence|Token)Classification$|ForQuestionAnswering$|Reward|(?<!LMHead)(?<!DoubleHeads)(?<!ChatGLM)(?<!VLChat)Model$"
)
# Prediction modules, by the names that families have for their number; most families' readers leave the modules out.
_PREDICTION = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "num_mtp_modules",
    "mtp_num_hidden_layers",
    "mtp_layer_types",
)
_OTHER_TOWERS = ("embd_layer", "img_processor", "audio_processor", "mm_vision_tower", "vision_tower", "vq_config")


class _Refused(Struct):
    """Families, by their `model_type`, or by a `key` that is true in their configs; `captured_from_config`: their
    `config.json` is enough to capture a step."""

    what: str
    families: str
    key: str = ""
    captured_from_config: bool = True


class _Known(Struct):
    """Hold the content of `huggingface.yaml`."""

    refused: list[_Refused]
    known_keys: str
    without_effect: dict[str, str]  # keys, by what they are
    idle: str


def model_from_config(file: Path) -> Config:
    """The `model` mapping of a config file; InputError for an unknown family or a variant not expressible. What the
    config does not say about its weights' formats is taken from NVIDIA's file beside it."""
    config, beside = _read(file), file.with_name(QUANTIZATION_FILE)
    if beside.is_file():
        said, given = _read(beside).get("quantization"), config.get("quantization_config")
        if isinstance(said, dict):
            config["quantization_config"] = {"quant_method": "modelopt"} | said | (given or {})
    return model_of_config(config, str(file))


def model_of_config(whole: Config, file: str) -> Config:
    """The `model` mapping of a config; errors name `file` as its place."""
    whole = Recorded(whole)
    towers = _towers(whole)
    nested = bool(towers) or _has_decoder_alone(whole)
    config = _decoder(whole) if nested else whole
    assert isinstance(config, Recorded)
    if config.get("draft_vocab_size"):  # EAGLE-3's output matrix (vLLM 0.33, models/llama_eagle3.py)
        decided(config, "vocab_size")
        config = config | {"vocab_size": config["draft_vocab_size"]}
    family = _family(config) or (_family(whole) if nested else None) or config.get("model_type")
    if towers and family not in FAMILIES:
        raise InputError(f"{file}: {_of_several_inputs(whole, towers)}")
    if not isinstance(family, str) or family not in FAMILIES:
        raise InputError(f"{file}: {_unknown(config, family)}")
    if config.get("is_causal") is False:
        why = "found false; tokens that attend to those after them cannot be simulated"
        raise InputError(f"{file}: is_causal: {why}; the model {_CAPTURE}")
    parts_of_all = whole.get(_THINKER) or whole
    in_part = any(isinstance(parts_of_all.get(key), dict) for key in _DECODERS)
    config = _filled_in(config, family, nested and in_part)
    for key, value in dict.items(config):
        if isinstance(value, str) and _SIZE.search(key) and value.strip().isdecimal():
            raise InputError(f"{file}: {key}: found {show(value)}; must be a number, without quotes")
    for key in _LAYERS:
        if isinstance(found := dict.get(config, key), (int, float)) and found > MAX_LAYERS:
            raise InputError(f"{file}: {key}: found {show(found)}; must be at most {MAX_LAYERS:,}")
    try:
        mapping = FAMILIES[family](config)
    except KeyError as missing:
        raise InputError(f"{file}: {missing.args[0]}: is required and missing for model_type {family}") from None
    except NotExpressibleError as problem:
        raise InputError(f"{file}: {problem}") from None
    except (AttributeError, OverflowError, TypeError, ValueError, ZeroDivisionError) as problem:
        # A value of a wrong type, or 0, of a key that is only computed with.
        raise InputError(f"{file}: has a value that model_type {family} does not allow ({problem})") from None
    mapping = _trained_positions(config, mapping, file) | mapping
    stored = stored_weights(_quantization(whole, config), mapping, config)
    mapping |= {"checkpoint_quantization": stored.quantization, "checkpoint_modules": stored.modules}
    mapping |= {"checkpoint_group_size": stored.group, "checkpoint_cache": stored.cache}
    predicts = not mapping.get("mtp_layers") and any(config.get(key) for key in _PREDICTION)
    if predicts or mapping.get("mtp_layers"):
        decided(config, *(key for key in config if "mtp" in key), *_PREDICTION)
    parts = [*mapping.pop("left_out", ()), *(["prediction modules"] if predicts else [])]
    left_out = [*towers, *stored.unread, *parts, *_other_ends(whole.get("architectures"))]
    left_out += _other_code(family, whole.get("architectures"))
    for part in (whole, parts_of_all):
        part.accept(towers)
    given = {key: value for key, value in mapping.items() if value is not None}
    if nested:
        decided(whole, *(key for key, value in dict.items(whole) if key in config and dict.get(config, key) == value))
    for names in _ALIKE:
        same(whole, names)
        same(config, names)
    unread = _unread(whole)
    return given | ({"left_out": left_out} if left_out else {}) | ({"unread": unread} if unread else {})


def _family(config: Config) -> str | None:
    """The family that a config's `model_type` names, or else its code (`architectures`): as a reader is called, or as
    that of a decoder in a larger model."""
    own = config.get("model_type")
    if isinstance(own, str) and (own in FAMILIES or _refusal(own) is not None):
        return own if own in FAMILIES else None
    found = _called(own) if isinstance(own, str) else None
    return found or next(filter(None, map(_of_code, config.get("architectures") or [])), None)


def _of_code(name: Any) -> str | None:
    """The family of a class of Transformers, or of code beside weights that is called alike."""
    found = re.match("(.*?)(Sparse|Flash)?For(CausalLM|ConditionalGeneration)$", str(name))
    return None if found is None else _called(found[1])


def _called(name: str) -> str | None:
    """The family whose name has these letters and figures, without what says that it is a part of a model."""
    return _names().get(_plain(name))


@cache
def _names() -> dict[str, str]:
    ends = ("(_vl)?_text(_model)?$", "_text(_model)?$", "$")  # later names count
    return {_plain(re.sub(end, "", name)): name for end in ends for name in FAMILIES}


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _other_code(family: str, architectures: Any) -> list[str]:
    """Code of another family than the one that the config is read as."""
    names = architectures if isinstance(architectures, list) else []
    others = {name: other for name in names if (other := _of_code(name)) is not None}
    return [
        f"code of {one_line(str(name))} (simulated: that of {family})"
        for name, other in others.items()
        if FAMILIES[other] != FAMILIES[family] and _called(family) != other
    ]


def _trained_positions(config: Config, mapping: Config, file: str) -> Config:
    """The positions that the config names where no table limits them; an error is said here by the config's own key,
    which the model's key would hide."""
    longest = config.get("max_position_embeddings")
    if mapping.get("positions") == "learned" or not isinstance(longest, int) or longest <= 0:
        return {}
    if longest > MAX_POSITIONS:
        found = f"found {show(longest)}; must be at most {MAX_POSITIONS:,}"
        raise InputError(f"{file}: max_position_embeddings: {found}")
    return {"trained_positions": longest}


def _other_ends(architectures: Any) -> list[str]:
    """Ends of reward models, classifiers and embedding models, in whose place an output matrix is simulated."""
    names = architectures if isinstance(architectures, list) else []
    ends = [one_line(name) for name in names if isinstance(name, str) and _OTHER_END.search(name)]
    return [f"end of {name} (simulated: an output matrix over the vocabulary)" for name in ends]


def _unread(whole: Recorded) -> list[str]:
    """Keys that nobody asked for, with their places, but for those that never matter, and those that do only where
    they are on."""
    idle = {*_known().idle.split()}
    found = ((place, place.rpartition(".")[2], value) for place, value in whole.unread())
    return [place for place, key, value in found if not _never_matters(key) and (value or key not in idle)]


def _never_matters(key: str) -> bool:
    """Tell whether a key never matters to time and memory; an ending does not say so of what may be a size."""
    names, patterns = _without_effect()
    sized = _SIZE.search(key) is not None
    return key in names or any(fnmatchcase(key, p) for p in patterns if not (sized and p.startswith("*")))


@cache
def _without_effect() -> tuple[frozenset[str], tuple[str, ...]]:
    """Keys that never matter to time and memory, and patterns of such."""
    words = [word for keys in _known().without_effect.values() for word in keys.split()]
    return frozenset(words), tuple([word for word in words if "*" in word])


def _quantization(whole: Config, config: Config) -> Any:
    """What says how weights are kept: of the whole config, else of the decoder's (vLLM, config/model.py,
    `_parse_quant_hf_config`), under either name."""
    names = ("quantization_config", "compression_config", "quantization")  # the last: MLX, beside the first
    found = [part.get(key) for part in (whole, config) for key in names if dict.get(part, key) is not None]
    for other in found[1:]:
        if isinstance(other, Recorded) and other is not found[0] and other == found[0]:
            other.accept(other)
    return found[0] if found else None


def _towers(config: Config) -> list[str]:
    """Keys of the encoders of pictures and sound. The decoder's sizes are at the top level or under another key."""
    mappings = [key for key, value in dict.items(config) if isinstance(value, dict) and key.endswith("_config")]
    if _THINKER in mappings:  # whose parts are named in place of itself
        others = [key for key in mappings if key != _THINKER and _TOWER.search(key)]
        return [*_towers(config[_THINKER]), *others]
    return [key for key in mappings if _TOWER.search(key)] + [key for key in _OTHER_TOWERS if config.get(key)]


def _has_decoder_alone(config: Config) -> bool:
    """Tell whether a model of several kinds of input has none but text: its towers are null (Gemma 4), or left out with
    all sizes but the decoder's (Llama 4)."""
    parts = any(isinstance(config.get(key), dict) for key in _DECODERS)
    null = [key for key, value in dict.items(config) if value is None and key.endswith("_config")]
    return parts and (any(_TOWER.search(key) for key in null) or not any(key in config for key in _LAYERS[:2]))


def _decoder(config: Config) -> Config:
    """The decoder's own keys: of the config of a model of several kinds of input a part, or the config itself.

    The whole model has the output matrix, so its own `tie_word_embeddings` holds before the part's.
    """
    if isinstance(thinker := config.get(_THINKER), dict):
        return _decoder(thinker)
    part = next((config[key] for key in _DECODERS if isinstance(config.get(key), dict)), config)
    decided(part, "tie_word_embeddings")
    tied = config.get("tie_word_embeddings")
    if tied is None or (not tied and _TIED_BY_DECODER.match(str(config.get("model_type")))):
        return {"tie_word_embeddings": tied} | part if tied is not None else part
    return part | {"tie_word_embeddings": tied}


def _filled_in(config: Config, family: str, nested: bool) -> Config:
    """The config with sizes that Transformers' class of the family fills in: where it is a part of another config
    (`nested`), of which Transformers writes only what differs from the class, all of them, else those of `_LEFT_OUT`.
    """
    named = {other for names in _SYNONYMS if not config.keys().isdisjoint(names) for other in names}
    own = _defaults().get(family) or _defaults().get(f"{family}_text", {})  # flat configs of Qwen 2-VL
    sizes = {key: size for key, size in own.items() if nested or key in _LEFT_OUT}
    return {key: size for key, size in sizes.items() if key not in named} | config


@cache
def _defaults() -> dict[str, dict[str, int]]:
    """Sizes of each family's config class."""
    return msgspec.yaml.decode(_DEFAULTS.read_bytes(), type=dict[str, dict[str, int]])


def _of_several_inputs(config: Config, towers: list[str]) -> str:
    """Name the towers, and the other way in."""
    part = next((f"its {key}'s" for key in _DECODERS if isinstance(config.get(key), dict)), "its")
    family = _decoder(config).get("model_type")
    refused = _refusal(family)
    why = nearest(family, FAMILIES) if refused is None else f", {refused.what}"
    return (
        f"model_type: found {show(config.get('model_type'))}, a model of several kinds of input "
        f"({', '.join(map(one_line, towers))}), of which the decoder alone can be simulated, if {part} model_type is "
        f"that of a known family; found {show(family)}{why}; for the whole model, {_FUNCTION}"
    )


@cache
def _known() -> _Known:
    return msgspec.yaml.decode(_FILE.read_bytes(), type=_Known)


def _refusal(family: Any) -> _Refused | None:
    """What is said of a family that no scenario's words describe."""
    return next((refused for refused in _known().refused if family in refused.families.split()), None)


def _unknown(config: Config, family: Any) -> str:
    """Name the keys that nothing here reads, and the other way in."""
    refused = _refusal(family) or next((r for r in _known().refused if config.get(r.key) is True), None)
    if refused is not None:
        way = f"it {_CAPTURE}" if refused.captured_from_config else _FUNCTION
        return f"model_type: found {show(family)}, {refused.what}, which a scenario's keys do not describe; {way}"
    strange = [key for key in sorted({*config} - {*_known().known_keys.split()}) if not _never_matters(key)]
    keys = f"; keys that no known family has: {', '.join(map(one_line, strange[:12]))}" if strange else ""
    return (
        f"model_type: found {show(family)}; must be one of the {len(FAMILIES)} families in docs/models.md, such as "
        f"llama, qwen3_moe or deepseek_v3{nearest(family, FAMILIES)}{keys}; any other model {_CAPTURE}"
    )


def _read(file: Path) -> Config:
    config = parse_json(read_text(file, _MAX_BYTES), str(file), finite=False)  # Mamba's time_step_limit has Infinity
    if not isinstance(config, dict):
        raise InputError(f"{file}: must hold a mapping (a Hugging Face config.json)")
    return config
