"""The table of GPUs is what their files and profiles say."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from docs import gpus


def test_the_table_of_gpus_is_that_of_their_files() -> None:
    assert gpus.table() in gpus.PAGE.read_text("utf-8"), "python -m docs.gpus"
