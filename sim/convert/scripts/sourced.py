"""Scripts beside a launch script, which it reads with `source`, starts, or submits by sbatch."""

from __future__ import annotations

import re
from pathlib import Path

from sim.convert.scripts.unknown import MARK

OF_ENVIRONMENT = re.compile(
    r"activate|conda|bashrc|profile|/etc/|/opt/|\.env$|setvars|cargo/env|modules?/init|ssh-agent|shellenv|modulecmd"
)


def found_script(folder: Path, word: str) -> Path | None:
    """The file of a name, beside the script whatever is said of its folder."""
    name = MARK.sub("", word).strip().lstrip("~/")
    if not name or len(name) > 1000 or "\n" in name or "\0" in name:
        return None
    tries = (folder / name, folder / Path(name).name)
    return next((path.resolve() for path in tries if path.is_file()), None)


def advice(absent: tuple[str, ...]) -> str:
    """Return the advice on files that a script reads and that are absent; it follows an error, or is a note."""
    return f"the script reads {', '.join(absent)}, not found beside it: put it there, or give what it sets by --var"
