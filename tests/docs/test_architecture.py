"""The table of folders in docs/architecture.md says which other folders each really imports."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# From one end of the path to the other, then what is beside it. `simulation` is the module that puts the path together.
ORDER = ("inputs", "ranks", "models", "schedules", "prices", "programs", "graph", "engine", "processes", "results")


def imported(folder: str) -> set[str]:
    """Other folders of `sim`, and `topology`, that a folder's modules import, for types too."""
    found: set[str] = set()
    for path in (ROOT / "sim" / folder).rglob("*.py"):
        if path.name in ("__main__.py", "command_line.py"):  # these are commands wherever they lie
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                first, _, rest = node.module.partition(".")
                found |= {first} if first == "topology" else {rest.partition(".")[0]} if first == "sim" else set()
    # A result shows its own page to notebooks alone (`tests/test_imports.py`), and all folders import `core`.
    return found - {folder, "", "core", *(("views",) if folder != "commands" else ())}


def words(folder: str) -> str:
    """What the table says of a folder."""
    found = imported(folder)
    names = [*(name for name in ORDER if name in found), *sorted(found - set(ORDER))]
    return ", ".join(f"`{name}`" if name in ("topology", "simulation") else name for name in names) or "–"


def stated() -> dict[str, str]:
    """The last column of the table by folder."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `(\w+)/` \|.*\| ([^|]*) \|$", text, re.MULTILINE))


def test_every_folder_has_a_row() -> None:
    assert set(stated()) == {path.parent.name for path in (ROOT / "sim").glob("*/__init__.py")}


@pytest.mark.parametrize("folder", stated())
def test_the_table_says_what_a_folder_imports(folder: str) -> None:
    assert stated()[folder] == words(folder)
