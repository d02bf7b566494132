"""`--set a.b.c=VALUE` and the merging of one mapping over another."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sim.core.errors import InputError
from sim.inputs.input_source import Source, show
from sim.inputs.yaml_input import KeyPath, dotted, one_line, parse_yaml

# Where a single word may stand for a mapping, and the key under which the mapping holds that word.
_SHORT_FORMS: dict[KeyPath, str] = {
    ("model",): "preset",
    ("cluster",): "preset",
    ("cluster", "gpu"): "preset",
    ("distillation", "teacher"): "preset",
    ("inference", "speculative", "draft"): "preset",
    ("training", "recompute"): "mode",
}

# An entry of a list as messages write it, `stragglers[0].rank`, which is read as `stragglers.0.rank`.
_ENTRY = re.compile(r"\[(\d+)\]")

# A key's former name, still read, and what it is called now.
FORMER_NAMES: dict[tuple[str, str], str] = {("training", "elementwise"): "framework"}


def with_present_names(source: Source) -> Source:
    """The source with former names of keys replaced; InputError where both names are given and differ."""
    for (section, former), present in FORMER_NAMES.items():
        written = source.data.get(section)
        if isinstance(written, dict) and former in written:
            source = _renamed_in(source, (section, former), (section, present), written)
    return source


def _renamed_in(source: Source, former: KeyPath, present: KeyPath, section: dict[str, Any]) -> Source:
    name = str(present[-1])
    old, new = section[str(former[-1])], section.get(name)
    if None not in (old, new) and old != new:
        line = source.origins.get(present)
        place = f" in line {line}" if isinstance(line, int) else ""
        said = f"{dotted(present)}, its present name, is {show(new)}{place}; give one of the two"
        raise source.error(former, f"found {show(old)}, but {said}")
    moved = {k: v for k, v in section.items() if k not in (former[-1], name)} | {name: old if new is None else new}
    origins = {present if k == former and new is None else k: v for k, v in source.origins.items()}
    return Source(source.label, {**source.data, str(former[0]): moved}, origins, source.folder)


def _present(path: KeyPath) -> KeyPath:
    return next(((s, now) for (s, former), now in FORMER_NAMES.items() if path == (s, former)), path)


def with_present_keys(section: Mapping[str, Any], path: KeyPath) -> dict[str, Any]:
    """A section's keys by their present names; a key that is given by both names stays, and is refused later.

    >>> with_present_keys({"elementwise": "eager"}, ("training",))
    {'framework': 'eager'}
    """
    named = ((key, str(_present((*path, key))[-1]), value) for key, value in section.items())
    return {key if present in section else present: value for key, present, value in named}


def _opened(value: Any, path: KeyPath) -> Any:
    """A short form as the mapping it stands for; other values as they are."""
    if isinstance(value, str) and path in _SHORT_FORMS:
        return {_SHORT_FORMS[path]: value}
    return value


def merge(base: Any, changes: Any, path: KeyPath = ()) -> Any:
    """`changes` over `base`, key by key; lists and single values are replaced. Neither argument is changed.

    >>> merge({"model": "gpt2", "training": {"seq_len": 8}}, {"model": {"layers": 2}})
    {'model': {'preset': 'gpt2', 'layers': 2}, 'training': {'seq_len': 8}}
    """
    if not isinstance(changes, dict):
        return changes
    opened = _opened(base, path)
    if not isinstance(opened, dict):
        return changes
    result = with_present_keys(opened, path)
    for key, value in with_present_keys(changes, path).items():
        result[key] = merge(result.get(key), value, (*path, key))
    return result


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys with dots as sections of a scenario.

    >>> nested({"training.seq_len": 512, "training.recompute.mode": "full", "cluster": "dgx-b200"})
    {'training': {'seq_len': 512, 'recompute': {'mode': 'full'}}, 'cluster': 'dgx-b200'}
    """
    sections: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        inner = sections
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return sections


def with_overrides(source: Source, overrides: Sequence[str]) -> Source:
    """The source with `KEY=VALUE` options applied in order; InputError for an option that cannot be read."""
    source = with_present_names(source)
    for option in overrides:
        source = with_present_names(_overridden(source, option))
    return source


def _overridden(source: Source, option: str) -> Source:
    text, separator, value_text = option.partition("=")
    label = f"--set {one_line(option, 80)}"
    keys = _ENTRY.sub(r".\1", text.strip()).split(".")
    if not separator or not all(keys):
        raise InputError(f"{label}: must be KEY=VALUE, such as parallelism.pp=4")
    if not value_text.strip():  # as of a shell's variable that is not set
        raise InputError(f"{label}: has no value; null stands for the key's default")
    if len(keys) > 16:
        raise InputError(f"{label}: the key has more than 16 parts")
    value, _ = parse_yaml(value_text, f"--set {one_line(text.strip(), 80)}")
    path = _present(tuple(keys))
    data = _put(source.data, path, value, (), label)
    placed = tuple(int(key) if _is_index(str(key)) else key for key in path)
    origins = {known: origin for known, origin in source.origins.items() if known[: len(placed)] != placed}
    origins[placed] = dotted(tuple(int(key) if _is_index(key) else key for key in keys))
    return Source(source.label, data, origins, source.folder)


def _is_index(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) < 9


def _put(base: Any, path: KeyPath, value: Any, done: KeyPath, label: str) -> Any:
    if not path:
        return value
    key = path[0]
    base = _opened(base, done)
    if base is None:
        base = [] if _is_index(str(key)) else {}
    if isinstance(base, list) and isinstance(key, str):
        if not (_is_index(key) and int(key) <= len(base)):
            raise InputError(
                f"{label}: {dotted(done)} is a list of {len(base)}; '{one_line(key)}' must be a number from 0 to "
                f"{len(base)}"
            )
        index = int(key)
        longer = [*base, None] if index == len(base) else base
        return [_put(v, path[1:], value, (*done, i), label) if i == index else v for i, v in enumerate(longer)]
    if not isinstance(base, dict):
        raise InputError(f"{label}: {dotted(done)} holds a single value, so it has no key '{one_line(str(key))}'")
    return {**base, str(key): _put(base.get(str(key)), path[1:], value, (*done, key), label)}
