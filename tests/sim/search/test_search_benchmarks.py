"""The benchmarks run and report what they say; no time is asserted, as machines differ."""

from __future__ import annotations

import math

import pytest

cases = pytest.importorskip("benchmarks.cases", reason="the benchmarks are in the repository, not in the package")


def test_engines_and_folding_report_ratios() -> None:
    engines, folding = cases.engines(1), cases.folding(1)
    for rows in (engines, folding):
        assert [r["seconds"] > 0 for r in rows] == [True, True]
        assert rows[1]["ratio"] == pytest.approx(rows[0]["seconds"] / rows[1]["seconds"])


def test_ranks_by_themselves_with_shared_links_are_timed() -> None:
    (row,) = cases.contended(1)
    assert row["what"] == "32 ranks unfolded, links shared"
    assert row["tasks"] > 10_000
    assert row["seconds"] > 0


@pytest.mark.slow
def test_large_steps_and_processes_are_timed() -> None:
    rows = cases.large(1)
    assert [r["what"] for r in rows[:2]] == ["16,384 GPUs, links shared", "16,384 GPUs, links to themselves"]
    assert rows[1]["ratio"] == pytest.approx(rows[0]["seconds"] / rows[1]["seconds"])
    assert all(r["seconds"] > 0 for r in cases.processes(1))


@pytest.mark.slow
def test_served_requests_are_timed() -> None:
    from benchmarks.serving import WAYS, conversations, serving, serving_ways

    requests = conversations(200, 10.0)
    assert len({r.prompt_tokens for r in requests}) > 150
    assert any(r.hashes for r in requests)
    rows = [*serving(1, 50), *serving_ways(1, 50)]
    assert len(rows) == 2 + len(WAYS)
    for row in rows:
        assert row["per_s"] == pytest.approx(50 / row["seconds"])


def test_slope_is_the_exponent() -> None:
    from benchmarks.measure import slope

    assert math.isclose(slope([1, 2, 4, 8], [5 * n**1.5 for n in (1, 2, 4, 8)]), 1.5)
