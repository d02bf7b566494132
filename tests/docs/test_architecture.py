"""The table of folders in docs/architecture.md says which other folders each really imports, from the bottom up."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = ("distillation", "simulation")  # of one file at the top of `sim`, which are no commands


def files(name: str) -> list[Path]:
    """The files of a folder of `sim`, or its one file; without those that are commands wherever they lie."""
    if name in MODULES:
        return [ROOT / "sim" / f"{name}.py"]
    found = (ROOT / "sim" / name).rglob("*.py")
    return [path for path in found if path.name not in ("__main__.py", "command_line.py")]


def imported(name: str) -> set[str]:
    """Other folders of `sim`, and `topology`, that a folder's modules import, for types too."""
    found: set[str] = set()
    for path in files(name):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                first, _, rest = node.module.partition(".")
                found |= {first} if first == "topology" else {rest.partition(".")[0]} if first == "sim" else set()
    # A result shows its own page to notebooks alone (`tests/test_imports.py`), and all folders import `core`.
    return found - {name, "", "core", *(("views",) if name != "commands" else ())}


def stated() -> dict[str, str]:
    """The last column of the table by folder or module."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `(\w+)(?:/|\.py)` \|.*\| ([^|]*) \|$", text, re.MULTILINE))


ORDER = list(stated())


def words(name: str) -> str:
    """What the table says of a folder: the others in the table's order, then `topology`."""
    found = imported(name)
    assert found <= {*ORDER, "topology"}, f"{name} imports {found - {*ORDER, 'topology'}}, which has no row"
    names = [*(n for n in ORDER if n in found), *sorted(found - set(ORDER))]
    return ", ".join(f"`{n}`" if n in ("topology", *MODULES) else n for n in names) or "–"


def test_every_folder_has_a_row() -> None:
    assert set(ORDER) == {*(path.parent.name for path in (ROOT / "sim").glob("*/__init__.py")), *MODULES}


@pytest.mark.parametrize("name", ORDER)
def test_a_folder_imports_only_those_above_it(name: str) -> None:
    below = imported(name) & set(ORDER[ORDER.index(name) :])
    assert not below, f"sim/{name} imports {sorted(below)}, whose rows do not stand above its own"


@pytest.mark.parametrize("name", ORDER)
def test_the_table_says_what_a_folder_imports(name: str) -> None:
    assert stated()[name] == words(name)
