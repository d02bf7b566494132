"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    path.relative_to(ROOT)
    for package in ("sim", "topology", "calibrate")
    for path in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in path.read_text("utf-8")
]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_examples_in_docstrings_hold(path: Path) -> None:
    if path.parts[0] == "calibrate":
        pytest.importorskip("torch", reason="calibrations run torch")
    module = import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
    result = doctest.testmod(module)
    lines = (ROOT / path).read_text("utf-8").splitlines()
    assert result.attempted == sum(line.lstrip().startswith(">>> ") for line in lines)  # doctest finds each
    assert result.failed == 0
