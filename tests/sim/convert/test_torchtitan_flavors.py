"""torchtitan's flavors of a model that differ in its attention alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.convert.converting import converted

TEXT = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
"""


@pytest.mark.parametrize("ending", ["", "_flex", "_varlen", "_flex_attn"])
def test_a_flavor_with_an_attention_of_its_own(tmp_path: Path, ending: str) -> None:
    """models/llama3/__init__.py: `attn_backend`, `attn_mask_type`."""
    text = TEXT.replace("8B", f"8B{ending}")
    data, said = converted(tmp_path, "a.toml", text, "--cluster", "dgx-h100", "--gpus", "8")
    plain, _ = converted(tmp_path, "a.toml", TEXT, "--cluster", "dgx-h100", "--gpus", "8")
    assert data == plain
    assert ("attention stays within a text there" in said) == bool(ending)
