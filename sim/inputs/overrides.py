"""`--set a.b.c=VALUE` and the merging of one mapping over another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim.errors import InputError
from sim.inputs.input_source import Source
from sim.inputs.yaml_input import KeyPath, dotted, one_line, parse_yaml

# Where a single word may stand for a mapping, and the key under which the mapping holds that word.
_SHORT_FORMS: dict[KeyPath, str] = {
    ("model",): "preset",
    ("cluster",): "preset",
    ("cluster", "gpu"): "preset",
    ("distillation", "teacher"): "preset",
    ("training", "recompute"): "mode",
}


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
    result = dict(opened)
    for key, value in changes.items():
        result[key] = merge(opened.get(key), value, (*path, key))
    return result


def with_overrides(source: Source, overrides: Sequence[str]) -> Source:
    """The source with `KEY=VALUE` options applied in order; InputError for an option that cannot be read."""
    data, origins = source.data, dict(source.origins)
    for option in overrides:
        text, separator, value_text = option.partition("=")
        label = f"--set {one_line(option, 80)}"
        keys = text.strip().split(".")
        if not separator or not all(keys):
            raise InputError(f"{label}: must be KEY=VALUE, such as parallelism.pp=4")
        if len(keys) > 16:
            raise InputError(f"{label}: the key has more than 16 parts")
        value, _ = parse_yaml(value_text, label)
        path: KeyPath = tuple(keys)
        data = _put(data, path, value, (), label)
        placed = tuple(int(key) if _is_index(key) else key for key in keys)
        for key in [known for known in origins if known[: len(placed)] == placed]:
            del origins[key]
        origins[placed] = dotted(placed)
    return Source(source.label, data, origins, source.folder)


def _is_index(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) < 9


def _put(base: Any, path: KeyPath, value: Any, done: KeyPath, label: str) -> Any:
    if not path:
        return value
    key = path[0]
    base = _opened(base, done)
    if base is None:
        base = [] if key == "0" else {}
    if isinstance(base, list) and isinstance(key, str):
        if not (_is_index(key) and int(key) <= len(base)):
            raise InputError(
                f"{label}: {dotted(done)} is a list of {len(base)}; '{one_line(key)}' is not a place in it or after it"
            )
        index = int(key)
        longer = [*base, None] if index == len(base) else base
        return [_put(v, path[1:], value, (*done, i), label) if i == index else v for i, v in enumerate(longer)]
    if not isinstance(base, dict):
        raise InputError(f"{label}: {dotted(done)} holds a single value, so it has no key '{one_line(str(key))}'")
    return {**base, str(key): _put(base.get(str(key)), path[1:], value, (*done, key), label)}
