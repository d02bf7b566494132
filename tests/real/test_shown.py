"""Collectives and split products give what their definitions say, on real ranks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from calibrate import collectives  # noqa: E402
from calibrate.shown import W, X, on_ranks  # noqa: E402
from calibrate.timings.timing import Bench  # noqa: E402


def test_collectives_on_three_ranks() -> None:
    found = dict(on_ranks(3, "collectives"))
    assert found["all_reduce"] == [[6.0] * 3] * 3  # the course's own example
    assert found["reduce"] == [[6.0] * 3, [2.0] * 3, [3.0] * 3]
    assert found["broadcast"] == [[1.0] * 3] * 3
    assert found["gather"] == [[1.0, 2.0, 3.0], [2.0], [3.0]]
    assert found["scatter"] == [[10.0], [20.0], [30.0]]
    assert found["all_gather"] == [[1.0, 2.0, 3.0]] * 3
    assert found["reduce_scatter"] == [[6.0]] * 3
    assert found["all_to_all"] == [[10.0 * sender + mine for sender in range(3)] for mine in range(3)]


def test_a_product_by_columns_and_by_rows() -> None:
    found = dict(on_ranks(2, "products"))
    whole = (torch.tensor(X) @ torch.tensor(W)).tolist()
    assert whole == [[20.0, 40.0], [80.0, 180.0], [140.0, 320.0], [200.0, 460.0]]
    assert found["columns"] == found["rows"] == [whole, whole]


def test_every_collective_is_measured() -> None:
    """`calibrate.run` times them all, those that no scheme uses included."""
    keys = [f"collective {op} 2 4096" for op in collectives.OPS]
    found = dict(collectives.measure(Bench("cpu", quick=True, limit_s=0.01), 2, keys))
    assert list(found) == keys
    assert {"reduce", "gather", "scatter"} < set(collectives.OPS)
    assert all(record.seconds > 0 for (record,) in found.values())
