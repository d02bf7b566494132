"""Data that a user wrote, with the file and line of each key, and errors that name them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, field
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from sim.core.dtypes import normalise_dtype
from sim.core.errors import InputError
from sim.inputs.synonyms import synonym, value_synonym
from sim.inputs.yaml_input import MAX_DEPTH, KeyPath, dotted, one_line

MOST_BEGINNINGS = 6  # of known words that a message names; of more the first
MOST_HOMES = 3  # mappings with a key of one name that a message names; of more none
MOST_KEYS = 6  # of a mapping, in a message
SHORT_LIST = 4  # items that a message shows
_GLUED = re.compile(r"\w+:\S+")  # a key and its value without a space behind the colon
_THOUSANDS = r"([0-9]{1,9})\s*([kKmM])"
DTYPE_KEYS = ("dtype", "precision")  # endings of keys that hold a dtype
ModelT = TypeVar("ModelT", bound=BaseModel)
Problems = Iterator[tuple[KeyPath, str]]  # what a rule finds: the key, and what is wrong with its value

# Tags of unions told apart by form; pydantic puts them into an error's location.
_FORM_TAGS = ("<mapping>", "<name>", "<list>", "<trace>", "<pattern>")


class UserInput(BaseModel):
    """Base of what users write: unknown keys, wrong types, NaN and infinity are errors; values are fixed.

    A section's checks are made when it is first read, half a millisecond each. Defaults that are sections are therefore
    `model_construct`ed: they take each key's default unchecked. Files of sections do without `from __future__ import
    annotations`, with which pydantic would compile each annotation from its text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True, defer_build=True)


class OneOf:
    """An annotation of a text that names an entry of `known`; the JSON Schema lists the names. `or_file`: the ending
    of files that may be named instead. `meant`: the entry that another text means and that is taken for it, or nothing;
    `told`: what else the message says of a text."""

    def __init__(
        self,
        known: Mapping[str, object],
        or_file: str = "",
        meant: Callable[[str], str] | None = None,
        told: Callable[[str], str] | None = None,
    ) -> None:
        self.known, self.or_file, self.meant, self.told = known, or_file, meant, told

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # Before the check that it is text, whose message could not name the entries.
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        names = {**handler(schema), "enum": list(self.known)}
        return (
            {"anyOf": [names, {"type": "string", "pattern": f"{re.escape(self.or_file)}$"}]} if self.or_file else names
        )

    def _check(self, name: Any) -> Any:
        known = isinstance(name, str) and (name in self.known or (self.or_file and name.endswith(self.or_file)))
        if not known and self.meant and isinstance(name, str) and (found := self.meant(name)):
            return found
        if not known:
            *others, last = map(repr, self.known)
            expected = f"{', '.join(others)} or {last}" + f", or a file ({self.or_file})" * bool(self.or_file)
            told = self.told(name) if self.told and isinstance(name, str) else ""
            context = {"expected": expected, "told": told}
            raise PydanticCustomError("literal_error", "must be {expected}", context)
        return name


def as_tuple(value: Any) -> Any:
    """A list as the tuple that a fixed value needs; pydantic's strict mode takes none for it."""
    return tuple(value) if isinstance(value, list) else value


class Source(Struct, frozen=True):
    """A mapping that a user wrote. `origins`: the line of a key, or the `--set` option that gave it."""

    label: str
    data: dict[str, Any]
    origins: Mapping[KeyPath, int | str] = field(default_factory=dict)
    folder: str = ""  # where relative paths are looked up first

    def error(self, path: KeyPath, problem: str) -> InputError:
        """The one message for something wrong at `path`: file, line or option, key, problem."""
        origin, key = self._origin(path), dotted(path)
        problem += self._respelled(path)
        if isinstance(origin, str):
            key = f"--set {origin}" if origin == key else f"--set {origin}: {key}"
            return InputError(f"{self.label}: {key}: {problem}")
        place = self.label if origin is None else f"{self.label}:{origin}"
        return InputError(f"{place}: {key}: {problem}" if key else f"{place}: {problem}")

    def _respelled(self, path: KeyPath) -> str:
        """Say under which name a dtype was read, as the problem's text has that name."""
        written: Any = self.data
        for key in path:
            written = written.get(key) if isinstance(written, dict) else None
        if not isinstance(written, str) or not str(path[-1]).endswith(DTYPE_KEYS):
            return ""
        short = normalise_dtype(written)
        return "" if short == written else f"; '{written}' is read as '{short}'"

    def _origin(self, path: KeyPath) -> int | str | None:
        """Where the key was written, or else the option that made a key below it, or the nearest mapping around it."""
        if path in self.origins:
            return self.origins[path]
        for key, origin in self.origins.items():
            if path and isinstance(origin, str) and key[: len(path)] == path:
                return origin
        around = (path[:length] for length in range(len(path) - 1, 0, -1))
        return next((self.origins[key] for key in around if key in self.origins), None)


def raise_first(problems: Problems, source: Source, path: KeyPath = ()) -> None:
    """Raise InputError for the first problem of rules; `path`: of the mapping whose keys they name."""
    for key, problem in problems:
        raise source.error((*path, *key), problem)


def show(value: Any) -> str:
    """A found value, short enough for a message."""
    if isinstance(value, str):
        text = f"'{value}'"
    elif value is None:
        text = "null"
    elif isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, Mapping):
        text = "a mapping"
    elif isinstance(value, (list, tuple)):
        text = f"a list of {len(value)}" if value else "an empty list"
    else:
        text = str(value) if not isinstance(value, int) or abs(value) < 10**40 else "a very long number"
    return one_line(text)


def show_items(value: Any) -> str:
    """A found value as `show` writes it, and a short list with its items."""
    short = isinstance(value, (list, tuple)) and 0 < len(value) <= SHORT_LIST
    return one_line(f"[{', '.join(map(show, value))}]") if short else show(value)


def found_file(name: str, source: Source, path: KeyPath) -> str:
    """The path of a file that a key names: beside the source, or else from here.

    Raises:
        InputError: where there is none.
    """
    if (file := file_named(name, source)) is not None:
        return str(file)
    why = "is a folder; a file is needed" if is_folder(name, source) else "no such file"
    raise source.error(path, f"found {show(name)}; {why}")


def file_named(name: str, source: Source, inside: str = "") -> Path | None:
    """The file of a name, beside the source or else from here; of a folder the one called `inside`."""
    for folder in dict.fromkeys((source.folder, "")):
        try:
            path = Path(folder, name)
            path = path / inside if path.is_dir() else path
            if path.is_file():
                return path
        except (OSError, ValueError):  # a name too long, or with a NUL byte
            break
    return None


def is_folder(name: str, source: Source) -> bool:
    """Tell whether a name is that of a folder, beside the source or from here."""
    try:
        return any(Path(folder, name).is_dir() for folder in (source.folder, ""))
    except (OSError, ValueError):
        return False


def nearest(word: Any, known: Iterable[str], alike: float = 0.6) -> str:
    """`; did you mean 'x'?` for the nearest known word, or the few that begin so; or nothing.

    `alike`: difflib's least ratio of a word to the one that may be meant.

    >>> nearest("h1000", ["v100", "h100-pcie", "h100-sxm"]), nearest("framwork", ["framework", "precision"])
    ('; did you mean one of h100-pcie, h100-sxm?', "; did you mean 'framework'?")
    """
    text, choices = str(word)[:100].lower(), list(known)
    begins = [choice for choice in choices if len(text) > 2 and choice.startswith(text)]
    found = begins or _alike(text, choices, min(alike, 0.5) if len(text) == 2 else alike)  # tq for tp
    if 1 < len(found) <= MOST_BEGINNINGS:
        return f"; did you mean one of {', '.join(found)}?"
    return f"; did you mean '{found[0]}'?" if found else ""


def _alike(text: str, choices: list[str], cutoff: float) -> list[str]:
    """The choice that a mistyped text is most like, or the few whose part before `-` is more like it: h100 of
    h100-sxm and h100-pcie."""
    import difflib

    of_head: dict[str, list[str]] = {}
    for choice in choices:
        of_head.setdefault(choice.partition("-")[0], []).append(choice)
    words = [*choices, *(head for head, own in of_head.items() if 1 < len(own) <= MOST_BEGINNINGS)]
    found = difflib.get_close_matches(text, words, n=1, cutoff=cutoff)
    return found if not found or found[0] in choices else of_head[found[0]]


def unknown_key(key: Any, known: Iterable[str], section: str = "") -> str:
    """Say what is wrong with a key of a top-level section: the one that was meant, else all that are allowed."""
    names = list(known)
    other = synonym(key, section)
    # A word may have a key in several sections: prompt_len in those of requests and of rl.
    if section and not other.startswith(f"; here it is {section}."):
        other = next((f"; did you mean '{name}'?" for name in names if other.endswith(f".{name}")), other)
    if section == "rl":  # an engine's keys stand there in `generation`
        other = other.replace("; here it is inference.", "; here it is rl.generation.")
    return f"unknown key{other or nearest(key, names) or ' (allowed: ' + ', '.join(names) + ')'}"


def check_plain(source: Source) -> None:
    """Raise unless the data is made of plain values, lists and mappings with text keys, not too deep."""
    _check_plain(source, source.data, ())


def _check_plain(source: Source, value: Any, path: KeyPath) -> None:
    if len(path) > MAX_DEPTH:
        raise source.error(path[:4], f"is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise source.error(path, f"found the key {show(key)}; keys must be text")
            if item is None and _GLUED.fullmatch(key):  # YAML reads {pp:8} as a key without a value
                raise source.error((*path, key), f"is one key without a value; write {key.replace(':', ': ', 1)}")
            _check_plain(source, item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_plain(source, item, (*path, index))
    elif isinstance(value, float) and not math.isfinite(value):
        raise source.error(path, f"found {value}; must be a finite number")
    elif not (value is None or isinstance(value, (str, bool, int, float))):
        raise source.error(path, f"found a {type(value).__name__}; must be text, a number, a list or a mapping")


def without_nulls(value: Any) -> Any:
    """The value without keys that are null: null means the default."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def validate(model: type[ModelT], data: Any, source: Source, path: KeyPath) -> ModelT:
    """`data` as `model`; InputError for the first thing wrong with it, unknown keys before all else."""
    refuse_unknown_nulls(model, data, source, path)
    try:
        return model.model_validate(without_nulls(data), strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
        loc = _without_tags(first["loc"], first["type"] == "extra_forbidden")
        message = _message(first["type"], first, model, loc, path)
        raise source.error((*path, *loc), message) from None


def refuse_unknown_nulls(
    model: type[BaseModel], data: Any, source: Source, path: KeyPath, beside: tuple[str, ...] = ()
) -> None:
    """Raise for a key that is null and unknown, which `without_nulls` would hide; `beside`: keys that are read before
    the mapping is one of `model`."""
    for loc, forms in _unknown_nulls([model], data, ()):
        if loc[-1] not in beside:
            raise source.error((*path, *loc), unknown_key(loc[-1], forms[0].model_fields, str(path[0]) if path else ""))


def _unknown_nulls(
    forms: list[type[BaseModel]], value: Any, loc: KeyPath
) -> Iterator[tuple[KeyPath, list[type[BaseModel]]]]:
    """Keys that are null and that no form of their mapping has, with these forms."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown_nulls(forms, item, (*loc, index))
    elif isinstance(value, dict) and forms:
        for key, item in value.items():
            fields = [form.model_fields[key] for form in forms if key in form.model_fields]
            if item is None and not fields:
                yield (*loc, key), forms
            inner = [found for field in fields for found in _models_in(field.annotation)]
            yield from _unknown_nulls(inner, item, (*loc, key))


def _without_tags(loc: KeyPath, ends_in_own_key: bool) -> KeyPath:
    """A location without the tags between its keys; an unknown key at its end stays, whatever its name."""
    end = loc[-1:] if ends_in_own_key else ()
    return (*(part for part in loc[: len(loc) - len(end)] if part not in _FORM_TAGS), *end)


_EXPECTED = {
    **dict.fromkeys(("int_type", "int_from_float", "int_parsing"), "must be an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    "dict_type": "must be a mapping",
    **dict.fromkeys(("tuple_type", "list_type"), "must be a list"),
    "string_type": "must be text (put a number in quotes)",
    "finite_number": "must be a finite number",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "must be a month or a day, such as 2024-12 or 2024-12-05",  # of dates alone
}


def _message(kind: str, problem: Mapping[str, Any], model: type[BaseModel], loc: KeyPath, path: KeyPath) -> str:
    """What is wrong at `loc` of a `model` that stands at `path`."""
    found = show(problem["input"])
    context = problem.get("ctx", {})
    if kind == "missing":
        return "is required and missing"
    if kind == "extra_forbidden":
        return _not_a_key(model, loc, path)
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        words = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}
        key, limit = next((k, v) for k, v in context.items() if k in words)
        return (
            f"found {found}; must be {words[key]} {limit:,}"
            if isinstance(limit, int)
            else (f"found {found}; must be {words[key]} {limit:g}")
        )
    if kind in ("too_short", "too_long"):
        least = context.get("min_length")
        limit = f"at most {context['max_length']:,}" if least is None else f"at least {least}"
        return f"found {found}; must have {limit} entr{'y' if least == 1 else 'ies'}"
    if kind == "literal_error":
        allowed = str(context["expected"]).replace("True", "true").replace("False", "false")  # as YAML has them
        choices = allowed.replace("'", "").replace(" or ", ", ").split(", ")
        hint = context.get("told") or value_synonym(loc, problem["input"]) or nearest(problem["input"], choices)
        return f"found {found}; must be {allowed}{hint}"
    if kind == "value_error":
        return str(context["error"]) if found == "a mapping" else f"found {found}; {context['error']}"
    if kind in ("model_type", "model_attributes_type"):
        keys = [*_forms_at(model, loc)[0].model_fields]
        return f"found {found}; must be a mapping of {', '.join(keys[:MOST_KEYS])}{' …' * (len(keys) > MOST_KEYS)}"
    hint = _in_full(kind, problem["input"]) or value_synonym(loc, problem["input"])
    return f"found {found}; {_EXPECTED.get(kind, problem['msg'])}{hint}"


def _not_a_key(model: type[BaseModel], loc: KeyPath, path: KeyPath) -> str:
    """What is wrong with the last key of `loc`, which no form of its mapping has, or another than the chosen one."""
    forms = _forms_at(model, loc[:-1])
    of_another = any(loc[-1] in form.model_fields for form in forms)
    if of_another and (chosen := next((form for form in forms if loc[-1] not in form.model_fields), None)):
        others = [key for key in chosen.model_fields if sum(key in form.model_fields for form in forms) == 1]
        return f"cannot stand beside {' or '.join(others)}, which is another form of this mapping"
    if homes := _mappings_with(forms[0], loc[-1]):
        return f"unknown key; it belongs in {' or '.join(dotted((*path, *loc[:-1], home)) for home in homes)}"
    return unknown_key(loc[-1], forms[0].model_fields, str(path[0]) if path else "")


def _in_full(kind: str, value: Any) -> str:
    """The integer that `8k` or `1e3` means, as YAML takes it; k is 1,024, as for tokens and sequences."""
    if kind.startswith("int") and isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f": write {int(value)}"
    short = re.fullmatch(_THOUSANDS, value) if kind.startswith("int") and isinstance(value, str) else None
    if short is None:
        return ""
    number = int(short[1]) * 1024 ** (1 + "km".index(short[2].lower()))
    return f": write {number} (or {number:_})"


def _forms_at(model: type[BaseModel], loc: KeyPath) -> list[type[BaseModel]]:
    """The model classes of which one's fields stand at `loc` below `model`."""
    forms = [model]
    for part in loc:
        if isinstance(part, int) or part not in forms[0].model_fields:
            continue
        forms = _models_in(forms[0].model_fields[part].annotation)
    return forms


def _mappings_with(model: type[BaseModel], key: Any) -> list[str]:
    """The fields of a model that are mappings and have a key of this name; nothing where they are many."""
    fields = model.model_fields.items()
    homes = [name for name, field in fields if any(key in each.model_fields for each in _models_in(field.annotation))]
    return homes if len(homes) <= MOST_HOMES else []


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for item in getattr(annotation, "__args__", ()) for model in _models_in(item)]
