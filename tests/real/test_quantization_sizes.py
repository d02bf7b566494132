"""The stored table of 8-bit methods over model sizes: what it says, and a tiny case done anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from calibrate import quantization_sizes as sizes  # noqa: E402

ROOT = Path(__file__).parents[2]
ROWS = [sizes.Sized(**row) for row in json.loads((ROOT / "sim" / "presets" / "quantization_sizes.json").read_text())]


def test_the_page_has_the_stored_table() -> None:
    page = (ROOT / "docs" / "quantization.md").read_text("utf-8").splitlines()
    assert set(sizes.table(ROWS)) <= set(page)


def test_outliers_grow_with_the_model_and_then_methods_differ_as_published() -> None:
    """Dettmers et al. 2022, table 1: without outliers no method loses; with them absmax most, zero points less, rows
    and vectors less still, and outliers apart next to nothing."""
    assert [row.largest for row in ROWS] == sorted(row.largest for row in ROWS)
    *small, real = ROWS
    for row in small:
        assert row.outliers == 0
        assert max(row.perplexity.values()) < 1.005 * row.fp32
    assert real.outliers > 0
    loss = {name: found / real.fp32 - 1 for name, found in real.perplexity.items()}
    order = ("absmax", "zero_point", "row_wise", "vector_wise", "row_wise_decomposed", "llm_int8")
    assert sorted(order, key=loss.__getitem__, reverse=True) == list(order)
    assert loss["llm_int8_zero_point"] < loss["llm_int8"] < 0.02
    assert loss["zero_point_vector_wise"] < loss["vector_wise"]


def test_a_tiny_case() -> None:
    torch.set_num_threads(1)
    text, held_out = sizes.corpus()
    short = held_out[: 2 * (sizes.SEQ + 1)]
    blocks = sizes.trained("S", text, 3)
    layers = [m for b in blocks[1:-1] for m in b.modules() if isinstance(m, sizes.Linear)]
    assert len(layers) == 8
    found = sizes.measured("S", blocks, short, "here", rows=2)
    assert found.parameters == ROWS[0].parameters
    assert found.fp32 < 400  # bytes are 256, and three steps teach little
    assert set(found.perplexity) == set(ROWS[0].perplexity)
