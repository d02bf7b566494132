"""Files of the layouts that a search lists: a scenario of each, and a trainer's flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from sim.core.errors import InputError
from sim.core.files import write_text

if TYPE_CHECKING:
    from sim.search.found import SearchResult


def save_layouts(folder: Path, result: SearchResult) -> None:
    """Write the files of the best layouts, numbered as in the table.

    Raises:
        InputError: where the folder cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--save {folder}: cannot be made: {error.strerror}") from None
    runs = [row.runnable for row in result.best if row.runnable is not None]
    for number, run in enumerate(runs, 1):
        write_text(folder / f"{number}.yaml", _named(run.yaml, f"{result.name}-{number}"))
        if run.flags is not None:
            write_text(folder / f"{number}.flags", run.flags + "\n")


def _named(text: str, name: str) -> str:
    """A scenario's text with this name in it, which results and pages show: that of the file would be a number."""
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith("name:")]
    return f"name: {json.dumps(name, ensure_ascii=False)}\n{''.join(lines)}"
