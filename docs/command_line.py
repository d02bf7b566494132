"""Command lines of the modules that write the documentation."""

from __future__ import annotations

import argparse
from pathlib import Path


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
