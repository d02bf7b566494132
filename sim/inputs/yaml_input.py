"""YAML read from events: plain data with the line of every key, and nothing that could run code or explode.

Anchors, aliases and tags are refused, so are duplicate keys, further documents, deep nesting and large files.
Numbers are read as in YAML 1.2 (`1e9` is a number, `010` is ten); `yes`, `no`, `on`, `off` stay booleans.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from sim.core.errors import InputError

MAX_BYTES = 1_000_000
MAX_DEPTH = 32

KeyPath = tuple[str | int, ...]

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INTEGER = re.compile(r"[-+]?[0-9](_?[0-9])*")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9](_?[0-9])*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_NULLS = ("", "~", "null", "Null", "NULL")
_TRUES = ("true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON")
_FALSES = ("false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF")


def parse_yaml(text: str, label: str) -> tuple[Any, dict[KeyPath, int]]:
    """A YAML text's value and the line (from 1) of every key path in it. `label` starts error messages."""
    reader = _Reader(label)
    try:
        events = iter(yaml.parse(text, Loader=_LOADER))
        return reader.document(events), reader.lines
    except yaml.YAMLError as error:
        raise InputError(_syntax_error(error, text, label)) from None


# libyaml's word for the list or mapping on one line in which it met a mistake, and the signs around one.
_OPENED = {"while parsing a flow sequence": ("[", "]"), "while parsing a flow mapping": ("{", "}")}


def _syntax_error(error: yaml.YAMLError, text: str, label: str) -> str:
    mark: Any = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be parsed"
    context, begun = getattr(error, "context", None) or "", getattr(error, "context_mark", None)
    position = getattr(error, "position", None)
    if mark is not None:
        line = min(mark.line + 1, text.count("\n") + 1)
    elif isinstance(position, int):
        line = text[:position].count("\n") + 1
    else:
        return f"{label}: is not valid YAML: {problem}"
    if "nesting depth" in problem:  # libyaml's own limit, which it reaches before the first event
        return f"{label}:{line}: is nested more than {MAX_DEPTH} levels deep"
    written = text.split("\n")[line - 1]
    if written[: len(written) - len(written.lstrip())].count("\t"):
        problem = "a tab; YAML indents with spaces"
    elif line > 1 and ("did not find expected key" in problem or "mapping values are not allowed" in problem):
        problem += f"; check indentation and colons of lines {line - 1} and {line}"
    elif "quoted" in context and "end of stream" in problem and begun is not None:
        problem = f"the quote that begins in line {begun.line + 1} has no end"
    elif context in _OPENED and begun is not None:
        opened, closing = _OPENED[context]
        problem = f"a comma is missing, or the {opened} of line {begun.line + 1} has no {closing}"
    elif "did not find expected node content" in problem:
        problem = "a value is missing here, or a [ or { before it has no end"
    return f"{label}:{line}: is not valid YAML: {problem}"


class _Reader:
    """Builds data from one event stream; holds the lines found so far."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.lines: dict[KeyPath, int] = {}

    def document(self, events: Iterator[Any]) -> Any:
        value: Any = None
        seen = False
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if seen:
                    raise self.refuse(event, "holds more than one YAML document; one is allowed")
                seen = True
            elif not isinstance(event, (yaml.StreamStartEvent, yaml.DocumentEndEvent, yaml.StreamEndEvent)):
                value = self.value(event, events, ())
        return value

    def value(self, event: Any, events: Iterator[Any], path: KeyPath) -> Any:
        self.check(event, path)
        self.lines.setdefault(path, event.start_mark.line + 1)
        if isinstance(event, yaml.MappingStartEvent):
            return self.mapping(events, path)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Any] = []
            while not isinstance(event := next(events), yaml.SequenceEndEvent):
                items.append(self.value(event, events, (*path, len(items))))
            return items
        if event.style in ("", None):
            return self.scalar(event)
        return event.value

    def mapping(self, events: Iterator[Any], path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key: Any = event
            self.check(key, path)
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarEvent):
                raise self.refuse(key, "a key must be a plain word, not a list or a mapping")
            name = key.value
            if name in result:
                first = self.lines[(*path, name)]
                raise self.refuse(key, f"{dotted((*path, name))}: is given twice (first in line {first})")
            self.lines[(*path, name)] = line
            result[name] = self.value(next(events), events, (*path, name))
        return result

    def check(self, event: Any, path: KeyPath) -> None:
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise self.refuse(event, "anchors and aliases (&name, *name) are not allowed; write the value out")
        if event.tag is not None and event.tag != "!":
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise self.refuse(event, f"the tag {tag[:60]} is not allowed; write a plain value")
        if len(path) > MAX_DEPTH:
            raise self.refuse(event, f"is nested more than {MAX_DEPTH} levels deep")

    def scalar(self, event: Any) -> Any:
        text: str = event.value
        if text in _NULLS:
            return None
        if text in _TRUES:
            return True
        if text in _FALSES:
            return False
        if len(text) <= 100:
            if _INTEGER.fullmatch(text):
                return int(text)
            if _FLOAT.fullmatch(text):
                return float(text)
            if _SPECIAL.fullmatch(text):
                return float(text.replace(".", "", 1))
        return text

    def refuse(self, event: Any, problem: str) -> InputError:
        return InputError(f"{self.label}:{event.start_mark.line + 1}: {problem}")


def dotted(path: KeyPath) -> str:
    """A key path as a person writes it: `faults.stragglers[0].rank`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else ("." if text else "") + one_line(part)
    return text


def one_line(text: str, limit: int = 60) -> str:
    """A text as it can stand in a message: control characters replaced, cut to `limit`."""
    short = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(c if c.isprintable() else "?" for c in short)
