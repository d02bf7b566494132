"""How a checkpoint keeps its weights, by its `quantization_config`: one format, and the parts of layers that differ.

Publishers name modules that stay in 16 bits (`modules_to_not_convert`, `ignore`, `exclude_modules` and others), or that
have a format of their own (`config_groups` with targets, `quantized_layers`), as names, with wildcards or as regular
expressions. Here each layer's parts are asked, by the names that checkpoints give their matrices, which of these hold.

Sources: Transformers, utils/quantization_config.py (`QuantizationMethod`), quantizers/quantizers_utils.py
(`should_convert_module`); compressed-tensors, quantization/quant_scheme.py, utils/match.py; NVIDIA ModelOpt,
`quant_algo` and `exclude_modules`; AMD Quark, `global_quant_config`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import translate
from typing import Any, NamedTuple, cast

from sim.core.quantization import PARTS, QUANTIZATIONS, Part, Quantization
from sim.inputs.recorded import decided
from sim.inputs.yaml_input import one_line

# Keys of lists of modules that stay in 16 bits.
_KEPT = (
    *("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules", "ignore", "exclude_modules", "exclude"),
    "dynamic_exclude",
)
_OF_GROUPS = ("ignore", "exclude_modules")  # of these, the ones that say what ModelOpt's or other groups leave alone
_ROOT = re.compile(r"^(?P<above>.*?)(?:^|\.)(?:layers|h|blocks?|layer)\.(?=[\d*?\[])")
_BESIDE = re.compile("vis|image|audio|mtp|draft|eagle|projector|sound|talker")  # whose layers are not the decoder's
_STEMS = ("model.", "model.language_model.", "language_model.model.", "backbone.", "transformer.", "")
_GLOB, _REGEX = re.compile(r"[*?\[]"), re.compile(r"[\\^$(|+]")
_OF_LAYER = re.compile(r"layers\\?\.(\d+)\\?\.")
_END = translate("").removeprefix("(?s:)")  # what fnmatch ends a pattern with
# Names of a layer's matrices, one set for each way to write them down.
_OF_GATED = (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"), ("w1", "w2", "w3"))
_OF_TWO = (("up_proj", "down_proj"), ("fc1", "fc2"), ("c_fc", "c_proj"), ("dense_h_to_4h", "dense_4h_to_h"))
_MLPS = ("mlp", "feed_forward", "ffn", "mixer", "block_sparse_moe", "moe")
_SHARED = ("shared_experts", "shared_expert", "shared_mlp", "share_expert")
_ATTENTIONS = ("self_attn", "attn", "attention", "self_attention", "mixer")
_OF_ATTENTION = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("qkv_proj", "o_proj"),
    ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"),
    ("query_key_value", "dense"),
    ("c_attn", "c_proj"),
    ("wqkv", "wo"),
)
_STATES = ("linear_attn", "mamba", "mixer", "conv", "linear_attention", "self_attn")
_OF_STATES = (("in_proj_qkv", "in_proj_z", "out_proj"), ("in_proj_qkvz", "out_proj"), ("in_proj", "out_proj"))


def _joined(owners: Iterable[str], sets: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    return tuple([tuple([f"{owner}.{name}" for name in names]) for owner in owners for names in sets])


_DENSE = _joined(_MLPS, (*_OF_GATED, *_OF_TWO))
_NAMES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "attention": _joined(_ATTENTIONS, _OF_ATTENTION),
    "states": _joined(_STATES, (*_OF_STATES, *_OF_ATTENTION[:1])),
    "mlp": _DENSE,
    **{name: _joined([*(f"{owner}.{name}" for owner in _MLPS), name], (*_OF_GATED, *_OF_TWO[:1])) for name in _SHARED},
    "experts": _joined(
        [f"{owner}.experts{number}" for owner in _MLPS for number in (".0", "")], (*_OF_GATED, *_OF_TWO[:1])
    ),
    "experts_beside": _joined(("experts.0", "experts"), (*_OF_GATED, *_OF_TWO[:1])),
}
_SAYS_SHARED = re.compile("shared?_(expert|intermediate|mlp)|n_shared|num_shared")


class Stored(NamedTuple):
    """How a checkpoint keeps its weights and its cache; keys as those of a scenario's `model`. `unread`: what no format
    here describes, in words."""

    quantization: Quantization | None = None
    modules: dict[str, Any] | None = None
    group: int | None = None
    cache: str | None = None
    unread: tuple[str, ...] = ()


class _Format(NamedTuple):
    """A format of linear layers, or mxfp4 of experts; `group`: weights that share a 16-bit scale in 4 bits."""

    name: str
    group: int | None = None

    def scaled(self, part: Part) -> int | None:
        """Weights of a part that share 16 bits of scales; mxfp4 elsewhere than in experts is int4 with its scales."""
        return 64 if self.name == "mxfp4" and part != "experts" else self.group


_SIXTEEN = _Format("none")


# `expert_dtype` of DeepSeek V4's checkpoints, and what others may say there
_EXPERTS = {
    **dict.fromkeys(("fp4", "mxfp4"), _Format("mxfp4")),
    **dict.fromkeys(("fp8", "float8_e4m3fn", "e4m3"), _Format("fp8")),
    **dict.fromkeys(("bf16", "bfloat16"), _SIXTEEN),
    "nvfp4": _Format("nvfp4"),
    "int4": _Format("int4_weight_only"),
}


class _Modules:
    """Names of modules as checkpoints list them, which a module matches as itself or as a part of a named one."""

    def __init__(self, given: Iterable[Any]) -> None:
        self.strange: list[str] = []  # patterns that are none
        self._named: dict[int, set[str]] = {}  # of a layer
        self._loose: set[str] = set()  # in any layer
        self._of_layer: dict[int, list[re.Pattern[str]]] = {}
        self._of_layers: list[re.Pattern[str]] = []  # that depend on the layer's number
        self._of_any: list[re.Pattern[str]] = []
        self._known: dict[str, bool] = {}
        for text in given:
            if isinstance(text, str):
                self._add(text.removesuffix(".weight").rstrip("."))

    def _add(self, text: str) -> None:
        root, regex = _ROOT.match(text), text.startswith("re:") or _REGEX.search(text) is not None
        if not regex and root is not None and _BESIDE.search(root["above"]):
            return
        own = text.removeprefix("re:") if regex or root is None else f"layers.{text[root.end() :]}"
        if not regex and not _GLOB.search(own):
            number, _, rest = own.removeprefix("layers.").partition(".")
            if root is None or not number.isdecimal():
                self._loose.add(own)
            else:
                self._named.setdefault(int(number), set()).add(rest)
            return
        if not regex:
            start, own = ("", own) if root is not None else (r"(?:.*\.)?", re.sub(r"^\.\*", "*", own))
            stem = r"(?:.*\.)?" if root is not None else ""
            own = rf"{stem}{start}(?:{translate(own).removesuffix(_END)})(?:\..*)?\Z"
        try:
            pattern = re.compile(own)
        except re.error:
            self.strange.append(one_line(text)[:60])
            return
        if (fixed := _OF_LAYER.search(own)) is not None:
            self._of_layer.setdefault(int(fixed[1]), []).append(pattern)
        else:
            (self._of_layers if re.search(r"\d", own) else self._of_any).append(pattern)

    def has(self, layer: int, name: str) -> bool:
        """Tell whether module `name` of layer `layer` is one of them, or a part of one."""
        if name not in self._known:
            self._known[name] = self._in_any(name)
        if self._known[name]:
            return True
        words = name.split(".")
        named = self._named.get(layer, ())
        if named and ("" in named or any(".".join(words[: j + 1]) in named for j in range(len(words)))):
            return True
        return _match([*self._of_layer.get(layer, ()), *self._of_layers], layer, name)

    def _in_any(self, name: str) -> bool:
        words = name.split(".")
        parts = {".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
        return not self._loose.isdisjoint(parts) or _match(self._of_any, 0, name)


def _match(patterns: list[re.Pattern[str]], layer: int, name: str) -> bool:
    full = [f"{stem}layers.{layer}.{name}" for stem in _STEMS] if patterns else []
    return any(pattern.match(text) for pattern in patterns for text in full)


def stored_weights(given: Any, model: Mapping[str, Any], config: Mapping[str, Any]) -> Stored:
    """How the weights of a `model` (a scenario's keys) are kept by the `quantization_config` of its config."""
    if not given:
        return Stored()
    if not isinstance(given, Mapping):
        return Stored(unread=("quantization_config",))
    cache, strange = _cache(given)
    rules, usual = _rules(given, config)
    if any(form is None for form in (usual, *(form for _, form in rules))):
        method = given.get("quant_method") or given.get("quant_algo")
        decided(given, *given)
        return Stored(cache=cache, unread=(f"quantization_config ({one_line(str(method))})", *strange))
    known = [(modules, cast("_Format", form)) for modules, form in rules]
    parts, uneven = _by_part(known, cast("_Format", usual), model, config)
    groups = Counter(
        [group for part, forms in parts.items() for form in forms if form is not None and (group := form.scaled(part))]
    )
    strange += [f"pattern {pattern}" for modules, _ in rules for pattern in modules.strange]
    unread = [*strange, *(f"formats of single matrices of {part}" for part in uneven)]
    if any(form.name != "none" and modules.has(0, "lm_head") for modules, form in known):
        unread.append("the output matrix in few bits")
    name, modules = _as_model(parts)
    group = groups.most_common(1)[0][0] if groups else None
    return Stored(name, modules, group, cache, tuple(unread))


def _cache(given: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """How keys and values are kept: `kv_cache_scheme` of compressed-tensors (of AutoFP8: static, in fp8),
    `kv_cache_quant_algo` of ModelOpt, `kv_cache_quant_config` of Quark."""
    scheme, algo = given.get("kv_cache_scheme"), given.get("kv_cache_quant_algo")
    tensors = [_mapping(own) for own in _mapping(given.get("kv_cache_quant_config")).values()]  # Quark
    if tensors and scheme is None:
        dtypes = {str(_mapping(own.get("output_tensors")).get("dtype")) for own in tensors}
        decided(given, "kv_cache_quant_config")
        found: Any = "fp8" if all(dtype.startswith("fp8") for dtype in dtypes) else "another"
    elif isinstance(scheme, Mapping):
        found = "fp8" if (scheme.get("type"), scheme.get("num_bits")) == ("float", 8) else "another"
    else:
        found = scheme if scheme is not None else algo
    if found is None or str(found).lower() in ("none", "auto", ""):
        return None, []
    if str(found).lower() in ("fp8", "static"):
        return "fp8", []
    return None, [f"cache in {one_line(str(algo or scheme))[:40]}"]


def _rules(given: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[list[tuple[_Modules, _Format | None]], Any]:
    """Modules that have a format of their own, those that decide first first, and the format of all others; None: a
    format that is not known."""
    method = str(given.get("quant_method"))
    given.get("group_size")  # of formats whose size is fixed, too
    own = _of_method(given, method)
    groups, usual = _of_groups(given)
    usual = own if usual is None and own is not None else usual
    lists = {key: given.get(key) for key in _KEPT}
    rules: list[tuple[_Modules, _Format | None]] = []
    # ModelOpt on a checkpoint that is in fp8 already says what its own groups leave alone.
    over_fp8 = method == "fp8" and bool(groups)
    for key, names in lists.items():
        if isinstance(names, (list, tuple)):
            kept = usual if over_fp8 and key in _OF_GROUPS else _SIXTEEN
            rules.append((_Modules(names), kept))
    for pattern, options in _mapping(given.get("dynamic")).items():  # GPTQModel: "-:name" stays, "+:name" has its own
        bits = _mapping(options).get("bits")
        form = _SIXTEEN if pattern.startswith("-:") else _weight_only(bits, given.get("group_size"))
        rules.append((_Modules([f"re:{pattern[2:]}" if pattern[:2] in ("-:", "+:") else pattern]), form))
    for pattern, options in _mapping(given.get("extra_config")).items():  # AutoRound
        bits = _mapping(options).get("bits")
        rules.append((_Modules([pattern]), _SIXTEEN if bits == 16 else _weight_only(bits, given.get("group_size"))))
    for pattern, scheme in _mapping(given.get("layer_quant_config")).items():  # Quark
        rules.append((_Modules([pattern]), _of_quark(_mapping(scheme))))
    for name in [name for name in given if "." in name]:  # MLX: a module's own bits, or false
        options = given[name]
        bits = _mapping(options).get("bits")
        rules.append(
            (_Modules([name]), _weight_only(bits, _mapping(options).get("group_size")) if options else _SIXTEEN)
        )
    rules += groups
    experts = given.get("expert_dtype", config.get("expert_dtype")) if usual is not None else None
    if method == "mxfp4" or experts is not None:
        rules.append((_Modules(["experts"]), _EXPERTS.get(str(experts)) if experts is not None else _Format("mxfp4")))
    return rules, _SIXTEEN if usual is None and (groups or method == "mxfp4") else usual


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _of_method(given: Mapping[str, Any], method: str) -> _Format | None:
    """The format that the config's method and algorithm give all linear layers."""
    algo = given.get("quant_algo")
    if method == "quark":
        return _of_quark(_mapping(given.get("global_quant_config")))
    if isinstance(algo, str) and algo not in ("MIXED_PRECISION", "NO_QUANT"):
        return _of_algorithm(algo, given.get("group_size"))
    if method in ("fp8", "fbgemm_fp8"):
        return _Format("fp8")
    if method == "bitsandbytes":
        in_8, in_4 = given.get("load_in_8bit"), given.get("load_in_4bit", True)
        return _Format("llm_int8") if in_8 else _Format("int4_weight_only") if in_4 else None
    if method in ("modelopt", "compressed-tensors", "mxfp4"):
        return None
    return _weight_only(given.get("bits", given.get("w_bit")), given.get("group_size", given.get("q_group_size")))


def _weight_only(bits: Any, group: Any) -> _Format | None:
    if bits not in (4, 8) or isinstance(bits, bool):
        return None
    return _Format(f"int{bits}_weight_only", group if isinstance(group, int) and group > 0 and bits == 4 else None)


def _of_algorithm(algo: str, group: Any) -> _Format | None:
    """A format by ModelOpt's name, and by the weights that share a scale."""
    name = algo.upper()
    if "NVFP4" in name:
        return _floats(group) if "A16" in name else _Format("nvfp4")
    if "MXFP4" in name:
        return _Format("mxfp4")
    if "FP8" in name:
        return _Format("fp8")
    if "W8A16" in name:
        return _Format("int8_weight_only")
    if "INT8_SQ" in name or "W8A8" in name:
        return _Format("llm_int8")
    return _weight_only(4, group) if "INT4" in name or "W4A16" in name else None


def _floats(group: Any) -> _Format:
    """4-bit floats that 16 bits are multiplied with: int4 with as many bytes of scales, 8 bits for each group."""
    return _Format("int4_weight_only", 2 * (group if isinstance(group, int) and group > 0 else 16))


def _of_scheme(scheme: Mapping[str, Any], packed: Any) -> _Format | None:
    """A format by compressed-tensors' description of weights and inputs; `packed`: its name of the layout."""
    weights, inputs = _mapping(scheme.get("weights")), scheme.get("input_activations")
    bits, kind, group = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    wide = inputs is None
    narrow = not wide and _mapping(inputs).get("num_bits") == bits and _mapping(inputs).get("type") == kind
    decided(scheme, "input_activations")
    if kind == "float" and bits in (4, 8) and not wide and not narrow:
        return None
    if (kind, bits) == ("float", 8):
        return _weight_only(8, None) if wide else _Format("fp8")
    if (kind, bits) == ("float", 4):
        if "mxfp4" in str(scheme.get("format", packed)) or group == 32:
            return _Format("mxfp4")
        return _floats(group) if wide else _Format("nvfp4")
    return _weight_only(bits, group) if kind == "int" and inputs is None else None


def _of_quark(scheme: Mapping[str, Any]) -> _Format | None:
    """A format by Quark's description of weights and inputs."""
    weights = _mapping(scheme.get("weight"))
    dtype, inputs = str(weights.get("dtype")), scheme.get("input_tensors")
    group = weights.get("group_size")
    decided(scheme, *scheme)
    if dtype.startswith("fp8"):
        return _Format("fp8")
    if dtype == "fp4":
        return _Format("mxfp4")
    if dtype in ("int4", "uint4", "int8") and inputs is None:
        return _weight_only(8 if dtype == "int8" else 4, group)
    return _SIXTEEN if not weights else None


def _of_groups(given: Mapping[str, Any]) -> tuple[list[tuple[_Modules, _Format | None]], _Format | None]:
    """Modules that `quantized_layers` or `config_groups` name, and the format of a group that has all linear layers."""
    found: list[tuple[_Modules, _Format | None]] = []
    named: dict[_Format | None, list[str]] = {}
    for name, options in _mapping(given.get("quantized_layers")).items():
        form = _of_algorithm(str(_mapping(options).get("quant_algo")), _mapping(options).get("group_size"))
        named.setdefault(form, []).append(name)
    found += [(_Modules(names), form) for form, names in named.items()]
    if isinstance(moe := given.get("moe_quant_algo"), str) and not named:
        found.append((_Modules(["experts"]), _of_algorithm(moe, given.get("group_size"))))
    groups = _mapping(given.get("config_groups")).values()
    if named or (isinstance(given.get("quant_algo"), str) and given.get("quant_algo") != "MIXED_PRECISION"):
        decided(given, "config_groups")
        return found, None
    usual: _Format | None = None
    for group in groups:
        scheme = _mapping(group)
        form, targets = _of_scheme(scheme, given.get("format")), scheme.get("targets")
        listed = targets if isinstance(targets, (list, tuple)) else ["Linear"]
        names = [t for t in listed if isinstance(t, str) and (t.startswith("re:") or t[:1].islower() or "*" in t)]
        if names:
            found.append((_Modules(names), form))
        if len(names) < len(listed):
            usual = form if usual is None else usual
            if form is None:
                found.append((_Modules(()), None))
    return found, usual


def _kinds(model: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """Of each layer: whether it has a state in attention's place, and the kind of its MLP."""
    moe, kinds = model.get("moe"), model.get("attention_pattern") or ["full"]
    mlps = model.get("mlp_pattern")
    usual = "state_space" if model.get("state_space") and "attention_pattern" not in model else None
    for i in range(model["layers"]):
        routed = moe is not None and i >= (moe.get("dense_layers") or 0) and (i + 1) % (moe.get("every") or 1) == 0
        mlp = mlps[i % len(mlps)] if mlps else "experts" if routed else "dense"
        yield (usual or kinds[i % len(kinds)]) == "state_space", mlp


def _by_part(
    rules: list[tuple[_Modules, _Format]], usual: _Format, model: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[dict[Part, list[_Format | None]], list[str]]:
    """The format of each layer's parts (None: a part that it lacks), and parts whose matrices differ."""
    parts: dict[Part, list[_Format | None]] = {part: [] for part in PARTS}
    uneven: set[str] = set()
    moe = model.get("moe") or {}
    shared = bool(moe.get("shared_experts") or moe.get("shared_ffn"))
    # An MLP beside the experts that no key calls shared is written as a dense layer's, experts outside it (Gemma 4).
    beside = shared and not any(_SAYS_SHARED.search(key) for key in config)
    written = tuple([name for name in _SHARED if any(re.search(f"(^|_){name}(_|$)", key) for key in config)]) or _SHARED
    for i, (states, mlp) in enumerate(_kinds(model)):
        routed = mlp == "experts"
        for part, names, there in (
            ("attention", ("states" if states else "attention",), True),
            ("mlp", ("mlp",), mlp == "dense"),
            ("shared_experts", ("mlp",) if beside else written, routed and shared),
            ("experts", ("experts_beside" if beside else "experts",), routed),
        ):
            forms = _formats(rules, usual, i, names) if there else [None]
            parts[cast("Part", part)].append(forms[0])
            uneven |= {part} if len(forms) > 1 else set()
    return parts, sorted(uneven)


def _formats(
    rules: list[tuple[_Modules, _Format]], usual: _Format, layer: int, names: tuple[str, ...]
) -> list[_Format | None]:
    """The formats of a part's matrices, that of most of them first, by the names of which the rules know most."""
    best: list[_Format | None] = [usual]
    most = 0.0
    for group in (group for name in names for group in _NAMES[name]):
        forms = [next((form for modules, form in rules if modules.has(layer, name)), None) for name in group]
        share = sum(form is not None for form in forms) / len(forms)
        if share > most:
            most, counted = share, Counter([form or usual for form in forms])
            best = [form for form, _ in counted.most_common()]
            if share == 1.0 and len(best) == 1:
                break
    return best


def _as_model(parts: Mapping[Part, list[_Format | None]]) -> tuple[Quantization | None, dict[str, Any] | None]:
    """The name of the format that most parts have, and the others."""
    there = {part: [form for form in forms if form is not None] for part, forms in parts.items()}
    if all(form.name == "none" for forms in there.values() for form in forms):
        return None, None

    def named(part: Part, form: _Format) -> Quantization:
        if form.name != "mxfp4":
            return cast("Quantization", form.name)
        return "mxfp4_experts" if part == "experts" else "int4_weight_only"

    def alike(name: Quantization, part: Part, other: Quantization) -> bool:
        a, b = QUANTIZATIONS[name], QUANTIZATIONS[other]
        return (a.bytes_of(part), a.matmul_of(part)) == (b.bytes_of(part), b.matmul_of(part)) or (
            part == "experts" and {name, other} == {"mxfp4_experts", "fp8_mxfp4_experts"}
        )

    def unlike(name: Quantization) -> Counter[Part]:
        return Counter(p for p, forms in there.items() for form in forms if not alike(name, p, named(p, form)))

    last: Part = "experts" if there["experts"] else "mlp"
    whole = [
        name
        for name, form in QUANTIZATIONS.items()
        if name != "none" and (form.expert_bytes is None or (there["experts"] and "experts" not in unlike(name)))
    ]
    usual = min(whole, key=lambda name: (len(unlike(name)), last in unlike(name), unlike(name).total()))
    modules: dict[str, Any] = {}
    for part in unlike(usual):
        names = [usual if form is None else named(part, form) for form in parts[part]]
        held = {named(part, form) for form in there[part]}
        modules[part] = held.pop() if len(held) == 1 else names
    return usual, modules or None
