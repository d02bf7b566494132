"""What quantization costs in quality: perplexities that calibrate.quantization_sizes has measured."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

MEASURED = Path(__file__).parents[2] / "presets" / "quantization_sizes.json"


@cache
def perplexity_added(quantization: str) -> float | None:
    """The part by which a method raises the perplexity of the largest model it was measured on; None where it was not.

    >>> round(perplexity_added("llm_int8"), 3), perplexity_added("none")
    (0.011, None)
    """
    largest = json.loads(MEASURED.read_text("utf-8"))[-1]
    measured = largest["perplexity"].get(quantization)
    return None if measured is None else float(measured / largest["fp32"] - 1)
