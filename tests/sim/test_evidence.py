"""Published measurements beside a result, and the interval that is made of their errors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sim.inputs.scenario import Scenario, parse_scenario
from sim.prices.profiles import load_profile
from sim.results.certainty import HELD_OUT, NINETY_BY_MEAN
from sim.results.evidence import (
    FEWEST_TABLES,
    Row,
    distance,
    features_of,
    interval_factor,
    nearest,
    published,
)
from sim.simulation import simulate
from sim.validation.tables import read_table

PUBLISHED = Path(__file__).parents[2] / "scenarios" / "published"


def scenario(**changes: Any) -> Scenario:
    data = {
        "model": "llama3-8b",
        "cluster": "dgx-h100",
        "parallelism": {"dp": 8, "zero": 1},
        "training": {"seq_len": 4096, "global_batch_size": 16, "framework": "megatron"},
    }
    return parse_scenario(data | changes)


SAMPLE = published()[::29]


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row.row)
def test_what_is_shipped_is_what_is_simulated_today(row: Row) -> None:
    """Where this fails: `python tools/predict_published.py`."""
    found = next(r for r in read_table(PUBLISHED / f"{row.table}.json").rows if r.id == row.row)
    s = parse_scenario({**found.scenario, "name": row.row})
    assert simulate(s).step_time_s == pytest.approx(row.predicted, rel=1e-3)
    assert row.measured == found.measured["step_time_s"]
    assert row.features == features_of(s)


def test_a_published_step_is_its_own_nearest() -> None:
    found = next(r for r in read_table(PUBLISHED / "mlperf_training_405b.json").rows if "eos-dfw_n1024" in r.id)
    first, *others = nearest(parse_scenario({**found.scenario, "name": "row"}))
    assert (first.row, first.distance) == (found.id, 0.0)
    assert first.error == pytest.approx(first.predicted / first.measured - 1)
    assert [e.distance for e in others] == sorted(e.distance for e in others)
    assert len({first.table, *(e.table for e in others)}) == 3


def test_distance_is_symmetric_and_grows_with_each_difference() -> None:
    a = features_of(scenario())
    assert distance(a, a) == 0.0
    for other in (
        a._replace(gpu="h200-sxm"),
        a._replace(active=2 * a.active),
        a._replace(kind="moe"),
        a._replace(bits=8.0),
        a._replace(framework="eager"),
        a._replace(date="2023-01"),
        a._replace(tp=8),
        a._replace(sharded=True),
    ):
        assert distance(a, other) == distance(other, a) > 0
    far = a._replace(gpu="b200-sxm", architecture="blackwell")
    assert distance(a, far) > distance(a, a._replace(gpu="h200-sxm"))


def made(table: str, errors: list[float], **features: Any) -> list[Row]:
    f = features_of(scenario())._replace(**features)
    return [Row(table, f"{table}{i}", 1.0, math.exp(e), f) for i, e in enumerate(errors)]


def test_tables_count_alike_whatever_their_rows() -> None:
    """Nine of ten parts of the tables' weight: a table of a hundred small errors hides no table of one."""
    own = features_of(scenario())
    rows = [*made("a", [0.01] * 100), *(row for name in "bcd" for row in made(name, [0.02])), *made("e", [-0.3])]
    width = interval_factor(own, rows)
    assert width is not None
    assert width.factor == pytest.approx(math.exp(0.3))
    assert width.why == "errors on 5 published tables of dense training with megatron on hopper"


def test_too_few_tables_of_a_sort_widen_the_group_and_are_named() -> None:
    own = features_of(scenario())._replace(framework="nanotron")
    rows = [row for name in "abcdefgh"[:FEWEST_TABLES] for row in made(name, [0.1])]
    width = interval_factor(own, rows)
    assert width is not None
    assert width.why.endswith("with any framework (none of them is with torch on hopper)")
    assert interval_factor(own, rows[:1]) is None


def test_the_interval_of_a_shipped_profile_is_the_published_errors() -> None:
    result = simulate(scenario()).result
    width = interval_factor(features_of(scenario()))
    assert width is not None
    low, high = result["step_time_interval_s"]
    assert (low, high) == pytest.approx((result["step_time_s"] / width.factor, result["step_time_s"] * width.factor))
    assert result["interval_from"] == width.why


def test_a_fitted_profile_has_the_errors_that_its_fit_did_not_see() -> None:
    from msgspec.structs import replace

    profile = replace(load_profile("h100-sxm"), name="own", settings={HELD_OUT: 0.02})
    result = simulate(scenario(), profile).result
    low, high = result["step_time_interval_s"]
    assert high / low == pytest.approx(math.exp(2 * NINETY_BY_MEAN * 0.02))
    assert "did not see" in result["interval_from"]


def test_the_file_is_small_and_has_no_row_twice() -> None:
    from sim.results.evidence import FILE

    assert FILE.stat().st_size < 150_000
    assert json.loads(FILE.read_text(encoding="utf-8"))["format"] == "evidence/1"
    names = [(row.table, row.row) for row in published()]
    assert len(names) == len(set(names))
