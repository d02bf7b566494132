"""What Transformers' layers with a state keep is what the stored table says, with the Transformers installed.

In a process of its own, because stand-ins of libraries are in their places there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

ROOT = Path(__file__).parents[2]


def test_layers_keep_what_the_table_says() -> None:
    stored = json.loads((ROOT / "tests/sim/data/saved_by_state_layers.json").read_text(encoding="utf-8"))
    if stored["versions"]["transformers"].split(".")[0] != transformers.__version__.split(".")[0]:
        pytest.skip("the table is of another major version of Transformers")
    command = [sys.executable, "-m", "tests.real.saved_by_state_layers", "--print"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    for family, row in json.loads(printed.splitlines()[-1])["families"].items():
        assert row["kept_bytes"] == pytest.approx(stored["families"][family]["kept_bytes"], rel=1e-3), family
