"""Each scheme's page names the file that runs it for real, and that file names the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "calibrate" / "parallel").glob("*.py"))
AROUND = {"__init__", "comm", "model_parallel", "proof", "runner", "storages"}  # what all schemes share


@pytest.mark.parametrize("file", [f for f in FILES if f.stem not in AROUND], ids=lambda f: f.stem)
def test_a_schemes_file_and_its_page_name_each_other(file: Path) -> None:
    page = re.search(r"Documentation: (docs/\w+\.md)\.", file.read_text())
    assert page is not None
    assert f"{file.name}`" in (ROOT / page[1]).read_text()
