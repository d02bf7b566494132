"""The page on recipes is what `python tools/recipes_that_run.py` writes, and most recipes fit where their makers run
them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tools.recipes_that_run import PAGE, line, recipes, simulated, summary, written  # noqa: E402


def test_the_page_is_what_the_tool_writes() -> None:
    assert PAGE.read_text() == written(), "written anew by python tools/recipes_that_run.py"


def test_a_recipe_that_does_not_fit_counts_against_us(tmp_path: Path) -> None:
    """Of a model of 8B parameters in fp32, on 24 GB."""
    recipe = {
        "recipe": "too large",
        "of": "a test",
        "settings": {"base_model": "meta-llama/Llama-3.1-8B", "sequence_len": 512, "micro_batch_size": 1, "bf16": True},
        "cluster": {"gpu": "rtx4090", "gpus_per_node": 1},
        "gpus": 1,
        "says": {"gib": 12, "fits": True},
    }
    found = simulated(recipe, tmp_path)
    assert not found.refused
    assert found.fits is False
    assert "| no |" in line(recipe, found)
    assert summary([(recipe, found)]).startswith("**0 of 1 fit")


@pytest.mark.parametrize("word", ["settings", "command"])
def test_each_recipe_says_what_it_needs(word: str) -> None:
    for recipe in recipes():
        assert {"recipe", "of", "cluster", "gpus", "says"} <= {*recipe}
        assert ("settings" in recipe) != ("command" in recipe)
    assert any(word in recipe for recipe in recipes())
