"""What Transformers' layers keep for their backward is what the stored table says, with the Transformers installed."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

from tests.real.saved_by_transformers import CASES, FILE, measured  # noqa: E402


@pytest.mark.parametrize("family", CASES)
def test_layers_keep_what_the_table_says(family: str) -> None:
    table = json.loads(FILE.read_text(encoding="utf-8"))
    if table["versions"]["transformers"].split(".")[0] != transformers.__version__.split(".")[0]:
        pytest.skip("the table is of another major version of Transformers")
    stored = table["families"][family]["kept_bytes"]
    assert measured(family)["kept_bytes"] == pytest.approx(stored, rel=1e-3)
