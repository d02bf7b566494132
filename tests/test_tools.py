"""The scripts that made what is shipped still find what they use of the project."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.mark.parametrize("path", sorted(TOOLS.glob("*.py")), ids=lambda p: p.stem)
def test_a_tool_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    assert runpy.run_path(str(path), run_name="loaded")["__doc__"]  # an import that is gone raises
