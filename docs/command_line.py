"""Command lines of the modules that write the documentation."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def parser(module: str, about: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m MODULE`; `about` is the module's docstring."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m {module}", description=about, formatter_class=form)


def folder(module: str, about: str | None, usual: Path) -> Path:
    """Read the command line of a module that writes files into a folder."""
    words = parser(module, about)
    words.add_argument("folder", nargs="?", type=Path, default=usual, metavar="FOLDER", help=f"default: {usual}")
    given: Path = words.parse_args().folder
    if not given.is_dir():
        words.error(f"FOLDER: {given} is no folder")
    return given


def json_file(module: str, about: str | None, name: str, form: str) -> Mapping[str, Any]:
    """Read the command line of a module that reads a JSON file of a format, and the file."""
    words = parser(module, about)
    words.add_argument("file", type=Path, metavar=name)
    path = words.parse_args().file
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        words.error(f"{name}: {path} is no JSON file: {error}")
    if not isinstance(read, Mapping) or read.get("format") != form:
        words.error(f"{name}: {path} is no file of format {form}")
    return read
