import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.records import Collective, Constant, Partial, Point, from_json, make_profile, point, to_json
from calibrate.timings.timing import Bench, Timing, summarize
from sim.prices.profile_input import profile_from

FACTS = {"hardware": {"device": "cpu"}, "software": {"torch": "2"}, "settings": {"quick": True}}
RECORDS = [
    Point("gemm", "fp32", (1, 64, 64, 64), 2e-5, 0.1, 7),
    Point("gemm", "fp32", (1, 32, 64, 64), 1e-5, 0.1, 5),
    Point("gemm_weight_grad", "fp32", (1, 64, 64, 64), 1e-5, 0.1, 5),
    Point("copy", "fp32", (4096,), 1e-6, 0.0, 5),
    Collective("all_reduce", 2, 4096.0, 2e-4, 0.2),
    Collective("all_reduce", 2, 1024.0, 1e-4, 0.1),
    Constant("kernel_gap_s", 1e-6, "a test"),
]


@pytest.mark.parametrize("record", RECORDS)
def test_records_survive_json(record: Point | Collective | Constant) -> None:
    assert from_json(json.loads(json.dumps(to_json(record)))) == record


def test_a_profile_of_records_is_sorted_and_valid() -> None:
    profile = make_profile("node", FACTS, RECORDS)
    assert profile_from(profile.to_json()).to_json() == profile.to_json()
    tables = {t.op: t for t in profile.points}
    assert tables["gemm"].shapes.tolist() == [[1, 32, 64, 64], [1, 64, 64, 64]]
    assert tables["gemm"].seconds.tolist() == [1e-5, 2e-5]
    assert profile.collectives[0].bytes.tolist() == [1024, 4096]
    assert profile.coefficients.kernel_gap_s == 1e-6
    assert profile.coefficients.peak_flops_per_s["fp32"] == pytest.approx(2 * 64**3 / 1e-5)
    assert profile.hardware == FACTS["hardware"]


def test_a_partial_file_is_taken_up_again(tmp_path: Path) -> None:
    path = tmp_path / "p.json.partial"
    first = Partial(path, FACTS)
    first.add("a", RECORDS[:2])
    first.add("b", RECORDS[4:])
    left, fresh = (tmp_path / f".p.json.partial.{name}.tmp" for name in ("left", "fresh"))
    for file in (left, fresh):
        file.write_text("{half")
    os.utime(left, (0, 0))
    second = Partial(path, FACTS)
    assert "a" in second
    assert "c" not in second
    assert list(second.records(["b", "a", "c"])) == RECORDS[4:] + RECORDS[:2]
    assert sorted(tmp_path.iterdir()) == [fresh, path]  # somebody else may be at it right now


@pytest.mark.parametrize("change", ["hardware", "software", "settings"])
def test_what_another_machine_or_setting_measured_is_not_taken_up(tmp_path: Path, change: str) -> None:
    path = tmp_path / "p.json.partial"
    Partial(path, FACTS).add("a", RECORDS)
    assert len(Partial(path, FACTS)) == 1
    assert len(Partial(path, {**FACTS, change: {"other": 1}})) == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "profile-partial/1"}', '{"format": "profile/1"}'])
def test_a_foreign_partial_file_is_started_over(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json.partial"
    path.write_text(text)
    partial = Partial(path, FACTS)
    assert len(partial) == 0
    partial.add("a", RECORDS)
    assert len(Partial(path, FACTS)) == 1


@given(st.lists(st.floats(1e-7, 10), min_size=1), st.floats(0.5, 2))
def test_the_summary_scales_with_its_samples(samples: list[float], factor: float) -> None:
    one, other = summarize(samples), summarize([factor * x for x in samples])
    assert other.seconds == pytest.approx(factor * one.seconds)
    assert other.spread == pytest.approx(one.spread, abs=1e-9)
    assert min(samples) <= one.seconds <= max(samples)


def test_the_summary_ignores_an_outlier() -> None:
    assert summarize([1.0, 1.1, 0.9, 50.0, 1.0]) == Timing(1.0, pytest.approx(0.1), 5)


def test_calls_take_turns_and_short_ones_are_repeated_within_a_sample() -> None:
    calls: list[str] = []
    bench = Bench("cpu", True, 0.02)
    timing = bench.time([lambda: calls.append("a"), lambda: calls.append("b")])
    assert calls[:4] == ["a", "b", "a", "b"]
    assert abs(calls.count("a") - calls.count("b")) <= 1
    assert len(calls) > 10 * timing.samples
    assert point("copy", "fp32", (1,), timing).seconds == timing.seconds > 0


def test_copies_outgrow_the_cache_within_limits() -> None:
    bench = Bench("cpu", True, 0.1)
    assert bench.copies(1 << 30) == 1
    assert bench.copies(8 << 20) == 8
    assert bench.copies(1) == 16
