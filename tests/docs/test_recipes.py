"""The page on recipes is what `python tools/recipes_that_run.py` writes, and most recipes fit where their makers run
them."""

from __future__ import annotations

import runpy
from pathlib import Path

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "recipes_that_run.py"))


def test_the_page_is_what_the_tool_writes() -> None:
    assert TOOL["PAGE"].read_text(encoding="utf-8") == TOOL["written"](), (
        "written anew by python tools/recipes_that_run.py"
    )


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
    found = TOOL["simulated"](recipe, tmp_path)
    assert not found.refused
    assert found.fits is False
    assert "| no |" in TOOL["line"](recipe, found)
    assert TOOL["summary"]([(recipe, found)]).startswith("**0 of 1 fit")


def test_each_recipe_says_what_it_needs() -> None:
    for recipe in TOOL["recipes"]():
        assert {"recipe", "of", "cluster", "gpus", "says"} <= {*recipe}
        assert ("settings" in recipe) != ("command" in recipe)
        assert "fits" in recipe["says"]
