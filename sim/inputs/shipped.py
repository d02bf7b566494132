"""The scenarios that come with the program: found by name from any folder."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


@cache
def scenarios_folder() -> Path:
    """`scenarios/` beside the package in a checkout, inside it where it was installed."""
    beside = _PACKAGE.parent / "scenarios"
    return beside if (beside / "1f1b_pp8.yaml").is_file() else _PACKAGE / "scenarios"


def shipped_scenarios() -> dict[str, Path]:
    """All of them by name, such as `1f1b_pp8` and `cpu/1f1b_pp2`; those of the top folder first."""
    folder = scenarios_folder()
    files = sorted(folder.rglob("*.yaml"), key=lambda path: (len(path.parts), path))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in files}


def shipped_name(path: Path) -> str:
    """The name of a shipped scenario's file; nothing for another file."""
    return next((name for name, own in shipped_scenarios().items() if own == path), "")


def scenario_file(path: Path) -> Path:
    """The path; of a shipped scenario's name, where no file has it, that scenario's file."""
    own = None if path.suffix else shipped_scenarios().get(path.as_posix())
    return path if own is None or path.exists() else own


def first_comment(path: Path) -> str:
    """The first sentence of a scenario's comment, which says what it shows.

    >>> first_comment(scenarios_folder() / "tp8_sp.yaml")[:30]
    'Tensor and sequence parallelis'
    """
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# ") or line.startswith("#   "):
            break
        lines.append(line[2:].strip())
    sentence, stop, _ = re.split(r"(?<!et al)(\. )", " ".join(lines) + ". ", maxsplit=1)
    return sentence.rstrip(".:") + stop.strip()
