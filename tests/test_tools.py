"""The scripts that made what is shipped, pages included, still find what they use of the project."""

from __future__ import annotations

import math
import runpy
import sys
from pathlib import Path

import pytest

from sim.inputs.nearest_gpu import MEDIAN_FACTOR, NINTH_FACTOR, USUAL, measured_gpus
from sim.prices.reference_gpu import OTHER_CHIP_UNCERTAINTY

TOOLS, DOCS = (Path(__file__).parents[1] / name for name in ("tools", "docs"))
SCRIPTS = sorted([*TOOLS.glob("*.py"), *DOCS.glob("*.py"), *DOCS.glob("*/__main__.py")])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: str(p.relative_to(TOOLS.parent)))
def test_a_tool_loads_explains_itself_and_refuses_wrong_arguments(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    loaded = runpy.run_path(str(path), run_name="loaded")  # an import that is gone raises
    purpose = loaded["__doc__"].splitlines()[0]
    for option, code in (("--help", 0), ("--no-such-option", 2)):
        if "main" in loaded:  # the others hold data or functions of a tool
            monkeypatch.setattr(sys, "argv", [path.name, option])
            with pytest.raises(SystemExit) as end:
                loaded["main"]()
            assert end.value.code == code
            assert (purpose if code == 0 else "error: ") in "".join(capsys.readouterr())


@pytest.mark.slow
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


def test_the_fit_of_engines_prices_a_row_as_the_simulator_does() -> None:
    """From parts that are linear in the fitted constants; fp8 experts on two ranks, so that none of them is 0."""
    tool = runpy.run_path(str(TOOLS / "fit_engines.py"), run_name="loaded")
    fit = tool["FITS"][-1]
    rows = tool["halves"](fit, tool["read_table"](tool["PUBLISHED"] / f"{fit.table}.json").rows)[0]
    row = next(r for r in rows if "mixtral" in r.id and "tp2_i00128" in r.id)
    (key,) = row.measured
    simulated = tool["value_of"](tool["_simulated"](row).result, row, key)
    assert tool["_rate"](fit, row) == pytest.approx(simulated, rel=1e-4)


@pytest.mark.slow
def test_the_page_of_runs_on_a_gpu_has_the_tables_that_its_tool_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    tool = runpy.run_path(str(TOOLS / "gpu_table.py"), run_name="loaded")
    page = tool["PAGE"].read_text()
    assert tool["with_tables"](page) == page  # else: python tools/gpu_table.py


@pytest.mark.slow
def test_the_page_of_programs_has_the_table_of_the_h100_that_its_tool_writes() -> None:
    tool = runpy.run_path(str(TOOLS / "gpu_programs.py"), run_name="loaded")
    page = tool["PAGE"].read_text()
    table = "\n".join(tool["show"](tool["STORED"]))
    assert tool["with_table"](page, tool["ON_PAGE"], table) == page  # else: python tools/gpu_programs.py show


@pytest.mark.slow
def test_the_page_of_programs_has_the_steps_of_the_h200_that_were_predicted_before() -> None:
    tool = runpy.run_path(str(TOOLS / "gpu_programs.py"), run_name="loaded")
    page = tool["PAGE"].read_text()
    table = "\n".join(tool["steps"](tool["PREDICTED_BEFORE"]))
    assert tool["with_table"](page, tool["STEPS_ON_PAGE"], table) == page  # else: python tools/gpu_programs.py steps


def test_the_power_in_8_bits_counts_each_table_once() -> None:
    """One table has a row that is right at 1.2, the other three rows of which the middle one is right at 1.6."""
    tool = runpy.run_path(str(TOOLS / "fit_power.py"), run_name="loaded")
    one, other = ([[value - right for value in tool["VALUES"]] for right in rows] for rows in ((1.2,), (1.5, 1.6, 1.9)))
    assert tool["value_of"]({"one": one, "other": other}) == pytest.approx(1.4)
    assert tool["value_of"]({"one": one, "other": other}, without="one") == pytest.approx(1.6)
