"""Published measurements beside a result, and the interval that is made of their errors."""

from __future__ import annotations

import io
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sim.core.normal import NINETY_BY_MEAN, NINETY_PERCENT, student_by_normal
from sim.inputs.scenario import Scenario, load_scenario, parse_scenario
from sim.prices.likeness import OTHER_KIND, Features, columns, distances, family, features_of
from sim.prices.profiles import load_profile
from sim.results.certainty import HELD_OUT
from sim.results.evidence import (
    FEWEST_TABLES,
    REACH,
    SERVING,
    PublishedStep,
    interval_factor,
    nearest,
    published,
    published_for,
)
from sim.serve.results.certainty import serving_features
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate
from sim.validation.serving_rows import serving_scenario, value_of
from sim.validation.tables import read_table
from sim.variants.frameworks.facts import Framework
from sim.variants.frameworks.records import FRAMEWORKS
from sim.views.summary import print_summary
from sim.views.terminal import Terminal

PUBLISHED = Path(__file__).parents[3] / "scenarios" / "published"


def scenario(**changes: Any) -> Scenario:
    data = {
        "model": "llama3-8b",
        "cluster": "dgx-h100",
        "parallelism": {"dp": 8, "zero": 1},
        "training": {"seq_len": 4096, "global_batch_size": 16, "framework": "megatron"},
    }
    return parse_scenario(data | changes)


STEPS = published_for(serving=False)
SERVED = [row for row in published() if row.features.kind == SERVING]
SAMPLE = STEPS[::29]
QUICK = [row for row in SERVED if row.table != "trtllm_017_throughput"]  # its rows serve thousands of requests


@pytest.mark.slow
@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row.row)
def test_what_is_shipped_is_what_is_simulated_today(row: PublishedStep) -> None:
    """Where this fails: `python tools/predict_published.py`."""
    found = next(r for r in read_table(PUBLISHED / f"{row.table}.json").rows if r.id == row.row)
    s = parse_scenario({**found.scenario, "name": row.row})
    assert simulate(s).step_time_s == pytest.approx(row.predicted, rel=1e-3)
    assert row.measured == found.measured["step_time_s"]
    assert row.features == features_of(s)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    QUICK[::19],
    ids=lambda row: f"{row.row} {row.quantity}",
)
def test_what_is_shipped_of_serving_is_what_is_simulated_today(row: PublishedStep) -> None:
    """Where this fails: `python tools/predict_published.py`.

    Between processors the last bits of a time differ, so that a request joins an iteration earlier or later.
    """
    found = next(r for r in read_table(PUBLISHED / f"{row.table}.json").rows if r.id == row.row)
    s = serving_scenario(found, found.scenario)
    assert value_of(simulate_serving(s).result, found, row.quantity) == pytest.approx(row.predicted, rel=1e-2)
    assert row.measured == found.measured[row.quantity]
    assert row.features == serving_features(s)


def test_a_latency_s_error_is_that_of_the_server() -> None:
    """A latency that grows as the square of the server's time and is 21 % off: the server is 10 % off."""
    own = features_of(scenario())
    assert PublishedStep("t", "r", 1.0, 1.21, own, power=2.0).error == pytest.approx(math.log(1.1))
    assert PublishedStep("t", "r", 1.21, 1.0, own, power=2.0).error == pytest.approx(math.log(1.1))


def test_training_s_intervals_know_no_serving_and_serving_s_both() -> None:
    step, served = features_of(scenario()), features_of(scenario())._replace(kind=SERVING, framework="vLLM")
    assert interval_factor(step) == interval_factor(step, STEPS)
    assert interval_factor(served) == interval_factor(served, published()) != interval_factor(served, STEPS)
    assert all(row.features.kind == SERVING for row in SERVED)
    width = interval_factor(served)
    assert width is not None
    assert "(one is of serving with vLLM on hopper)" in width.why


@pytest.mark.slow
def test_nine_of_ten_served_quantities_lie_in_intervals_made_without_their_table() -> None:
    """As `python tools/predict_published.py --check` judges them."""
    inside, half = list[float](), list[float]()
    for name in {row.table for row in SERVED}:
        others = [row for row in published() if row.table != name]
        mine = [row for row in SERVED if row.table == name]
        factors = {row.features: interval_factor(row.features, others) for row in mine}
        widths = [(row, factors[row.features]) for row in mine]
        found = [(r, math.hypot(math.log(w.factor), NINETY_PERCENT * r.host)) for r, w in widths if w is not None]
        inside.append(statistics.fmean(row.error <= width for row, width in found))
        half.append(statistics.fmean(math.expm1(width) for _, width in found))
    assert 0.85 <= statistics.fmean(inside) <= 0.96
    assert statistics.fmean(half) < 0.2


def test_a_published_step_is_its_own_nearest() -> None:
    found = next(r for r in read_table(PUBLISHED / "mlperf_training_405b.json").rows if "eos-dfw_n1024" in r.id)
    first, *others = nearest(parse_scenario({**found.scenario, "name": "row"}))
    assert (first.row, first.distance) == (found.id, 0.0)
    assert first.error == pytest.approx(first.predicted / first.measured - 1)
    assert [e.distance for e in others] == sorted(e.distance for e in others)
    assert len({first.table, *(e.table for e in others)}) == 3


def distance(a: Features, b: Features) -> float:
    return float(distances(a, columns([b]))[0])


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


def made(table: str, errors: list[float], **features: Any) -> list[PublishedStep]:
    f = features_of(scenario())._replace(**features)
    return [PublishedStep(table, f"{table}{i}", 1.0, math.exp(e), f) for i, e in enumerate(errors)]


def test_the_family_of_a_framework_is_its_record_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FRAMEWORKS, "mine", Framework("mine", family="torch"))
    monkeypatch.setitem(FRAMEWORKS, "alone", Framework("alone"))
    a = published_for(serving=False)[0].features._replace(framework="eager")
    mine, alone = (family(a._replace(framework=name)) for name in ("mine", "alone"))
    assert mine == family(a) == "torch"
    assert alone == "alone"
    assert family(a._replace(framework="TensorRT-LLM Triton")) == "TensorRT-LLM"


def test_tables_count_alike_whatever_their_rows() -> None:
    """A table of a hundred small errors hides no table of one."""
    own = features_of(scenario())
    rows = [*made("a", [0.01] * 100), *(row for name in "bcd" for row in made(name, [-0.02])), *made("e", [-0.3])]
    width = interval_factor(own, rows)
    assert width is not None
    of_five = NINETY_BY_MEAN * student_by_normal(5)
    assert math.log(width.factor) == pytest.approx(of_five * (0.01 + 3 * 0.02 + 0.3) / 5)
    assert "(5 are of dense training with megatron on hopper)" in width.why


def test_nearer_tables_count_more() -> None:
    own = features_of(scenario())
    near, far = made("a", [0.02]), [row for name in "bcde" for row in made(name, [0.2], kind="moe")]
    width = interval_factor(own, [*near, *far])
    assert width is not None
    part = math.exp(-OTHER_KIND / REACH)
    tables = (1 + 4 * part) ** 2 / (1 + 4 * part**2)  # 2.2: the four far ones together count about as one
    mean = (0.02 + 4 * part * 0.2) / (1 + 4 * part)
    assert math.log(width.factor) == pytest.approx(NINETY_BY_MEAN * student_by_normal(tables) * mean)
    assert "(one is of dense" in width.why


@pytest.mark.parametrize(("degrees", "quantile"), [(2, 2.920), (3, 2.353), (5, 2.015), (10, 1.812), (1e9, 1.645)])
def test_the_quantiles_of_few_tables_are_students(degrees: float, quantile: float) -> None:
    """The table of the distribution, 95 %."""
    assert 1.645 * student_by_normal(degrees) == pytest.approx(quantile, rel=0.013)


def test_an_interval_does_not_depend_on_the_layout() -> None:
    own = features_of(scenario())
    assert interval_factor(own._replace(tp=4, pp=2, ranks=512, sharded=True)) == interval_factor(own)
    assert interval_factor(own._replace(active=100 * own.active)) != interval_factor(own)


def test_what_is_far_from_all_tables_is_named_and_few_tables_make_no_interval() -> None:
    own = features_of(scenario())._replace(framework="nanotron")
    rows = [row for name in "abcdefgh"[:FEWEST_TABLES] for row in made(name, [0.1])]
    width = interval_factor(own, rows)
    assert width is not None
    assert width.why.endswith("(none is of dense training with torch on hopper)")
    assert interval_factor(own, rows[:-1]) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("belongs", "widest"),
    [
        (lambda f: True, 0.18),
        (lambda f: f.kind == "dense", 0.17),
        (lambda f: f.framework == "megatron", 0.17),
        (lambda f: f.kind == "moe", 0.3),
    ],
)
def test_nine_of_ten_rows_of_a_table_lie_in_intervals_made_without_it(
    belongs: Callable[[Features], bool], widest: float
) -> None:
    tables: dict[str, list[PublishedStep]] = {}
    for row in STEPS:
        tables.setdefault(row.table, []).append(row)
    inside, half = [], []
    for name, mine in tables.items():
        others = [row for row in STEPS if row.table != name]
        found = [row for row in mine if belongs(row.features)]
        asked = found[:: max(1, len(found) // 16)]  # one row of a small table would decide too much
        factors = [interval_factor(row.features, others) for row in asked]
        pairs = [(row, width.factor) for row, width in zip(asked, factors, strict=True) if width is not None]
        if pairs:
            inside.append(statistics.fmean(1 / f <= row.predicted / row.measured <= f for row, f in pairs))
            half.append(statistics.fmean(f - 1 for _, f in pairs))
    assert 0.85 <= statistics.fmean(inside) <= 0.95
    assert statistics.fmean(half) < widest


def test_the_interval_of_a_shipped_profile_is_the_published_errors() -> None:
    result = simulate(scenario()).result
    width = interval_factor(features_of(scenario()))
    assert width is not None
    low, high = result["step_time_interval_s"]
    assert (low, high) == pytest.approx((result["step_time_s"] / width.factor, result["step_time_s"] * width.factor))
    assert result["interval_from"] == width.why


def test_a_profile_of_ones_own_is_not_the_shipped_one_whose_name_it_has(tmp_path: Path) -> None:
    """`calibrate.run --out h100-sxm.json` names the profile so; its interval is that of its own points."""
    load_profile("h100-sxm").save(own := tmp_path / "h100-sxm.json")
    for calibration, shipped in (("h100-sxm", True), (str(own), False)):
        simulation = simulate(load_scenario("scenarios/dp8.yaml", [f"calibration={calibration}"]))
        assert ("published tables" in simulation.result["interval_from"]) is shipped
        print_summary(simulation.outcome, Terminal(file=(printed := io.StringIO())))
        assert ("h100-sxm (shipped profile" in printed.getvalue()) is shipped


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
    names = [(row.table, row.row, row.quantity) for row in published()]
    assert len(names) == len(set(names))
