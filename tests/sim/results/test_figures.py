"""Numbers of results have records, from which comparisons, pages and the documentation take their units."""

from __future__ import annotations

import re
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from sim.results.figures import FIGURES, SHARE, TIME, figure_of, unit_of_measured
from sim.results.result import MeanRank, MiddleLayer, StepResult, Utilization
from sim.rl.records import RlResult
from sim.serve.results.records import Percentiles, ServingResult
from sim.studies.difference import TIMES
from sim.views.difference import CARDS

PAGE = Path(__file__).parents[3] / "docs" / "api.md"
RECORDS: tuple[type[Any], ...] = (StepResult, Utilization, MeanRank, MiddleLayer, ServingResult, RlResult)


def numbers(record: type[Any]) -> set[str]:
    """Keys of a record's own numbers that may be fractions, and of its latencies."""
    hints = get_type_hints(record)
    found = {name: get_args(kind) if get_origin(kind) is UnionType else (kind,) for name, kind in hints.items()}
    return {name for name, kinds in found.items() if {float, Percentiles} & set(kinds)}


@pytest.mark.parametrize("record", RECORDS)
def test_every_number_of_a_result_has_a_record(record: type[Any]) -> None:
    assert numbers(record)
    assert numbers(record) <= FIGURES.keys()


def test_every_record_is_of_a_number() -> None:
    assert set().union(*(numbers(record) for record in RECORDS)) == FIGURES.keys()


@pytest.mark.parametrize("key", FIGURES)
def test_a_records_unit_is_that_of_its_name(key: str) -> None:
    """Times end with `_s`, bytes with `_bytes`, rates have `_per_s`, and no share has a unit."""
    ending = {"s": r"_s$", "bytes": r"_bytes$", "1/s": r"_per_s(_per_gpu)?$", "FLOP/s": r"_flops_per_s(_per_gpu)?$"}
    said = [symbol for symbol, pattern in ending.items() if re.search(pattern, key)]
    assert FIGURES[key].unit.symbol in (said or [SHARE.symbol])


def test_what_is_compared_has_a_record_with_a_name() -> None:
    assert all(figure_of(name) for name in TIMES)
    assert all(figure_of(name).name for name in CARDS)


def test_names_of_tables_have_units() -> None:
    assert unit_of_measured("seconds") is unit_of_measured("iteration_time_s") is TIME
    assert unit_of_measured("seconds_of_nothing").symbol == ""


def test_the_page_lists_all_numbers() -> None:
    rows = [f"| `{f.key}` | {f.unit.symbol} | {f.meaning} |" for f in FIGURES.values()]
    assert "\n".join(["| number | unit | meaning |", "|---|---|---|", *rows]) in PAGE.read_text(encoding="utf-8")
