"""The scripts that made what is shipped still find what they use of the project."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest

from sim.inputs.nearest_gpu import MEDIAN_FACTOR, NINTH_FACTOR, USUAL, measured_gpus
from sim.prices.operator_prices import OTHER_CHIP_UNCERTAINTY

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.mark.parametrize("path", sorted(TOOLS.glob("*.py")), ids=lambda p: p.stem)
def test_a_tool_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    assert runpy.run_path(str(path), run_name="loaded")["__doc__"]  # an import that is gone raises


def test_the_stated_error_of_unmeasured_gpus_is_that_of_measured_ones_left_out() -> None:
    """Where this fails: `python tools/borrowed_kernels.py`, and the tables of docs/gpus.md."""
    tool = runpy.run_path(str(TOOLS / "borrowed_kernels.py"), run_name="loaded")
    chips, (of_a_kind, half, nine_in_ten) = tool["factors_of"](tool["by_rule"])
    assert chips == 5
    assert (half, nine_in_ten) == pytest.approx((MEDIAN_FACTOR, NINTH_FACTOR), abs=0.006)
    assert pytest.approx(1.4826 * math.log(half), abs=0.006) == OTHER_CHIP_UNCERTAINTY
    assert of_a_kind < half
    # One chip for all is `USUAL` where nothing else decides; the rule is better, and far better than no efficiencies.
    always = {name: tool["factors_of"](tool["by_always"](name))[1][1] for name in measured_gpus()}
    assert min(always, key=lambda name: always[name]) == USUAL
    assert half < always[USUAL]
    assert tool["factors_of"](tool["by_always"]("roofline"))[1][0] > 2.0
