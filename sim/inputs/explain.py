"""The meaning of a scenario's key: type, default and what is allowed, from the JSON Schema, and its text in the docs.

The text is the key's row in docs/scenario.md, which a checkout has and an installed wheel has not.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from sim.core.dtypes import SPELLINGS
from sim.core.errors import InputError
from sim.inputs.input_source import nearest
from sim.inputs.scenario import json_schema
from sim.inputs.synonyms import synonym

Schema = dict[str, Any]


def explain(key: str) -> str:
    """A key such as `parallelism.zero` in words, or the keys of a section; all keys for an empty text.

    Raises:
        InputError: if a scenario has no such key; names the nearest one.
    """
    key = _full_key(key)
    schema = _root()
    default: Any = None
    walked: list[str] = []
    for part in [p for p in key.split(".") if p and not p.isdigit()]:  # a list's entries are alike
        keys = _keys(schema)
        if part not in keys:
            where = ".".join(walked) or "a scenario"
            hint = synonym(part) or nearest(part, keys)
            raise InputError(f"--explain: {where} has no key '{part[:60]}'{hint} (there are: {', '.join(keys)})")
        walked.append(part)
        required = part in _required(schema)
        schema = keys[part]
        default = "required" if required else schema.get("default")
    return _text(".".join(walked), schema, default)


def _full_key(key: str) -> str:
    """A key of one section alone with its section: `zero` is `parallelism.zero`.

    Raises:
        InputError: if several sections have the key; names them.
    """
    if not key or key.partition(".")[0] in _keys(_root()):
        return key
    found = [known for known in all_keys() if known.endswith(f".{key}")]
    short = [known for known in found if known.count(".") == min(k.count(".") for k in found)]
    if len(short) > 1:
        raise InputError(f"--explain: found '{key[:60]}'; must be one of {', '.join(short)}")
    return short[0] if short else key


def all_keys() -> list[str]:
    """Every key of a scenario but those of the entries of lists, in the schema's order."""
    out: list[str] = []

    def walk(prefix: str, schema: Schema, depth: int) -> None:
        for name, inner in _keys(schema, of_lists=False).items():
            out.append(f"{prefix}{name}")
            if depth < 6:
                walk(f"{prefix}{name}.", inner, depth + 1)

    walk("", _root(), 0)
    return out


@cache
def _root() -> Schema:
    return json_schema()


def _text(key: str, schema: Schema, default: Any) -> str:
    lines = [f"{key or 'scenario'}: {' | '.join(_forms(schema))}"]
    note = _documented().get(key) or _note(schema)
    lines += [f"  {note}"] if note else []
    if key:
        lines.append(f"  default: {'required, there is none' if default == 'required' else _value(default)}")
    required = _required(schema)
    for name, inner in _keys(schema).items():
        inner_default = "required" if name in required else _value(inner.get("default"))
        lines.append(f"  {key + '.' if key else ''}{name}: {' | '.join(_forms(inner))} (default: {inner_default})")
    return "\n".join(lines)


@cache
def _documented() -> dict[str, str]:
    """The last column of the tables in docs/scenario.md, by key with its section."""
    page = Path(__file__).parents[2] / "docs" / "scenario.md"
    out: dict[str, str] = {}
    section = ""
    for line in page.read_text(encoding="utf-8").splitlines() if page.is_file() else []:
        if line.startswith("## "):
            named = re.fullmatch(r"## `(\w+)`", line)
            section = f"{named[1]}." if named else ""
        cells = [c.strip() for c in line.strip("|").split(" | ")] if line.startswith("| `") else []
        for name in re.findall(r"`([\w.]+)`", cells[0]) if len(cells) == 3 else []:
            plain = cells[2].rstrip(" |").replace("`", "")
            plain = re.sub(r"\[([^]]+)\]\(#[^)]*\)", r"\1", plain)  # links within this page
            out[section + name] = re.sub(r"\[([^]]+)\]\(([\w.]+)[^)]*\)", r"\1 (docs/\2)", plain)  # to others
    return out


def _alternatives(schema: Schema) -> list[Schema]:
    """The schema's forms with references and nested choices resolved; null is left out."""
    if "$ref" in schema:
        return _alternatives(_root()["$defs"][schema["$ref"].rpartition("/")[2]])
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices and "properties" not in schema:
        return [form for choice in choices for form in _alternatives(choice)]
    return [] if schema.get("type") == "null" else [schema]


def _mappings(schema: Schema, of_lists: bool) -> list[Schema]:
    """The schema's forms that have keys, with `of_lists` those of the entries of its lists, too."""
    out: list[Schema] = []
    for form in _alternatives(schema):
        out += [form] * ("properties" in form)
        out += _mappings(form["items"], True) if of_lists and "items" in form else []
    return out


def _keys(schema: Schema, of_lists: bool = True) -> dict[str, Schema]:
    out: dict[str, Schema] = {}
    for form in _mappings(schema, of_lists):
        out = {**form["properties"], **out}
    return out


def _required(schema: Schema) -> set[str]:
    """Keys without which no form of the mapping is complete."""
    needed = [set(form.get("required", [])) for form in _mappings(schema, True)]
    return needed[0] if needed else set()


def _forms(schema: Schema) -> list[str]:
    words = list(dict.fromkeys(_form(f) for f in _alternatives(schema)))
    return words or ["null"]


def _form(form: Schema) -> str:
    if "enum" in form:
        values = form["enum"]  # of number formats in every usual spelling: one of each is shown
        shown = [v for v in values if SPELLINGS.get(str(v), v) == v or SPELLINGS[str(v)] not in values]
        return " | ".join(map(_value, shown))
    if "const" in form:
        return _value(form["const"])
    kind = form.get("type", "anything")
    if isinstance(kind, list):
        return " | ".join(_form({**form, "type": each}) for each in kind if each != "null")
    if kind == "array":
        return f"list of {' | '.join(_forms(form.get('items', {})))}"
    if kind == "object":
        return "mapping"
    names = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true | false"}
    return names.get(str(kind), str(kind)) + _limits(form)


def _limits(form: Schema) -> str:
    low, high = form.get("minimum"), form.get("maximum")
    above, below = form.get("exclusiveMinimum"), form.get("exclusiveMaximum")
    bounds = (("at least", low), ("above", above), ("at most", high), ("below", below))
    words = [f"{word} {_value(v)}" for word, v in bounds if v is not None]
    return f" ({', '.join(words)})" if words else ""


def _note(schema: Schema) -> str:
    note = schema.get("description")
    if note is None:
        note = next((f["description"] for f in _alternatives(schema) if "description" in f), "")
    return " ".join(str(note).split())


def _value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)) and float(value).is_integer():
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.0f}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_value(item)}' for key, item in value.items())}}}"
    return str(value) if value != "" else "empty"
