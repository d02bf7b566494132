"""Other Python processes that run modules of this program."""

from __future__ import annotations

import sys
from pathlib import Path

HOME = Path(__file__).parents[2]  # of the packages `sim`, `topology` and `calibrate`


def python_module(name: str) -> list[str]:
    """The start of a command that runs a module of this program, from any folder.

    `-P` keeps the current folder off the path, where another `sim` may lie; in a checkout it is where this one lies.
    """
    return [sys.executable, *([] if Path.cwd() == HOME else ["-P"]), "-m", name]
