"""The kind of a file that was given in place of another: a scenario, a result, a profile, a trace."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sim.core.errors import InputError

KINDS = {  # by the part of `format` before the slash: what it is, and what takes it
    "profile": ("a calibration profile", "name it with --set calibration=FILE"),
    "engine": ("a measured engine", "name it with --set inference.engine=FILE"),
    "profile-partial": ("an unfinished calibration profile", "`stepsim calibrate run` goes on from it"),
    "measured-run": ("a measured run", "`stepsim compare SCENARIO FILE` takes it"),
    "measurements": ("a table of measurements", "`stepsim validate FILE` takes it"),
    "sim-result": ("a result", "`stepsim diff A B` compares two; its key `scenario` can be run"),
    "sim-search": ("a search's result", "the key `scenario` of each of its `best` can be run"),
    "sim-sweep": ("a sweep's result", "each of its rows says which keys to --set"),
    "sim-compare": ("a comparison's result", "no command reads it"),
    "sim-replay": ("a replay's result", "no command reads it"),
    "sim-validate": ("a validation's result", "no command reads it"),
    "sim-regress": ("the accepted errors of stored runs", "`stepsim regress FOLDER` reads it"),
}
SCENARIO = "a scenario", "`stepsim run FILE` takes it"
TRACE = "a profiler trace", "`stepsim replay FILE` takes it"
SQLITE = b"SQLite format 3\0"  # a file's first bytes: https://www.sqlite.org/fileformat.html, section 1.3.1
NSYS = "an SQLite file, such as Nsight Systems exports", "`stepsim replay FILE` takes those"
MODEL_CONFIG = "a model's config.json", "a scenario names it: `stepsim run SCENARIO --set model=FILE`"
CONVERTS = "`stepsim convert FILE --cluster NAME` makes a scenario of another program's configuration or script"
OF_OTHER_KINDS = ("format", "traceEvents", "architectures", "vocab_size")  # keys by which `kind_of` may tell a file
FOREIGN_FROM = 3  # keys of which none is a scenario's: fewer may be mistyped
GZIP = b"\x1f\x8b"  # RFC 1952, section 2.3.1
ZIPPED = "a file compressed with gzip", "`stepsim replay FILE` takes compressed profiler traces"
PAGES = (b"<!doctype html", b"<html")  # in small letters
PAGE = "an HTML page", "a browser opens it"
NSYS_REPORTS = (".nsys-rep", ".qdrep")


def kind_of(data: Any) -> tuple[str, str] | None:
    """Return what plain data is, and what takes it; None where that cannot be told."""
    if not isinstance(data, Mapping):
        return None
    found = data.get("format")
    if isinstance(found, str) and found.partition("/")[0] in KINDS:
        return KINDS[found.partition("/")[0]]
    if "traceEvents" in data:
        return TRACE
    if "architectures" in data or ("model_type" in data and "vocab_size" in data):
        return MODEL_CONFIG
    return SCENARIO if "model" in data and "cluster" in data else None


def refuse_other_kind(path: str | Path, data: Any, wanted: str, own: str = "") -> None:
    """Raise where `data` is of a kind that is known; `wanted`: what the command takes, such as `run wants a scenario`.

    `own`: the format that the caller reads; another version of it is for the caller to refuse.

    Raises:
        InputError: saying what the file is, what was wanted, and which command takes it.
    """
    kind = kind_of(data)
    if kind is not None and kind != KINDS.get(own):
        raise InputError(f"{path}: is {kind[0]}; {wanted} ({kind[1]})")


def refuse_foreign(path: str | Path, data: Mapping[Any, Any], known: Collection[str]) -> None:
    """Raise for a configuration that has no key of a scenario, such as another trainer's.

    Raises:
        InputError: that names the command that reads those.
    """
    if len(data) >= FOREIGN_FROM and not any(key in known for key in data):
        few = ", ".join(str(key)[:40] for key in list(data)[:FOREIGN_FROM])
        raise InputError(f"{path}: has {few} and so on, and no key of a scenario; {CONVERTS}")


def other_format(where: str | Path, data: Any, allowed: str) -> InputError:
    """Return the error of data whose key `format` is not the one `allowed`."""
    from sim.inputs.input_source import show

    if not isinstance(data, Mapping):
        return InputError(f"{where}: found {show(data)}; must be a mapping whose format is {allowed!r}")
    found = f"found {show(data['format'])}" if data.get("format") is not None else "is missing"
    return InputError(f"{where}: format: {found}; must be {allowed!r}")


def refuse_recording(path: str | Path, wanted: str) -> None:
    """Raise for a recorded trace, which may be no text or too long to be parsed; `wanted` as for `refuse_other_kind`.

    Raises:
        InputError: saying what the file is, and which command takes it.
    """
    begin = _first_bytes(path)
    kind = NSYS if begin.startswith(SQLITE) else TRACE if b'"traceEvents"' in begin else None
    kind = ZIPPED if begin.startswith(GZIP) else PAGE if is_page(begin) else kind
    if kind is not None:
        raise InputError(f"{path}: is {kind[0]}; {wanted} ({kind[1]})")


def is_page(begin: bytes) -> bool:
    """Tell whether a file's first bytes are those of an HTML page."""
    return begin.lstrip()[: len(PAGES[0])].lower().startswith(PAGES)


def starts_as_sqlite(path: str | Path) -> bool:
    """Tell whether a file's first bytes are SQLite's; not where it cannot be read."""
    return _first_bytes(path).startswith(SQLITE)


def _first_bytes(path: str | Path) -> bytes:
    """Return a file's first bytes; none where it cannot be read. A pipe would lose these bytes."""
    if not os.path.isfile(path):
        return b""
    try:
        with open(path, "rb") as file:
            return file.read(4096)
    except (OSError, ValueError):
        return b""


def read_data(path: str | Path) -> Any:
    """The content of a file of JSON; of YAML where its name says so, so that `refuse_other_kind` can tell what it is.

    Raises:
        InputError: if it cannot be read, is empty, or is neither.
    """
    from sim.core.files import read_json, read_text
    from sim.inputs.yaml_input import MAX_BYTES, parse_yaml

    if not str(path).endswith((".yaml", ".yml")):
        return read_json(Path(path))
    data = parse_yaml(read_text(Path(path), MAX_BYTES), str(path))[0]
    if data is None:
        raise InputError(f"{path}: is empty")
    return data


def read_yaml_if_any(path: str | Path) -> Any:
    """The content of a YAML (or JSON) file of a scenario's size; None where it is none."""
    from sim.core.files import read_text
    from sim.inputs.yaml_input import MAX_BYTES, parse_yaml

    try:
        return parse_yaml(read_text(Path(path), MAX_BYTES), str(path))[0]
    except InputError:
        return None
